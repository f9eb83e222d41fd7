//! The configuration file on disk: replaced as a whole, in one step for whoever reads it, by one program at a time.

use std::fs::{File, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// Permissions of a new file, less what the process masks.
const NEW_FILE: u32 = 0o666;

/// Links to links that are followed; the system follows no more.
const MAX_LINKS: usize = 40;

/// Longest wait for another program; a change takes milliseconds.
const WAIT: Duration = Duration::from_secs(5);

/// The file that is changed. Until this is dropped no other process changes it in this way.
#[derive(Debug)]
pub(super) struct Target {
    path: PathBuf,
    /// The folder: a lock on the file itself would go with the file that is replaced.
    _lock: File,
}

impl Target {
    /// The file, or the one that a link names, whether it exists or not. Its folder is made, and other processes are waited for.
    ///
    /// # Errors
    /// The folder cannot be had, or another process does not come to an end.
    pub fn lock(path: &Path) -> io::Result<Target> {
        let path = behind_links(path)?;
        let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        std::fs::create_dir_all(folder)?;
        let lock = File::open(folder)?;
        wait_for(&lock)?;
        Ok(Target { path, _lock: lock })
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// The file cannot be written, or is none that may be replaced.
    pub fn replace(&self, text: &str) -> io::Result<()> {
        let old = std::fs::metadata(&self.path).ok();
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            // A device or a folder would be gone.
            return Err(io::Error::other("it is no regular file"));
        }
        let folder = self.path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let mut file = tempfile::Builder::new()
            .prefix(".config.")
            .permissions(Permissions::from_mode(NEW_FILE))
            .tempfile_in(folder)?;
        if let Some(old) = old {
            file.as_file().set_permissions(old.permissions())?;
        }
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        Ok(())
    }
}

/// What a path comes to when links are followed, also those that lead nowhere yet.
fn behind_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match std::fs::read_link(&path) {
            Ok(to) => path = path.parent().unwrap_or(Path::new("/")).join(to),
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotFound) => {
                return Ok(path);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("it is a link that leads to itself"))
}

/// Locks the folder, where its file system can; elsewhere whole files are replaced all the same.
fn wait_for(lock: &File) -> io::Result<()> {
    match lock.try_lock() {
        Ok(()) => return Ok(()),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => {
            tracing::debug!(%error, "the folder of the configuration file cannot be locked");
            return Ok(());
        }
    }
    let (sender, receiver) = mpsc::channel();
    let waiting = lock.try_clone()?;
    // Whoever has given up has dropped the receiver.
    let wait = move || drop(sender.send(waiting.lock()));
    std::thread::Builder::new().name("config-lock".into()).spawn(wait)?;
    let limit = || format!("another program has kept its folder locked for {} s", WAIT.as_secs());
    receiver.recv_timeout(WAIT).unwrap_or_else(|_| Err(io::Error::other(limit())))
}
