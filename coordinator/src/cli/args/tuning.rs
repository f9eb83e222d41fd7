//! Flags that stand for settings. Their help comes from the table of settings, and settings say what no flag says.

use crate::config::{AskedPlacement, Config, Generation, flag_help, table as settings};
use crate::placement::Placement;
use crate::sampler::SamplingParams;
use clap::{Args, ValueHint};
use spillway_protocol::jsonl::PlacementParams;
use std::path::PathBuf;

/// Which process runs which layers, and with how much memory.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Placement")]
pub struct PlacementArgs {
    #[command(flatten)]
    wishes: WishArgs,
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true", help = flag_help(&settings::ALLOW_SHARED_DEVICE))]
    allow_shared_device: Option<bool>,
}

/// What a saved plan says already. That others may use its devices, too, it does not say.
#[derive(Debug, Default, Args)]
struct WishArgs {
    #[arg(long, value_name = "LIST|all|none", help = flag_help(&settings::DEVICES))]
    devices: Option<String>,
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true", help = flag_help(&settings::ALLOW_MIXED_ARCH))]
    allow_mixed_arch: Option<bool>,
    #[arg(long, value_name = "SIZE,…", help = flag_help(&settings::VRAM_LIMIT))]
    vram_limit: Option<String>,
    #[arg(long, value_name = "GB", allow_hyphen_values = true, help = flag_help(&settings::UNIFORM_VRAM_TOLERANCE_GB))]
    uniform_vram_tolerance_gb: Option<String>,
    #[arg(long, value_name = "N", help = flag_help(&settings::CPU_WORKERS))]
    cpu_workers: Option<u64>,
    #[arg(long, value_name = "N", help = flag_help(&settings::PP))]
    pp: Option<u64>,
    #[arg(long, value_name = "A,B,…", allow_hyphen_values = true, help = flag_help(&settings::PP_LAYERS))]
    pp_layers: Option<String>,
    #[arg(long, value_name = "uniform|auto|bytes:SIZE,…", help = flag_help(&settings::SPLIT))]
    split: Option<String>,
    #[arg(long, value_name = "N|auto", allow_hyphen_values = true, help = flag_help(&settings::GPU_LAYER_BUDGET))]
    gpu_layer_budget: Option<String>,
    #[arg(long, value_name = "pcie|cpu", help = flag_help(&settings::OFFLOAD_EXEC))]
    offload_exec: Option<String>,
    #[arg(long, value_name = "auto|gpu|cpu", help = flag_help(&settings::OFFLOAD_PROMPTS))]
    offload_prompts: Option<String>,
    #[arg(long, value_name = "N", help = flag_help(&settings::MAX_SEQ))]
    max_seq: Option<u64>,
    #[arg(long, value_name = "N", help = flag_help(&settings::THREADS))]
    threads: Option<u64>,
    #[arg(long, value_name = "N", help = flag_help(&settings::PARALLEL))]
    parallel: Option<u64>,
    #[arg(long, value_name = "auto|f32|f16", help = flag_help(&settings::KV_TYPE))]
    kv_type: Option<String>,
    #[arg(long, value_name = "auto|int8|int16", help = flag_help(&settings::ACTIVATIONS))]
    activations: Option<String>,
    #[arg(long, value_name = "N", help = flag_help(&settings::CHUNK))]
    chunk: Option<u64>,
    #[arg(long, value_name = "auto|off", help = flag_help(&settings::PEER_COPIES))]
    peer_copies: Option<String>,
}

impl PlacementArgs {
    /// What flags say.
    pub fn params(&self) -> PlacementParams {
        let wishes = &self.wishes;
        PlacementParams {
            devices: wishes.devices.clone(),
            allow_shared_device: self.allow_shared_device,
            allow_mixed_arch: wishes.allow_mixed_arch,
            vram_limit: wishes.vram_limit.clone(),
            uniform_vram_tolerance_gb: wishes.uniform_vram_tolerance_gb.clone(),
            cpu_workers: wishes.cpu_workers,
            pp: wishes.pp,
            pp_layers: wishes.pp_layers.clone(),
            split: wishes.split.clone(),
            gpu_layer_budget: wishes.gpu_layer_budget.clone(),
            offload_exec: wishes.offload_exec.clone(),
            offload_prompts: wishes.offload_prompts.clone(),
            max_seq: wishes.max_seq,
            threads: wishes.threads,
            parallel: wishes.parallel,
            kv_type: wishes.kv_type.clone(),
            activations: wishes.activations.clone(),
            chunk: wishes.chunk,
            peer_copies: wishes.peer_copies.clone(),
        }
    }

    /// The request as the planner takes it; settings say what no flag says.
    pub fn to_request(&self, config: &Config) -> AskedPlacement {
        config.placement(self.params())
    }

