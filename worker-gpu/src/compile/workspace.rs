//! What a compiler works in: a folder of its own for each kernel.

use super::error::CompileError;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::fs::DirEntry;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// Age of a folder that may be left over. Younger ones are let be: their maker may live in another container that shares the
/// temporary folder, where it cannot be seen from here.
const LEFT_OVER: Duration = Duration::from_secs(600);

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

/// Removes old folders of processes that were killed while they compiled.
pub(super) fn sweep(temporary: &Path) {
    let Ok(entries) = std::fs::read_dir(temporary) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok());
        let is_gone = maker.is_some_and(|maker| kill(Pid::from_raw(maker), None) == Err(Errno::ESRCH));
        if is_gone && age(&entry).is_some_and(|age| age >= LEFT_OVER) {
            // Another process may be doing the same.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Time since something was made in a folder; `None` when it is gone, or changed in the future.
fn age(folder: &DirEntry) -> Option<Duration> {
    folder.metadata().ok()?.modified().ok()?.elapsed().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::process::Command;
    use std::time::SystemTime;

    #[test]
    fn old_folders_of_processes_that_are_gone_are_removed_and_no_others() {
        let temporary = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let make = |name: String, age: Duration| {
            let path = temporary.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("object"), "x").unwrap();
            File::open(&path).unwrap().set_modified(SystemTime::now() - age).unwrap();
            path
        };
        let gone = make(format!("{PREFIX}{}-a", ended.id()), LEFT_OVER);
        let kept = [
            make(format!("{PREFIX}{}-b", ended.id()), LEFT_OVER / 2),
            make(format!("{PREFIX}{}-a", std::process::id()), LEFT_OVER),
            make(format!("{PREFIX}x"), LEFT_OVER),
            make("other".into(), LEFT_OVER),
        ];
        sweep(temporary.path());
        assert!(!gone.exists() && kept.iter().all(|path| path.exists()));
    }
}
