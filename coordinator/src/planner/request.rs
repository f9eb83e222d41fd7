//! What the user asked for, as written, and its reading into values that cannot be wrong. The planner does the reading,
//! so that the command line, JSON lines and configuration files share one set of refusals.

use super::gpus::{DeviceWish, GpuSurvey};
use super::seats::{self, Seat};
use super::{ModelSummary, Refusal};
use spillway_protocol::plan::{ActivationType, KvType};
use spillway_worker_gpu::speed::DeviceSpeed;

/// Placement options. Every field left out takes the planner's default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementRequest {
    /// GPUs in pipeline order, each by number, id, bus address or architecture; `all`, a provider such as
    /// `emulated:devices=2`, or `none`. Default `none`.
    pub devices: Option<String>,
    /// Lets several workers own one GPU, of this program and of others that allow it too.
    pub allow_shared_device: bool,
    /// Lets GPUs of different architectures work together.
    pub allow_mixed_arch: bool,
    /// Memory to plan with, a size for each GPU or one for all, as if the cards were smaller. Default: what is free.
    pub vram_limit: Option<String>,
    /// Largest difference of free memory between GPUs with uniform bands, in GB (10⁹ bytes). Default 2.0.
    pub uniform_vram_tolerance_gb: Option<String>,
    /// CPU workers, one band each. Default without GPUs: `pp`, else the entries of `pp_layers`, else 1; with GPUs one for
    /// the layers that spill.
    pub cpu_workers: Option<usize>,
    /// Pipeline stages: on GPUs if there are any, else CPU workers.
    pub pp: Option<usize>,
    /// Layers of each stage, comma separated.
    pub pp_layers: Option<String>,
    /// How GPUs share layers: `uniform`, `auto` by memory and speed, or `bytes:A,B` by budgets. Default `uniform`.
    pub split: Option<String>,
    /// Layers in GPUs' memory, the last of the model: a number, or `auto` for what is fastest by measured speeds. Default: all.
    pub gpu_layer_budget: Option<String>,
    /// Who executes spilled layers: `pcie`, the first GPU out of host memory, or `cpu`. Default `pcie`; with a budget of `auto`
    /// whoever is faster.
    pub offload_exec: Option<String>,
    /// Who runs layers for prompts that spilled to CPU workers: `cpu`, they; `gpu`, the first GPU, out of page-locked host memory;
    /// `auto`, the GPU for prompts that are faster so, where memory allows. Default `auto`.
    pub offload_prompts: Option<String>,
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

pub(crate) const DEFAULT_MAX_SEQ: usize = 4096;
pub(crate) const DEFAULT_PARALLEL: usize = 4;
pub(super) const DEFAULT_STEP: usize = 512;

/// Layer weights from which on a model does not need inputs finer than 8 bits (decision 7).
const FINE_BELOW: u64 = 1_000_000_000;

/// Highest values that mean anything; beyond them a typo is more likely than a wish.
pub(crate) const MAX_THREADS: usize = 1024;
pub(crate) const MAX_PARALLEL: usize = 256;
pub(crate) const MAX_STEP: usize = 8192;
pub(crate) const MAX_STAGES: usize = 256;

/// A request that has been read: every number is in range, names are resolved, stages are not yet laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wishes {
    /// GPUs in pipeline order.
    pub seats: Vec<Seat>,
    /// Measured speeds of the seats, where all of them were measured.
    pub speeds: Option<Vec<DeviceSpeed>>,
    pub budget: Budget,
    pub offload: Offload,
    /// Whether the request leaves it to speed who executes what spills.
    pub offload_is_open: bool,
    pub prompts: Prompts,
    /// CPU workers, if there is anything for them.
    pub cpu_stages: usize,
    pub division: Division,
    pub max_seq: usize,
    pub parallel: usize,
    pub step: usize,
    /// Whether the request leaves the size of steps to the planner.
    pub step_is_open: bool,
    pub threads: Option<usize>,
    pub kv_type: KvType,
    pub activations: ActivationType,
    pub peer_copies: bool,
    pub warnings: Vec<String>,
}

/// How many layers, counted from the last, are in GPUs' memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Budget {
    /// All; without GPUs there is no other.
    All,
    /// This many.
    Layers(usize),
    /// What is fastest, as far as speeds are known.
    Auto,
}

