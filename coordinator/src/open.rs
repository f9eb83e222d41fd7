//! Opening a model: everything that can be refused is refused here, before any side effect.

use crate::planner::ModelSummary;
use std::path::Path;
use thiserror::Error;

/// How much of the text layer (tokenizer, chat template) a command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextNeed {
    /// A tokenizer must be present and valid.
    Required,
    /// A model without a tokenizer is fine; a broken one is refused.
    Optional,
    /// Token ids only: the tokenizer is not looked at.
    Ignored,
}

/// A validated model: the mapped file, its program, its text layer, its sizes.
#[derive(Debug)]
pub struct LoadedModel {
    summary: ModelSummary,
}

impl LoadedModel {
    /// Sizes for the planner.
    pub fn summary(&self) -> &ModelSummary {
        &self.summary
    }
}

/// A model that cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Not implemented.
    #[error("{0}")]
    Missing(String),
}

impl OpenError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        "missing"
    }
}

/// Opens and validates a model file.
pub fn open_model(path: &Path, _text: TextNeed) -> Result<LoadedModel, OpenError> {
    Err(OpenError::Missing(path.display().to_string()))
}
