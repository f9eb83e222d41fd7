//! A vocabulary as its file states it, before anything is built from it.

use super::TokenizerError;
use crate::gguf::{Metadata, required};

/// What a token is for (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// A piece of text.
    Normal,
    /// Stands for text the vocabulary cannot express.
    Unknown,
    /// Steers the model; never part of plain text.
    Control,
    /// An added piece of text that is recognised whole, before anything else.
    UserDefined,
    /// Fills the vocabulary up; never produced, means nothing.
    Unused,
    /// One byte, spelled `<0xNN>`.
    Byte,
}

impl TokenKind {
    /// Reads the file's number.
    pub fn from_gguf(value: u32) -> Option<Self> {
        Some(match value {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// The tokenizer section of a model file. `Tokenizer::new` checks and compiles it.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary<'a> {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: &'a str,
    /// `tokenizer.ggml.pre`: the rule that splits text before BPE.
    pub pre: Option<&'a str>,
    /// Spelling of each token; its position is its id.
    pub tokens: Vec<&'a str>,
    /// Kind of each token.
    pub kinds: Vec<TokenKind>,
    /// SentencePiece score of each token; empty for BPE.
    pub scores: Vec<f32>,
    /// BPE merges `left right` in order of priority; empty for SentencePiece.
    pub merges: Vec<&'a str>,
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Ends a turn.
    pub eot: Option<u32>,
    /// Ends a message that waits for a tool.
    pub eom: Option<u32>,
    /// Stands for what cannot be expressed (SentencePiece).
    pub unk: Option<u32>,
    /// Whether a text begins with `bos`; `None` where the file leaves it to the tokenizer's custom.
    pub add_bos: Option<bool>,
    /// Whether a text ends with `eos`.
    pub add_eos: Option<bool>,
    /// Whether SentencePiece text gets a space in front.
    pub add_space_prefix: Option<bool>,
}

/// GGUF keys of the tokenizer section.
pub(super) mod keys {
    pub const MODEL: &str = "tokenizer.ggml.model";
    pub const PRE: &str = "tokenizer.ggml.pre";
    pub const TOKENS: &str = "tokenizer.ggml.tokens";
    pub const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
    pub const SCORES: &str = "tokenizer.ggml.scores";
    pub const MERGES: &str = "tokenizer.ggml.merges";
    pub const BOS: &str = "tokenizer.ggml.bos_token_id";
    pub const EOS: &str = "tokenizer.ggml.eos_token_id";
    pub const EOT: &str = "tokenizer.ggml.eot_token_id";
    pub const EOM: &str = "tokenizer.ggml.eom_token_id";
    pub const UNK: &str = "tokenizer.ggml.unknown_token_id";
    pub const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
    pub const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
    pub const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
}

/// Most tokens accepted; the largest published vocabularies have about 260,000.
const MAX_TOKENS: usize = 1 << 22;

impl<'a> Vocabulary<'a> {
    /// Reads the tokenizer section; the strings stay in the file.
    pub fn from_metadata(metadata: Metadata<'a>) -> Result<Self, TokenizerError> {
        let kinds = required(keys::TOKEN_TYPE, metadata.u32_array(keys::TOKEN_TYPE)?)?;
        let kind = |(id, &value): (usize, &u32)| {
            TokenKind::from_gguf(value).ok_or(TokenizerError::BadTokenType { id, value })
        };
        Ok(Self {
            model: required(keys::MODEL, metadata.str(keys::MODEL)?)?,
            pre: metadata.str(keys::PRE)?,
            tokens: required(keys::TOKENS, metadata.str_array(keys::TOKENS)?)?,
            kinds: kinds.iter().enumerate().map(kind).collect::<Result<_, _>>()?,
            scores: metadata.f32_array(keys::SCORES)?.unwrap_or_default(),
            merges: metadata.str_array(keys::MERGES)?.unwrap_or_default(),
            bos: metadata.u32(keys::BOS)?,
            eos: metadata.u32(keys::EOS)?,
            eot: metadata.u32(keys::EOT)?,
            eom: metadata.u32(keys::EOM)?,
            unk: metadata.u32(keys::UNK)?,
            add_bos: metadata.bool(keys::ADD_BOS)?,
            add_eos: metadata.bool(keys::ADD_EOS)?,
            add_space_prefix: metadata.bool(keys::ADD_SPACE_PREFIX)?,
        })
    }

    /// Checks what holds for every tokenizer: lengths that agree and ids that exist.
    pub(super) fn check(&self) -> Result<(), TokenizerError> {
        let tokens = self.tokens.len();
        if tokens == 0 {
            return Err(TokenizerError::MissingKey { key: keys::TOKENS });
        }
        if tokens > MAX_TOKENS {
            return Err(TokenizerError::TooLarge { what: "tokens", found: tokens, limit: MAX_TOKENS });
        }
        if self.kinds.len() != tokens {
            let key = keys::TOKEN_TYPE;
            return Err(TokenizerError::WrongLength { key, found: self.kinds.len(), expected: tokens });
        }
        let ids = [
            (keys::BOS, self.bos),
            (keys::EOS, self.eos),
            (keys::EOT, self.eot),
            (keys::EOM, self.eom),
            (keys::UNK, self.unk),
        ];
        for (key, id) in ids {
            match id {
                Some(id) if id as usize >= tokens => {
                    return Err(TokenizerError::IdOutOfRange { key, id, tokens });
                }
                _ => {}
            }
        }
        Ok(())
    }
}
