//! Control messages between the coordinator and one worker: one enum per direction, so that a worker cannot say what
//! only the coordinator may. They travel as length-prefixed `postcard` frames over the worker's socketpair; end-of-file
//! in either direction means the other side is gone.
//!
//! Conversation: worker `Hello` → coordinator `Load` → worker `Progress`* → `Loaded` or `Failed`. After `Loaded` the
//! worker serves step frames from its incoming ring until `Shutdown` or end-of-file.

use crate::plan::{Limits, Stage};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Everything a worker needs to load and serve one band.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadBand {
    /// Model file.
    pub model: PathBuf,
    /// Length the coordinator validated; a different length now is a refusal.
    pub file_bytes: u64,
    /// Pipeline incarnation; frames of earlier ones are dropped, a frame of a later one begins it.
    pub epoch: u64,
    /// Place in the pipeline, 0-based.
    pub stage_index: usize,
    /// The band.
    pub stage: Stage,
    /// Sizes that hold for every stage.
    pub limits: Limits,
}

/// From the coordinator to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Load a band. Sent once.
    Load(Box<LoadBand>),
    /// Finish the step in hand, free everything, exit 0.
    Shutdown,
}

/// What a worker really allocated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadStats {
    /// Device memory.
    pub device_bytes: u64,
    /// Page-locked host memory.
    pub pinned_bytes: u64,
    /// Private host memory: weights, KV, states, scratch.
    pub host_bytes: u64,
    /// Weights of each layer of the band, as stored.
    pub layers: Vec<LayerBytes>,
    /// Formats of the matrices of the band's layers.
    pub formats: Vec<String>,
    /// Name of the kernel set that computes (for example `avx512vnni`).
    pub kernels: String,
    /// Load time in milliseconds.
    pub load_ms: u64,
}

/// Where a worker keeps the weights of one layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerBytes {
    /// In device memory.
    pub device: u64,
    /// In page-locked host memory that the device reads.
    pub pinned: u64,
    /// In private host memory.
    pub host: u64,
}

impl LayerBytes {
    /// All of them.
    pub fn total(self) -> u64 {
        self.device + self.pinned + self.host
    }
}

/// From a worker to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
    /// First message: the process is up and speaks this protocol version.
    Hello {
        /// [`PROTOCOL_VERSION`] of the worker.
        protocol: u32,
        /// Process id as the worker sees it.
        pid: u32,
    },
    /// Load progress; `done` never exceeds `total`.
    Progress {
        /// Weight bytes stored so far.
        done: u64,
        /// Weight bytes of the band.
        total: u64,
    },
    /// The band is ready to serve.
    Loaded(LoadStats),
    /// Loading or serving ended with an error; the worker exits after this.
    Failed {
        /// Stable code, for example `file_changed`, `out_of_memory`.
        code: String,
        /// One sentence.
        message: String,
    },
}

/// Version of control messages, step frames, rings and status pages together.
pub const PROTOCOL_VERSION: u32 = 2;
