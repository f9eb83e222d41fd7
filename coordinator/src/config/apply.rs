//! What settings come to: placement, sampling, supervision, and the environment of this program and its workers.

use super::table::{self, Fallback, SETTINGS, Scope, Setting};
use super::value::Value;
use super::{Config, Source};
use crate::engine::{DeviceLost, EngineOptions};
use crate::planner::{DeviceWish, PlacementRequest};
use crate::sampler::SamplingParams;
use spillway_protocol::jsonl::PlacementParams;

/// What requests get that leave it out.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// How tokens are chosen; without a seed of its own.
    pub sampling: SamplingParams,
}

/// The same by the way a request comes.
#[derive(Debug, Clone, PartialEq)]
pub struct Generations {
    /// As JSON lines.
    pub lines: Generation,
    /// From an OpenAI client, which expects that protocol's defaults where no setting says otherwise.
    pub openai: Generation,
}

impl Default for Generation {
    fn default() -> Self {
        Config::default().generation()
    }
}

/// A placement that is asked for, and by whom besides the command or message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AskedPlacement {
    /// The request.
    pub request: PlacementRequest,
    /// Settings that are part of it, and who has set them.
    pub settings: Vec<(&'static str, Source)>,
}

impl Config {
    /// The placement of a load: what is `given`, by flags or by parameters of a message, and settings for the rest.
    pub fn placement(&self, given: PlacementParams) -> AskedPlacement {
        let mut rest = Rest { config: self, stood_in_for: self.stood_in_for(&given), used: Vec::new() };
        let request = PlacementRequest {
            devices: rest.text(given.devices, &table::DEVICES),
            allow_shared_device: rest.switch(given.allow_shared_device, &table::ALLOW_SHARED_DEVICE),
            allow_mixed_arch: rest.switch(given.allow_mixed_arch, &table::ALLOW_MIXED_ARCH),
            vram_limit: rest.text(given.vram_limit, &table::VRAM_LIMIT),
            uniform_vram_tolerance_gb: rest
                .text(given.uniform_vram_tolerance_gb, &table::UNIFORM_VRAM_TOLERANCE_GB),
            cpu_workers: rest.size(given.cpu_workers, &table::CPU_WORKERS),
            pp: rest.size(given.pp, &table::PP),
            pp_layers: rest.text(given.pp_layers, &table::PP_LAYERS),
            split: rest.text(given.split, &table::SPLIT),
            gpu_layer_budget: rest.text(given.gpu_layer_budget, &table::GPU_LAYER_BUDGET),
            offload_exec: rest.text(given.offload_exec, &table::OFFLOAD_EXEC),
            offload_prompts: rest.text(given.offload_prompts, &table::OFFLOAD_PROMPTS),
            max_seq: rest.size(given.max_seq, &table::MAX_SEQ),
            threads: rest.size(given.threads, &table::THREADS),
            parallel: rest.size(given.parallel, &table::PARALLEL),
            kv_type: rest.text(given.kv_type, &table::KV_TYPE),
            activations: rest.text(given.activations, &table::ACTIVATIONS),
            chunk: rest.size(given.chunk, &table::CHUNK),
            peer_copies: rest.text(given.peer_copies, &table::PEER_COPIES),
        };
        AskedPlacement { request, settings: rest.used }
    }

