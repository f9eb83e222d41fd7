//! Memory of the emulated devices that other processes open, as HIP's IPC handles allow.
//!
//! Memory becomes shared when a handle for it is asked for: the pages of the allocation are replaced by those of a file in memory
//! with the same contents. The handle says which process holds the file and under which descriptor, and where the process may
//! be looked at, the file may be opened.

use super::super::status::{self, Status};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

/// Only whole pages can be shared.
pub(super) const PAGE: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"SPWEMIPC");
const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// What the bytes of a handle say.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Handle {
    magic: u64,
    pid: u32,
    fd: u32,
    len: u64,
    /// The device that the memory belongs to.
    pub ordinal: u32,
    reserved: [u32; 9],
}

impl Handle {
    pub fn to_bytes(self) -> [u8; 64] {
        bytemuck::cast(self)
    }

    pub fn from_bytes(bytes: [u8; 64]) -> Result<Self, Status> {
        let handle: Self = bytemuck::cast(bytes);
        if handle.magic == MAGIC { Ok(handle) } else { Err(status::INVALID_VALUE) }
    }
}

/// Shared pages under an allocation of this process.
#[derive(Debug)]
pub(super) struct Shared {
    file: File,
    len: NonZeroUsize,
}

impl Shared {
    /// Puts a file's pages in place of those at `address`.
    ///
    /// # Safety
    /// `len` bytes at `address` are an allocation of the caller's, and nobody accesses them meanwhile.
    pub unsafe fn replace(address: NonNull<u8>, len: usize) -> Result<Self, Status> {
        let whole = NonZeroUsize::new(len).filter(|len| len.get().is_multiple_of(PAGE));
        let len = whole.filter(|_| address.addr().get().is_multiple_of(PAGE)).ok_or(status::INVALID_VALUE)?;
        let failed = |_| status::OPERATING_SYSTEM;
        let fd = memfd_create(c"spillway-emulated-memory", MFdFlags::MFD_CLOEXEC).map_err(failed)?;
        let mut file = File::from(fd);
        // SAFETY: as required of the caller.
        let contents = unsafe { std::slice::from_raw_parts(address.as_ptr(), len.get()) };
        file.write_all(contents).map_err(|_| status::OPERATING_SYSTEM)?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: the range is whole pages of the caller's allocation, whose contents the file now holds.
        unsafe { mmap(Some(address.addr()), len, READ_WRITE, flags, &file, 0) }.map_err(failed)?;
        Ok(Self { file, len })
    }

    /// The handle with which other processes open the memory.
    pub fn handle(&self, ordinal: u32) -> Handle {
        Handle {
            magic: MAGIC,
            pid: std::process::id(),
            fd: self.file.as_raw_fd().cast_unsigned(),
            len: self.len.get() as u64,
            ordinal,
            reserved: [0; 9],
        }
    }

    /// Puts private pages back, so that the allocator can have its memory again.
    ///
    /// # Safety
    /// `address` is the one that [`Shared::replace`] was called with, and nobody accesses the memory any more.
    pub unsafe fn restore(self, address: NonNull<u8>) -> Result<(), Status> {
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
        // SAFETY: the range is still the allocation's, as required of the caller.
        unsafe { mmap_anonymous(Some(address.addr()), self.len, READ_WRITE, flags) }
            .map_err(|_| status::OPERATING_SYSTEM)?;
        Ok(())
    }
}

/// Memory of another process, mapped into this one.
#[derive(Debug)]
pub(super) struct Imported {
    address: NonNull<c_void>,
    len: NonZeroUsize,
}

impl Imported {
    /// Maps what a handle names. A process cannot open its own memory, as on real devices.
    pub fn open(handle: &Handle) -> Result<Self, Status> {
        let len =
            usize::try_from(handle.len).ok().and_then(NonZeroUsize::new).ok_or(status::INVALID_VALUE)?;
        if handle.pid == std::process::id() {
            return Err(status::INVALID_VALUE);
        }
        let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
        let file =
            OpenOptions::new().read(true).write(true).open(path).map_err(|_| status::INVALID_HANDLE)?;
        let held = file.metadata().map_err(|_| status::INVALID_HANDLE)?.len();
        if held < handle.len {
            return Err(status::INVALID_VALUE);
        }
        // SAFETY: a new mapping at an address of the kernel's choice, within the file.
        let address = unsafe { mmap(None, len, READ_WRITE, MapFlags::MAP_SHARED, &file, 0) };
        Ok(Self { address: address.map_err(|_| status::OPERATING_SYSTEM)?, len })
    }

    pub fn address(&self) -> usize {
        self.address.as_ptr().expose_provenance()
    }

    pub fn len(&self) -> usize {
        self.len.get()
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length; the driver forgets the range with this value.
        let _ = unsafe { munmap(self.address, self.len.get()) };
    }
}