impl Budget {
    /// Reads a number of layers, or `auto`. Whether a model has so many is seen later.
    ///
    /// # Errors
    /// It is neither.
    pub fn read(asked: &str) -> Result<Budget, Refusal> {
        match asked {
            "auto" => Ok(Budget::Auto),
            _ => asked
                .parse()
                .map(Budget::Layers)
                .map_err(|_| Refusal::BudgetUnreadable { asked: asked.into() }),
        }
    }
}

/// How GPUs share layers, as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split<'a> {
    /// Equal numbers.
    Uniform,
    /// By memory and speed.
    Auto,
    /// Within these budgets, a list that is not empty.
    Bytes(&'a str),
}

impl Split<'_> {
    /// Reads `uniform`, `auto`, or `bytes:` and a list, which is read when the number of GPUs is known.
    ///
    /// # Errors
    /// It is none of them.
    pub fn read(asked: &str) -> Result<Split<'_>, Refusal> {
        let list = asked.strip_prefix("bytes:").filter(|list| !list.trim().is_empty());
        match (asked, list) {
            ("uniform", _) => Ok(Split::Uniform),
            ("auto", _) => Ok(Split::Auto),
            (_, Some(list)) => Ok(Split::Bytes(list)),
            _ => Err(Refusal::SplitUnknown { asked: asked.into() }),
        }
    }
}

/// Who runs the layers that spill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offload {
    /// CPU workers.
    Cpu,
    /// The first GPU, which reads them over the bus.
    Pcie,
}

/// Who runs spilled layers for prompts, where CPU workers run them otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prompts {
    /// Whoever is faster, as far as memory allows.
    Auto,
    /// CPU workers.
    Cpu,
    /// The first GPU.
    Gpu,
}

/// How layers are divided between stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Division {
    /// Equal numbers, the remainder to the first.
    Uniform,
    /// By the bytes that each GPU may take, and speeds where they are known.
    Weighted,
    /// As the request says, CPU stages first.
    Explicit(Vec<usize>),
}

impl PlacementRequest {
    /// How the request names GPUs.
    ///
    /// # Errors
    /// In no way that is known.
    pub fn device_wish(&self) -> Result<DeviceWish, Refusal> {
        DeviceWish::read(self.devices.as_deref())
    }

    /// The same wishes for CPU workers alone: what is about GPUs is left out.
    pub(crate) fn without_gpus(&self) -> PlacementRequest {
        PlacementRequest {
            cpu_workers: self.cpu_workers,
            max_seq: self.max_seq,
            threads: self.threads,
            parallel: self.parallel,
            kv_type: self.kv_type.clone(),
            activations: self.activations.clone(),
            chunk: self.chunk,
            ..PlacementRequest::default()
        }
    }

    /// Places in `survey` of the GPUs whose speeds decide something and are not known. A request that will be refused for the GPUs
    /// that it names has none.
    pub(crate) fn unmeasured(&self, survey: &GpuSurvey) -> Vec<usize> {
        let select = |wish: DeviceWish| wish.select(survey, self.allow_shared_device);
        let mut gpus = self.device_wish().and_then(select).unwrap_or_default();
        // Those beyond `pp` are not used.
        gpus.truncate(self.pp.unwrap_or(gpus.len()));
        let to_be_split = written(&self.split) == Some("auto") && gpus.len() > 1;
        let decides = to_be_split || self.asks_for_host_speed();
        gpus.retain(|&gpu| decides && survey.gpus[gpu].speed.is_none());
        gpus.sort_unstable();
        gpus.dedup();
        gpus
    }

    /// Whether the measured speed of the host decides anything.
    pub fn asks_for_host_speed(&self) -> bool {
        written(&self.gpu_layer_budget) == Some("auto")
    }

    /// Whether speeds that are known decide which prompts the GPU runs for CPU workers. For that alone none is measured.
    pub fn weighs_prompts(&self) -> bool {
        let is_open = matches!(written(&self.offload_prompts), None | Some("auto"));
        is_open && written(&self.offload_exec) == Some("cpu")
    }

