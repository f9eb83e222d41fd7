//! Why a line was not accepted.

use serde::{Deserialize, Serialize};

/// What kind of failure an error event reports; clients decide by it whether to correct, retry or give up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// May succeed when tried again: a worker died, the queue is full, the daemon is ending.
    Transient,
    /// The line is not a JSON object in UTF-8, or too long.
    Malformed,
    /// A field is missing, unknown, of the wrong type or out of range.
    Validation,
    /// The prompt does not fit the context.
    ContextLength,
    /// The message names a request that is not in flight.
    Cancel,
    /// A feature this program does not have.
    Unsupported,
    /// A defect of this program.
    Internal,
}

impl Class {
    /// Whether the same message may succeed later without a change.
    pub fn retryable(self) -> bool {
        matches!(self, Class::Transient)
    }
}

/// Why a line was not accepted as a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// Not UTF-8.
    #[error("the line is not valid UTF-8 (first bad byte at offset {offset}); send JSON in UTF-8")]
    NotUtf8 {
        /// Offset of the first byte that cannot be decoded.
        offset: usize,
    },
    /// Longer than [`super::MAX_LINE_BYTES`].
    #[error("the line is longer than {limit} bytes and was skipped; send a smaller message")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// Not JSON.
    #[error("the line is not valid JSON: {reason}; send one JSON object per line")]
    NotJson {
        /// What the parser says, with its position.
        reason: String,
    },
    /// JSON, but not an object.
    #[error("the line is {found}, not a JSON object; send {{\"type\":…}}")]
    NotObject {
        /// What it is.
        found: &'static str,
    },
    /// No such message.
    #[error(
        "unknown message type \"{found}\"; known: load, generate, abort, reset, reload, unload, ping, diag"
    )]
    UnknownType {
        /// The type as sent.
        found: String,
    },
    /// A message of the v1 or v2 protocol that this program does not have.
    #[error("message type \"{found}\" is not supported by this program")]
    UnsupportedType {
        /// The type as sent.
        found: String,
    },
    /// A required field is absent or null.
    #[error("{message} needs the field \"{field}\" ({expected})")]
    MissingField {
        /// Message type.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// What belongs there.
        expected: &'static str,
    },
    /// A field has the wrong JSON type.
    #[error("the field \"{field}\" must be {expected}, not {found}")]
    WrongType {
        /// Name of the field, with its path (`params.max_seq`).
        field: String,
        /// What belongs there.
        expected: &'static str,
        /// What was sent.
        found: String,
    },
    /// The message has no such field.
    #[error("{message} has no field \"{field}\"; remove it or correct its name")]
    UnknownField {
        /// Message type.
        message: &'static str,
        /// Name of the field, with its path.
        field: String,
    },
    /// A field of a feature this program does not have, with a value that asks for the feature.
    #[error("the field \"{field}\" asks for {feature}, which this program does not have; {remedy}")]
    UnsupportedField {
        /// Stable code of the feature.
        code: &'static str,
        /// Name of the field, with its path.
        field: String,
        /// The feature.
        feature: &'static str,
        /// What to do instead.
        remedy: String,
    },
    /// Two fields that exclude one another.
    #[error("the fields \"{first}\" and \"{second}\" exclude one another; send one of them")]
    Conflict {
        /// One.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A saved plan together with wishes.
    #[error(
        "the field \"params.plan\" names a placement that was made before, so no placement parameter but \
         \"params.allow_shared_device\" may be sent with it; send one or the other"
    )]
    PlanWithPlacement,
    /// An id that is empty or too long.
    #[error("the field \"id\" must have 1 to {limit} bytes, not {found}", limit = super::MAX_ID_BYTES)]
    BadId {
        /// Its length.
        found: usize,
    },
}

impl LineError {
    /// Stable code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            LineError::NotUtf8 { .. } => "invalid_utf8",
            LineError::TooLong { .. } => "line_too_long",
            LineError::NotJson { .. } => "invalid_json",
            LineError::NotObject { .. } => "not_an_object",
            LineError::UnknownType { .. } => "unknown_type",
            LineError::UnsupportedType { .. } => "unsupported_type",
            LineError::MissingField { .. } => "missing_field",
            LineError::WrongType { .. } => "wrong_type",
            LineError::UnknownField { .. } => "unknown_field",
            LineError::UnsupportedField { code, .. } => code,
            LineError::Conflict { .. } | LineError::PlanWithPlacement => "conflicting_fields",
            LineError::BadId { .. } => "bad_id",
        }
    }

    /// The field that is wrong, with its path, if it is about one.
    pub fn field(&self) -> Option<&str> {
        match self {
            LineError::MissingField { field, .. } | LineError::Conflict { first: field, .. } => Some(field),
            LineError::WrongType { field, .. }
            | LineError::UnknownField { field, .. }
            | LineError::UnsupportedField { field, .. } => Some(field),
            LineError::PlanWithPlacement => Some("params.plan"),
            LineError::BadId { .. } => Some("id"),
            LineError::NotUtf8 { .. }
            | LineError::TooLong { .. }
            | LineError::NotJson { .. }
            | LineError::NotObject { .. }
            | LineError::UnknownType { .. }
            | LineError::UnsupportedType { .. } => None,
        }
    }

    /// Class of the error.
    pub fn class(&self) -> Class {
        match self {
            LineError::NotUtf8 { .. }
            | LineError::TooLong { .. }
            | LineError::NotJson { .. }
            | LineError::NotObject { .. } => Class::Malformed,
            LineError::UnsupportedType { .. } | LineError::UnsupportedField { .. } => Class::Unsupported,
            LineError::UnknownType { .. }
            | LineError::MissingField { .. }
            | LineError::WrongType { .. }
            | LineError::UnknownField { .. }
            | LineError::Conflict { .. }
            | LineError::PlanWithPlacement
            | LineError::BadId { .. } => Class::Validation,
        }
    }
}

/// A line that was not accepted, with the id it carried if that much could be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Rejected {
    /// Id of the message.
    pub id: Option<String>,
    /// Why.
    pub error: LineError,
}

impl From<LineError> for Rejected {
    fn from(error: LineError) -> Self {
        Rejected { id: None, error }
    }
}