    /// Settings that `given` stands in for, since it says the same in another way.
    fn stood_in_for(&self, given: &PlacementParams) -> Vec<&'static Setting> {
        let no_gpu = |devices: Option<&str>| matches!(DeviceWish::read(devices), Ok(DeviceWish::None));
        let of_settings = self.set(&table::DEVICES).map(|found| found.value.to_string());
        let only_cpu = no_gpu(given.devices.as_deref().or(of_settings.as_deref()));
        let by_count = given.pp.is_some() || given.cpu_workers.is_some();
        let by_memory = given.split.is_some() || given.gpu_layer_budget.is_some();
        let workers_are_set = self.set(&table::CPU_WORKERS).is_some();
        let rows: [(bool, &[&'static Setting]); 6] = [
            (
                given.devices.is_some() && only_cpu,
                &[
                    &table::VRAM_LIMIT,
                    &table::SPLIT,
                    &table::GPU_LAYER_BUDGET,
                    &table::OFFLOAD_EXEC,
                    &table::OFFLOAD_PROMPTS,
                ],
            ),
            (
                given.pp_layers.is_some(),
                &[&table::SPLIT, &table::GPU_LAYER_BUDGET, &table::PP, &table::CPU_WORKERS],
            ),
            (by_count || by_memory, &[&table::PP_LAYERS]),
            // Stages on GPUs that are not used now, beside CPU workers that are.
            (given.devices.is_some() && only_cpu && workers_are_set, &[&table::PP]),
            // Both count the CPU workers then.
            (only_cpu && given.pp.is_some(), &[&table::CPU_WORKERS]),
            (only_cpu && given.cpu_workers.is_some(), &[&table::PP]),
        ];
        rows.iter().filter(|(holds, _)| *holds).flat_map(|(_, settings)| settings.iter().copied()).collect()
    }

    /// What requests get that leave it out.
    pub fn generation(&self) -> Generation {
        #[expect(clippy::cast_possible_truncation, reason = "sampling computes in f32")]
        let real = |setting| match self.value(setting) {
            Some(Value::Number(number)) => number as f32,
            _ => 0.0,
        };
        let count = |setting| match self.value(setting) {
            Some(Value::Count(count)) => usize::try_from(count).unwrap_or(usize::MAX),
            _ => 0,
        };
        Generation {
            max_tokens: count(&table::MAX_TOKENS),
            sampling: SamplingParams {
                temperature: real(&table::TEMPERATURE),
                top_k: u32::try_from(count(&table::TOP_K)).unwrap_or(u32::MAX),
                top_p: real(&table::TOP_P),
                min_p: real(&table::MIN_P),
                repeat_penalty: real(&table::REPEAT_PENALTY),
                presence_penalty: real(&table::PRESENCE_PENALTY),
                frequency_penalty: real(&table::FREQUENCY_PENALTY),
                repeat_window: count(&table::REPEAT_WINDOW),
                ..SamplingParams::default()
            },
        }
    }

    /// What requests get that leave it out, by the way they come.
    pub fn generations(&self) -> Generations {
        let lines = self.generation();
        let is_set = |setting| self.set(setting).is_some();
        let SamplingParams { temperature, top_p, .. } = lines.sampling;
        let openai = Generation {
            // As much as the context holds.
            max_tokens: if is_set(&table::MAX_TOKENS) { lines.max_tokens } else { usize::MAX },
            sampling: SamplingParams {
                temperature: if is_set(&table::TEMPERATURE) { temperature } else { 1.0 },
                top_p: if is_set(&table::TOP_P) { top_p } else { 1.0 },
                ..lines.sampling.clone()
            },
        };
        Generations { lines, openai }
    }

    /// What an engine is started with; the rest left out.
    pub fn engine_options(&self) -> EngineOptions {
        let restart_limit = match self.value(&table::RESTART_LIMIT) {
            Some(Value::Count(limit)) => Some(usize::try_from(limit).unwrap_or(usize::MAX)),
            _ => None,
        };
        let device_lost = match self.value(&table::DEVICE_LOST) {
            Some(Value::Text(word)) if word == "fail" => DeviceLost::Fail,
            _ => DeviceLost::Replan,
        };
        EngineOptions { restart_limit, device_lost, ..EngineOptions::default() }
    }

    /// What is set once for the whole program, as variables for it and its workers; without those that are set just so.
    pub fn variables(&self) -> Vec<(String, String)> {
        let of_program = SETTINGS.iter().filter(|setting| setting.scope == Scope::Program);
        let variable = |setting: &&Setting| {
            let found = self.set(setting)?;
            let as_it_is = found.source == Source::Variable(setting.variable());
            // Words for switches are brought to the numbers that workers know.
            let kept = as_it_is && !matches!(found.value, Value::Bool(_));
            (!kept).then(|| (setting.variable(), found.value.to_variable()))
        };
        of_program.filter_map(variable).collect()
    }
}

/// Settings for what is not given.
struct Rest<'a> {
    config: &'a Config,
    stood_in_for: Vec<&'static Setting>,
    /// Those that were asked for and set.
    used: Vec<(&'static str, Source)>,
}

impl<'a> Rest<'a> {
    fn set(&mut self, setting: &Setting) -> Option<&'a Value> {
        if self.stood_in_for.iter().any(|other| other.key == setting.key) {
            return None;
        }
        let found = self.config.set(setting)?;
        self.used.push((setting.key, found.source.clone()));
        Some(&found.value)
    }

    /// A number beyond this machine's word stays too large for any limit.
    fn size(&mut self, given: Option<u64>, setting: &Setting) -> Option<usize> {
        let number = given.or_else(|| match self.set(setting)? {
            Value::Count(count) => Some(*count),
            _ => None,
        });
        number.map(|number| usize::try_from(number).unwrap_or(usize::MAX))
    }

    fn text(&mut self, given: Option<String>, setting: &Setting) -> Option<String> {
        given.or_else(|| self.set(setting).map(Value::to_string))
    }

    fn switch(&mut self, given: Option<bool>, setting: &Setting) -> bool {
        given.unwrap_or_else(|| self.set(setting) == Some(&Value::Bool(true)))
    }
}

impl Fallback {
    /// The value; none where the program works it out.
    pub fn value(&self) -> Option<Value> {
        match *self {
            Fallback::Bool(on) => Some(Value::Bool(on)),
            Fallback::Count(count) => Some(Value::Count(count)),
            Fallback::Number(number) => Some(Value::Number(number)),
            Fallback::Text(text) => Some(Value::Text(text.into())),
            Fallback::Derived(_) => None,
        }
    }

    /// The value, or what the program works out, in words.
    pub fn words(&self) -> String {
        match self {
            Fallback::Derived(words) => (*words).into(),
            _ => self.value().map(|value| value.to_string()).unwrap_or_default(),
        }
    }
}

/// Help of the flag of a setting.
pub fn flag_help(setting: &Setting) -> String {
    match setting.default {
        // Nobody expects a switch to be on.
        Fallback::Bool(false) => setting.help.into(),
        default => format!("{} [default: {}]", setting.help, default.words()),
    }
}