    pub(super) fn read(&self, model: &ModelSummary, survey: &GpuSurvey) -> Result<Wishes, Refusal> {
        let gpus = self.device_wish()?.select(survey, self.allow_shared_device)?;
        let mut warnings = Vec::new();
        let budget = self.read_budget(!gpus.is_empty(), model.layers.len())?;
        let offload = self.read_offload(!gpus.is_empty(), &mut warnings)?;
        let idle = budget == Budget::Layers(0) && offload == Offload::Cpu;
        if idle && !gpus.is_empty() {
            self.check_unused()?;
        }
        let mut seats = seats::seats(if idle { &[] } else { &gpus }, survey, self)?;
        let parallel = in_range("parallel", self.parallel, DEFAULT_PARALLEL, MAX_PARALLEL)?;
        let max_seq = self.read_max_seq(model.model.context_length)?;
        let step = in_range("chunk", self.chunk, DEFAULT_STEP.min(max_seq), MAX_STEP)?;
        let activations = self.read_activations(model.layer_weights(), !seats.is_empty())?;
        let (division, cpu_stages) =
            if seats.is_empty() { self.read_cpu_division()? } else { self.read_gpu_division(&mut seats)? };
        self.check_seats(&seats, survey, &division, budget)?;
        let speed = |seat: &Seat| survey.gpus[seat.gpu].speed;
        Ok(Wishes {
            speeds: seats.iter().map(speed).collect(),
            offload_is_open: written(&self.offload_exec).is_none(),
            prompts: self.read_prompts(!gpus.is_empty())?,
            budget: if seats.is_empty() { Budget::Layers(0) } else { budget },
            offload: if seats.is_empty() { Offload::Cpu } else { offload },
            seats,
            cpu_stages,
            division,
            max_seq,
            parallel,
            // A decode token of every live sequence fits into one step.
            step: step.max(parallel),
            step_is_open: self.chunk.is_none(),
            threads: self.threads.map(|n| in_range("threads", Some(n), n, MAX_THREADS)).transpose()?,
            kv_type: self.read_kv_type(model.is_quantised())?,
            activations,
            peer_copies: self.read_peer_copies()?,
            warnings,
        })
    }

    /// Refuses what is said of GPUs that are named and not used.
    fn check_unused(&self) -> Result<(), Refusal> {
        let split = written(&self.split).filter(|split| *split != "uniform");
        let prompts = written(&self.offload_prompts).filter(|who| *who == "gpu");
        let about_gpus =
            [("vram_limit", written(&self.vram_limit)), ("split", split), ("offload_prompts", prompts)];
        match about_gpus.into_iter().find(|(_, said)| said.is_some()) {
            Some((field, _)) => Err(Refusal::GpusUnused { field }),
            None => Ok(()),
        }
    }

    fn read_peer_copies(&self) -> Result<bool, Refusal> {
        match written(&self.peer_copies) {
            None | Some("auto") => Ok(true),
            Some("off") => Ok(false),
            Some(asked) => Err(Refusal::PeerCopiesUnknown { asked: asked.into() }),
        }
    }

    /// Whether the GPUs go together, and with a budget.
    fn check_seats(
        &self,
        seats: &[Seat],
        survey: &GpuSurvey,
        division: &Division,
        budget: Budget,
    ) -> Result<(), Refusal> {
        if !self.allow_mixed_arch {
            seats::check_architectures(seats, survey)?;
        }
        if *division == Division::Uniform {
            seats::check_difference(seats, survey, self.uniform_vram_tolerance_gb.as_deref())?;
        }
        let integrated = seats.iter().map(|seat| &survey.gpus[seat.gpu]).find(|gpu| gpu.integrated);
        match integrated {
            Some(gpu) if budget != Budget::All => {
                Err(Refusal::BudgetOnUnifiedMemory { index: gpu.device.index, name: gpu.device.name.clone() })
            }
            _ => Ok(()),
        }
    }

    fn read_budget(&self, gpus: bool, layers: usize) -> Result<Budget, Refusal> {
        let Some(asked) = written(&self.gpu_layer_budget) else { return Ok(Budget::All) };
        match Budget::read(asked)? {
            Budget::Layers(budget) if budget > layers => Err(Refusal::BudgetBeyondLayers { budget, layers }),
            budget if gpus || budget == Budget::Layers(0) => Ok(budget),
            _ => Err(Refusal::BudgetWithoutGpu { asked: asked.into() }),
        }
    }

