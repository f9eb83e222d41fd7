//! What a compiler works in: a folder of its own for each kernel, and an end when this process ends.

use super::error::CompileError;
use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// What folders are called, before the number of the process that made them.
const PREFIX: &str = "spillway-kernel-";

/// Makes a folder that is removed when it is dropped.
///
/// # Errors
/// The temporary folder cannot be written to.
pub(super) fn folder() -> Result<TempDir, CompileError> {
    let prefix = format!("{PREFIX}{}-", std::process::id());
    tempfile::Builder::new().prefix(&prefix).tempdir().map_err(|error| {
        CompileError::io("creating a folder for the compiler", &std::env::temp_dir(), &error)
    })
}

/// Removes folders of processes that were killed while they compiled.
pub(super) fn sweep(temporary: &Path) {
    let Ok(entries) = std::fs::read_dir(temporary) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok());
        if maker.is_some_and(|maker| kill(Pid::from_raw(maker), None) == Err(Errno::ESRCH)) {
            // Another process may be doing the same.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Lets the compiler end when the thread that waits for it does.
pub(super) fn end_with_this_process(command: &mut Command) {
    // SAFETY: between fork and exec only a system call is made, which allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGTERM)?));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_processes_that_are_gone_are_removed_and_no_others() {
        let temporary = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let make = |name: String| {
            let path = temporary.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("object"), "x").unwrap();
            path
        };
        let gone = make(format!("{PREFIX}{}-a", ended.id()));
        let kept = [
            make(format!("{PREFIX}{}-a", std::process::id())),
            make(format!("{PREFIX}x")),
            make("other".into()),
        ];
        sweep(temporary.path());
        assert!(!gone.exists() && kept.iter().all(|path| path.exists()));
    }

    #[test]
    fn a_compiler_ends_with_the_thread_that_waits_for_it() {
        let mut compiler = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            command.arg("60");
            end_with_this_process(&mut command);
            command.spawn().unwrap()
        })
        .join()
        .unwrap();
        assert!(!compiler.wait().unwrap().success(), "it was ended");
    }
}
