//! Why a placement is refused: code and sentence.

use thiserror::Error;

/// A placement that cannot be had. Nothing has been touched when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Refusal {
    code: &'static str,
    message: String,
}

impl Refusal {
    pub(super) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Refusal { code, message: message.into() }
    }
    /// Stable code, for example `pp_layers_sum`.
    pub fn code(&self) -> &'static str {
        self.code
    }
}
