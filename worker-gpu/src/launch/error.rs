//! Why an operation was not queued.

use crate::compile::CompileError;
use crate::hip::HipError;
use thiserror::Error;

/// Why an operation was not queued. A refusal queues nothing.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// The device refused.
    #[error(transparent)]
    Hip(#[from] HipError),
    /// A kernel could not be compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// Memory is too small for the dimensions.
    #[error(
        "{operation}: {what} has {got} bytes where the operation needs {want}; this is a fault in Spillway, report it"
    )]
    Size {
        /// The operation.
        operation: &'static str,
        /// Which memory.
        what: &'static str,
        /// Its bytes.
        got: usize,
        /// Bytes needed.
        want: usize,
    },
    /// A dimension that the kernels cannot handle.
    #[error("{operation}: {what} is {got}, which the GPU kernels do not support: it must be {rule}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// The dimension.
        what: &'static str,
        /// Its value.
        got: usize,
        /// What would be possible.
        rule: &'static str,
    },
    /// A matrix of a format whose kernels were not loaded.
    #[error("no kernels were loaded for {format} weights; this is a fault in Spillway, report it")]
    Format {
        /// Name of the format.
        format: &'static str,
    },
    /// Inputs in a form that the format does not read.
    #[error("{format} weights read inputs of another form; this is a fault in Spillway, report it")]
    Form {
        /// Name of the format.
        format: &'static str,
    },
    /// A source that the table lacks.
    #[error("there is no device source {name}; this is a fault in Spillway, report it")]
    NoSource {
        /// Its name.
        name: String,
    },
}

impl LaunchError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            LaunchError::Hip(error) => error.code(),
            LaunchError::Compile(error) => error.code(),
            LaunchError::Size { .. } => "gpu_operation_size",
            LaunchError::Unsupported { .. } => "gpu_operation_unsupported",
            LaunchError::Format { .. } => "gpu_format_not_loaded",
            LaunchError::Form { .. } => "gpu_input_form",
            LaunchError::NoSource { .. } => "gpu_source_missing",
        }
    }
}
