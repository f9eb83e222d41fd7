//! Why an engine could not be started.

use crate::workers::WorkerError;
use std::path::PathBuf;
use thiserror::Error;

/// The pipeline could not be started. Every process and segment is gone again.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The plan was made for another model.
    #[error("the plan was made for {}, but {} was opened; plan again", planned.display(), opened.display())]
    PlanMismatch {
        /// Path in the plan.
        planned: PathBuf,
        /// Path of the model.
        opened: PathBuf,
    },
    /// The system refused a thread or a descriptor.
    #[error("starting the engine failed: {action}: {source}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A worker could not be started or loaded.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The engine's thread ended without a word.
    #[error("starting the engine failed: its thread ended unexpectedly; this is a defect, please report it")]
    Lost,
}

impl EngineError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            EngineError::PlanMismatch { .. } => "plan_mismatch",
            EngineError::System { .. } => "engine_system",
            EngineError::Worker(error) => error.code(),
            EngineError::Lost => "internal",
        }
    }
}
