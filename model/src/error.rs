//! Why a model is refused, once its container has been read.

use crate::gguf::{GgmlType, GgufError};
use std::path::PathBuf;

/// A refusal of a model. The message says what was found, where, and what would be accepted.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The container is refused.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Any other refusal, with the file it is about.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file that was opened.
        path: PathBuf,
        /// What is wrong with the model in it.
        error: Box<ModelError>,
    },
    /// An architecture no builder is registered for.
    #[error("architecture {found:?} is not supported; supported are: {supported}")]
    UnknownArchitecture {
        /// Name in the file.
        found: String,
        /// Names with a builder.
        supported: String,
    },
    /// A number or list in the metadata that no model of the architecture can have.
    #[error("metadata key {key:?}: {reason}")]
    BadConfig {
        /// The key.
        key: String,
        /// What is wrong with its value.
        reason: String,
    },
    /// The file asks for something we do not compute; ignoring it would give wrong results.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The metadata key or tensor that asks for it.
        what: String,
        /// What it means.
        reason: String,
    },
    /// A tensor the architecture needs is absent.
    #[error("tensor {name:?} is missing; the model needs it with shape {expected:?}")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
        /// Shape it must have, the contiguous dimension first.
        expected: Vec<u64>,
    },
    /// A tensor has another shape than the configuration implies.
    #[error("tensor {name:?} has shape {found:?}, but the model's metadata implies {expected:?}")]
    Misshapen {
        /// Name of the tensor.
        name: String,
        /// Shape it must have, the contiguous dimension first.
        expected: Vec<u64>,
        /// Shape it has.
        found: Vec<u64>,
    },
    /// A tensor the model needs has a format we cannot compute with.
    #[error("tensor {name:?} has format {found}, which cannot be computed with; supported are: {supported}")]
    UnusableFormat {
        /// Name of the tensor.
        name: String,
        /// Its format.
        found: GgmlType,
        /// Formats that can be used.
        supported: String,
    },
    /// A tensor's values cannot be used.
    #[error("tensor {name:?}: {reason}")]
    BadTensor {
        /// Name of the tensor.
        name: String,
        /// What is wrong with its values.
        reason: String,
    },
}

impl ModelError {
    /// Stable name of the kind of refusal.
    pub fn code(&self) -> &'static str {
        match self {
            ModelError::Gguf(error) => error.code(),
            ModelError::InFile { error, .. } => error.code(),
            ModelError::UnknownArchitecture { .. } => "unknown_architecture",
            ModelError::BadConfig { .. } => "model_bad_config",
            ModelError::Unsupported { .. } => "model_unsupported",
            ModelError::MissingTensor { .. } => "tensor_missing",
            ModelError::Misshapen { .. } => "tensor_misshapen",
            ModelError::UnusableFormat { .. } => "tensor_unusable_format",
            ModelError::BadTensor { .. } => "tensor_bad_values",
        }
    }
}
