//! `daemon`: serve JSON lines.

use super::args::DaemonArgs;
use super::failure::Failure;
use crate::config::ConfigFile;
use crate::daemon::{DaemonEnd, DaemonOptions, run};

/// Serves until the end of standard input or a signal.
pub fn daemon(args: &DaemonArgs, config: ConfigFile) -> Result<(), Failure> {
    match run(&DaemonOptions { listen: args.listen.clone(), drain_limit: args.drain_limit, config })? {
        DaemonEnd::Drained => Ok(()),
        DaemonEnd::Interrupted => Err(Failure::Interrupted),
    }
}
