//! The tokens themselves: id to spelling, id to bytes, spelling to id.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use super::TokenizerError;
use super::vocabulary::{TokenKind, Vocabulary};

/// Most bytes of spelling accepted for a whole vocabulary.
const MAX_SPELLING_BYTES: usize = 1 << 30;

/// Strings of bytes in one allocation.
#[derive(Debug, Clone)]
struct Arena {
    bytes: Vec<u8>,
    /// `ends[i]` is where string `i` ends and string `i + 1` begins.
    ends: Vec<u32>,
}

impl Arena {
    fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        self.bytes.get(start..end)
    }

    /// The length of each string in bytes.
    fn lengths(&self) -> impl Iterator<Item = usize> {
        let mut start = 0;
        self.ends.iter().map(move |&end| (end - std::mem::replace(&mut start, end)) as usize)
    }
}

/// Every token of a vocabulary, immutable.
#[derive(Debug, Clone)]
pub(super) struct TokenTable {
    spellings: Arena,
    /// What a token adds to the text.
    texts: Arena,
    kinds: Vec<TokenKind>,
    by_spelling: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl TokenTable {
    /// Builds the table. `append_text(spelling, kind, out)` says which bytes a token stands for.
    pub fn new(
        vocabulary: &Vocabulary<'_>,
        append_text: impl Fn(&str, TokenKind, &mut Vec<u8>),
    ) -> Result<Self, TokenizerError> {
        let total: usize = vocabulary.tokens.iter().map(|t| t.len()).sum();
        if total > MAX_SPELLING_BYTES {
            let what = "bytes of token spellings";
            return Err(TokenizerError::TooLarge { what, found: total, limit: MAX_SPELLING_BYTES });
        }
        let count = vocabulary.tokens.len();
        let mut table = Self {
            spellings: Arena { bytes: Vec::with_capacity(total), ends: Vec::with_capacity(count) },
            texts: Arena { bytes: Vec::with_capacity(total), ends: Vec::with_capacity(count) },
            kinds: vocabulary.kinds.clone(),
            by_spelling: HashTable::with_capacity(count),
            hasher: DefaultHashBuilder::default(),
        };
        for (spelling, &kind) in vocabulary.tokens.iter().zip(&vocabulary.kinds) {
            append_text(spelling, kind, &mut table.texts.bytes);
            table.push(spelling)?;
        }
        Ok(table)
    }

    /// Adds the next token, whose text is already in its arena.
    fn push(&mut self, spelling: &str) -> Result<(), TokenizerError> {
        let id = offset(self.spellings.ends.len())?;
        self.spellings.bytes.extend_from_slice(spelling.as_bytes());
        self.spellings.ends.push(offset(self.spellings.bytes.len())?);
        self.texts.ends.push(offset(self.texts.bytes.len())?);
        if spelling.is_empty() {
            return Ok(()); // can neither be found in text nor asked for
        }
        let (spellings, hasher) = (&self.spellings, &self.hasher);
        let hash = hasher.hash_one(spelling.as_bytes());
        let same = |other: &u32| spellings.get(*other as usize) == Some(spelling.as_bytes());
        if let Some(&first) = self.by_spelling.find(hash, same) {
            return Err(TokenizerError::DuplicateToken { first, second: id, spelling: spelling.to_owned() });
        }
        let rehash = |other: &u32| hasher.hash_one(spellings.get(*other as usize).unwrap_or_default());
        self.by_spelling.insert_unique(hash, id, rehash);
        Ok(())
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The token with exactly this spelling.
    pub fn find(&self, spelling: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(spelling);
        self.by_spelling.find(hash, |id| self.spellings.get(*id as usize) == Some(spelling)).copied()
    }

    /// What token `id` adds to the text.
    pub fn text(&self, id: u32) -> Option<&[u8]> {
        self.texts.get(id as usize)
    }

    /// Most bytes of text that one token can stand for. A token without a text may still be found by its spelling.
    pub fn longest(&self) -> usize {
        let (texts, spellings) = (self.texts.lengths(), self.spellings.lengths());
        texts
            .zip(spellings)
            .map(|(text, spelling)| if text == 0 { spelling } else { text })
            .max()
            .unwrap_or(0)
    }

    /// What token `id` is for.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }
}

/// An index or byte offset as it is stored.
fn offset(value: usize) -> Result<u32, TokenizerError> {
    u32::try_from(value).map_err(|_| TokenizerError::TooLarge {
        what: "bytes of token texts",
        found: value,
        limit: u32::MAX as usize,
    })
}