    /// The request of a command that runs one sequence: memory for others would be wasted.
    pub fn to_single_request(&self, config: &Config) -> AskedPlacement {
        let mut asked = self.to_request(config);
        asked.request.parallel.get_or_insert(1);
        asked
    }
}

/// A placement that was made before.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Placement")]
pub struct SavedPlanArgs {
    /// Place as a saved plan says, if it still holds, instead of making one; `spillway plan --save` keeps one
    #[arg(long = "plan", value_name = "PLAN", value_hint = ValueHint::FilePath, conflicts_with = "WishArgs")]
    pub plan: Option<PathBuf>,
}

impl SavedPlanArgs {
    /// The saved plan if there is one, else what is asked for.
    pub fn or(&self, asked: AskedPlacement) -> Placement {
        Placement::of(self.plan.clone(), asked)
    }
}

/// How tokens are chosen and when an answer ends.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    #[arg(short = 'n', long, value_name = "N", help = flag_help(&settings::MAX_TOKENS))]
    pub max_tokens: Option<usize>,
    #[arg(long, value_name = "T", allow_negative_numbers = true, help = flag_help(&settings::TEMPERATURE))]
    pub temp: Option<f32>,
    #[arg(long, value_name = "K", help = flag_help(&settings::TOP_K))]
    pub top_k: Option<u32>,
    #[arg(long, value_name = "P", allow_negative_numbers = true, help = flag_help(&settings::TOP_P))]
    pub top_p: Option<f32>,
    #[arg(long, value_name = "P", allow_negative_numbers = true, help = flag_help(&settings::MIN_P))]
    pub min_p: Option<f32>,
    #[arg(long, value_name = "X", allow_negative_numbers = true, help = flag_help(&settings::REPEAT_PENALTY))]
    pub repeat_penalty: Option<f32>,
    #[arg(long, value_name = "N", help = flag_help(&settings::REPEAT_WINDOW))]
    pub repeat_window: Option<usize>,
    #[arg(long, value_name = "X", allow_negative_numbers = true, help = flag_help(&settings::PRESENCE_PENALTY))]
    pub presence_penalty: Option<f32>,
    #[arg(long, value_name = "X", allow_negative_numbers = true, help = flag_help(&settings::FREQUENCY_PENALTY))]
    pub frequency_penalty: Option<f32>,
    /// Seed; the same seed gives the same text [default: drawn anew each time, shown with --json]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Add to the logit of a token, for example 13=-1.5 or 13=-inf (repeatable)
    #[arg(long, value_name = "ID=VALUE", value_parser = parse_bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// End the answer before this text (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Do not end at the model's end-of-text token
    #[arg(long)]
    pub ignore_eos: bool,
}

impl SamplingArgs {
    /// The parameters as the engine takes them; `settings` say what no flag says, and `seed` stands in when none was given.
    pub fn to_params(&self, settings: &Generation, seed: u64) -> SamplingParams {
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            presence_penalty,
            frequency_penalty,
            repeat_window,
            ..
        } = settings.sampling;
        SamplingParams {
            temperature: self.temp.unwrap_or(temperature),
            top_k: self.top_k.unwrap_or(top_k),
            top_p: self.top_p.unwrap_or(top_p),
            min_p: self.min_p.unwrap_or(min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(repeat_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(frequency_penalty),
            repeat_window: self.repeat_window.unwrap_or(repeat_window),
            seed: self.seed.unwrap_or(seed),
            logit_bias: self.logit_bias.clone(),
        }
    }

    /// Tokens to generate at most; `settings` say it where no flag does.
    pub fn max_tokens(&self, settings: &Generation) -> usize {
        self.max_tokens.unwrap_or(settings.max_tokens)
    }
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, value) = text.split_once('=').ok_or("expected ID=VALUE, for example 13=-1.5")?;
    let id = id.parse().map_err(|_| format!("\"{id}\" is not a token id"))?;
    let value = value.parse().map_err(|_| format!("\"{value}\" is not a number"))?;
    Ok((id, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    /// Flags that are about one request and no setting.
    const OF_ONE_REQUEST: [&str; 4] = ["seed", "logit-bias", "stop", "ignore-eos"];

    #[test]
    fn every_flag_of_placement_and_sampling_is_a_setting_and_says_the_same() {
        let flags = SamplingArgs::augment_args(PlacementArgs::augment_args(Command::new("both")));
        let flags = flags.get_arguments().filter_map(|flag| Some((flag.get_long()?, flag.get_help()?)));
        let mut seen = 0;
        for (name, help) in flags.filter(|(name, _)| !OF_ONE_REQUEST.contains(name)) {
            let row = settings::SETTINGS.iter().find(|setting| setting.flag == Some(name));
            assert_eq!(row.map(|setting| flag_help(setting)), Some(help.to_string()), "{name}");
            seen += 1;
        }
        assert_eq!(seen, 28);
    }
}
