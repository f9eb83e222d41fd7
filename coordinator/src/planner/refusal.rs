//! Why a placement is refused: one variant per condition, with its code and its sentence.

use super::shortage::Shortage;
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
        "devices is `{asked}`, which has an empty entry; it must be device numbers, ids, bus addresses or architectures \
         separated by commas, `all`, `none`, or a provider (`amd`, `cuda`, `emulated:devices=2`)"
    )]
    DevicesUnreadable {
        /// As written.
        asked: String,
    },
    /// A device that does not exist.
    #[error("there is no device `{entry}`; there are: {table}")]
    UnknownDevice {
        /// The entry as written.
        entry: String,
        /// All devices.
        table: String,
    },
    /// An architecture that more cards have than were asked for.
    #[error(
        "`{entry}` stands for {cards} devices, so it does not say which to use; name it {cards} times, or use numbers, ids \
         or bus addresses: {table}"
    )]
    DeviceAmbiguous {
        /// The entry as written.
        entry: String,
        /// Devices that it stands for.
        cards: usize,
        /// All devices.
        table: String,
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
    #[error(
        "device {index} is named twice; each GPU runs one band, unless --allow-shared-device (allow_shared_device) is \
         given; there are: {table}"
    )]
    DeviceTwice {
        /// The number.
        index: usize,
        /// All devices.
        table: String,
    },
    /// Cards of several architectures.
    #[error(
        "{first} and {other} have different architectures, and a cut between them changes results; name alike devices, or \
         accept it with --allow-mixed-arch (allow_mixed_arch)"
    )]
    ArchMismatch {
        /// The first device.
        first: String,
        /// The first that differs.
        other: String,
    },
    /// Uniform bands on cards of very different free memory.
    #[error(
        "{least} has {} free and {most} has {}: more than {} apart, too much for uniform bands; use split `auto` or \
         pp_layers, or raise uniform_vram_tolerance_gb", bytes(.least_free), bytes(.most_free), bytes(.tolerance)
    )]
    VramDifference {
        /// The device with the least free memory.
        least: String,
        /// Its free bytes.
        least_free: u64,
        /// The device with the most.
        most: String,
        /// Its free bytes.
        most_free: u64,
        /// Difference that is accepted.
        tolerance: u64,
    },
    /// A tolerance that is no number.
    #[error(
        "uniform_vram_tolerance_gb is `{asked}`, but must be a number of GB (10⁹ bytes), for example 2.0"
    )]
    ToleranceUnreadable {
        /// As written.
        asked: String,
    },
    /// A way to split that does not exist.
    #[error(
        "split is `{asked}`, but must be `uniform`, `auto` or `bytes:` with a size for each GPU, as in `bytes:8GiB,12GiB`"
    )]
    SplitUnknown {
        /// As written.
        asked: String,
    },
    /// Both explicit bands and a way to split.
    #[error("split and pp_layers both say how many layers each GPU runs; give one of them")]
    SplitWithPpLayers,
    /// An option about GPUs without GPUs.
    #[error(
        "{field} is about GPUs, but no GPU is part of this placement (devices: none); leave it out, or name devices"
    )]
    NeedsGpu {
        /// The option.
        field: &'static str,
    },
    /// An option about GPUs where the request names some and uses none.
    #[error(
        "{field} is about GPUs, but gpu_layer_budget 0 with offload_exec `cpu` leaves none of those that are named in this \
         placement; leave it out, or use a larger budget"
    )]
    GpusUnused {
        /// The option.
        field: &'static str,
    },
    /// A size that cannot be read.
    #[error(
        "{field} has the entry `{entry}`, but must hold sizes separated by commas, for example 8GiB,12GiB"
    )]
    SizeUnreadable {
        /// The option.
        field: &'static str,
        /// The entry.
        entry: String,
    },
    /// Another number of sizes than GPUs.
    #[error(
        "{field} has {entries} sizes, but there are {devices} devices; give one for each, or one for all"
    )]
    SizeCount {
        /// The option.
        field: &'static str,
        /// Sizes given.
        entries: usize,
        /// GPUs in use.
        devices: usize,
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
    /// A budget of more layers than there are.
    #[error(
        "gpu_layer_budget is {budget}, but the model has only {layers} layers; leave it out to keep all of them in GPUs' \
         memory"
    )]
    BudgetBeyondLayers {
        /// As given.
        budget: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A budget on a device whose memory is the host's.
    #[error(
        "gpu_layer_budget spills layers from a GPU's memory to the host's, but device {index} ({name}) shares the host's \
         memory: nothing would be gained; leave it out"
    )]
    BudgetOnUnifiedMemory {
        /// The number.
        index: usize,
        /// Its name.
        name: String,
    },
    /// More page-locked memory than the host can spare.
    #[error(
        "layers in host memory that a GPU reads would page-lock {} ({} of weights, {} of buffers), but only {}, half of the \
         {} available, may be: use a larger gpu_layer_budget, or offload_exec `cpu`, which locks nothing",
        bytes(&(mapped + pinned)), bytes(.mapped), bytes(.pinned), bytes(.cap), bytes(.available)
    )]
    PinnedMemory {
        /// Weights.
        mapped: u64,
        /// Buffers.
        pinned: u64,
        /// Most that may be locked.
        cap: u64,
        /// Memory of the host.
        available: u64,
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
    /// A choice of who runs prompts that does not exist.
    #[error("offload_prompts is `{asked}`, but must be `auto`, `gpu` or `cpu`")]
    OffloadPromptsUnknown {
        /// As written.
        asked: String,
    },
    /// The GPU is to run spilled layers for prompts, and there is no memory for that.
    #[error("offload_prompts `gpu` takes memory that is not there: {reason}; `auto` or `cpu` takes none")]
    PromptsOnGpu {
        /// Which memory, with the arithmetic.
        reason: String,
        /// Code of the refusal of the placement with it.
        code: &'static str,
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
    /// A budget that leaves a GPU without layers.
    #[error(
        "gpu_layer_budget leaves {budget} layers for {gpus} GPUs, and each of them runs at least one; use a budget of at least \
         {gpus}, or fewer devices"
    )]
    BudgetBelowGpus {
        /// Layers in GPUs' memory.
        budget: usize,
        /// GPUs of the pipeline.
        gpus: usize,
    },
    /// Too little spills for all CPU workers.
    #[error(
        "only {spilled} layers spill to the CPU, but cpu_workers is {workers}, and each of them runs at least one; use at most \
         {spilled}, or a smaller gpu_layer_budget"
    )]
    SpillBelowWorkers {
        /// Layers that spill.
        spilled: usize,
        /// CPU workers asked for.
        workers: usize,
    },
    /// `pp_layers` holds something that is not a number.
    #[error(
        "pp_layers is `{asked}`, but must be numbers of layers separated by commas, for example 12,18; `{entry}` is not one"
    )]
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
    /// A saved plan of another version of this program.
    #[error("the saved plan has version {found}, this program knows {known}; make a new plan")]
    PlanVersion {
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A saved plan for another file.
    #[error(
        "the saved plan is for another model file: {what} was {planned}, and is {found}; make a new plan"
    )]
    PlanOtherModel {
        /// What differs.
        what: &'static str,
        /// In the plan.
        planned: String,
        /// In the file.
        found: String,
    },
    /// A saved plan with a device that is not there.
    #[error("the saved plan uses {planned}, which is not there; there are: {table}; make a new plan")]
    PlanOtherDevice {
        /// The device of the plan.
        planned: String,
        /// All devices.
        table: String,
    },
    /// A saved plan that leaves layers out.
    #[error(
        "the saved plan is damaged at the stage of layers {}-{} of {layers}: stages must cover every layer once, in order, \
         and say where each lives; make a new plan", stage.start, stage.end.saturating_sub(1)
    )]
    PlanMalformed {
        /// Its stage.
        stage: std::ops::Range<usize>,
        /// Layers of the model.
        layers: usize,
    },
    /// A saved plan with a number that no plan has.
    #[error("the saved plan is damaged: {what} is {found}, but must be {} to {}; make a new plan", allowed.start(), allowed.end())]
    PlanNumber {
        /// Which.
        what: &'static str,
        /// In the plan.
        found: usize,
        /// What is possible.
        allowed: std::ops::RangeInclusive<usize>,
    },
    /// A saved plan whose bytes are not those of its stages.
    #[error(
        "the saved plan charges layers {}-{} with other bytes than they take: it was changed, or another version made it; \
         make a new plan", stage.start, stage.end.saturating_sub(1)
    )]
    PlanBytes {
        /// The stage.
        stage: std::ops::Range<usize>,
    },
    /// A saved plan whose weights are where no plan has them.
    #[error(
        "the saved plan has weights of layers {}-{} where no plan has them: those of a CPU stage are in its memory, those of a GPU          stage on the device, except the first ones, if they spilled; make a new plan", stage.start, stage.end.saturating_sub(1)
    )]
    PlanResidency {
        /// The stage.
        stage: std::ops::Range<usize>,
    },
    /// A saved plan that lifts other layers than spilled, or from where they are not.
    #[error(
        "the saved plan has prompts of layers {}-{} run on stage {stage}, which is not so in any plan: it was changed, or another version made it; \
         make a new plan", layers.start, layers.end.saturating_sub(1)
    )]
    PlanLift {
        /// The layers.
        layers: std::ops::Range<usize>,
        /// The stage.
        stage: usize,
    },
    /// A saved plan for a host with other NUMA nodes.
    #[error(
        "the saved plan keeps a CPU stage to NUMA node {node}, which this host does not have; make a new plan"
    )]
    PlanOtherNode {
        /// The node.
        node: u32,
    },
    /// A saved plan that does not fit any more.
    #[error(
        "the saved plan needs {} of {place}, of which {} are available now; free the rest, or make a new plan",
        bytes(.needed), bytes(.available)
    )]
    PlanMemory {
        /// Which memory.
        place: String,
        /// What the plan takes.
        needed: u64,
        /// What there is.
        available: u64,
    },
    /// The host has not enough memory.
    #[error("{0}")]
    Memory(Box<Shortage>),
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
            Refusal::DeviceAmbiguous { .. } => "device_ambiguous",
            Refusal::DeviceTwice { .. } => "device_twice",
            Refusal::ArchMismatch { .. } => "arch_mismatch",
            Refusal::VramDifference { .. } => "vram_difference",
            Refusal::ToleranceUnreadable { .. } => "uniform_vram_tolerance_unreadable",
            Refusal::SplitUnknown { .. } => "split_unknown",
            Refusal::SplitWithPpLayers => "split_with_pp_layers",
            Refusal::NeedsGpu { .. } | Refusal::GpusUnused { .. } => "needs_gpu",
            Refusal::SizeUnreadable { .. } => "size_unreadable",
            Refusal::SizeCount { .. } => "size_count",
            Refusal::PpBeyondDevices { .. } => "pp_beyond_devices",
            Refusal::ActivationsOnGpu => "activations_on_gpu",
            Refusal::BudgetWithPpLayers => "gpu_layer_budget_with_pp_layers",
            Refusal::BudgetBeyondLayers { .. } => "gpu_layer_budget_beyond_layers",
            Refusal::BudgetOnUnifiedMemory { .. } => "gpu_layer_budget_on_unified_memory",
            Refusal::PinnedMemory { .. } => "pinned_memory_limit",
            Refusal::BudgetWithoutGpu { .. } => "gpu_layer_budget_without_gpu",
            Refusal::BudgetUnreadable { .. } => "gpu_layer_budget_unreadable",
            Refusal::PcieWithoutGpu => "offload_exec_without_gpu",
            Refusal::KvTypeUnknown { .. } => "kv_type_unknown",
            Refusal::ActivationsUnknown { .. } => "activations_unknown",
            Refusal::OffloadPromptsUnknown { .. } => "offload_prompts_unknown",
            Refusal::PromptsOnGpu { code, .. } => code,
            Refusal::PeerCopiesUnknown { .. } => "peer_copies_unknown",
            Refusal::OutOfRange { .. } => "placement_out_of_range",
            Refusal::MaxSeqBeyondModel { .. } => "max_seq_beyond_model",
            Refusal::StagesDisagree { .. } => "stages_disagree",
            Refusal::TooFewLayers { .. }
            | Refusal::BudgetBelowGpus { .. }
            | Refusal::SpillBelowWorkers { .. } => "too_few_layers",
            Refusal::PpLayersParse { .. } => "pp_layers_parse",
            Refusal::PpLayersCount { .. } => "pp_layers_count",
            Refusal::PpLayersEmptyStage { .. } => "pp_layers_empty_stage",
            Refusal::PpLayersSum { .. } => "pp_layers_sum",
            Refusal::PlanVersion { .. } => "plan_version",
            Refusal::PlanOtherModel { .. } => "plan_other_model",
            Refusal::PlanOtherDevice { .. } | Refusal::PlanOtherNode { .. } => "plan_other_device",
            Refusal::PlanMalformed { .. }
            | Refusal::PlanNumber { .. }
            | Refusal::PlanBytes { .. }
            | Refusal::PlanLift { .. }
            | Refusal::PlanResidency { .. } => "plan_malformed",
            Refusal::Memory(_) | Refusal::PlanMemory { .. } => "out_of_memory",
        }
    }
}
