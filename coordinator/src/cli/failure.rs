//! Why a command ended early, as a sentence, a stable code and an exit code.

use crate::cards::LockError;
use crate::config::ConfigError;
use crate::daemon::{DaemonError, LoadError};
use crate::engine::{EngineError, ErrorClass, RequestError};
use crate::http::HttpError;
use crate::open::OpenError;
use crate::placement::PlacementError;
use crate::prompt::PromptError;
use crate::sampler::ParamError;
use serde_json::json;
use spillway_model::tokenizer::TokenizerError;
use spillway_worker_gpu::compile::CompileError;
use std::io;
use std::process::ExitCode;

/// Why a command ended early.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The command line asks for something that cannot be asked.
    #[error("{0}")]
    Usage(String),
    /// The model file was refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The placement was refused.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// Settings cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A device is in use by another process.
    #[error(transparent)]
    Card(#[from] LockError),
    /// Kernels cannot be compiled, or their cache cannot be used.
    #[error(transparent)]
    Kernels(#[from] CompileError),
    /// The prompt cannot be made.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// A sampling option is out of range.
    #[error(transparent)]
    Sampling(#[from] ParamError),
    /// The ids are not the vocabulary's.
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
    /// The daemon could not serve.
    #[error(transparent)]
    Daemon(DaemonError),
    /// HTTP cannot be served where it should be.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The workers could not be started.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The request was refused or failed.
    #[error("{}", with_advice(.0))]
    Request(#[from] RequestError),
    /// No daemon listens.
    #[error("no daemon listens at {path}: {source}; start one with `spillway daemon --listen {path}`")]
    NoDaemon {
        /// Its socket.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A daemon has been reached and says nothing.
    #[error("the daemon at {path} {}", silence(.source))]
    SilentDaemon {
        /// Its socket.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Standard input holds something else than was expected.
    #[error("standard input cannot be used: {0}")]
    BadInput(String),
    /// Standard input cannot be read.
    #[error("standard input cannot be read: {0}")]
    Input(#[source] io::Error),
    /// Standard output, a socket or a thread failed.
    #[error("input or output failed: {0}")]
    Output(#[source] io::Error),
    /// Whoever read standard output has gone away.
    #[error("the reader of standard output has gone away")]
    ReaderGone,
    /// The user pressed Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

/// What happened to a request; where the engine has given up, what to do as well.
fn with_advice(error: &RequestError) -> String {
    format!("{error}{}", if error.given_up { "; run the command again" } else { "" })
}

/// Why a daemon that was reached does not answer.
fn silence(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "does not answer; its process may be stopped, or the machine overloaded".into()
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            "has ended".into()
        }
        _ => format!("cannot be understood: {error}"),
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Output(error)
    }
}

impl From<DaemonError> for Failure {
    /// A model that the daemon did not load is reported as by the commands that load one.
    fn from(error: DaemonError) -> Self {
        match error {
            DaemonError::Load(LoadError::Open(error)) => Failure::Open(error),
            DaemonError::Load(LoadError::Placement(error)) => Failure::Placement(error),
            DaemonError::Load(LoadError::Config(error)) => Failure::Config(error),
            DaemonError::Load(LoadError::Card(error)) => Failure::Card(error),
            DaemonError::Load(LoadError::Engine { error, .. }) => Failure::Engine(error),
            other => Failure::Daemon(other),
        }
    }
}

impl Failure {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Failure::Usage(_) => "usage",
            Failure::Open(error) => error.code(),
            Failure::Placement(error) => error.code(),
            Failure::Config(error) => error.code(),
            Failure::Card(error) => error.code(),
            Failure::Kernels(error) => error.code(),
            Failure::Prompt(error) => error.code(),
            Failure::Sampling(error) => error.code(),
            Failure::Tokens(error) => error.code(),
            Failure::Daemon(error) => error.code(),
            Failure::Http(error) => error.code(),
            Failure::Engine(error) => error.code(),
            Failure::Request(error) => error.code,
            Failure::NoDaemon { .. } => "no_daemon",
            Failure::SilentDaemon { .. } => "daemon_silent",
            Failure::BadInput(_) => "bad_input",
            Failure::Input(_) => "input_failed",
            Failure::Output(_) => "output_failed",
            Failure::ReaderGone => "reader_gone",
            Failure::Interrupted => "interrupted",
        }
    }

    /// Exit code of the command.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::ReaderGone => 0,
            Failure::Input(_)
            | Failure::Output(_)
            | Failure::Daemon(_)
            | Failure::Http(HttpError::InUse(_) | HttpError::Io { .. })
            | Failure::NoDaemon { .. }
            | Failure::SilentDaemon { .. }
            | Failure::Config(ConfigError::Unwritable { .. }) => 1,
            Failure::Usage(_)
            | Failure::Http(HttpError::NeedsKey(_))
            | Failure::Kernels(CompileError::UnknownArch(_)) => 2,
            Failure::Kernels(_) => 4,
            Failure::Open(_)
            | Failure::Placement(_)
            | Failure::Config(_)
            | Failure::Card(_)
            | Failure::Prompt(_)
            | Failure::BadInput(_)
            | Failure::Sampling(_)
            | Failure::Tokens(_) => 3,
            Failure::Request(error) => match error.class {
                ErrorClass::Validation | ErrorClass::ContextLength | ErrorClass::Unsupported => 3,
                ErrorClass::Transient | ErrorClass::Internal => 4,
            },
            Failure::Engine(_) => 4,
            Failure::Interrupted => 130,
        }
    }

    /// Tells the user, on standard error and, where JSON was asked for, also on standard output.
    pub fn report(&self, as_json: bool) -> ExitCode {
        if !matches!(self, Failure::ReaderGone) {
            let message = one_line(&self.to_string());
            super::output::note(&format!("error: {message}"));
            if as_json {
                // Nothing more can be said where standard output does not work.
                let _ =
                    super::output::json(&json!({"type": "error", "code": self.code(), "message": message}));
            }
        }
        ExitCode::from(self.exit_code())
    }
}

/// Control characters (a file name may hold them) become spaces, so that a message stays one line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
