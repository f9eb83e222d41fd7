//! What the user asked for, as written, and its reading into values that cannot be wrong. The planner does the reading,
//! so that the command line, JSON lines and configuration files share one set of refusals.

use super::gpus::{DeviceWish, GpuSurvey};
use super::{ModelSummary, Refusal};
use spillway_protocol::plan::{ActivationType, KvType};

/// Placement options. Every field left out takes the planner's default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementRequest {
    /// GPUs: numbers in pipeline order, `all`, a provider such as `emulated:devices=2`, or `none`. Default `none`.
    pub devices: Option<String>,
    /// Lets several workers own one GPU.
    pub allow_shared_device: bool,
    /// CPU workers, one band each. Default without GPUs: `pp`, else the entries of `pp_layers`, else 1; with GPUs one for
    /// the layers that spill.
    pub cpu_workers: Option<usize>,
    /// Pipeline stages: on GPUs if there are any, else CPU workers.
    pub pp: Option<usize>,
    /// Layers of each stage, comma separated.
    pub pp_layers: Option<String>,
    /// Layers on GPUs, the last of the model: a number, or `auto` for as many as fit. Default: all.
    pub gpu_layer_budget: Option<String>,
    /// Who executes spilled layers: `pcie` or `cpu`.
    pub offload_exec: Option<String>,
    /// Longest sequence in tokens, prompt and answer. Default: the model's context, at most 4096.
    pub max_seq: Option<usize>,
    /// Compute threads of each worker. Default: every usable CPU of the host, or of the worker's NUMA node.
    pub threads: Option<usize>,
    /// Sequences that may be live at once. Default 4.
    pub parallel: Option<usize>,
    /// KV cache element: `auto` (f32 for unquantised files, f16 for quantised ones), `f32` or `f16`.
    pub kv_type: Option<String>,
    /// Inputs of quantised matrices: `auto` (16 bits for models below [`FINE_BELOW`] layer weights, 8 bits for larger ones),
    /// `int8` or `int16`.
    pub activations: Option<String>,
    /// Tokens of the largest step. Default 512, at most `max_seq` when that is longer than the decode batch.
    pub chunk: Option<usize>,
    /// Whether stages on GPUs may write into each other's memory: `auto` (where a test says that it works) or `off`.
    pub peer_copies: Option<String>,
}

const DEFAULT_MAX_SEQ: usize = 4096;
const DEFAULT_PARALLEL: usize = 4;
const DEFAULT_STEP: usize = 512;

/// Layer weights from which on a model does not need inputs finer than 8 bits (decision 7).
const FINE_BELOW: u64 = 1_000_000_000;

/// Highest values that mean anything; beyond them a typo is more likely than a wish.
const MAX_THREADS: usize = 1024;
const MAX_PARALLEL: usize = 256;
const MAX_STEP: usize = 8192;
const MAX_STAGES: usize = 256;

/// A request that has been read: every number is in range, names are resolved, stages are not yet laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wishes {
    /// GPUs in pipeline order, by their place in the survey.
    pub gpus: Vec<usize>,
    pub budget: Budget,
    pub split: Split,
    pub max_seq: usize,
    pub parallel: usize,
    pub step: usize,
    pub threads: Option<usize>,
    pub kv_type: KvType,
    pub activations: ActivationType,
    pub peer_copies: bool,
}

/// How many layers, counted from the last, are for GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Budget {
    /// All; without GPUs there is no other.
    All,
    /// This many.
    Layers(usize),
    /// As many as fit.
    Auto,
}

/// How layers are divided. CPU stages come first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Split {
    Uniform { cpu_stages: usize, gpu_stages: usize },
    Explicit { counts: Vec<usize>, cpu_stages: usize },
}

impl PlacementRequest {
    /// How the request names GPUs.
    ///
    /// # Errors
    /// In no way that is known.
    pub fn device_wish(&self) -> Result<DeviceWish, Refusal> {
        DeviceWish::read(self.devices.as_deref())
    }

    pub(super) fn read(&self, model: &ModelSummary, survey: &GpuSurvey) -> Result<Wishes, Refusal> {
        let mut gpus = self.device_wish()?.select(survey, self.allow_shared_device)?;
        let budget = self.read_budget(!gpus.is_empty())?;
        if budget == Budget::Layers(0) {
            gpus.clear();
        }
        self.check_offload(!gpus.is_empty())?;
        let parallel = in_range("parallel", self.parallel, DEFAULT_PARALLEL, MAX_PARALLEL)?;
        let max_seq = self.read_max_seq(model.model.context_length)?;
        let step = in_range("chunk", self.chunk, DEFAULT_STEP.min(max_seq), MAX_STEP)?;
        let activations = self.read_activations(model.layer_weights(), !gpus.is_empty())?;
        let split = if gpus.is_empty() { self.read_cpu_split()? } else { self.read_gpu_split(&mut gpus)? };
        Ok(Wishes {
            budget: if gpus.is_empty() { Budget::Layers(0) } else { budget },
            gpus,
            split,
            max_seq,
            parallel,
            // A decode token of every live sequence fits into one step.
            step: step.max(parallel),
            threads: self.threads.map(|n| in_range("threads", Some(n), n, MAX_THREADS)).transpose()?,
            kv_type: self.read_kv_type(model.is_quantised())?,
            activations,
            peer_copies: self.read_peer_copies()?,
        })
    }

    fn read_peer_copies(&self) -> Result<bool, Refusal> {
        match written(&self.peer_copies) {
            None | Some("auto") => Ok(true),
            Some("off") => Ok(false),
            Some(asked) => Err(Refusal::PeerCopiesUnknown { asked: asked.into() }),
        }
    }

