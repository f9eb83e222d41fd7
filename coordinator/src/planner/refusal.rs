//! Why a placement is refused: one variant per condition, with its code and its sentence.

use thiserror::Error;

/// A placement that cannot be had. Nothing has been touched when it is returned.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// GPUs were asked for.
    #[error(
        "devices `{asked}` need a GPU worker, and this build has only CPU workers (it was looked for as a band \
         executor of this executable); use `--devices none` and `--cpu-workers N`"
    )]
    NoGpuWorkers {
        /// The device list as written.
        asked: String,
    },
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
    "the placement needs {} of memory (weights {}, KV cache {} for {} tokens, states {}, scratch {}, rings {}), but \
     {} are available: {} too little; use a smaller file, or lower max_seq ({}), parallel ({}) or the step size ({})",
    bytes(.needed), bytes(.weights), bytes(.kv), kv_tokens, bytes(.state), bytes(.scratch), bytes(.rings),
    bytes(.available), bytes(&needed.saturating_sub(*.available)), max_seq, parallel, step
)]
pub struct Shortage {
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
    /// Rings between the stages.
    pub rings: u64,
    /// Longest sequence.
    pub max_seq: usize,
    /// State slots.
    pub parallel: usize,
    /// Tokens of the largest step.
    pub step: usize,
}

fn bytes(count: &u64) -> String {
    super::render::bytes(*count)
}

impl Refusal {
    /// Stable code, for example `pp_layers_sum`.
    pub fn code(&self) -> &'static str {
        match self {
            Refusal::NoGpuWorkers { .. } => "no_gpu_workers",
            Refusal::BudgetWithoutGpu { .. } => "gpu_layer_budget_without_gpu",
            Refusal::BudgetUnreadable { .. } => "gpu_layer_budget_unreadable",
            Refusal::PcieWithoutGpu => "offload_exec_without_gpu",
            Refusal::OffloadUnknown { .. } => "offload_exec_unknown",
            Refusal::KvTypeUnknown { .. } => "kv_type_unknown",
            Refusal::ActivationsUnknown { .. } => "activations_unknown",
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
