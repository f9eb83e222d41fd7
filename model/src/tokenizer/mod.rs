//! Text to tokens and back, from the tokenizer section of a model file.
//!
//! Two kinds of vocabulary are supported: byte-level BPE (`gpt2`) and SentencePiece (`llama`). Ids are those of llama.cpp: text is not normalised first. What differs from other tools is
//! listed in `docs/tokenizers.md`.
//!
//! A [`Tokenizer`] is immutable and shared between threads. Encoding never fails and takes O(n log n) time at worst.

mod alphabet;
mod bpe;
mod error;
mod merge;
mod special;
mod split;
mod spm;
mod table;
#[cfg(test)]
mod tests;
mod vocabulary;

pub use error::TokenizerError;
pub use vocabulary::{TokenKind, Vocabulary};

use crate::gguf::Metadata;
use bpe::Bpe;
use special::{Fragment, Specials};
use split::Splitter;
use spm::Spm;
use std::num::NonZeroUsize;
use table::TokenTable;
use vocabulary::keys;

/// Choices the file leaves to the user.
#[derive(Debug, Clone, Default)]
pub struct TokenizerOptions {
    /// The pre-tokenizer to use instead of the one the file names (or does not).
    pub assume_pre: Option<String>,
}

/// How to encode a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncodeOptions {
    /// Adds the tokens that begin and end a text, where the vocabulary has that custom.
    pub add_special: bool,
    /// Recognises control tokens by their spelling. Off for text from outside: it must not be able to end a turn.
    pub parse_special: bool,
}

impl EncodeOptions {
    /// For a rendered chat template, which spells its control tokens out, BOS included.
    pub const RENDERED_CHAT: Self = Self { add_special: false, parse_special: true };
}

/// Whether control tokens are part of a decoded text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlText {
    /// As they are spelled.
    Show,
    /// Not at all.
    Hide,
}

/// The algorithm of a vocabulary.
#[derive(Debug, Clone)]
enum Algorithm {
    Bpe(Bpe),
    Spm(Spm),
}

impl Algorithm {
    /// A number of bytes of `text` that become part of tokens at least.
    fn least_bytes(&self, text: &str) -> usize {
        match self {
            Algorithm::Bpe(bpe) => bpe.least_bytes(text),
            Algorithm::Spm(spm) => spm.least_bytes(text),
        }
    }
}

/// A compiled tokenizer.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    table: TokenTable,
    algorithm: Algorithm,
    specials: Specials,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Put in front of a text.
    prefix: Option<u32>,
    /// Put behind a text.
    suffix: Option<u32>,
    /// Most bytes of text that one token stands for.
    longest: NonZeroUsize,
}

impl Tokenizer {
    /// Compiles the tokenizer of a model file.
    pub fn from_metadata(metadata: Metadata<'_>, options: &TokenizerOptions) -> Result<Self, TokenizerError> {
        Self::new(&Vocabulary::from_metadata(metadata)?, options)
    }

    /// Checks and compiles a vocabulary.
    pub fn new(vocabulary: &Vocabulary<'_>, options: &TokenizerOptions) -> Result<Self, TokenizerError> {
        vocabulary.check()?;
        let (table, algorithm, custom_bos) = match vocabulary.model {
            "gpt2" => {
                let splitter = Splitter::new(pre(vocabulary, options)?)?;
                let add_bos = splitter.adds_bos();
                let table = TokenTable::new(vocabulary, Bpe::append_text)?;
                let bpe = Bpe::new(vocabulary, &table, splitter)?;
                (table, Algorithm::Bpe(bpe), add_bos)
            }
            "llama" => {
                let table = TokenTable::new(vocabulary, Spm::append_text)?;
                let spm = Spm::new(vocabulary, &table)?;
                (table, Algorithm::Spm(spm), true)
            }
            model => return Err(TokenizerError::UnsupportedModel { model: model.to_owned() }),
        };
        let affix = |wanted: bool, id: Option<u32>, flag, key| match (wanted, id) {
            (false, _) => Ok(None),
            (true, Some(id)) => Ok(Some(id)),
            (true, None) => Err(TokenizerError::NoSuchSpecial { flag, key }),
        };
        let add_bos = vocabulary.add_bos.unwrap_or(custom_bos);
        let add_eos = vocabulary.add_eos.unwrap_or(false);
        Ok(Self {
            specials: Specials::new(vocabulary, &table)?,
            prefix: affix(add_bos, vocabulary.bos, keys::ADD_BOS, keys::BOS)?,
            suffix: affix(add_eos, vocabulary.eos, keys::ADD_EOS, keys::EOS)?,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            longest: NonZeroUsize::new(table.longest()).unwrap_or(NonZeroUsize::MIN),
            table,
            algorithm,
        })
    }

