//! Why a placement is refused: one variant per condition, with its code and its sentence.

use thiserror::Error;

/// A placement that cannot be had. Nothing has been touched when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// GPUs were asked for and there is none that can be used.
    #[error(
        "no GPU can be used: {looked_for}; `spillway devices` shows the same; use `--devices none` for the CPU alone"
    )]
    NoGpu {
        /// What was looked for.
        looked_for: String,
    },
    /// A device list that cannot be read.
    #[error(
        "devices is `{asked}`, but must be device numbers separated by commas, `all`, `none`, or a provider (`amd`, \
         `cuda`, `emulated:devices=2`); `spillway devices` lists the numbers"
    )]
    DevicesUnreadable {
        /// As written.
        asked: String,
    },
    /// A device that does not exist.
    #[error("there is no device {index}; {count} were found, numbered from 0: see `spillway devices`")]
    UnknownDevice {
        /// The number.
        index: usize,
        /// Devices found.
        count: usize,
    },
    /// A device that cannot be used.
    #[error("device {index} cannot be used: {reason}")]
    DeviceRefused {
        /// The number.
        index: usize,
        /// Why.
        reason: String,
    },
    /// A device was named twice.
    #[error("device {index} is named twice; each GPU runs one band, unless --allow-shared-device is given")]
    DeviceTwice {
        /// The number.
        index: usize,
    },
    /// More GPU stages than GPUs.
    #[error("pp is {pp}, but {devices} devices are named; every GPU stage needs a device of its own")]
    PpBeyondDevices {
        /// Stages asked for.
        pp: usize,
        /// Devices named.
        devices: usize,
    },
    /// Finer activations than GPUs have.
    #[error(
        "activations `int16` are for CPU workers; GPUs compute with 8-bit ones: leave it out, or use `--devices none`"
    )]
    ActivationsOnGpu,
    /// Both a budget and explicit bands.
    #[error("gpu_layer_budget and pp_layers both say how many layers GPUs run; give one of them")]
    BudgetWithPpLayers,
    /// Host-mapped execution, which GPU workers cannot do.
    #[error(
        "offload_exec `pcie` is not supported by this build: spilled layers are computed by CPU workers; leave it out, \
         or set it to `cpu`"
    )]
    PcieUnsupported,
    /// A layer budget for GPUs without GPUs.
    #[error(
        "gpu_layer_budget `{asked}` puts layers on GPUs, but no GPU is part of this placement (devices: none); leave \
         it out, or set it to 0"
    )]
    BudgetWithoutGpu {
        /// The budget as written.
        asked: String,
    },
    /// A layer budget that is neither a number nor `auto`.
    #[error("gpu_layer_budget is `{asked}`, but must be a number of layers or `auto`")]
    BudgetUnreadable {
        /// The budget as written.
        asked: String,
    },
    /// Host-mapped execution without a GPU.
    #[error(
        "offload_exec `pcie` lets a GPU read spilled weights, but no GPU is part of this placement (devices: none); \
         leave it out, or set it to `cpu`"
    )]
    PcieWithoutGpu,
    /// An execution target that does not exist.
    #[error("offload_exec is `{asked}`, but must be `pcie` or `cpu`")]
    OffloadUnknown {
        /// As written.
        asked: String,
    },
    /// A KV type that does not exist.
    #[error("kv_type is `{asked}`, but must be `auto`, `f32` or `f16`")]
    KvTypeUnknown {
        /// As written.
        asked: String,
    },
    /// An input type that does not exist.
    #[error("activations is `{asked}`, but must be `auto`, `int8` or `int16`")]
    ActivationsUnknown {
        /// As written.
        asked: String,
    },
    /// A choice of peer copies that does not exist.
    #[error("peer_copies is `{asked}`, but must be `auto` or `off`")]
    PeerCopiesUnknown {
        /// As written.
        asked: String,
    },
    /// A number outside its range.
    #[error("{field} is {found}, but must be between {low} and {high}")]
    OutOfRange {
        /// Option as users spell it.
        field: &'static str,
        /// What was given.
        found: usize,
        /// Lowest accepted value.
        low: usize,
        /// Highest accepted value.
        high: usize,
    },
    /// `max_seq` beyond what the model was made for.
    #[error(
        "max_seq is {found}, but the model was made for a context of {context} tokens; use a value from 1 to {context}"
    )]
    MaxSeqBeyondModel {
        /// What was given.
        found: usize,
        /// The model's context length.
        context: usize,
    },
    /// `pp` and `cpu_workers` disagree.
    #[error(
        "pp is {pp} and cpu_workers is {cpu_workers}, but without GPUs every stage is one CPU worker; give one of them, \
         or the same number"
    )]
    StagesDisagree {
        /// Stages asked for.
        pp: usize,
        /// Workers asked for.
        cpu_workers: usize,
    },
    /// More stages than layers.
    #[error("{stages} stages were asked for, but the model has only {layers} layers; use at most {layers}")]
    TooFewLayers {
        /// Stages asked for.
        stages: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// `pp_layers` holds something that is not a number.
    #[error("pp_layers is `{asked}`, but must be whole numbers separated by commas; `{entry}` is not one")]
    PpLayersParse {
        /// As written.
        asked: String,
        /// The entry that is no number.
        entry: String,
    },
    /// `pp_layers` has another number of entries than there are stages.
    #[error("pp_layers has {entries} entries, but there are {stages} stages; give one number per stage")]
    PpLayersCount {
        /// Entries given.
        entries: usize,
        /// Stages of the pipeline.
        stages: usize,
    },
    /// `pp_layers` gives a stage nothing to do.
    #[error("pp_layers gives stage {stage} no layer; every stage runs at least 1")]
    PpLayersEmptyStage {
        /// The idle stage.
        stage: usize,
    },
    /// `pp_layers` does not add up to the model.
    #[error("pp_layers adds up to {sum} layers, but the model has {layers}")]
    PpLayersSum {
        /// Sum of the entries.
        sum: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// The host has not enough memory.
    #[error("{0}")]
    Memory(Box<Shortage>),
}

/// The arithmetic of a placement that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "the placement needs {} of memory{place} (weights {}, KV cache {} for {} tokens, states {}, scratch {}, buffers {}), but \
     {} are available: {} too little; use a smaller file, or lower max_seq ({}), parallel ({}) or the step size ({}){}",
    bytes(.needed), bytes(.weights), bytes(.kv), kv_tokens, bytes(.state), bytes(.scratch), bytes(.buffers),
    bytes(.available), bytes(&needed.saturating_sub(*.available)), max_seq, parallel, step, advice(*.fitting_budget)
)]
pub struct Shortage {
    /// Which memory: ` of device 0 (its name)`; empty for the host's.
    pub place: String,
    /// A number of layers on GPUs that would fit.
    pub fitting_budget: Option<usize>,
    /// Sum of everything below.
    pub needed: u64,
    /// Available memory.
    pub available: u64,
    /// Weights of all stages.
    pub weights: u64,
    /// KV cache for `kv_tokens`.
    pub kv: u64,
    /// Tokens of one full sequence, the least a plan provides for.
    pub kv_tokens: usize,
    /// Recurrent states of all slots.
    pub state: u64,
    /// Activations.
    pub scratch: u64,
    /// Rings between the stages, and page-locked memory for copies to and from devices.
    pub buffers: u64,
    /// Longest sequence.
    pub max_seq: usize,
    /// State slots.
    pub parallel: usize,
    /// Tokens of the largest step.
    pub step: usize,
}

