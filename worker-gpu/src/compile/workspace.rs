//! What a compiler works in: a folder of its own for each kernel.

use super::error::CompileError;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::path::Path;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

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
}
