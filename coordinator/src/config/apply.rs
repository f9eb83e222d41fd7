//! What settings come to: placement, sampling, supervision, and the environment of this program and its workers.

use super::table::{self, Fallback, SETTINGS, Scope, Setting};
use super::value::Value;
use super::{Config, Source};
use crate::engine::EngineOptions;
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

impl Default for Generation {
    fn default() -> Self {
        Config::default().generation()
    }
}

impl Config {
    /// The placement of a load: what is `given`, by flags or by parameters of a message, and settings for the rest.
    pub fn placement(&self, given: PlacementParams) -> PlacementRequest {
        // A number beyond this machine's word stays too large for any limit.
        let word = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let size = |given: Option<u64>, setting| {
            let number = given.or_else(|| match self.set(setting)?.value {
                Value::Count(count) => Some(count),
                _ => None,
            });
            number.map(word)
        };
        let text = |given: Option<String>, setting| {
            given.or_else(|| self.set(setting).map(|found| found.value.to_string()))
        };
        // What is given also stands in for settings that say the same in another way.
        let wish = DeviceWish::read(given.devices.as_deref());
        let no_gpu = given.devices.is_some() && matches!(wish, Ok(DeviceWish::None));
        let by_stage = given.pp_layers.is_some();
        let by_count = given.pp.is_some() || given.cpu_workers.is_some();
        let by_memory = given.split.is_some() || given.gpu_layer_budget.is_some();
        let size_unless = |stood_in_for: bool, given: Option<u64>, setting| {
            if stood_in_for { given.map(word) } else { size(given, setting) }
        };
        let text_unless = |stood_in_for: bool, given: Option<String>, setting| {
            if stood_in_for { given } else { text(given, setting) }
        };
        let switch = |given: Option<bool>, setting| {
            given.unwrap_or_else(|| self.value(setting) == Some(Value::Bool(true)))
        };
        PlacementRequest {
            devices: text(given.devices, &table::DEVICES),
            allow_shared_device: switch(given.allow_shared_device, &table::ALLOW_SHARED_DEVICE),
            allow_mixed_arch: switch(given.allow_mixed_arch, &table::ALLOW_MIXED_ARCH),
            vram_limit: text_unless(no_gpu, given.vram_limit, &table::VRAM_LIMIT),
            uniform_vram_tolerance_gb: text(
                given.uniform_vram_tolerance_gb,
                &table::UNIFORM_VRAM_TOLERANCE_GB,
            ),
            cpu_workers: size_unless(by_stage, given.cpu_workers, &table::CPU_WORKERS),
            pp: size_unless(by_stage, given.pp, &table::PP),
            pp_layers: text_unless(by_count || by_memory, given.pp_layers, &table::PP_LAYERS),
            split: text_unless(no_gpu || by_stage, given.split, &table::SPLIT),
            gpu_layer_budget: text_unless(
                no_gpu || by_stage,
                given.gpu_layer_budget,
                &table::GPU_LAYER_BUDGET,
            ),
            offload_exec: text_unless(no_gpu, given.offload_exec, &table::OFFLOAD_EXEC),
            max_seq: size(given.max_seq, &table::MAX_SEQ),
            threads: size(given.threads, &table::THREADS),
            parallel: size(given.parallel, &table::PARALLEL),
            kv_type: text(given.kv_type, &table::KV_TYPE),
            activations: text(given.activations, &table::ACTIVATIONS),
            chunk: size(given.chunk, &table::CHUNK),
            peer_copies: text(given.peer_copies, &table::PEER_COPIES),
        }
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

    /// What an engine is started with; the rest left out.
    pub fn engine_options(&self) -> EngineOptions {
        let restart_limit = match self.value(&table::RESTART_LIMIT) {
            Some(Value::Count(limit)) => Some(usize::try_from(limit).unwrap_or(usize::MAX)),
            _ => None,
        };
        EngineOptions { restart_limit, ..EngineOptions::default() }
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
