//! Every setting, once. Help of flags, the reference in docs/configuration.md, its JSON schema and everything that `config`
//! shows are made from these rows.
//!
//! The variable of a setting is `SPILLWAY_` and the last part of its key in capitals, so last parts are unique.

use super::kind::{
    Kind, any, is_budget, is_devices, is_layers, is_log_filter, is_provider, is_sizes, is_split,
};
use crate::engine::DEFAULT_RESTART_LIMIT;
use crate::planner::{MAX_PARALLEL, MAX_STAGES, MAX_STEP, MAX_THREADS, TOLERANCE};
use crate::sampler::{self, Bounds};
use spillway_kernels::isa::KernelSet;

/// One row.
#[derive(Debug)]
pub struct Setting {
    /// Section and name: `memory.max_seq`.
    pub key: &'static str,
    /// Type and range.
    pub kind: Kind,
    /// What counts where nobody says otherwise.
    pub default: Fallback,
    /// One sentence, without a full stop.
    pub help: &'static str,
    /// When it is read.
    pub scope: Scope,
    /// Variables beside [`Setting::variable`], the more important ones first.
    pub also: &'static [&'static str],
    /// The flag, without dashes.
    pub flag: Option<&'static str>,
    /// The parameter of `load`, or the field of `generate`.
    pub param: Option<&'static str>,
}

/// What counts where nobody says otherwise.
#[derive(Debug, Clone, Copy)]
pub enum Fallback {
    /// A switch.
    Bool(bool),
    /// A whole number.
    Count(u64),
    /// A number.
    Number(f64),
    /// A text.
    Text(&'static str),
    /// What the program works out; in words.
    Derived(&'static str),
}

/// When a setting is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// At every load of a model: placement and supervision.
    Load,
    /// At every load, for the requests to the model that leave it out.
    Request,
    /// Once, when the program starts.
    Program,
}

impl Scope {
    /// In words, for the reference.
    pub fn words(self) -> &'static str {
        match self {
            Scope::Load => "load",
            Scope::Request => "request",
            Scope::Program => "program",
        }
    }
}

impl Setting {
    /// The variable that sets it.
    pub fn variable(&self) -> String {
        format!("SPILLWAY_{}", self.leaf().to_uppercase())
    }

    /// All variables that set it, the most important one first.
    pub fn variables(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.variable()).chain(self.also.iter().map(|name| (*name).to_owned()))
    }

    /// Everything before the last part of the key.
    pub fn section(&self) -> &'static str {
        self.key.rsplit_once('.').map_or("", |(section, _)| section)
    }

    /// The last part of the key.
    pub fn leaf(&self) -> &'static str {
        self.key.rsplit_once('.').map_or(self.key, |(_, leaf)| leaf)
    }

    const fn also(mut self, names: &'static [&'static str]) -> Self {
        self.also = names;
        self
    }

    const fn flag(mut self, name: &'static str) -> Self {
        self.flag = Some(name);
        self
    }

    const fn param(mut self, name: &'static str) -> Self {
        self.param = Some(name);
        self
    }
}

const fn row(scope: Scope, key: &'static str, kind: Kind, default: Fallback, help: &'static str) -> Setting {
    Setting { key, kind, default, help, scope, also: &[], flag: None, param: None }
}

const fn load(key: &'static str, kind: Kind, default: Fallback, help: &'static str) -> Setting {
    row(Scope::Load, key, kind, default, help)
}

const fn request(key: &'static str, kind: Kind, default: Fallback, help: &'static str) -> Setting {
    row(Scope::Request, key, kind, default, help)
}

const fn program(key: &'static str, kind: Kind, default: Fallback, help: &'static str) -> Setting {
    row(Scope::Program, key, kind, default, help)
}

const fn up_to(high: usize) -> Kind {
    Kind::Count { low: 1, high: Some(high as u64) }
}

const fn at_least(low: u64) -> Kind {
    Kind::Count { low, high: None }
}

const fn words(words: &'static [&'static str]) -> Kind {
    Kind::Choice { words, lenient: false }
}

