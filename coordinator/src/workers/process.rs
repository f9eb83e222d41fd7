//! One worker process: started with inherited descriptors, watched through a pidfd, reaped on every path.

use super::error::{Ending, SetupError, WorkerError};
use super::lifecycle::End;
use super::visibility::Visibility;
use command_fds::{CommandFdExt, FdMapping};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use spillway_worker::args::WorkerArgs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a killed process may take to be gone before it is left to the system.
const KILL_WAIT: Duration = Duration::from_secs(2);

/// Descriptors that a worker inherits.
#[derive(Debug)]
pub(super) struct Inherited {
    pub control: OwnedFd,
    pub ring_in: OwnedFd,
    pub ring_out: OwnedFd,
    pub status: OwnedFd,
    pub states: Option<OwnedFd>,
}

/// A child process. Dropping it kills and reaps it.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    child: Child,
    pidfd: OwnedFd,
}

impl WorkerProcess {
    /// Starts `exe subcommand …`. The calling thread must outlive the worker: the worker asks the system to end it with
    /// the thread that started it.
    pub(super) fn spawn(
        exe: &Path,
        subcommand: &str,
        inherited: Inherited,
        visible: &Visibility,
    ) -> Result<WorkerProcess, WorkerError> {
        let args = WorkerArgs::standard(std::process::id(), inherited.states.is_some());
        let spawn_error = |source| WorkerError::Spawn { exe: exe.into(), source };
        let mut command = Command::new(exe);
        command.arg0("spillway").args(args.to_argv(subcommand)).stdin(Stdio::null()).stdout(Stdio::null());
        visible.apply(&mut command);
        let Inherited { control, ring_in, ring_out, status, states } = inherited;
        let mappings = [
            (control, args.control_fd),
            (ring_in, args.ring_in_fd),
            (ring_out, args.ring_out_fd),
            (status, args.status_fd),
        ];
        let mappings = mappings.into_iter().chain(states.zip(args.states_fd));
        command
            .fd_mappings(mappings.map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd }).collect())
            .map_err(|error| spawn_error(std::io::Error::other(error)))?;
        let mut child = command.spawn().map_err(spawn_error)?;
        match pidfd(&child) {
            Ok(pidfd) => Ok(WorkerProcess { child, pidfd }),
            Err(source) => {
                // Without a pidfd there is nothing to wait on with a limit; SIGKILL makes the wait short.
                let _ = child.kill();
                let _ = child.wait();
                Err(SetupError::Descriptor { action: "pidfd_open", source }.into())
            }
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the process, at most `timeout`.
    pub(super) fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            // Rounded up so that the last millisecond is not spent spinning.
            let limit = PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)], limit);
        }
    }

    /// Kills the process and reaps it. One that is stuck in the kernel is left behind after a moment; the system reaps it.
    pub(super) fn kill(&mut self) {
        if self.wait(Duration::ZERO).is_none() {
            let _ = self.child.kill();
            if self.wait(KILL_WAIT).is_none() {
                tracing::error!(pid = self.pid(), "a killed worker does not end; it is stuck in the kernel");
            }
        }
    }

    /// Whether a signal has stopped the process.
    pub(super) fn is_stopped(&self) -> bool {
        is_stopped(self.pid())
    }

    /// How long threads of the process have waited for a processor, in all. Zero where the system does not say.
    pub(super) fn starved(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        let waited = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            stat.split_whitespace().nth(1).and_then(|text| text.parse().ok()).unwrap_or(0)
        };
        Duration::from_nanos(tasks.map(waited).sum())
    }

    /// How the process ended, for a worker whose control channel is closed.
    pub(super) fn ending(&mut self) -> Ending {
        self.wait(Duration::from_secs(1)).map_or(Ending::Unreachable, Ending::Exited)
    }
}

/// Whether a signal has stopped a process.
pub(crate) fn is_stopped(pid: u32) -> bool {
    // The state follows the name, which is in parentheses and may hold anything.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    matches!(state, Some("T" | "t"))
}

fn pidfd(child: &Child) -> std::io::Result<OwnedFd> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| std::io::Error::other("the process id is not a number the system uses"))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

impl End for WorkerProcess {
    fn end(&mut self) {
        self.kill();
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
