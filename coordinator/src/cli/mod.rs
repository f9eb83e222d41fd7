//! The command line. `main` is [`run()`] and an exit code; each command is a module; `docs/cli.md` is the reference.

mod args;
mod bench;
mod chat;
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

use args::{Cli, Command};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use failure::Failure;
use spillway_protocol::shm;
use spillway_worker::Worker;
use spillway_worker_cpu::CpuWorker;
use spillway_worker_gpu::compile::nvrtc;
use spillway_worker_gpu::links::probe;
use spillway_worker_gpu::{GpuWorker, NVRTC_SUBCOMMAND, PROBE_SUBCOMMAND};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

/// Environment variable with the log filter; the log goes to standard error.
const LOG_ENV: &str = "SPILLWAY_LOG";

/// Runs the command line `argv`, program name first.
pub fn run(argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let argv: Vec<OsString> = argv.into_iter().collect();
    start_log();
    shm::prefer_errors_to_signals();
    if let Some(code) = run_hidden(&argv) {
        return code;
    }
    // Read from the raw words, since a usage error comes before there are parsed ones.
    let as_json = argv.iter().any(|word| word == "--json");
    let command = match Cli::try_parse_from(&argv) {
        Ok(cli) => cli.command,
        Err(error) => return usage(&error, as_json),
    };
    match dispatch(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(as_json),
    }
}

/// Not commands of the user's: this program starts them itself, and they read their own arguments.
fn run_hidden(argv: &[OsString]) -> Option<ExitCode> {
    let (command, arguments) = argv.get(1..)?.split_first()?;
    match command.to_str()? {
        CpuWorker::NAME => Some(spillway_worker::run::<CpuWorker>(arguments.to_vec())),
        GpuWorker::NAME => Some(spillway_worker::run::<GpuWorker>(arguments.to_vec())),
        NVRTC_SUBCOMMAND => Some(match nvrtc::child(arguments) {
            Ok(answer) => {
                println!("{answer}");
                ExitCode::SUCCESS
            }
            Err(message) => {
                eprintln!("{message}");
                ExitCode::FAILURE
            }
        }),
        PROBE_SUBCOMMAND => Some(match probe::serve(std::io::stdin().lock(), std::io::stdout().lock()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: link-probe: {error}");
                ExitCode::FAILURE
            }
        }),
        _ => None,
    }
}

fn dispatch(command: Command) -> Result<(), Failure> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::chat(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Logits(args) => logits::logits(&args),
        Command::Tokenize(args) => tokens::tokenize(&args),
        Command::Detokenize(args) => tokens::detokenize(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Serve(args) => serve::serve(&args),
        Command::Daemon(args) => daemon::daemon(&args),
        Command::Status(args) => status::status(&args),
        Command::Top(args) => top::top(&args),
        Command::Devices(args) => devices::devices(&args),
        Command::Kernels(command) => kernels::kernels(&command),
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
            eprint!("{text}");
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