const fn list(expected: &'static str, good: fn(&str) -> bool) -> Kind {
    Kind::List { expected, good }
}

const fn text(expected: &'static str) -> Kind {
    Kind::Text { expected, good: any }
}

/// Any difference of free memory is allowed.
const DIFFERENCE: Bounds = Bounds { low: 0.0, high: f32::INFINITY, words: "of at least 0" };

macro_rules! table {
    ($($(#[$doc:meta])* $name:ident = $row:expr;)+) => {
        $(pub static $name: Setting = $row;)+
        /// Every setting, in the order of the reference.
        pub static SETTINGS: &[&Setting] = &[$(&$name),+];
    };
}

table! {
    DEVICES = load(
        "hardware.devices",
        list("device numbers, ids, bus addresses or architectures separated by commas, `all`, `none`, or a provider", is_devices),
        Fallback::Text("none"),
        "GPUs in pipeline order by number, id, bus address or architecture; \"all\", a provider, or \"none\"",
    ).also(&["HIPFIRE_DEVICES", "HIPFIRE_DEVICE"]).flag("devices").param("devices");
    PROVIDER = program(
        "hardware.provider",
        Kind::Text { expected: "a provider of devices: `amd`, `cuda`, or `emulated` with its options", good: is_provider },
        Fallback::Derived("those of real devices"),
        "Provider to look for devices at, where `devices` does not name one",
    ).flag("provider");
    ALLOW_SHARED_DEVICE = load(
        "hardware.allow_shared_device",
        Kind::Switch,
        Fallback::Bool(false),
        "Let several workers own one GPU, of this program and of others that allow it too",
    ).flag("allow-shared-device").param("allow_shared_device");
    ALLOW_MIXED_ARCH = load(
        "hardware.allow_mixed_arch",
        Kind::Switch,
        Fallback::Bool(false),
        "Let GPUs of different architectures work together; a cut between them changes results by rounding",
    ).also(&["HIPFIRE_ALLOW_MIXED_ARCH"]).flag("allow-mixed-arch").param("allow_mixed_arch");
    VRAM_LIMIT = load(
        "hardware.vram_limit",
        list("sizes separated by commas, for example `8GiB,12GiB`", is_sizes),
        Fallback::Derived("what is free"),
        "Plan as if GPUs had less free memory: a size for each, or one for all, for example 8GiB,12GiB",
    ).flag("vram-limit").param("vram_limit");
    UNIFORM_VRAM_TOLERANCE_GB = load(
        "hardware.uniform_vram_tolerance_gb",
        Kind::Number(DIFFERENCE),
        Fallback::Number(TOLERANCE as f64 / 1e9),
        "Largest difference of free memory between GPUs with uniform bands, in GB",
    ).also(&["HIPFIRE_UNIFORM_VRAM_TOLERANCE_GB"]).flag("uniform-vram-tolerance-gb").param("uniform_vram_tolerance_gb");
    PEER_COPIES = load(
        "hardware.peer_copies",
        words(&["auto", "off"]),
        Fallback::Text("auto"),
        "Let GPUs write into each other's memory where a test says that it works",
    ).also(&["SPILLWAY_PEER"]).flag("peer-copies").param("peer_copies");
    LOCK_DIR = program(
        "hardware.lock_dir",
        Kind::Folder,
        Fallback::Derived("spillway/locks in XDG_RUNTIME_DIR, XDG_CACHE_HOME or ~/.cache"),
        "Folder of the files that lock GPUs; programs that share GPUs need the same one",
    ).also(&["HIPFIRE_LOCK_DIR"]);

    PP = load(
        "placement.pp",
        up_to(MAX_STAGES),
        Fallback::Derived("one per worker"),
        "Pipeline stages, on GPUs if there are any",
    ).flag("pp").param("pp");
    PP_LAYERS = load(
        "placement.pp_layers",
        list("whole numbers of at least 1 separated by commas", is_layers),
        Fallback::Derived("uniform"),
        "Layers of each stage, for example 12,18",
    ).also(&["HIPFIRE_PP_LAYERS"]).flag("pp-layers").param("pp_layers");
    SPLIT = load(
        "placement.split",
        list("`uniform`, `auto`, or `bytes:` with a size for each GPU, as in `bytes:8GiB,12GiB`", is_split),
        Fallback::Text("uniform"),
        "How GPUs share layers: equal numbers, by memory and speed, or by a budget for each, bytes:8GiB,12GiB",
    ).flag("split").param("split");
    CPU_WORKERS = load(
        "placement.cpu_workers",
        up_to(MAX_STAGES),
        Fallback::Derived("1, or what pp and pp_layers ask for"),
        "CPU worker processes, one band of layers each; with GPUs, for the layers that spill",
    ).flag("cpu-workers").param("cpu_workers");

    GPU_LAYER_BUDGET = load(
        "memory.gpu_layer_budget",
        list("a number of layers or `auto`", is_budget),
        Fallback::Derived("all"),
        "Layers in GPUs' memory, the last of the model; the others spill; auto: what is fastest, as measured",
    ).also(&["HIPFIRE_GPU_LAYER_BUDGET"]).flag("gpu-layer-budget").param("gpu_layer_budget");
    OFFLOAD_EXEC = load(
        "memory.offload_exec",
        Kind::Choice { words: &["pcie", "cpu"], lenient: true },
        Fallback::Derived("pcie; with a budget of auto whoever is faster"),
        "Who computes spilled layers: the first GPU, which reads them over the bus, or the CPU",
    ).also(&["HIPFIRE_OFFLOAD_EXEC"]).flag("offload-exec").param("offload_exec");
    OFFLOAD_PROMPTS = load(
        "memory.offload_prompts",
        Kind::Choice { words: &["auto", "gpu", "cpu"], lenient: false },
        Fallback::Text("auto"),
        "Who runs layers for prompts that the CPU computes otherwise: the first GPU, the CPU, or whoever is faster",
    ).flag("offload-prompts").param("offload_prompts");
    MAX_SEQ = load(
        "memory.max_seq",
        at_least(1),
        Fallback::Derived("the model's context, at most 4096"),
        "Longest sequence in tokens, prompt and answer",
    ).flag("max-seq").param("max_seq");
    KV_TYPE = load(
        "memory.kv_type",
        words(&["auto", "f32", "f16"]),
        Fallback::Text("auto"),
        "Element type of the KV cache; auto: f32 for unquantised files, f16 otherwise",
    ).flag("kv-type").param("kv_type");
    PARALLEL = load(
        "memory.parallel",
        up_to(MAX_PARALLEL),
        Fallback::Derived("4 for plan and servers, 1 for the other commands"),
        "Sequences that may run at once",
    ).flag("parallel").param("parallel");

    THREADS = load(
        "compute.threads",
        up_to(MAX_THREADS),
        Fallback::Derived("all usable CPUs"),
        "Compute threads of each worker",
    ).flag("threads").param("threads");
    ACTIVATIONS = load(
        "compute.activations",
        words(&["auto", "int8", "int16"]),
        Fallback::Text("auto"),
        "Inputs of quantised matrices; auto: int16 for small models on CPUs, int8 otherwise",
    ).flag("activations").param("activations");
    CHUNK = load(
        "compute.chunk",
        up_to(MAX_STEP),
        Fallback::Derived("512; where one GPU computes everything and has the room 1024, or 2048 for one sequence"),
        "Tokens of the largest step; long prompts are computed in chunks of this size",
    ).flag("chunk").param("chunk");
    KERNELS = program(
        "compute.kernels",
        words(&KernelSet::NAMES),
        Fallback::Derived("the fastest that the CPU has"),
        "CPU kernels to use; the CPU must have their instructions",
    );
    GPU_GRAPHS = program(
        "compute.gpu_graphs",
        Kind::Switch,
        Fallback::Bool(true),
        "Let GPU workers capture steps that come again and replay them",
    );

    MAX_TOKENS = request(
        "generation.max_tokens",
        at_least(0),
        Fallback::Count(512),
        "Most tokens to generate; 0 = none",
    ).flag("max-tokens").param("max_tokens");
    TEMPERATURE = request(
        "generation.temperature",
        Kind::Number(sampler::TEMPERATURE),
        Fallback::Number(0.3),
        "Temperature; 0 = always the most probable token",
    ).flag("temp").param("temperature");
    TOP_K = request(
        "generation.top_k",
        Kind::Count { low: 0, high: Some(u32::MAX as u64) },
        Fallback::Count(0),
        "Keep the K most probable tokens; 0 = all",
    ).flag("top-k").param("top_k");
    TOP_P = request(
        "generation.top_p",
        Kind::Number(sampler::TOP_P),
        Fallback::Number(0.8),
        "Keep the most probable tokens that together reach this probability; 1 = all",
    ).flag("top-p").param("top_p");
    MIN_P = request(
        "generation.min_p",
        Kind::Number(sampler::MIN_P),
        Fallback::Number(0.0),
        "Keep tokens at least this times as probable as the best; 0 = all",
    ).flag("min-p").param("min_p");
    REPEAT_PENALTY = request(
        "generation.repeat_penalty",
        Kind::Number(sampler::REPEAT_PENALTY),
        Fallback::Number(1.0),
        "Divide the logits of recent tokens by this; 1 = off",
    ).flag("repeat-penalty").param("repeat_penalty");
    REPEAT_WINDOW = request(
        "generation.repeat_window",
        at_least(0),
        Fallback::Count(128),
        "How many tokens are recent, for all penalties",
    ).flag("repeat-window").param("repeat_window");
    PRESENCE_PENALTY = request(
        "generation.presence_penalty",
        Kind::Number(sampler::PENALTY),
        Fallback::Number(0.0),
        "Subtract this from the logits of recent tokens",
    ).flag("presence-penalty").param("presence_penalty");
    FREQUENCY_PENALTY = request(
        "generation.frequency_penalty",
        Kind::Number(sampler::PENALTY),
        Fallback::Number(0.0),
        "Subtract this once per occurrence of a recent token",
    ).flag("frequency-penalty").param("frequency_penalty");

    RESTART_LIMIT = load(
        "supervision.restart_limit",
        at_least(0),
        Fallback::Count(DEFAULT_RESTART_LIMIT as u64),
        "Failures of workers within a minute that are answered with a replacement; one more ends every request",
    );
    DEVICE_LOST = load(
        "supervision.device_lost",
        words(&["replan", "fail"]),
        Fallback::Text("replan"),
        "What happens when a GPU does not come back: the model is placed on what is left, or every request fails",
    );

    KERNEL_CACHE = program(
        "compilers.kernel_cache",
        Kind::Folder,
        Fallback::Derived("spillway/kernels in XDG_CACHE_HOME or ~/.cache"),
        "Folder of compiled GPU kernels and of results of link tests",
    );
    CLANG = program(
        "compilers.clang",
        text("a program"),
        Fallback::Derived("ROCm's or the system's"),
        "The clang that compiles kernels for AMD and NVIDIA GPUs",
    );
    NVRTC = program(
        "compilers.nvrtc",
        text("a library"),
        Fallback::Derived("the first that loads"),
        "The NVRTC library that compiles kernels for NVIDIA GPUs",
    );
    CXX = program(
        "compilers.cxx",
        text("a program"),
        Fallback::Derived("the system's"),
        "The C++ compiler that compiles kernels for emulated GPUs",
    );

    LOG = program(
        "diagnostics.log",
        Kind::Text { expected: "a log filter, for example `info` or `warn,spillway=debug`", good: is_log_filter },
        Fallback::Text("warn"),
        "What is logged to standard error: error, warn, info, debug or trace, or a filter by module",
    );
    CPU_EXEC_TRACE = program(
        "diagnostics.cpu_exec_trace",
        Kind::Switch,
        Fallback::Bool(false),
        "Print a line for every kind of step that a CPU worker sees for the first time",
    ).also(&["HIPFIRE_CPU_EXEC_TRACE"]);
}
