//! Control messages between the coordinator and one worker: one enum per direction, so that a worker cannot say what
//! only the coordinator may. They travel as length-prefixed `postcard` frames over the worker's socketpair; end-of-file
//! in either direction means the other side is gone.
//!
//! Conversation: worker `Hello` → coordinator `Load` → worker `Progress`* → `Loaded` or `Failed`. Then links are arranged, where
//! two stages may reach each other's memory: `Offer` → `Offered` with the later one, `Connect` → `Connected` with the earlier
//! one. After `Serve` the worker serves step frames from its incoming ring until `Shutdown` or end-of-file. Links may be arranged
//! anew between steps, when a neighbour has been replaced; `Begin` → `Begun` then tells a stage that writes memory of another one
//! where the steps of the time before end.

use crate::plan::{Lift, Limits, Stage};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Everything a worker needs to load and serve one band.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadBand {
    /// Model file.
    pub model: PathBuf,
    /// Length the coordinator validated; a different length now is a refusal.
    pub file_bytes: u64,
    /// Device, inode and time of change (seconds, nanoseconds) of the file that the coordinator has open: the same path may name
    /// another file by the time a worker is replaced. `None` when it has none open.
    pub file_stamp: Option<[i64; 4]>,
    /// Pipeline incarnation; frames of earlier ones are dropped, a frame of a later one begins it.
    pub epoch: u64,
    /// Place in the pipeline, 0-based.
    pub stage_index: usize,
    /// The band.
    pub stage: Stage,
    /// What is lifted past this stage, or by it.
    pub lift: Option<Lift>,
    /// Sizes that hold for every stage.
    pub limits: Limits,
}

/// From the coordinator to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Load a band. Sent once.
    Load(Box<LoadBand>),
    /// Let the stage before write residual rows into this one's device.
    Offer,
    /// Write residual rows into the next stage's device from now on; none: into the ring.
    Connect(Option<DeviceShare>),
    /// A pipeline incarnation begins: drop frames of earlier ones. Answered when no step of them is under way any more.
    Begin(u64),
    /// All links are arranged: serve steps.
    Serve,
    /// Finish the step in hand, free everything, exit 0.
    Shutdown,
}

impl ToWorker {
    /// Whether this is a request about links or incarnations, or the end of them.
    pub fn arranges(&self) -> bool {
        matches!(self, ToWorker::Offer | ToWorker::Connect(_) | ToWorker::Begin(_) | ToWorker::Serve)
    }
}

/// Memory of a stage's device that the stage before writes residual rows into: for every slot of the ring between them an area
/// of `area_bytes`, in the order of the slots. A frame whose rows lie there says so ([`crate::frame::Place`]), and the area is the
/// sender's while the slot is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceShare {
    /// The driver's handle of the memory, which another process can open.
    pub handle: Vec<u8>,
    /// Bytes of the memory.
    pub bytes: u64,
    /// Bytes from one slot's area to the next.
    pub area_bytes: u64,
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
    /// Weights of layers that are lifted by this stage, in page-locked host memory.
    pub lifted_bytes: u64,
    /// Formats of the matrices of the band's layers.
    pub formats: Vec<String>,
    /// Name of the kernel set that computes (for example `avx512vnni`).
    pub kernels: String,
    /// Load time in milliseconds.
    pub load_ms: u64,
    /// What does not work as well as it might, one sentence each.
    pub notes: Vec<String>,
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
    /// Answer to `Offer`: the memory, or why there is none.
    Offered(Result<DeviceShare, String>),
    /// Answer to `Connect`: whether the memory can be written, or why not.
    Connected(Result<(), String>),
    /// Answer to `Begin`: nothing of an earlier incarnation is written to shared memory any more.
    Begun,
    /// Loading or serving ended with an error; the worker exits after this.
    Failed {
        /// Stable code, for example `file_changed`, `out_of_memory`.
        code: String,
        /// One sentence.
        message: String,
    },
}

/// Version of control messages, step frames, rings and status pages together.
pub const PROTOCOL_VERSION: u32 = 3;
