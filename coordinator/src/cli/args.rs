//! Flags as data: every command, its options and their help. Nothing is decided here; ranges are checked where the
//! values are used, so that the daemon refuses the same values in the same words.

mod host;
mod server;
mod tuning;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
pub use host::{
    CompletionsArgs, ConfigCommand, ConfigKeyArgs, ConfigListArgs, ConfigSetArgs, DevicesArgs,
    KernelsBuildArgs, KernelsCommand, KernelsListArgs, MeasureArg,
};
use serde_json::{Map, Value, json};
pub use server::{DaemonArgs, ServeArgs, ServerArgs, StatusArgs, TopArgs};
use spillway_model::tokenizer::TokenizerOptions;
use std::path::PathBuf;
pub use tuning::{PlacementArgs, SamplingArgs, SavedPlanArgs};

/// Exit codes, shown below the help of the program.
const EXIT_CODES: &str = "Exit codes: 0 done, 1 input or output failed, 2 wrong usage, 3 file, plan or request refused, \
     4 a worker failed, 130 interrupted.";

/// Runs language models that do not fit one GPU, as a pipeline of worker processes.
#[derive(Debug, Parser)]
#[command(name = "spillway", version, after_help = EXIT_CODES, arg_required_else_help = true)]
pub struct Cli {
    /// File with settings, which stand in for flags that are not given, instead of the user's
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Settings")]
    pub config: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt and end
    Run(RunArgs),
    /// Talk with a model, turn by turn
    Chat(ChatArgs),
    /// Show what a model file holds, checked as strictly as a load checks it
    Inspect(InspectArgs),
    /// Show which process would run which layers, without loading anything
    Plan(PlanArgs),
    /// Score token ids: arg max, top ids and values, mean and deviation of the logits at every position
    Logits(LogitsArgs),
    /// Turn text from standard input into a JSON array of token ids
    Tokenize(TokenizeArgs),
    /// Turn a JSON array of token ids from standard input into text
    Detokenize(DetokenizeArgs),
    /// Measure prompt and decode speed
    Bench(BenchArgs),
    /// Load a model and serve it to OpenAI clients over HTTP
    Serve(ServeArgs),
    /// Serve JSON lines on standard input and output, on a local socket, and HTTP
    Daemon(DaemonArgs),
    /// Show what a daemon is doing: stages, processes, requests, restarts
    Status(StatusArgs),
    /// Show it live: step times, shares and progress of every stage
    Top(TopArgs),
    /// List the GPUs of this machine, or say what was looked for
    Devices(DevicesArgs),
    /// Compile kernels for GPUs ahead of time, list or remove compiled ones
    #[command(subcommand)]
    Kernels(KernelsCommand),
    /// Show and change settings
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
}

/// The model file.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Model file (GGUF)
    #[arg(short = 'm', long = "model", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub model: PathBuf,
    #[command(flatten)]
    pub tokenizer: TokenizerArgs,
}

/// What the file leaves open about its tokenizer.
#[derive(Debug, Args)]
pub struct TokenizerArgs {
    /// Split text as this pre-tokenizer does, whatever the file says
    #[arg(long, value_name = "NAME")]
    pub assume_pre: Option<String>,
}

impl TokenizerArgs {
    /// The options as the tokenizer takes them.
    pub fn options(&self) -> TokenizerOptions {
        TokenizerOptions { assume_pre: self.assume_pre.clone() }
    }
}

/// How the chat template is used.
#[derive(Debug, Args)]
#[command(next_help_heading = "Chat template")]
pub struct TemplateArgs {
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Let the model think before it answers, where its template knows "enable_thinking"
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_thinking: Option<bool>,
    /// Set another variable of the template to a JSON value (repeatable)
    #[arg(long, value_name = "NAME=JSON", value_parser = parse_template_arg)]
    pub template_arg: Vec<(String, Value)>,
}

impl TemplateArgs {
    /// The system prompt as a message.
    pub fn system_message(&self) -> Option<Value> {
        self.system.as_ref().map(|text| json!({"role": "system", "content": text}))
    }

    /// Further variables of the template; of two with one name the later counts.
    pub fn kwargs(&self) -> Map<String, Value> {
        self.template_arg.iter().cloned().collect()
    }
}

fn parse_template_arg(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=JSON, for example reasoning=true")?;
    let value = serde_json::from_str(value).map_err(|error| format!("the value is not JSON: {error}"))?;
    Ok((name.to_owned(), value))
}

/// What is told about loading, on standard error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    /// A bar on a terminal, nothing otherwise
    #[default]
    Auto,
    /// One JSON object per event
    Json,
    /// Nothing
    None,
}

