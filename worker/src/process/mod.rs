//! The worker process: from inherited descriptors to a served band, and out again on every path.
//!
//! Two threads matter. The main thread is the data path: ring in, band, ring out; everything the processor needs
//! happens there. The control thread only reads the control socket: `Shutdown` or end-of-file asks the main thread to finish the step in
//! hand, and ends the process itself if that takes too long. Whatever goes wrong is reported as `Failed` with a stable
//! code; a panic is reported as `internal`.

mod inherit;
mod open;
mod requests;
mod serve;
mod stop;

use crate::args::{ArgsError, WorkerArgs};
use crate::band::{Rings, Worker};
use inherit::Inherited;
pub use inherit::follow_parent;
use requests::Requests;
use spillway_model::error::ModelError;
use spillway_protocol::ShmError;
use spillway_protocol::channel::{ChannelError, Received, Sender};
use spillway_protocol::control::{FromWorker, PROTOCOL_VERSION, ToWorker};
use spillway_protocol::frame::FrameError;
use spillway_protocol::ring::RingError;
use spillway_protocol::status::{StatusError, WorkerState};
use std::any::Any;
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use stop::Stop;

/// Exit code for arguments that do not make sense.
const EXIT_USAGE: u8 = 2;
/// Exit code after a failure, reported or not.
const EXIT_FAILED: u8 = 4;

/// Why a worker process ended other than on request.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The command line.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// The process that should be the parent is gone, or was never the parent.
    #[error(
        "worker: the parent is process {found}, not {expected}; this subcommand is started by the program itself"
    )]
    Parent {
        /// Process id on the command line.
        expected: u32,
        /// The parent now.
        found: u32,
    },
    /// An inherited descriptor is not there, or given twice.
    #[error(
        "worker: descriptor {fd} for {purpose} is {reason}; this subcommand is started by the coordinator"
    )]
    Descriptor {
        /// The number.
        fd: i32,
        /// What it should be.
        purpose: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
    /// A system call failed.
    #[error("worker: {action} failed: {source}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The control channel.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The status page.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// Memory that is shared with other processes.
    #[error(transparent)]
    Memory(#[from] ShmError),
    /// A step frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The first message was not `Load`.
    #[error(
        "the coordinator sent another message where `Load` belongs; both processes must be the same build"
    )]
    ExpectedLoad,
    /// The model file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The path names another file, or the file was written to.
    #[error(
        "{path}: the file is not the one that was loaded, or has been changed since; start over with the file as it is now"
    )]
    FileReplaced {
        /// The path.
        path: PathBuf,
    },
    /// The file is not the one that was planned for.
    #[error(
        "{path}: the file has {found} bytes now, {expected} when the plan was made; start over with the file as it is now"
    )]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// Bytes when it was validated.
        expected: u64,
        /// Bytes now.
        found: u64,
    },
    /// The band could not be loaded, or a step failed.
    #[error("{source}")]
    Band {
        /// Stable name of the error.
        code: &'static str,
        /// The error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Asked to stop while waiting: the way out, not a failure.
    #[error("the worker was asked to stop")]
    Stopped,
}

impl ProcessError {
    /// An error of a kind of worker, with its stable name.
    pub fn band(code: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        ProcessError::Band { code, source: source.into() }
    }

    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ProcessError::Args(error) => error.code(),
            ProcessError::Parent { .. } => "parent_gone",
            ProcessError::Descriptor { .. } => "bad_descriptor",
            ProcessError::System { .. } => "system_call_failed",
            ProcessError::Channel(error) => error.code(),
            ProcessError::Ring(error) => error.code(),
            ProcessError::Status(error) => error.code(),
            ProcessError::Memory(error) => error.code(),
            ProcessError::Frame(error) => error.code(),
            ProcessError::ExpectedLoad => "expected_load",
            ProcessError::Model(error) => error.code(),
            ProcessError::FileReplaced { .. } | ProcessError::FileChanged { .. } => "file_changed",
            ProcessError::Band { code, .. } => code,
            ProcessError::Stopped => "stopped",
        }
    }
}

