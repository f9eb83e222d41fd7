//! Compilers that end with the thread that waits for them.
//!
//! A system call of the compiler's own process asks for that, and this process, which may have a device open, runs no code
//! between fork and exec. So it starts its own executable again as [`child`], which makes the call and becomes the compiler.

use super::settings::ChildCommand;
use spillway_worker::process::follow_parent;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// The call of `compiler`, by way of `child`.
pub(super) fn command(child: &ChildCommand, compiler: &Command) -> Command {
    let mut command = Command::new(&child.program);
    command.args(&child.arguments).arg(std::process::id().to_string());
    command.arg(compiler.get_program()).args(compiler.get_args());
    command
}

/// Ties the process to its parent and becomes the compiler: `<parent's process id> <program> <argument>…`. Returns only when
/// that fails, with a message for stderr.
pub fn child(arguments: &[OsString]) -> String {
    let [parent, program, arguments @ ..] = arguments else {
        return "usage: <parent's process id> <program> <argument>…".to_owned();
    };
    let Some(parent) = parent.to_str().and_then(|number| number.parse().ok()) else {
        return "the first argument is no process id".to_owned();
    };
    match follow_parent(parent) {
        Ok(()) => {
            let error = Command::new(program).args(arguments).exec();
            format!("starting {}: {error}", Path::new(program).display())
        }
        Err(error) => error.to_string(),
    }
}
