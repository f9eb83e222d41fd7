//! The plan: which process runs which layers, and what every byte is for. A value, decided once before anything is
//! allocated; serialisable, so it can be printed, saved, compared and sent to workers.

use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;

/// Tokens of one KV block. A block id means the same tokens on every stage.
pub const KV_BLOCK_TOKENS: usize = 32;

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// 4 bytes an element; exact.
    F32,
    /// 2 bytes an element.
    F16,
}

impl Stage {
    /// The GPU that runs it, if one does.
    pub fn device(&self) -> Option<&GpuDevice> {
        match &self.execution {
            Execution::Gpu { device } => Some(device),
            Execution::Cpu { .. } => None,
        }
    }
}

impl Plan {
    /// What is lifted past, or by, the stage at this place.
    pub fn lift_at(&self, stage: usize) -> Option<&Lift> {
        self.lift.as_ref().filter(|lift| stage <= lift.stage)
    }
}

impl GpuDevice {
    /// Whether both are one card, whatever number it has by now.
    pub fn is_same_card(&self, other: &GpuDevice) -> bool {
        match (&self.uuid, &other.uuid) {
            (Some(one), Some(two)) => one == two,
            _ => (&self.provider, &self.pci) == (&other.provider, &other.pci),
        }
    }
}

impl KvType {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
        }
    }
}

/// What the inputs of quantised matrices are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationType {
    /// 8-bit codes.
    Int8,
    /// 16-bit codes: results as of exact inputs, for up to twice the arithmetic.
    Int16,
}

/// Where a layer's weights live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Residency {
    /// Device memory.
    Device,
    /// Pinned host memory that the device reads over the bus.
    HostMapped,
    /// Host memory.
    Host,
}

/// Which processor executes a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Execution {
    /// A CPU worker.
    Cpu {
        /// Threads that compute, the driving one included.
        threads: usize,
        /// NUMA node whose CPUs and memory the worker keeps to; none = no binding.
        node: Option<u32>,
    },
    /// A GPU worker.
    Gpu {
        /// The device it owns.
        device: GpuDevice,
    },
}

/// Which GPU a worker owns, in words that mean the same in every process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDevice {
    /// Number in the list of devices that was placed on.
    pub index: usize,
    /// Source of devices as `worker-gpu` reads it: `amd`, `cuda` or `emulated:…`.
    pub provider: String,
    /// Number of the device there.
    pub ordinal: u32,
    /// Marketing name.
    pub name: String,
    /// Architecture as the kernel compiler names it.
    pub arch: String,
    /// Bus address: a worker refuses a device with another.
    pub pci: String,
    /// Unique id, where the driver has one: a worker refuses a device with another.
    pub uuid: Option<String>,
    /// Version of the driver, as it counts: what was learnt about a device holds for one.
    pub driver: i32,
}

/// Bytes a stage is charged for, by purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageBytes {
    /// Weights in the memory of the processor, head included where it sits.
    pub weights: u64,
    /// Embedding rows (read from the mapped file on demand: page cache, not private memory).
    pub embedding: u64,
    /// KV blocks of every attention layer.
    pub kv: u64,
    /// Convolution and matrix states of every recurrent layer, all state slots.
    pub state: u64,
    /// Activations of the largest step.
    pub scratch: u64,
    /// Rings into and out of the stage (the outgoing one is charged here).
    pub rings: u64,
    /// Page-locked host memory for copies to and from a device.
    pub pinned: u64,
    /// Page-locked host memory with the weights of [`Residency::HostMapped`] layers.
    pub mapped: u64,
}

impl StageBytes {
    /// Bytes in the memory of the processor that runs the stage.
    pub fn of_processor(&self) -> u64 {
        self.weights + self.kv + self.state + self.scratch
    }

    /// Bytes in the host's memory, whichever processor runs the stage.
    pub fn of_host(&self) -> u64 {
        self.rings + self.pinned + self.mapped
    }

    /// Sum of all purposes except the page cache behind the embedding.
    pub fn private(&self) -> u64 {
        self.of_processor() + self.of_host()
    }
}

/// A band of layers and its place in the pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Contiguous layers, 0-based, end exclusive.
    pub layers: Range<usize>,
    /// Turns token ids into residual rows.
    pub embed: bool,
    /// Applies the final norm and the output projection.
    pub head: bool,
    /// Processor.
    pub execution: Execution,
    /// Where the weights of each layer live, in order.
    pub residency: Vec<Residency>,
    /// Memory charged to the stage.
    pub bytes: StageBytes,
    /// Why the band starts and ends where it does, one sentence.
    pub why: String,
}

/// The model a plan was made for, with what is needed to see that the file is still the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedModel {
    /// Absolute path.
    pub path: PathBuf,
    /// File length in bytes.
    pub file_bytes: u64,
    /// Architecture name of the file.
    pub architecture: String,
    /// Layers that run.
    pub layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Context length the model was made for.
    pub context_length: usize,
}

/// Limits every stage sizes its memory by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Longest sequence in tokens, prompt and answer.
    pub max_seq: usize,
    /// Sequences that may be live at once (state slots).
    pub max_sequences: usize,
    /// KV blocks shared by all sequences.
    pub kv_blocks: usize,
    /// Element type of keys and values.
    pub kv_type: KvType,
    /// Inputs of quantised matrices.
    pub activations: ActivationType,
    /// Tokens of the largest step: decode tokens and prefill chunk together.
    pub max_step_tokens: usize,
    /// Logit rows one frame to the coordinator may hold.
    pub max_logit_rows: usize,
}

/// Layers that spilled to CPU workers and that a GPU runs for prompts in their place: it reads their weights from page-locked
/// host memory, and their states lie in memory that both reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lift {
    /// The layers: all that CPU workers run, the first of the model.
    pub layers: Range<usize>,
    /// Place in the pipeline of the stage that lifts them: the one behind the CPU workers.
    pub stage: usize,
    /// New tokens of a prompt from which on it is run so; at least 1.
    pub from: usize,
    /// Bytes of the memory that holds keys, values and states of the layers; charged to the CPU workers' `kv` and `state`.
    pub shared: u64,
    /// What decided, one sentence.
    pub why: String,
}

/// Format version that [`Plan::version`] carries.
pub const PLAN_VERSION: u32 = 1;

/// A complete placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Format version of the plan itself.
    pub version: u32,
    /// What is placed.
    pub model: PlannedModel,
    /// Sizes that hold for every stage.
    pub limits: Limits,
    /// Whether a stage on a GPU may write its result into the next one's memory, where a test says that this works.
    pub peer_copies: bool,
    /// Stages in pipeline order; the first embeds, the last has the head.
    pub stages: Vec<Stage>,
    /// What a GPU runs for prompts in place of CPU workers.
    #[serde(default)]
    pub lift: Option<Lift>,
    /// What was asked for and is not done as asked, one sentence each.
    pub warnings: Vec<String>,
}
