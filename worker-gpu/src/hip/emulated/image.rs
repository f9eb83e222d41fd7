//! Kernels as shared objects in memory.

use super::super::status::{self, Status};
use super::abi::{ABI, Describe, Kernel};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::ffi::{CStr, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

/// A loaded shared object.
#[derive(Debug)]
pub(super) struct Image {
    library: Library,
    // The loader and debuggers know the object by this descriptor's path.
    _file: File,
}

/// Size of the fixed part of an ELF header, and where it says what lies at the end of the file.
const ELF_HEADER: usize = 64;
const SECTION_TABLE: usize = 0x28;
const SECTION_BYTES: usize = 0x3a;
const SECTION_COUNT: usize = 0x3c;

impl Image {
    /// Loads the object at `image`.
    ///
    /// # Safety
    /// `image` points at a whole ELF file whose section table is its last part (as linkers write it), or at something
    /// else of at least [`ELF_HEADER`] bytes or with a NUL before that.
    pub unsafe fn load(image: *const u8) -> Result<Self, Status> {
        // SAFETY: as required of the caller: bytes are read one by one until one of the magic differs.
        let is_elf = unsafe { (0..4).all(|i| *image.add(i) == b"\x7fELF"[i]) };
        if !is_elf {
            return Err(status::INVALID_IMAGE);
        }
        // SAFETY: an ELF file has a whole header.
        let header = unsafe { std::slice::from_raw_parts(image, ELF_HEADER) };
        let u16_at = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
        let table: [u8; 8] = std::array::from_fn(|i| header[SECTION_TABLE + i]);
        let table = usize::try_from(u64::from_le_bytes(table)).map_err(|_| status::INVALID_IMAGE)?;
        // SAFETY: the file ends with its section table.
        let bytes = unsafe {
            std::slice::from_raw_parts(image, table + u16_at(SECTION_BYTES) * u16_at(SECTION_COUNT))
        };
        Self::open(bytes)
    }

    fn open(bytes: &[u8]) -> Result<Self, Status> {
        let failed = |_| status::OPERATING_SYSTEM;
        let fd = memfd_create(c"spillway-kernel", MFdFlags::MFD_CLOEXEC).map_err(failed)?;
        let mut file = File::from(fd);
        file.write_all(bytes).map_err(|_| status::OPERATING_SYSTEM)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        // SAFETY: the object was made by the kernel compiler from our sources; its initialisers do nothing.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        match library {
            Ok(library) => Ok(Self { library, _file: file }),
            Err(error) => {
                tracing::error!(%error, "the emulated device cannot load a kernel object");
                Err(status::SHARED_OBJECT_INIT_FAILED)
            }
        }
    }

    /// The description of an entry point; lives as long as the image.
    pub fn kernel(&self, name: &CStr, wave: u32) -> Result<*const Kernel, Status> {
        let symbol = format!("{}_emulated", name.to_str().map_err(|_| status::NOT_FOUND)?);
        // SAFETY: only taken as an address here.
        let address = unsafe { self.library.get::<*mut c_void>(symbol.as_bytes()) };
        let address = address.map_err(|_| status::NOT_FOUND)?.into_raw();
        // SAFETY: exports of this name have this type (kernels/hip/target_emulated.h).
        let describe = unsafe { std::mem::transmute::<*mut c_void, Describe>(address) };
        // SAFETY: it returns a static description.
        let kernel = unsafe { describe() };
        // SAFETY: as above; the first two fields are the same in every version.
        let (abi, compiled_wave) = unsafe { ((*kernel).abi, (*kernel).wave) };
        if abi == ABI && compiled_wave == wave { Ok(kernel) } else { Err(status::NO_BINARY_FOR_GPU) }
    }
}
