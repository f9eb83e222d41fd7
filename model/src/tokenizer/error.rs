//! Why a vocabulary is refused.

use crate::gguf::GgufError;

/// A tokenizer that could not be built from its file, or ids it does not have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key without which the vocabulary means nothing.
    #[error(
        "the tokenizer key `{key}` is missing; the file cannot turn text into tokens, convert the model again"
    )]
    MissingKey {
        /// The GGUF key.
        key: &'static str,
    },
    /// A key holds something else than it should.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// Two arrays that describe the same tokens differ in length.
    #[error(
        "the tokenizer key `{key}` has {found} entries but there are {expected} tokens; the file is damaged"
    )]
    WrongLength {
        /// The GGUF key.
        key: &'static str,
        /// Entries in the array.
        found: usize,
        /// Number of tokens.
        expected: usize,
    },
    /// The tokenizer's kind is not one of ours.
    #[error("the tokenizer model `{model}` is not supported (supported: gpt2, llama)")]
    UnsupportedModel {
        /// `tokenizer.ggml.model`.
        model: String,
    },
    /// Byte-level BPE without the name of its splitting rule.
    #[error(
        "the file does not say how text is split before BPE (`tokenizer.ggml.pre` is missing or `default`); a \
         guess would quietly lower quality: convert the model again, or name the rule (known: {known})"
    )]
    MissingPre {
        /// Names a caller may assume.
        known: String,
    },
    /// A splitting rule nobody told us about.
    #[error("the pre-tokenizer `{pre}` is unknown; a guess would quietly lower quality (known: {known})")]
    UnknownPre {
        /// The name found.
        pre: String,
        /// Names a caller may assume.
        known: String,
    },
    /// A special token id that no token has.
    #[error("the tokenizer key `{key}` names token {id} but there are only {tokens} tokens")]
    IdOutOfRange {
        /// The GGUF key.
        key: &'static str,
        /// The id found.
        id: u32,
        /// Number of tokens.
        tokens: usize,
    },
    /// A value of `tokenizer.ggml.token_type` without a meaning.
    #[error("token {id} has the unknown type {value} in `tokenizer.ggml.token_type` (known: 1 to 6)")]
    BadTokenType {
        /// The token.
        id: usize,
        /// The value found.
        value: u32,
    },
    /// A SentencePiece score that is not a number.
    #[error("the score of token {id} in `tokenizer.ggml.scores` is not a finite number")]
    BadScore {
        /// The token.
        id: usize,
    },
    /// The same spelling twice: text would not have one tokenization.
    #[error("the tokens {first} and {second} are both spelled {spelling:?}; the vocabulary is damaged")]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// Their spelling.
        spelling: String,
    },
    /// A merge rule that cannot be applied.
    #[error("merge {index} of `tokenizer.ggml.merges` ({merge:?}) {reason}; the vocabulary is damaged")]
    BadMerge {
        /// Its position, which is its rank.
        index: usize,
        /// The rule as the file has it.
        merge: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The file wants a token in front of or behind every text but names none.
    #[error("`{flag}` is set but `{key}` is missing; convert the model again")]
    NoSuchSpecial {
        /// The flag that needs the id.
        flag: &'static str,
        /// The key that should give it.
        key: &'static str,
    },
    /// Counts or sizes that no real vocabulary has.
    #[error("the vocabulary has {found} {what}, more than the {limit} that are accepted")]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many are accepted.
        limit: usize,
    },
    /// A splitting rule of ours does not compile: a fault in this program.
    #[error("internal: a pre-tokenizer's expression does not compile: {0}")]
    Rule(#[from] Box<regex_automata::meta::BuildError>),
    /// An id given by a caller that no token has.
    #[error("token id {id} does not exist: the vocabulary has {tokens} tokens")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Number of tokens.
        tokens: usize,
    },
}

impl TokenizerError {
    /// A stable name for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::MissingKey { .. } => "tokenizer_missing_key",
            Self::Metadata(error) => error.code(),
            Self::WrongLength { .. } => "tokenizer_wrong_length",
            Self::UnsupportedModel { .. } => "tokenizer_unsupported_model",
            Self::MissingPre { .. } => "tokenizer_missing_pre",
            Self::UnknownPre { .. } => "tokenizer_unknown_pre",
            Self::IdOutOfRange { .. } => "tokenizer_id_out_of_range",
            Self::BadTokenType { .. } => "tokenizer_bad_token_type",
            Self::BadScore { .. } => "tokenizer_bad_score",
            Self::DuplicateToken { .. } => "tokenizer_duplicate_token",
            Self::BadMerge { .. } => "tokenizer_bad_merge",
            Self::NoSuchSpecial { .. } => "tokenizer_no_such_special",
            Self::TooLarge { .. } => "tokenizer_too_large",
            Self::Rule(_) => "internal",
            Self::UnknownToken { .. } => "unknown_token",
        }
    }
}