fn advice(fitting_budget: Option<usize>) -> String {
    fitting_budget.map_or_else(String::new, |layers| {
        format!("; gpu_layer_budget {layers} would fit, the other layers run on the CPU")
    })
}

fn bytes(count: &u64) -> String {
    super::render::bytes(*count)
}

impl Refusal {
    /// Stable code, for example `pp_layers_sum`.
    pub fn code(&self) -> &'static str {
        match self {
            Refusal::NoGpu { .. } => "no_gpu",
            Refusal::DevicesUnreadable { .. } => "devices_unreadable",
            Refusal::UnknownDevice { .. } => "unknown_device",
            Refusal::DeviceRefused { .. } => "device_refused",
            Refusal::DeviceTwice { .. } => "device_twice",
            Refusal::PpBeyondDevices { .. } => "pp_beyond_devices",
            Refusal::ActivationsOnGpu => "activations_on_gpu",
            Refusal::BudgetWithPpLayers => "gpu_layer_budget_with_pp_layers",
            Refusal::PcieUnsupported => "offload_exec_unsupported",
            Refusal::BudgetWithoutGpu { .. } => "gpu_layer_budget_without_gpu",
            Refusal::BudgetUnreadable { .. } => "gpu_layer_budget_unreadable",
            Refusal::PcieWithoutGpu => "offload_exec_without_gpu",
            Refusal::OffloadUnknown { .. } => "offload_exec_unknown",
            Refusal::KvTypeUnknown { .. } => "kv_type_unknown",
            Refusal::ActivationsUnknown { .. } => "activations_unknown",
            Refusal::PeerCopiesUnknown { .. } => "peer_copies_unknown",
            Refusal::OutOfRange { .. } => "placement_out_of_range",
            Refusal::MaxSeqBeyondModel { .. } => "max_seq_beyond_model",
            Refusal::StagesDisagree { .. } => "stages_disagree",
            Refusal::TooFewLayers { .. } => "too_few_layers",
            Refusal::PpLayersParse { .. } => "pp_layers_parse",
            Refusal::PpLayersCount { .. } => "pp_layers_count",
            Refusal::PpLayersEmptyStage { .. } => "pp_layers_empty_stage",
            Refusal::PpLayersSum { .. } => "pp_layers_sum",
            Refusal::Memory(_) => "out_of_memory",
        }
    }
}
