//! Why a band could not be loaded, or a step not run.

use crate::hip::HipError;
use crate::launch::LaunchError;
use spillway_kernels::formats::FormatError;
use spillway_kernels::pool::PoolError;
use spillway_model::error::ModelError;
use spillway_protocol::ShmError;
use spillway_worker::ProcessError;
use spillway_worker::embedding::EmbeddingError;
use spillway_worker::weights::WeightError;
use std::ops::Range;

/// Why a band could not be loaded, or a step not run. After a failed step the state of its sequences is undefined.
#[derive(Debug, thiserror::Error)]
pub enum BandError {
    /// The device.
    #[error(transparent)]
    Hip(#[from] HipError),
    /// An operation, or the kernels.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A weight in the file.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A weight does not suit the device's layout.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// No threads for repacking weights.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Token ids have no rows.
    #[error(transparent)]
    Embedding(#[from] EmbeddingError),
    /// A band that the model does not have, or sizes that no band has.
    #[error("band of layers {layers:?} of {available}: {reason}; make a new plan for this file")]
    Spec {
        /// Layers asked for.
        layers: Range<usize>,
        /// Layers of the model.
        available: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// More tokens or sequences than the band was made for.
    #[error(
        "a step of {tokens} tokens in {spans} spans exceeds the band's {max_tokens} tokens in {max_spans}"
    )]
    StepSize {
        /// Tokens of the step.
        tokens: usize,
        /// Spans of the step.
        spans: usize,
        /// Tokens allowed.
        max_tokens: usize,
        /// Spans allowed.
        max_spans: usize,
    },
    /// Something was asked of a band that is not at that end of the pipeline.
    #[error("this band has no {0}; the pipeline is wired wrongly")]
    NotHere(&'static str),
    /// States of lifted layers lie outside the memory that the coordinator made for them.
    #[error("{0} of a lifted layer is outside the memory for states; this is a fault in Spillway")]
    Lift(&'static str),
    /// Memory for the states of lifted layers.
    #[error(transparent)]
    Memory(#[from] ShmError),
    /// The device that was planned for is not there.
    #[error(
        "the plan is for the {provider} device {planned}, but this process sees only {visible}; make a new plan"
    )]
    OtherDevice {
        /// The provider.
        provider: String,
        /// Bus address and id of the plan.
        planned: String,
        /// Bus addresses and ids of the devices that there are.
        visible: String,
    },
    /// The load was given up on request.
    #[error("the load was cancelled")]
    Cancelled,
}

impl BandError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            BandError::Hip(error) => error.code(),
            BandError::Launch(error) => error.code(),
            BandError::Weight(error) => error.code(),
            BandError::Format(error) => error.code(),
            BandError::Pool(error) => error.code(),
            BandError::Embedding(error) => error.code(),
            BandError::Spec { .. } => "band_spec",
            BandError::StepSize { .. } => "step_size",
            BandError::NotHere(_) => "band_has_no_such_end",
            BandError::Lift(_) => "lift_outside_memory",
            BandError::Memory(error) => error.code(),
            BandError::OtherDevice { .. } => "gpu_other_device",
            BandError::Cancelled => "load_cancelled",
        }
    }
}

impl From<ModelError> for BandError {
    fn from(error: ModelError) -> Self {
        BandError::Weight(error.into())
    }
}

impl From<BandError> for ProcessError {
    fn from(error: BandError) -> Self {
        ProcessError::band(error.code(), error)
    }
}

impl From<HipError> for ProcessError {
    fn from(error: HipError) -> Self {
        BandError::from(error).into()
    }
}