    fn read_budget(&self, gpus: bool) -> Result<Budget, Refusal> {
        let Some(asked) = written(&self.gpu_layer_budget) else { return Ok(Budget::All) };
        let budget = match (asked, asked.parse::<usize>()) {
            ("auto", _) => Budget::Auto,
            (_, Ok(layers)) => Budget::Layers(layers),
            (_, Err(_)) => return Err(Refusal::BudgetUnreadable { asked: asked.into() }),
        };
        if gpus || budget == Budget::Layers(0) {
            return Ok(budget);
        }
        Err(Refusal::BudgetWithoutGpu { asked: asked.into() })
    }

    fn check_offload(&self, gpus: bool) -> Result<(), Refusal> {
        match written(&self.offload_exec) {
            None | Some("cpu") => Ok(()),
            Some("pcie") if gpus => Err(Refusal::PcieUnsupported),
            Some("pcie") => Err(Refusal::PcieWithoutGpu),
            Some(asked) => Err(Refusal::OffloadUnknown { asked: asked.into() }),
        }
    }

    fn read_max_seq(&self, context: usize) -> Result<usize, Refusal> {
        match self.max_seq {
            None => Ok(context.min(DEFAULT_MAX_SEQ)),
            Some(0) => Err(Refusal::OutOfRange { field: "max_seq", found: 0, low: 1, high: context }),
            Some(found) if found > context => Err(Refusal::MaxSeqBeyondModel { found, context }),
            Some(found) => Ok(found),
        }
    }

    fn read_kv_type(&self, quantised: bool) -> Result<KvType, Refusal> {
        match written(&self.kv_type) {
            None | Some("auto") => Ok(if quantised { KvType::F16 } else { KvType::F32 }),
            Some("f32") => Ok(KvType::F32),
            Some("f16") => Ok(KvType::F16),
            Some(asked) => Err(Refusal::KvTypeUnknown { asked: asked.into() }),
        }
    }

    /// GPUs have 8-bit products only, and one pipeline has one kind.
    fn read_activations(&self, layer_weights: u64, gpus: bool) -> Result<ActivationType, Refusal> {
        match written(&self.activations) {
            Some("int16") if gpus => Err(Refusal::ActivationsOnGpu),
            None | Some("auto") if layer_weights < FINE_BELOW && !gpus => Ok(ActivationType::Int16),
            None | Some("auto" | "int8") => Ok(ActivationType::Int8),
            Some("int16") => Ok(ActivationType::Int16),
            Some(asked) => Err(Refusal::ActivationsUnknown { asked: asked.into() }),
        }
    }

    fn read_cpu_split(&self) -> Result<Split, Refusal> {
        if let (Some(pp), Some(cpu_workers)) = (self.pp, self.cpu_workers)
            && pp != cpu_workers
        {
            return Err(Refusal::StagesDisagree { pp, cpu_workers });
        }
        let field = if self.pp.is_some() { "pp" } else { "cpu_workers" };
        let asked = self.pp.or(self.cpu_workers);
        let stages = in_range(field, asked, 1, MAX_STAGES)?;
        let Some(counts) = self.read_layer_list()? else {
            return Ok(Split::Uniform { cpu_stages: stages, gpu_stages: 0 });
        };
        if asked.is_some_and(|stages| stages != counts.len()) {
            return Err(Refusal::PpLayersCount { entries: counts.len(), stages });
        }
        Ok(Split::Explicit { cpu_stages: counts.len(), counts })
    }

    /// With GPUs, `pp` counts the stages on GPUs; those named beyond it are not used.
    fn read_gpu_split(&self, gpus: &mut Vec<usize>) -> Result<Split, Refusal> {
        let gpu_stages = in_range("pp", self.pp, gpus.len(), MAX_STAGES)?;
        if gpu_stages > gpus.len() {
            return Err(Refusal::PpBeyondDevices { pp: gpu_stages, devices: gpus.len() });
        }
        gpus.truncate(gpu_stages);
        let Some(counts) = self.read_layer_list()? else {
            let cpu_stages = in_range("cpu_workers", self.cpu_workers, 1, MAX_STAGES)?;
            return Ok(Split::Uniform { cpu_stages, gpu_stages });
        };
        if self.gpu_layer_budget.is_some() {
            return Err(Refusal::BudgetWithPpLayers);
        }
        let cpu_stages = self.cpu_workers.unwrap_or(counts.len().saturating_sub(gpu_stages));
        if counts.len() != cpu_stages + gpu_stages {
            return Err(Refusal::PpLayersCount { entries: counts.len(), stages: cpu_stages + gpu_stages });
        }
        Ok(Split::Explicit { counts, cpu_stages })
    }

    fn read_layer_list(&self) -> Result<Option<Vec<usize>>, Refusal> {
        written(&self.pp_layers).map(read_layer_list).transpose()
    }
}

/// An option that was given and is not blank.
fn written(option: &Option<String>) -> Option<&str> {
    option.as_deref().map(str::trim).filter(|text| !text.is_empty())
}

fn in_range(
    field: &'static str,
    given: Option<usize>,
    default: usize,
    high: usize,
) -> Result<usize, Refusal> {
    match given {
        None => Ok(default),
        Some(found) if (1..=high).contains(&found) => Ok(found),
        Some(found) => Err(Refusal::OutOfRange { field, found, low: 1, high }),
    }
}

fn read_layer_list(list: &str) -> Result<Vec<usize>, Refusal> {
    list.split(',')
        .map(|entry| {
            let entry = entry.trim();
            entry.parse().map_err(|_| Refusal::PpLayersParse { asked: list.into(), entry: entry.into() })
        })
        .collect()
}
