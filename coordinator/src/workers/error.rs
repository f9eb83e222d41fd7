//! What can go wrong with worker processes.

use spillway_protocol::ShmError;
use spillway_protocol::channel::ChannelError;
use spillway_protocol::frame::FrameError;
use spillway_protocol::ring::RingError;
use spillway_protocol::status::StatusError;
use std::fmt;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;
use thiserror::Error;

/// Which worker, in words a user knows from the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerName {
    /// Place in the pipeline, 0-based.
    pub stage: usize,
    /// The band.
    pub layers: Range<usize>,
    /// Process id.
    pub pid: u32,
}

impl fmt::Display for WorkerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.layers.end.saturating_sub(1);
        write!(
            f,
            "the worker of stage {} (layers {}-{last}, process {})",
            self.stage, self.layers.start, self.pid
        )
    }
}

/// How a worker came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The process ended with this status.
    Exited(ExitStatus),
    /// The system killed it because memory ran out.
    OutOfMemory {
        /// Private bytes it had reported.
        charged: u64,
    },
    /// It closed its control channel but was still running a second later.
    Unreachable,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Exited(status) => match (status.signal(), status.code()) {
                (Some(signal), _) => write!(f, "was killed by signal {signal}"),
                (None, code) => write!(f, "ended with exit code {}", code.unwrap_or_default()),
            },
            Ending::OutOfMemory { charged } => write!(
                f,
                "was killed because memory ran out, holding {:.1} GiB; lower --max-seq or --parallel, use a smaller \
                 model, or raise the limit of the container",
                *charged as f64 / (1u64 << 30) as f64
            ),
            Ending::Unreachable => f.write_str("closed its control channel without ending"),
        }
    }
}

/// Why workers could not be started or do not serve any more.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// A ring, a status page or a socket could not be made.
    #[error("setting up the workers failed: {0}")]
    Setup(#[from] SetupError),
    /// The executable could not be run.
    #[error("starting a worker failed: {} cannot be run: {source}", exe.display())]
    Spawn {
        /// The executable.
        exe: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The other side speaks another version.
    #[error("{worker} speaks protocol {found}, this process {expected}; both must be the same build")]
    Version {
        /// Which one.
        worker: WorkerName,
        /// Its version.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// A message that makes no sense at this point.
    #[error("{worker} broke the protocol: {reason}")]
    Protocol {
        /// Which one.
        worker: WorkerName,
        /// What it did.
        reason: String,
    },
    /// No sign of progress.
    #[error(
        "{worker} has made no progress for {seconds} s while {phase}; it hangs, is stopped, or the disk does not answer"
    )]
    Silent {
        /// Which one.
        worker: WorkerName,
        /// How long.
        seconds: u64,
        /// What it was supposed to do.
        phase: &'static str,
    },
    /// A step that does not end.
    #[error(
        "{worker} has made no progress in a step for {:.1} s, {}; it has been killed", silence.as_secs_f64(),
        if *stopped { "because a signal has stopped it" } else { "far longer than such a step takes" }
    )]
    Hung {
        /// Which one.
        worker: WorkerName,
        /// How long.
        silence: Duration,
        /// Whether the process was stopped (SIGSTOP, a debugger).
        stopped: bool,
    },
    /// After the loss of a device, nobody can say what is left.
    #[error("the model cannot be placed anew yet: {0}")]
    Unseen(String),
    /// Whoever waited for the load wants it no more.
    #[error("loading was given up")]
    GivenUp,
    /// The worker named its own error.
    #[error("{worker} failed: {message}")]
    Reported {
        /// Which one.
        worker: WorkerName,
        /// Its code.
        code: String,
        /// Its sentence.
        message: String,
    },
    /// The process is gone.
    #[error("{worker} {ending}")]
    Died {
        /// Which one.
        worker: WorkerName,
        /// How.
        ending: Ending,
    },
    /// The coordinator could not write the next step down; no worker is to blame.
    #[error("the next step could not be composed: {0}; this is a defect, please report it")]
    Unsendable(FrameError),
}

/// Codes of workers that a program may act on; any other is told as `worker_failed`, its sentence as it is.
const PASSED_ON: [&str; 4] = ["gpu_lost", "gpu_not_found", "gpu_no_such_device", "gpu_out_of_memory"];

/// What a worker does that has been told what to load.
pub(super) const LOADING: &str = "loading";

/// Those of them that say that a device is not there any more.
const DEVICE_LOST: [&str; 3] = ["gpu_lost", "gpu_not_found", "gpu_no_such_device"];

impl WorkerError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            WorkerError::Setup(_) => "worker_setup_failed",
            WorkerError::Spawn { .. } => "worker_spawn_failed",
            WorkerError::Version { .. } | WorkerError::Protocol { .. } => "worker_protocol",
            WorkerError::Unsendable(_) => "internal",
            WorkerError::Silent { .. } => "worker_silent",
            WorkerError::Hung { .. } => "worker_hung",
            WorkerError::Unseen(_) => "device_search_failed",
            WorkerError::GivenUp => "load_given_up",
            WorkerError::Reported { code, .. } => {
                PASSED_ON.into_iter().find(|known| code == known).unwrap_or("worker_failed")
            }
            WorkerError::Died { .. } => "worker_died",
        }
    }

    /// Whether another start would fail in the same way.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, WorkerError::Reported { code, .. } if code == "file_changed")
    }

    /// The stage whose device, if it has one, is lost: its driver says so, or does not come back from a load.
    pub(crate) fn lost_device(&self) -> Option<usize> {
        match self {
            WorkerError::Silent { worker, phase: LOADING, .. } => Some(worker.stage),
            WorkerError::Reported { worker, code, .. } if DEVICE_LOST.contains(&code.as_str()) => {
                Some(worker.stage)
            }
            _ => None,
        }
    }

    /// Whether what the worker was doing may be to blame. A signal from outside and an orderly end say nothing of the step in hand; a
    /// crash, an error and a step without end do.
    pub(crate) fn blames_the_step(&self) -> bool {
        match self {
            WorkerError::Reported { .. } => true,
            WorkerError::Hung { stopped, .. } => !stopped,
            WorkerError::Died { ending: Ending::Exited(status), .. } => {
                let from_outside = matches!(
                    status.signal(),
                    Some(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP)
                );
                !status.success() && !from_outside
            }
            _ => false,
        }
    }

    /// How close to the cause of a failed pipeline an error is likely to be: a worker that ends takes its neighbours
    /// with it, and those leave without an error of their own.
    pub(super) fn rank(&self) -> u8 {
        match self {
            WorkerError::Reported { .. } => 3,
            WorkerError::Died { ending: Ending::Exited(status), .. } if status.signal().is_some() => 2,
            WorkerError::Died { ending: Ending::Exited(status), .. } if status.success() => 0,
            _ => 1,
        }
    }
}

/// A piece of plumbing that could not be made.
#[derive(Debug, Error)]
pub enum SetupError {
    /// A ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Shared memory.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// A status page.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// A control channel.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A descriptor.
    #[error("{action}: {source}")]
    Descriptor {
        /// What was attempted.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}
