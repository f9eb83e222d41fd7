//! The local socket: taken only if nobody else serves it, readable by its owner alone, removed at the end.

use nix::sys::stat::{Mode, umask};
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process serves it.
    #[error("another process already serves the socket {0}; end it or listen on another path")]
    InUse(PathBuf),
    /// The path is taken by something else.
    #[error("{0} exists and is not a socket; remove it or listen on another path")]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {path}: {source}; check the directory and the length of the path")]
    Io {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl SocketError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            SocketError::InUse(_) => "socket_in_use",
            SocketError::NotASocket(_) => "not_a_socket",
            SocketError::Io { .. } => "socket_failed",
        }
    }
}

/// A socket file that is removed when dropped, if it is still the one that was made.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

/// Tells a file from a later one of the same name. The number of an inode is used again at once, its time is not.
type Identity = (u64, u64, u32, i64, i64);

/// Listens on `path`; a file left behind by a dead process is replaced. Call it before other threads exist: the mask of
/// new files is changed for a moment.
pub fn listen(path: &Path) -> Result<(UnixListener, SocketFile), SocketError> {
    let io = |source| SocketError::Io { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(io(error)),
        Ok(found) if !found.file_type().is_socket() => return Err(SocketError::NotASocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(SocketError::InUse(path.to_owned())),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(io)?
            }
            Err(error) => return Err(io(error)),
        },
    }
    let before = umask(Mode::S_IRWXG | Mode::S_IRWXO | Mode::S_IXUSR);
    let listener = UnixListener::bind(path);
    umask(before);
    let listener = listener.map_err(io)?;
    listener.set_nonblocking(true).map_err(io)?;
    let identity = identity(&fs::symlink_metadata(path).map_err(io)?);
    Ok((listener, SocketFile { path: path.to_owned(), identity }))
}

fn identity(file: &Metadata) -> Identity {
    (file.dev(), file.ino(), file.mode(), file.mtime(), file.mtime_nsec())
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| identity(&found) == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the socket file could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_live_socket_is_refused_a_stale_one_replaced_and_ours_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let (listener, file) = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(listen(&path).unwrap_err().code(), "socket_in_use");
        drop(listener);
        // The file is still there and nobody answers: what a killed process leaves behind.
        std::mem::forget(file);
        let (_listener, second) = listen(&path).unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_has_taken_the_place_of_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let (_listener, file) = listen(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"mine");
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        fs::write(&path, "mine").unwrap();
        assert_eq!(listen(&path).unwrap_err().code(), "not_a_socket");
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        assert_eq!(listen(&folder.path().join("no/such")).unwrap_err().code(), "socket_failed");
    }
}
