//! Anonymous shared memory of a fixed size.
//!
//! A segment is a `memfd`: it has no name, nothing stays behind when its last holder ends, and it is not bound by the
//! size of `/dev/shm`. Its pages are allocated when it is made (so that touching them cannot fail later) and its size is
//! sealed: no holder can shrink it under another one's feet, which would turn an access into SIGBUS.

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::stat::fstat;
use std::ffi::CStr;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// Why a segment cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A system call failed.
    #[error(
        "shared memory: {action} of {bytes} bytes failed: {source}; free memory, lower --max-seq or the step \
         size, or raise the limits of this process (`ulimit -a`)"
    )]
    System {
        /// What was attempted.
        action: &'static str,
        /// Size of the segment.
        bytes: usize,
        /// The system's reason.
        source: nix::Error,
    },
    /// The descriptor is not a sealed segment, or is too small for what it should hold.
    #[error(
        "shared memory: the inherited descriptor is not usable: {0}; coordinator and worker must be the same build"
    )]
    Foreign(&'static str),
    /// A size beyond the address space.
    #[error("shared memory: a segment of {0} bytes is larger than this system can map")]
    TooLarge(u64),
}

impl ShmError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ShmError::System { .. } => "shared_memory_failed",
            ShmError::Foreign(_) => "shared_memory_foreign",
            ShmError::TooLarge(_) => "shared_memory_too_large",
        }
    }
}

/// Makes a file or segment beyond the size limit (`ulimit -f`) an error value, in this process and those it starts: by default
/// the system ends the process without a word.
pub fn prefer_errors_to_signals() {
    // SAFETY: ignoring a signal installs no handler. It cannot fail for a signal that exists.
    let _ = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
}

/// A mapped segment together with its descriptor. Unmapped and closed on drop.
///
/// Another process writes here at any time, so no reference to the bytes is ever handed out: only raw pointers inside
/// this crate, for copies and for atomics.
#[derive(Debug)]
pub(crate) struct Segment {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: NonZeroUsize,
}

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through atomics or raw copies whose
// callers keep their own order (see `ring` and `status`).
unsafe impl Send for Segment {}
// SAFETY: as above; a shared `Segment` only gives out the address.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes a zeroed segment of exactly `len` bytes.
    pub(crate) fn create(name: &CStr, len: NonZeroUsize) -> Result<Self, ShmError> {
        let bytes = len.get();
        let failed = |action| move |source| ShmError::System { action, bytes, source };
        let size = libc::off_t::try_from(bytes).map_err(|_| ShmError::TooLarge(bytes as u64))?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd = memfd_create(name, flags).map_err(failed("memfd_create"))?;
        fallocate(&fd, FallocateFlags::empty(), 0, size).map_err(failed("fallocate"))?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).map_err(failed("sealing"))?;
        Self::map(fd, len)
    }

    /// Maps an inherited segment of at least `min_len` bytes.
    pub(crate) fn attach(fd: OwnedFd, min_len: usize) -> Result<Self, ShmError> {
        let failed = |action| move |source| ShmError::System { action, bytes: min_len, source };
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS).map_err(|_| ShmError::Foreign("it is not a memfd"))?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(ShmError::Foreign("its size is not sealed"));
        }
        let size = fstat(&fd).map_err(failed("fstat"))?.st_size;
        let len = usize::try_from(size).ok().filter(|len| *len >= min_len).and_then(NonZeroUsize::new);
        Self::map(fd, len.ok_or(ShmError::Foreign("it is too small"))?)
    }

    fn map(fd: OwnedFd, len: NonZeroUsize) -> Result<Self, ShmError> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; the size is sealed, so no access can fault.
        let base = unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, &fd, 0) };
        let base = base.map_err(|source| ShmError::System { action: "mmap", bytes: len.get(), source })?;
        Ok(Self { fd, base: base.cast(), len })
    }

    /// First byte; page aligned, valid for [`Segment::len`] bytes while the segment lives.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len.get()
    }

    /// The descriptor, to let a child inherit it.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map`, with this length, and nothing refers to it any more.
        let unmapped = unsafe { munmap(self.base.cast(), self.len.get()) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &CStr = c"spillway-test";

    #[test]
    fn a_segment_cannot_change_its_size() {
        let segment = Segment::create(NAME, NonZeroUsize::new(8192).unwrap()).unwrap();
        assert_eq!(nix::unistd::ftruncate(segment.fd(), 0), Err(nix::Error::EPERM));
        assert_eq!(nix::unistd::ftruncate(segment.fd(), 16384), Err(nix::Error::EPERM));
    }

    #[test]
    fn foreign_descriptors_are_refused() {
        let file = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
        assert_eq!(Segment::attach(file, 1).unwrap_err().code(), "shared_memory_foreign");
        let segment = Segment::create(NAME, NonZeroUsize::new(100).unwrap()).unwrap();
        let fd = segment.fd().try_clone_to_owned().unwrap();
        assert_eq!(Segment::attach(fd, 101).unwrap_err().code(), "shared_memory_foreign");
        let unsealed = memfd_create(NAME, MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&unsealed, 4096).unwrap();
        assert_eq!(Segment::attach(unsealed, 1).unwrap_err().code(), "shared_memory_foreign");
    }
}