    /// The tokens of `text`. Never fails: what the vocabulary cannot express is left out or becomes its unknown token.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        let affix = |id: Option<u32>| id.filter(|_| options.add_special);
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        out.extend(affix(self.prefix));
        let mut first = true;
        self.specials.fragments(text, options.parse_special, &mut |fragment| match fragment {
            Fragment::Token(id) => {
                out.push(id);
                first = true;
            }
            Fragment::Text(text) => {
                match &self.algorithm {
                    Algorithm::Bpe(bpe) => bpe.encode(text, &self.table, &mut out),
                    Algorithm::Spm(spm) => spm.encode(text, first, &self.table, &mut out),
                }
                first = false;
            }
        });
        out.extend(affix(self.suffix));
        out
    }

    /// A number of tokens that a text has at least, going by its length. Costs next to nothing, unlike [`Self::encode`].
    pub fn least_tokens(&self, text: &str) -> usize {
        self.algorithm.least_bytes(text).div_ceil(self.longest.get())
    }

    /// The bytes token `id` adds to a text: raw bytes of a piece of text (not always whole characters), the spelling of a
    /// control token, nothing for padding. `None` when there is no such token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.table.text(id)
    }

    /// The text of `ids` as bytes: the reverse of [`Self::encode`]. The space that a SentencePiece vocabulary puts in front of
    /// a text is taken away again.
    pub fn decode(&self, ids: &[u32], control: ControlText) -> Result<Vec<u8>, TokenizerError> {
        let mut out = Vec::new();
        let mut at_start = matches!(&self.algorithm, Algorithm::Spm(spm) if spm.adds_space_prefix());
        for &id in ids {
            let unknown = || TokenizerError::UnknownToken { id, tokens: self.table.len() };
            let mut bytes = self.table.text(id).ok_or_else(unknown)?;
            if self.is_control(id) {
                if control == ControlText::Hide {
                    continue;
                }
            } else if at_start {
                at_start = false;
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
            out.extend_from_slice(bytes);
        }
        Ok(out)
    }

    /// Whether token `id` steers the model and is no part of an answer's text.
    pub fn is_control(&self, id: u32) -> bool {
        matches!(self.table.kind(id), Some(TokenKind::Control | TokenKind::Unknown))
    }

    /// Whether token `id` ends an answer.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.specials.ends().binary_search(&id).is_ok()
    }

    /// The tokens that end an answer, sorted.
    pub fn end_of_generation(&self) -> &[u32] {
        self.specials.ends()
    }

    /// The token spelled exactly like this in the file.
    pub fn token_id(&self, spelling: &str) -> Option<u32> {
        self.table.find(spelling.as_bytes())
    }

    /// Number of tokens; ids are smaller.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// The token that begins a text, whether or not [`Self::encode`] adds it.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, whether or not [`Self::encode`] adds it.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether [`Self::encode`] puts BOS in front when asked for special tokens.
    pub fn adds_bos(&self) -> bool {
        self.prefix.is_some()
    }
}

/// The splitting rule's name: the user's word, else the file's. `default` is what converters write when they do not know.
fn pre<'v>(vocabulary: &Vocabulary<'v>, options: &'v TokenizerOptions) -> Result<&'v str, TokenizerError> {
    match (options.assume_pre.as_deref(), vocabulary.pre) {
        (Some(assumed), _) => Ok(assumed),
        (None, Some(named)) if named != "default" => Ok(named),
        (None, _) => Err(TokenizerError::MissingPre { known: split::known_names() }),
    }
}
