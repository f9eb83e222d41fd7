//! What the process gets from its parent: descriptors by number, and the promise to end with it.

use super::ProcessError;
use crate::args::WorkerArgs;
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::getppid;
use spillway_protocol::channel::WorkerEnd;
use spillway_protocol::ring::{RingConsumer, RingProducer};
use spillway_protocol::states::StateMemory;
use spillway_protocol::status::StatusWriter;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The inherited ends.
#[derive(Debug)]
pub(super) struct Inherited {
    pub(super) control: WorkerEnd,
    pub(super) ring_in: RingConsumer,
    pub(super) ring_out: RingProducer,
    pub(super) status: StatusWriter,
    pub(super) states: Option<StateMemory>,
}

impl Inherited {
    /// Ties the process to its parent and takes over the descriptors.
    pub(super) fn adopt(args: &WorkerArgs) -> Result<Self, ProcessError> {
        follow_parent(args.parent_pid)?;
        take_name()?;
        leave_signals_to_the_coordinator()?;
        let states = args.states_fd.map(|fd| (fd, "the memory of states"));
        let wanted = [
            (args.control_fd, "the control socket"),
            (args.ring_in_fd, "the incoming ring"),
            (args.ring_out_fd, "the outgoing ring"),
            (args.status_fd, "the status page"),
        ];
        if let Some((fd, purpose)) = states.filter(|(fd, _)| wanted.iter().any(|(other, _)| other == fd)) {
            return Err(ProcessError::Descriptor { fd, purpose, reason: "given twice" });
        }
        for (index, &(fd, purpose)) in wanted.iter().enumerate() {
            if wanted[..index].iter().any(|&(earlier, _)| earlier == fd) {
                return Err(ProcessError::Descriptor { fd, purpose, reason: "given twice" });
            }
        }
        let [control, ring_in, ring_out, status] = wanted.map(|(fd, purpose)| own(fd, purpose));
        let states = states.map(|(fd, purpose)| own(fd, purpose)).transpose()?;
        Ok(Self {
            control: WorkerEnd::from_fd(control?)?,
            ring_in: RingConsumer::attach(ring_in?)?,
            ring_out: RingProducer::attach(ring_out?)?,
            status: StatusWriter::attach(status?)?,
            states: states.map(|fd| StateMemory::attach(fd, 1)).transpose()?,
        })
    }
}

/// Asks the system to kill this process when the thread that started it ends, then looks whether it already has. That
/// holds for what the process becomes by exec, too.
///
/// # Errors
/// The parent is another process than `expected`.
pub fn follow_parent(expected: u32) -> Result<(), ProcessError> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)
        .map_err(|error| ProcessError::System { action: "PR_SET_PDEATHSIG", source: error.into() })?;
    let found = getppid().as_raw().unsigned_abs();
    if found == expected { Ok(()) } else { Err(ProcessError::Parent { expected, found }) }
}

/// Process lists show who this is, instead of the `exe` that it was started as.
fn take_name() -> Result<(), ProcessError> {
    nix::sys::prctl::set_name(c"spillway-cpu")
        .map_err(|error| ProcessError::System { action: "PR_SET_NAME", source: error.into() })
}

/// Signals that reach a whole terminal or service at once. What they mean is the coordinator's decision: it may be finishing
/// a request. A worker ends when the coordinator says so, or is gone.
const OF_THE_COORDINATOR: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

fn leave_signals_to_the_coordinator() -> Result<(), ProcessError> {
    for ignored in OF_THE_COORDINATOR {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(ignored, SigHandler::SigIgn) }
            .map_err(|error| ProcessError::System { action: "ignoring a signal", source: error.into() })?;
    }
    Ok(())
}

/// Takes over an inherited descriptor, after checking that there is one. It is not passed on to any child.
fn own(fd: RawFd, purpose: &'static str) -> Result<OwnedFd, ProcessError> {
    // SAFETY: sets a flag on a number; a number that is no descriptor is an error value.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return Err(ProcessError::Descriptor { fd, purpose, reason: "not open" });
    }
    // SAFETY: it is open, the parent opened it for this process under this number, each number is taken once (checked
    // by the caller), and nothing else in the process has opened descriptors to keep yet.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
