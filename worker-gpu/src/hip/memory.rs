//! Device memory and page-locked host memory.

use super::ledger::Kind;
use super::{Device, HipError};
use std::ffi::c_void;
use std::ptr::NonNull;

/// A range of device addresses: a plain value that owns nothing. Commands on a freed range are refused or harm only the
/// device's own memory; keeping the owner alive is its user's business.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSlice {
    address: u64,
    len: usize,
}

impl DeviceSlice {
    pub(super) fn new(address: u64, len: usize) -> Self {
        Self { address, len }
    }

    /// First address, as kernels take it.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// True for an empty range.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// They are not all inside.
    pub fn part(self, offset: usize, bytes: usize) -> Result<Self, HipError> {
        check_range("taking a part of device memory", offset, bytes, self.len)?;
        Ok(Self { address: self.address + offset as u64, len: bytes })
    }

    pub(super) fn as_ptr(self) -> *mut c_void {
        // Devices' addresses are the host's in width: drivers hand them out as pointers.
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.address).unwrap_or(0))
    }

    pub(super) fn expect_len(self, what: &'static str, bytes: usize) -> Result<(), HipError> {
        if bytes == self.len {
            Ok(())
        } else {
            Err(HipError::OutOfRange { what, offset: 0, bytes, len: self.len })
        }
    }
}

fn check_range(what: &'static str, offset: usize, bytes: usize, len: usize) -> Result<(), HipError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        _ => Err(HipError::OutOfRange { what, offset, bytes, len }),
    }
}

/// Device memory; freed on drop, after the device has finished with it.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Device,
    address: NonNull<u8>,
    len: usize,
    entry: u64,
}

impl DeviceBuffer {
    pub(super) fn new(device: Device, address: NonNull<u8>, len: usize, entry: u64) -> Self {
        Self { device, address, len, entry }
    }

    /// The whole buffer.
    pub fn slice(&self) -> DeviceSlice {
        DeviceSlice::new(self.address.as_ptr().expose_provenance() as u64, self.len)
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for an empty buffer.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.device.ledger().remove(self.entry);
        // SAFETY: the address came from hipMalloc and is freed once; the call waits for the device.
        self.device.release("hipFree", |api| unsafe { (api.free)(self.address.as_ptr().cast()) });
    }
}

/// Where pinned memory came from, hence how it is given back.
#[derive(Debug, Clone, Copy)]
enum Origin {
    Allocated,
    Registered,
}

/// Page-locked host memory, which copies run from and to at full speed while the host goes on.
///
/// The device, and for a registered ring another process, may access it at any time: there is no reference to its bytes,
/// only copies in and out.
#[derive(Debug)]
pub struct PinnedBuffer {
    device: Device,
    address: NonNull<u8>,
    len: usize,
    on_device: u64,
    origin: Origin,
    entry: u64,
}

impl PinnedBuffer {
    pub(super) fn allocated(
        device: &Device,
        address: NonNull<u8>,
        len: usize,
        label: &str,
    ) -> Result<Self, HipError> {
        Self::map(device, address, len, label, Origin::Allocated)
    }

    pub(super) fn registered(
        device: &Device,
        address: NonNull<u8>,
        len: usize,
        label: &str,
    ) -> Result<Self, HipError> {
        Self::map(device, address, len, label, Origin::Registered)
    }

    fn map(
        device: &Device,
        address: NonNull<u8>,
        len: usize,
        label: &str,
        origin: Origin,
    ) -> Result<Self, HipError> {
        let kind = match origin {
            Origin::Allocated => Kind::Pinned,
            Origin::Registered => Kind::Registered,
        };
        let entry = device.ledger().add(label, kind, len);
        // Owned from here on, so that a failure below gives the memory back.
        let mut buffer = Self { device: device.clone(), address, len, on_device: 0, origin, entry };
        let mut on_device: *mut c_void = std::ptr::null_mut();
        let function = device.api()?.host_get_device_pointer;
        // SAFETY: the function writes one address; the memory is page-locked and mapped.
        let status = unsafe { function(&mut on_device, address.as_ptr().cast(), 0) };
        device.check(status, "hipHostGetDevicePointer", || format!("mapping {label} for the device"))?;
        buffer.on_device = on_device.expose_provenance() as u64;
        Ok(buffer)
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for an empty buffer.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same memory as the device addresses it.
    pub fn on_device(&self) -> DeviceSlice {
        DeviceSlice::new(self.on_device, self.len)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// They do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), HipError> {
        let to = self.host_ptr(offset, bytes.len())?;
        // SAFETY: the range is inside; `bytes` cannot overlap memory that no reference is ever given to.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// There are not so many.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), HipError> {
        let from = self.host_ptr(offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Address of `bytes` bytes at `offset`, for filling in place (reading a file into it, say).
    ///
    /// # Errors
    /// They are not all inside.
    pub fn host_ptr(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, HipError> {
        check_range("using pinned memory", offset, bytes, self.len)?;
        // SAFETY: the offset is inside the allocation.
        Ok(unsafe { self.address.add(offset) })
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.device.ledger().remove(self.entry);
        let address = self.address.as_ptr().cast();
        // SAFETY: nothing queued still uses the memory after the wait; it is given back once, the way it came.
        self.device.release("hipDeviceSynchronize", |api| unsafe { (api.device_synchronize)() });
        match self.origin {
            Origin::Allocated => {
                // SAFETY: as above.
                self.device.release("hipHostFree", |api| unsafe { (api.host_free)(address) })
            }
            Origin::Registered => {
                // SAFETY: as above.
                self.device.release("hipHostUnregister", |api| unsafe { (api.host_unregister)(address) });
            }
        }
    }
}