    /// A word that is not known moves nothing to the CPU: it counts as the default, and the plan says so.
    fn read_offload(&self, gpus: bool, warnings: &mut Vec<String>) -> Result<Offload, Refusal> {
        match written(&self.offload_exec) {
            Some("cpu") => Ok(Offload::Cpu),
            Some("pcie") if !gpus => Err(Refusal::PcieWithoutGpu),
            None | Some("pcie") => Ok(Offload::Pcie),
            Some(asked) => {
                warnings.push(format!(
                    "offload_exec is `{asked}`, which is neither `pcie` nor `cpu`; it counts as `pcie`"
                ));
                Ok(Offload::Pcie)
            }
        }
    }

    fn read_prompts(&self, gpus: bool) -> Result<Prompts, Refusal> {
        match written(&self.offload_prompts) {
            None | Some("auto") => Ok(Prompts::Auto),
            Some("cpu") => Ok(Prompts::Cpu),
            Some("gpu") if !gpus => Err(Refusal::NeedsGpu { field: "offload_prompts" }),
            Some("gpu") => Ok(Prompts::Gpu),
            Some(asked) => Err(Refusal::OffloadPromptsUnknown { asked: asked.into() }),
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

    /// The division between CPU workers, and their number.
    fn read_cpu_division(&self) -> Result<(Division, usize), Refusal> {
        match written(&self.split) {
            None | Some("uniform") => {}
            Some(_) => return Err(Refusal::NeedsGpu { field: "split" }),
        }
        if let (Some(pp), Some(cpu_workers)) = (self.pp, self.cpu_workers)
            && pp != cpu_workers
        {
            return Err(Refusal::StagesDisagree { pp, cpu_workers });
        }
        let field = if self.pp.is_some() { "pp" } else { "cpu_workers" };
        let asked = self.pp.or(self.cpu_workers);
        let stages = in_range(field, asked, 1, MAX_STAGES)?;
        let Some(counts) = self.read_layer_list()? else {
            return Ok((Division::Uniform, stages));
        };
        if asked.is_some_and(|stages| stages != counts.len()) {
            return Err(Refusal::PpLayersCount { entries: counts.len(), stages });
        }
        let stages = counts.len();
        Ok((Division::Explicit(counts), stages))
    }

    /// With GPUs, `pp` counts the stages on GPUs; those named beyond it are not used.
    fn read_gpu_division(&self, seats: &mut Vec<Seat>) -> Result<(Division, usize), Refusal> {
        let gpu_stages = in_range("pp", self.pp, seats.len(), MAX_STAGES)?;
        if gpu_stages > seats.len() {
            return Err(Refusal::PpBeyondDevices { pp: gpu_stages, devices: seats.len() });
        }
        seats.truncate(gpu_stages);
        let Some(counts) = self.read_layer_list()? else {
            let cpu_stages = in_range("cpu_workers", self.cpu_workers, 1, MAX_STAGES)?;
            return Ok((self.read_split(seats)?, cpu_stages));
        };
        if written(&self.split).is_some() {
            return Err(Refusal::SplitWithPpLayers);
        }
        if written(&self.gpu_layer_budget).is_some() {
            return Err(Refusal::BudgetWithPpLayers);
        }
        let cpu_stages = self.cpu_workers.unwrap_or(counts.len().saturating_sub(gpu_stages));
        if counts.len() != cpu_stages + gpu_stages {
            return Err(Refusal::PpLayersCount { entries: counts.len(), stages: cpu_stages + gpu_stages });
        }
        Ok((Division::Explicit(counts), cpu_stages))
    }

    fn read_split(&self, seats: &mut [Seat]) -> Result<Division, Refusal> {
        match written(&self.split).map_or(Ok(Split::Uniform), Split::read)? {
            Split::Uniform => Ok(Division::Uniform),
            Split::Auto => Ok(Division::Weighted),
            Split::Bytes(list) => {
                let budgets = seats::sizes("split", Some(list), seats.len())?.unwrap_or_default();
                for (seat, budget) in seats.iter_mut().zip(budgets) {
                    seat.budget = Some(budget);
                }
                Ok(Division::Weighted)
            }
        }
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

/// Reads the layers of each stage.
pub(crate) fn read_layer_list(list: &str) -> Result<Vec<usize>, Refusal> {
    list.split(',')
        .map(|entry| {
            let entry = entry.trim();
            entry.parse().map_err(|_| Refusal::PpLayersParse { asked: list.into(), entry: entry.into() })
        })
        .collect()
}