/// How loading reports itself.
#[derive(Debug, Args)]
pub struct ProgressArgs {
    /// How to show loading, on standard error
    #[arg(long, value_enum, value_name = "HOW", default_value_t, conflicts_with = "quiet")]
    pub progress: Progress,
    /// Show no progress
    #[arg(short, long)]
    pub quiet: bool,
}

impl ProgressArgs {
    /// What was asked for.
    pub fn mode(&self) -> Progress {
        if self.quiet { Progress::None } else { self.progress }
    }
}

/// `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt; read from standard input when left out
    #[arg(value_name = "PROMPT", conflicts_with = "prompt")]
    pub text: Option<String>,
    /// The prompt, as an option
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Continue the prompt as it stands, without the chat template
    #[arg(long, conflicts_with_all = ["system", "enable_thinking", "template_arg"])]
    pub raw: bool,
    /// Print JSON lines; the last one has the whole answer
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub progress: ProgressArgs,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub saved: SavedPlanArgs,
    #[command(flatten)]
    pub placement: PlacementArgs,
}

/// `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub progress: ProgressArgs,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub saved: SavedPlanArgs,
    #[command(flatten)]
    pub placement: PlacementArgs,
}

/// `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model file (GGUF)
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    #[command(flatten)]
    pub tokenizer: TokenizerArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Model file (GGUF); of a loaded plan, if it has moved
    #[arg(short = 'm', long, value_name = "FILE", value_hint = ValueHint::FilePath,
          required_unless_present_any = ["load", "diff"])]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub tokenizer: TokenizerArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Also write the plan to a file
    #[arg(long, value_name = "PLAN", value_hint = ValueHint::FilePath, conflicts_with = "diff")]
    pub save: Option<PathBuf>,
    /// Check that a saved plan still holds, instead of making one: same model, same devices, enough memory
    #[arg(long, value_name = "PLAN", value_hint = ValueHint::FilePath, conflicts_with = "WishArgs")]
    pub load: Option<PathBuf>,
    /// Show how two saved plans differ
    #[arg(long, value_names = ["PLAN", "PLAN"], num_args = 2, value_hint = ValueHint::FilePath,
          conflicts_with_all = ["load", "model", "WishArgs", "allow_shared_device"])]
    pub diff: Option<Vec<PathBuf>>,
    #[command(flatten)]
    pub placement: PlacementArgs,
}

/// `logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids
    #[arg(long, value_name = "ID,ID,…", value_delimiter = ',', required = true)]
    pub ids: Vec<u32>,
    /// How many of the largest logits to show
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub top: usize,
    /// Print one JSON object per position
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub progress: ProgressArgs,
    #[command(flatten)]
    pub saved: SavedPlanArgs,
    #[command(flatten)]
    pub placement: PlacementArgs,
}

/// `tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Recognise the spellings of special tokens in the text
    #[arg(long)]
    pub parse_special: bool,
    /// Do not put the beginning-of-sequence token in front
    #[arg(long)]
    pub no_bos: bool,
}

/// `detokenize`.
#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
}

/// `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompt sizes in tokens; 0 = no prompt test
    #[arg(short = 'p', long, value_name = "N,N,…", value_delimiter = ',', default_value = "512")]
    pub prompt: Vec<usize>,
    /// Answer sizes in tokens; 0 = no decode test
    #[arg(short = 'n', long, value_name = "N,N,…", value_delimiter = ',', default_value = "128")]
    pub generate: Vec<usize>,
    /// Tokens in the context before the clock starts
    #[arg(short = 'd', long, value_name = "N,N,…", value_delimiter = ',', default_value = "0")]
    pub depth: Vec<usize>,
    /// Repetitions of every test
    #[arg(short = 'r', long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub progress: ProgressArgs,
    #[command(flatten)]
    pub saved: SavedPlanArgs,
    #[command(flatten)]
    pub placement: PlacementArgs,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_flags_do_not_contradict_one_another() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_help() {
        fn check(command: &clap::Command) {
            for flag in command.get_arguments() {
                assert!(flag.get_help().is_some(), "{} {}", command.get_name(), flag.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn values_that_look_like_options_are_values_where_they_must_be() {
        let cli = Cli::try_parse_from([
            "spillway",
            "run",
            "-m",
            "m",
            "-p",
            "- a list",
            "--stop",
            "--",
            "--logit-bias",
            "13=-inf",
            "--temp",
            "-1",
        ]);
        let Command::Run(run) = cli.unwrap().command else { panic!() };
        assert_eq!(run.prompt.as_deref(), Some("- a list"));
        assert_eq!(run.sampling.stop, ["--"]);
        assert_eq!(run.sampling.logit_bias, [(13, f32::NEG_INFINITY)]);
        assert_eq!(run.sampling.temp, Some(-1.0));
    }
}
