//! Arguments of the worker process: which inherited descriptor is what, and who the parent is.
//!
//! The coordinator builds [`WorkerArgs`], maps its descriptors to the numbers in it and appends [`WorkerArgs::to_argv`]
//! to the command; the worker reads them back with [`WorkerArgs::parse`]. Nothing else crosses on the command line: the
//! band itself arrives as a `Load` message.

use std::ffi::OsString;
use std::os::fd::RawFd;

/// Inherited descriptors by number, and the process that must be the parent.
///
/// Every descriptor has to be open in the child, without close-on-exec, under exactly the number given here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerArgs {
    /// Control socket (one end of a `socketpair`).
    pub control_fd: RawFd,
    /// Ring that brings step frames: token ids into stage 0, residual rows into later stages.
    pub ring_in_fd: RawFd,
    /// Ring that takes results: residual rows, or logits from the last stage.
    pub ring_out_fd: RawFd,
    /// Status page.
    pub status_fd: RawFd,
    /// Memory of the states of lifted layers, where there are any for this worker.
    pub states_fd: Option<RawFd>,
    /// Process id of the coordinator. A worker whose parent is another process ends at once.
    pub parent_pid: u32,
}

/// Why the arguments were refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ArgsError {
    /// An option that the worker does not have.
    #[error("worker: unknown argument `{0}`; this subcommand is started by the coordinator, not by hand")]
    Unknown(String),
    /// An option without a usable number.
    #[error("worker: `{option}` needs a number from 0 to 2147483647, found `{found}`")]
    Value {
        /// The option.
        option: &'static str,
        /// What stood there.
        found: String,
    },
    /// An option that must be given.
    #[error("worker: `{0}` is missing; this subcommand is started by the coordinator, not by hand")]
    Missing(&'static str),
}

impl ArgsError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ArgsError::Unknown(_) => "unknown_argument",
            ArgsError::Value { .. } => "bad_argument_value",
            ArgsError::Missing(_) => "missing_argument",
        }
    }
}

/// Option names, in the order of the values in [`WorkerArgs::values`].
const OPTIONS: [&str; 6] =
    ["--control-fd", "--ring-in-fd", "--ring-out-fd", "--status-fd", "--parent-pid", "--states-fd"];

impl WorkerArgs {
    /// Descriptors 3 to 6 in the order control, ring in, ring out, status, and 7 for `states`: the numbers right after the standard
    /// streams.
    pub fn standard(parent_pid: u32, states: bool) -> Self {
        let states_fd = states.then_some(7);
        Self { control_fd: 3, ring_in_fd: 4, ring_out_fd: 5, status_fd: 6, states_fd, parent_pid }
    }

    /// The arguments after the program's name, beginning with the worker's subcommand.
    pub fn to_argv(&self, subcommand: &str) -> Vec<OsString> {
        let mut argv = vec![OsString::from(subcommand)];
        for (option, value) in OPTIONS.iter().zip(self.values()) {
            let Some(value) = value else { continue };
            argv.push(OsString::from(option));
            argv.push(OsString::from(value.to_string()));
        }
        argv
    }

    /// Reads the arguments that follow the subcommand.
    ///
    /// # Errors
    /// An argument is unknown, missing or no number.
    pub fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<Self, ArgsError> {
        let mut values: [Option<RawFd>; OPTIONS.len()] = [None; OPTIONS.len()];
        let mut argv = argv.into_iter();
        while let Some(argument) = argv.next() {
            let Some(index) = OPTIONS.iter().position(|option| argument == *option) else {
                return Err(ArgsError::Unknown(argument.to_string_lossy().into_owned()));
            };
            let found = argv.next().unwrap_or_default().to_string_lossy().into_owned();
            let number = found.parse().ok().filter(|n: &RawFd| *n >= 0);
            values[index] = Some(number.ok_or(ArgsError::Value { option: OPTIONS[index], found })?);
        }
        let value = |index: usize| values[index].ok_or(ArgsError::Missing(OPTIONS[index]));
        Ok(Self {
            control_fd: value(0)?,
            ring_in_fd: value(1)?,
            ring_out_fd: value(2)?,
            status_fd: value(3)?,
            parent_pid: value(4)?.unsigned_abs(),
            states_fd: values[5],
        })
    }

    fn values(&self) -> [Option<i64>; OPTIONS.len()] {
        let Self { control_fd, ring_in_fd, ring_out_fd, status_fd, states_fd, parent_pid } = *self;
        let [control, ring_in, ring_out, status] =
            [control_fd, ring_in_fd, ring_out_fd, status_fd].map(|fd| Some(fd.into()));
        [control, ring_in, ring_out, status, Some(parent_pid.into()), states_fd.map(i64::from)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<WorkerArgs, ArgsError> {
        WorkerArgs::parse(words.iter().map(OsString::from))
    }

    #[test]
    fn what_the_coordinator_writes_the_worker_reads() {
        for states_fd in [None, Some(5)] {
            let (ring_in_fd, ring_out_fd, parent_pid) = (3, 17, 4_194_304);
            let args =
                WorkerArgs { control_fd: 9, ring_in_fd, ring_out_fd, status_fd: 0, states_fd, parent_pid };
            let argv = args.to_argv("worker-x");
            assert_eq!(argv[0], "worker-x");
            assert_eq!(WorkerArgs::parse(argv.into_iter().skip(1)), Ok(args));
        }
    }

    #[test]
    fn every_mistake_has_its_own_error() {
        assert_eq!(parse(&["--nice", "1"]), Err(ArgsError::Unknown("--nice".into())));
        for bad in ["", "x", "-1", "99999999999"] {
            let expected = ArgsError::Value { option: "--status-fd", found: bad.into() };
            assert_eq!(parse(&["--status-fd", bad]), Err(expected));
        }
        assert_eq!(parse(&["--control-fd", "3"]), Err(ArgsError::Missing("--ring-in-fd")));
    }
}
