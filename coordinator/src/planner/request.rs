//! What the user asked for, as written, and its reading into values that cannot be wrong. The planner does the reading,
//! so that the command line, JSON lines and configuration files share one set of refusals.

use super::{ModelSummary, Refusal};
use spillway_protocol::plan::{ActivationType, KvType};

/// Placement options. Every field left out takes the planner's default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementRequest {
    /// GPU list, or `none`.
    pub devices: Option<String>,
    /// CPU workers, one band each. Default: `pp`, else the entries of `pp_layers`, else 1.
    pub cpu_workers: Option<usize>,
    /// Pipeline stages. Without GPUs every stage is one CPU worker.
    pub pp: Option<usize>,
    /// Layers of each stage, comma separated.
    pub pp_layers: Option<String>,
    /// Layers on GPUs: a number or `auto`.
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
    pub bands: Bands,
    pub max_seq: usize,
    pub parallel: usize,
    pub step: usize,
    pub threads: Option<usize>,
    pub kv_type: KvType,
    pub activations: ActivationType,
}

/// How layers are divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Bands {
    Uniform(usize),
    Explicit(Vec<usize>),
}

impl PlacementRequest {
    pub(super) fn read(&self, model: &ModelSummary) -> Result<Wishes, Refusal> {
        self.refuse_gpu_options()?;
        let parallel = in_range("parallel", self.parallel, DEFAULT_PARALLEL, MAX_PARALLEL)?;
        let max_seq = self.read_max_seq(model.model.context_length)?;
        let step = in_range("chunk", self.chunk, DEFAULT_STEP.min(max_seq), MAX_STEP)?;
        Ok(Wishes {
            bands: self.read_bands()?,
            max_seq,
            parallel,
            // A decode token of every live sequence fits into one step.
            step: step.max(parallel),
            threads: self.threads.map(|n| in_range("threads", Some(n), n, MAX_THREADS)).transpose()?,
            kv_type: self.read_kv_type(model.is_quantised())?,
            activations: self.read_activations(model.layer_weights())?,
        })
    }

    fn refuse_gpu_options(&self) -> Result<(), Refusal> {
        if let Some(asked) = written(&self.devices).filter(|asked| *asked != "none") {
            return Err(Refusal::NoGpuWorkers { asked: asked.into() });
        }
        match written(&self.gpu_layer_budget).map(|asked| (asked, asked.parse::<usize>())) {
            None | Some((_, Ok(0))) => {}
            Some((asked, Ok(_)) | (asked @ "auto", Err(_))) => {
                return Err(Refusal::BudgetWithoutGpu { asked: asked.into() });
            }
            Some((asked, Err(_))) => return Err(Refusal::BudgetUnreadable { asked: asked.into() }),
        }
        match written(&self.offload_exec) {
            None | Some("cpu") => Ok(()),
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

    fn read_activations(&self, layer_weights: u64) -> Result<ActivationType, Refusal> {
        match written(&self.activations) {
            None | Some("auto") if layer_weights < FINE_BELOW => Ok(ActivationType::Int16),
            None | Some("auto" | "int8") => Ok(ActivationType::Int8),
            Some("int16") => Ok(ActivationType::Int16),
            Some(asked) => Err(Refusal::ActivationsUnknown { asked: asked.into() }),
        }
    }

    fn read_bands(&self) -> Result<Bands, Refusal> {
        if let (Some(pp), Some(cpu_workers)) = (self.pp, self.cpu_workers)
            && pp != cpu_workers
        {
            return Err(Refusal::StagesDisagree { pp, cpu_workers });
        }
        let field = if self.pp.is_some() { "pp" } else { "cpu_workers" };
        let asked = self.pp.or(self.cpu_workers);
        let stages = in_range(field, asked, 1, MAX_STAGES)?;
        let Some(list) = written(&self.pp_layers) else { return Ok(Bands::Uniform(stages)) };
        let bands = read_layer_list(list)?;
        if asked.is_some_and(|stages| stages != bands.len()) {
            return Err(Refusal::PpLayersCount { entries: bands.len(), stages });
        }
        Ok(Bands::Explicit(bands))
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