/// Runs a worker process. `argv` is what [`WorkerArgs::to_argv`] makes, without the subcommand. Call it first thing in the process, on its main
/// thread; return its exit code from `main`.
pub fn run<W: Worker>(argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let inherited = match WorkerArgs::parse(argv) {
        Ok(args) => Inherited::adopt(&args),
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match inherited.and_then(converse::<W>) {
        Ok(Ending::Asked) | Err(ProcessError::Stopped) => ExitCode::SUCCESS,
        // The coordinator tells whoever asked; a second voice would only repeat it.
        Ok(Ending::Told(error)) => {
            tracing::info!("{}: {error}", W::NAME);
            ExitCode::from(EXIT_FAILED)
        }
        Err(error) => {
            eprintln!("error: {}: {error}", W::NAME);
            ExitCode::from(EXIT_FAILED)
        }
    }
}

/// How a conversation ended that the coordinator could follow to its end.
#[derive(Debug)]
enum Ending {
    /// On request.
    Asked,
    /// With a failure that it was told.
    Told(ProcessError),
}

/// The whole conversation with the coordinator.
fn converse<W: Worker>(inherited: Inherited) -> Result<Ending, ProcessError> {
    let Inherited { control, mut ring_in, ring_out, status, states } = inherited;
    ring_in.set_patience(W::PATIENCE);
    let (mut sender, mut receiver) = control.split();
    sender.send(&FromWorker::Hello { protocol: PROTOCOL_VERSION, pid: std::process::id() })?;
    let load = match receiver.receive(None)? {
        Received::Message(ToWorker::Load(load)) => load,
        Received::Message(ToWorker::Shutdown) | Received::Closed => return Ok(Ending::Asked),
        Received::Message(_) | Received::TimedOut => return fail(&mut sender, ProcessError::ExpectedLoad),
    };
    status.set_epoch(load.epoch);
    let (stop, asked) = Stop::on_request(receiver)?;
    let rings = Rings { incoming: ring_in.memory(), outgoing: ring_out.memory(), states };
    let work = AssertUnwindSafe(|| {
        status.set_state(WorkerState::Loading);
        let mut served = open::open::<W>(&load, &rings, &mut sender, &status, &stop)?;
        let mut requests = Requests::new(asked, &mut sender, load.epoch);
        requests.until_serving(&mut served.band)?;
        serve::Server::new(served, ring_in, ring_out, &status, &stop).serve(&mut requests)
    });
    let outcome = catch_unwind(work);
    let leaving = if stop.requested() { WorkerState::Stopping } else { WorkerState::Failed };
    status.set_state(leaving);
    match outcome {
        Ok(Ok(())) => Ok(Ending::Asked),
        // Errors on the way out (a closed ring, say) are consequences of the request to stop.
        Ok(Err(_)) if stop.requested() => Ok(Ending::Asked),
        Ok(Err(error)) => fail(&mut sender, error),
        Err(panic) => report_panic(&mut sender, panic.as_ref()),
    }
}

/// Tells the coordinator.
fn fail(sender: &mut Sender<FromWorker>, error: ProcessError) -> Result<Ending, ProcessError> {
    let failed = FromWorker::Failed { code: error.code().into(), message: error.to_string() };
    sender.send(&failed)?;
    Ok(Ending::Told(error))
}

/// A panic is a defect of ours: it is told to the coordinator like any failure.
fn report_panic(sender: &mut Sender<FromWorker>, panic: &(dyn Any + Send)) -> Result<Ending, ProcessError> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    let message = format!("the worker panicked: {text}; this is a defect, please report it");
    sender.send(&FromWorker::Failed { code: "internal".into(), message: message.clone() })?;
    Ok(Ending::Told(ProcessError::System { action: "serving", source: std::io::Error::other(message) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_protocol::channel::pair;

    /// What the coordinator hears last, with the code of the error that ended the process.
    fn heard(
        end: impl FnOnce(&mut Sender<FromWorker>) -> Result<Ending, ProcessError>,
    ) -> (FromWorker, &'static str) {
        let (mut coordinator, worker) = pair().unwrap();
        let (mut sender, _receiver) = worker.split();
        let Ending::Told(error) = end(&mut sender).unwrap() else { panic!("nothing was told") };
        let Received::Message(message) = coordinator.receive(None).unwrap() else {
            panic!("nothing was sent")
        };
        (message, error.code())
    }

    #[test]
    fn a_failure_is_told_with_its_code() {
        let (message, code) =
            heard(|sender| fail(sender, ProcessError::band("numa_node", "no CPU on node 7")));
        let FromWorker::Failed { code: told, message } = message else { panic!("{message:?}") };
        assert_eq!((told.as_str(), code), ("numa_node", "numa_node"));
        assert!(message.contains("node 7"), "{message}");
    }

    #[test]
    fn a_panic_is_told_as_internal_with_its_text() {
        let panics: [Box<dyn Any + Send>; 3] =
            [Box::new("plain"), Box::new(String::from("made")), Box::new(5)];
        for (panic, text) in panics.into_iter().zip(["plain", "made", "no message"]) {
            let (message, _) = heard(|sender| report_panic(sender, panic.as_ref()));
            let FromWorker::Failed { code, message } = message else { panic!("{message:?}") };
            assert_eq!(code, "internal");
            assert!(message.contains(text), "{message}");
        }
    }
}
