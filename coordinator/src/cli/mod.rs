//! The command line. `main` is [`run()`] and an exit code; each command is a module; `docs/cli.md` is the reference.

mod args;
mod bench;
mod chat;
mod config;
mod daemon;
mod devices;
mod failure;
mod generation;
mod input;
mod inspect;
mod interrupt;
mod kernels;
mod logits;
mod output;
mod plan;
mod progress;
mod run;
mod serve;
mod session;
mod status;
mod tokens;
mod top;

use crate::config::{Config, ConfigFile};
use args::{Cli, Command};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use failure::Failure;
use spillway_protocol::shm;
use spillway_worker::Worker;
use spillway_worker_cpu::CpuWorker;
use spillway_worker_gpu::compile::{nvrtc, tied};
use spillway_worker_gpu::links::probe;
use spillway_worker_gpu::{COMPILER_SUBCOMMAND, GpuWorker, NVRTC_SUBCOMMAND, PROBE_SUBCOMMAND};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

/// Environment variable with the log filter; the log goes to standard error.
const LOG_ENV: &str = "SPILLWAY_LOG";

/// Runs the command line `argv`, program name first. To be called once, by a `main` that has started no thread.
pub fn run(argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let argv: Vec<OsString> = argv.into_iter().collect();
    shm::prefer_errors_to_signals();
    if let Some(code) = run_hidden(&argv) {
        return code;
    }
    // Read from the raw words, since a usage error comes before there are parsed ones.
    let as_json = argv.iter().any(|word| word == "--json");
    let cli = match Cli::try_parse_from(&argv) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, as_json),
    };
    match start(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(as_json),
    }
}

/// Not commands of the user's: this program starts them itself, and they read their own arguments.
fn run_hidden(argv: &[OsString]) -> Option<ExitCode> {
    let (command, arguments) = argv.get(1..)?.split_first()?;
    let command = command.to_str()?;
    let hidden = [CpuWorker::NAME, GpuWorker::NAME, NVRTC_SUBCOMMAND, COMPILER_SUBCOMMAND, PROBE_SUBCOMMAND];
    if !hidden.contains(&command) {
        return None;
    }
    // Settings have become variables in the process that has started this one.
    start_log();
    match command {
        CpuWorker::NAME => Some(spillway_worker::run::<CpuWorker>(arguments.to_vec())),
        GpuWorker::NAME => Some(spillway_worker::run::<GpuWorker>(arguments.to_vec())),
        NVRTC_SUBCOMMAND => Some(match nvrtc::child(arguments) {
            Ok(answer) => {
                println!("{answer}");
                ExitCode::SUCCESS
            }
            Err(message) => {
                output::note(&message);
                ExitCode::FAILURE
            }
        }),
        COMPILER_SUBCOMMAND => {
            eprintln!("{}", tied::child(arguments));
            Some(ExitCode::FAILURE)
        }
        PROBE_SUBCOMMAND => Some(match probe::serve(std::io::stdin().lock(), std::io::stdout().lock()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                output::note(&format!("error: link-probe: {error}"));
                ExitCode::FAILURE
            }
        }),
        _ => None,
    }
}

/// Reads settings where the command has any, and runs it.
fn start(cli: Cli) -> Result<(), Failure> {
    let file = ConfigFile::locate(cli.config.as_deref());
    let config = match &cli.command {
        // They show and repair settings, or have none.
        Command::Config(_) | Command::Status(_) | Command::Top(_) | Command::Completions(_) => {
            Config::default()
        }
        _ => Config::load(&file)?,
    };
    export(&config);
    start_log();
    dispatch(cli.command, &config, file)
}

/// Settings of the whole program become variables, which its other parts and its workers read.
fn export(config: &Config) {
    for (name, value) in config.variables() {
        // SAFETY: this is the only thread: `main` has started none before `run`, and `run` none before this.
        unsafe { std::env::set_var(name, value) };
    }
}

fn dispatch(command: Command, config: &Config, file: ConfigFile) -> Result<(), Failure> {
    match command {
        Command::Run(args) => run::run(&args, config),
        Command::Chat(args) => chat::chat(&args, config),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Plan(args) => plan::plan(&args, config),
        Command::Logits(args) => logits::logits(&args, config),
        Command::Tokenize(args) => tokens::tokenize(&args),
        Command::Detokenize(args) => tokens::detokenize(&args),
        Command::Bench(args) => bench::bench(&args, config),
        Command::Serve(args) => serve::serve(&args, file),
        Command::Daemon(args) => daemon::daemon(&args, file),
        Command::Status(args) => status::status(&args),
        Command::Top(args) => top::top(&args),
        Command::Devices(args) => devices::devices(&args),
        Command::Kernels(command) => kernels::kernels(&command),
        Command::Config(command) => config::config(&command, &file),
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "spillway", &mut script);
            output::bytes(&script)
        }
    }
}

/// Help and version are answers; anything else is wrong usage, told in one line.
fn usage(error: &clap::Error, as_json: bool) -> ExitCode {
    let text = error.render();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match output::text(&text.to_string()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => failure.report(as_json),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            output::note(text.to_string().trim_end());
            ExitCode::from(2)
        }
        _ => Failure::Usage(sentence(&text.to_string())).report(as_json),
    }
}

/// The parser's message without its heading, its usage block and its line breaks.
fn sentence(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let end = text.find("\n\nUsage:").or_else(|| text.find("\n\nFor more information")).unwrap_or(text.len());
    let words: Vec<&str> = text[..end].split_whitespace().collect();
    format!("{}; see --help", words.join(" "))
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env(LOG_ENV)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}
