//! What a device says about itself.
//!
//! `hipDeviceProp_t` has two layouts: R0600 since ROCm 6, R0000 before (the functions carry the layout in their names). We
//! read the few fields that matter by offset; both tables are checked or sourced in `tests/rocm_declarations.rs`.

use super::api::{HipApi, PROPERTY_BYTES};
use super::error::HipError;
use super::status::Status;
use std::ffi::{c_int, c_void};
use std::fmt;

/// Byte offsets of fields in one version of `hipDeviceProp_t`. Strings are 256 bytes, sizes 8, numbers 4.
#[derive(Debug)]
pub struct PropertyLayout {
    /// `name`
    pub name: usize,
    /// `totalGlobalMem`
    pub total_bytes: usize,
    /// `sharedMemPerBlock`
    pub shared_bytes: usize,
    /// `warpSize`
    pub wave: usize,
    /// `multiProcessorCount`
    pub compute_units: usize,
    /// `pciDomainID`
    pub pci_domain: usize,
    /// `pciBusID`
    pub pci_bus: usize,
    /// `pciDeviceID`
    pub pci_device: usize,
    /// `integrated`
    pub integrated: usize,
    /// `gcnArchName`
    pub arch: usize,
}

/// ROCm 6 and 7.
pub const R0600: PropertyLayout = PropertyLayout {
    name: 0,
    total_bytes: 288,
    shared_bytes: 296,
    wave: 308,
    compute_units: 388,
    pci_domain: 592,
    pci_bus: 584,
    pci_device: 588,
    integrated: 396,
    arch: 1160,
};

/// ROCm 5, from `hip_runtime_api.h` of ROCm 5.2.3.
pub const R0000: PropertyLayout = PropertyLayout {
    name: 0,
    total_bytes: 256,
    shared_bytes: 264,
    wave: 276,
    compute_units: 336,
    pci_domain: 364,
    pci_bus: 368,
    pci_device: 372,
    integrated: 652,
    arch: 396,
};

/// Where a device sits on the bus; displays as `0000:03:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Device; the function is 0.
    pub device: u32,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number in its provider, from 0.
    pub ordinal: u32,
    /// Marketing name.
    pub name: String,
    /// Architecture as the kernel compiler names it: `gfx1100`, `sm_90`, `emulated_wave32`. Feature suffixes
    /// (`:sramecc+:xnack-`) are kept.
    pub arch: String,
    /// Unique id, where the driver has one.
    pub uuid: Option<[u8; 16]>,
    /// Bus address.
    pub pci: PciAddress,
    /// All device memory in bytes.
    pub total_bytes: u64,
    /// Compute units (AMD) or multiprocessors (NVIDIA).
    pub compute_units: u32,
    /// Lanes of a wave as the driver reports it. RDNA kernels run with 32 whatever it says.
    pub wave: u32,
    /// Shared memory (LDS) of a block in bytes.
    pub shared_bytes: u64,
    /// True for a GPU that shares the host's memory.
    pub integrated: bool,
}

impl DeviceInfo {
    /// Reads a device's properties through whichever layout the library has.
    pub(super) fn read(api: &HipApi, ordinal: u32) -> Result<Result<Self, Status>, HipError> {
        let (function, layout) = match (api.get_device_properties, api.get_device_properties_r0000) {
            (Some(function), _) => (function, &R0600),
            (None, Some(function)) => (function, &R0000),
            (None, None) => return Err(HipError::FunctionMissing { symbol: "hipGetDevicePropertiesR0600" }),
        };
        let mut bytes = PropertyBytes([0; PROPERTY_BYTES]);
        // SAFETY: the buffer is larger than the structure of any version, and aligned for it.
        let status = unsafe { function(std::ptr::from_mut(&mut bytes).cast::<c_void>(), ordinal as c_int) };
        if !status.is_success() {
            return Ok(Err(status));
        }
        let mut uuid = [0; 16];
        // SAFETY: the function writes 16 bytes.
        let has_uuid =
            api.device_get_uuid.is_some_and(|get| unsafe { get(&mut uuid, ordinal as c_int) }.is_success());
        Ok(Ok(Self {
            ordinal,
            name: bytes.text(layout.name),
            arch: bytes.text(layout.arch),
            uuid: (has_uuid && uuid != [0; 16]).then_some(uuid),
            pci: PciAddress {
                domain: bytes.number(layout.pci_domain),
                bus: bytes.number(layout.pci_bus),
                device: bytes.number(layout.pci_device),
            },
            total_bytes: bytes.size(layout.total_bytes),
            compute_units: bytes.number(layout.compute_units),
            wave: bytes.number(layout.wave),
            shared_bytes: bytes.size(layout.shared_bytes),
            integrated: bytes.number(layout.integrated) != 0,
        }))
    }

    /// Writes the R0600 layout, for providers that have no HIP library of their own.
    ///
    /// # Safety
    /// `properties` must be a buffer of [`PROPERTY_BYTES`] bytes as [`DeviceInfo::read`] passes it.
    pub(super) unsafe fn write(&self, properties: *mut c_void) {
        let mut bytes = PropertyBytes([0; PROPERTY_BYTES]);
        bytes.set(R0600.name, &self.name.as_bytes()[..self.name.len().min(255)]);
        bytes.set(R0600.arch, &self.arch.as_bytes()[..self.arch.len().min(255)]);
        bytes.set(R0600.total_bytes, &self.total_bytes.to_ne_bytes());
        bytes.set(R0600.shared_bytes, &self.shared_bytes.to_ne_bytes());
        for (offset, number) in [
            (R0600.wave, self.wave),
            (R0600.compute_units, self.compute_units),
            (R0600.pci_domain, self.pci.domain),
            (R0600.pci_bus, self.pci.bus),
            (R0600.pci_device, self.pci.device),
            (R0600.integrated, u32::from(self.integrated)),
        ] {
            bytes.set(offset, &number.to_ne_bytes());
        }
        // SAFETY: the caller vouches for the buffer.
        unsafe { std::ptr::copy_nonoverlapping(bytes.0.as_ptr(), properties.cast::<u8>(), PROPERTY_BYTES) };
    }
}

#[repr(C, align(16))]
struct PropertyBytes([u8; PROPERTY_BYTES]);

impl PropertyBytes {
    fn field<const N: usize>(&self, offset: usize) -> [u8; N] {
        std::array::from_fn(|i| self.0[offset + i])
    }

    fn number(&self, offset: usize) -> u32 {
        u32::from_ne_bytes(self.field(offset))
    }

    fn size(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.field(offset))
    }

    fn text(&self, offset: usize) -> String {
        let bytes: Vec<u8> =
            self.0[offset..offset + 256].iter().copied().take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn set(&mut self, offset: usize, value: &[u8]) {
        self.0[offset..offset + value.len()].copy_from_slice(value);
    }
}
