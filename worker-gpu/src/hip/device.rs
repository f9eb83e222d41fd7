//! A device and what can be made on it.

use super::ledger::{Kind, Ledger};
use super::memory::{DeviceBuffer, DeviceSlice, PinnedBuffer};
use super::properties::DeviceInfo;
use super::status::{self, Status};
use super::{Driver, HipError, api, sysfs};
use std::ffi::c_void;
use std::path::Path;
use std::ptr::NonNull;
use std::rc::Rc;

/// Memory of a device: the minimum of what the driver and the kernel say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Bytes free.
    pub free: usize,
    /// Bytes in all.
    pub total: usize,
}

/// A device of a driver. Clones are the same device with the same ledger; everything made on it keeps it alive.
#[derive(Debug, Clone)]
pub struct Device {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    driver: Rc<Driver>,
    info: DeviceInfo,
    ledger: Ledger,
}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// There is no such device, or the driver refuses it.
    pub fn open(driver: &Rc<Driver>, ordinal: u32) -> Result<Self, HipError> {
        let info = driver.describe(ordinal)?;
        driver.activate(ordinal)?;
        Ok(Self { inner: Rc::new(Inner { driver: Rc::clone(driver), info, ledger: Ledger::default() }) })
    }

    /// What the device says about itself.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// What is allocated on it through this value and its clones.
    pub fn ledger(&self) -> &Ledger {
        &self.inner.ledger
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Rc<Driver> {
        &self.inner.driver
    }

    /// What its memory is handed out in, in bytes.
    pub(super) fn page_bytes(&self) -> usize {
        self.inner.driver.provider().page_bytes()
    }

    /// Free and total memory.
    ///
    /// # Errors
    /// The driver cannot say.
    pub fn memory(&self) -> Result<Memory, HipError> {
        let mut memory = Memory { free: 0, total: 0 };
        let function = self.api()?.mem_get_info;
        // SAFETY: the function writes two sizes.
        let status = unsafe { function(&mut memory.free, &mut memory.total) };
        self.check(status, "hipMemGetInfo", || "reading free memory".to_owned())?;
        Ok(memory.at_most(sysfs::memory(Path::new(sysfs::DEVICES), self.info().pci)))
    }

    /// Allocates device memory; its contents are undefined. `label` names it in the ledger and in errors.
    ///
    /// # Errors
    /// Out of memory, or the device is lost.
    pub fn allocate(&self, label: &str, bytes: usize) -> Result<DeviceBuffer, HipError> {
        let mut address: *mut c_void = std::ptr::null_mut();
        let function = self.api()?.malloc;
        // SAFETY: the function writes one address. Zero bytes would yield none on some drivers.
        let status = unsafe { function(&mut address, bytes.max(1)) };
        let address = self.allocated(status, "hipMalloc", address, label, Kind::Device, bytes)?;
        Ok(DeviceBuffer::new(self.clone(), address, bytes, self.ledger().add(label, Kind::Device, bytes)))
    }

    /// Allocates page-locked host memory that the device can address; its contents are undefined.
    ///
    /// # Errors
    /// Out of memory, or the device is lost.
    pub fn allocate_pinned(&self, label: &str, bytes: usize) -> Result<PinnedBuffer, HipError> {
        let mut address: *mut c_void = std::ptr::null_mut();
        let flags = api::HOST_MALLOC_PORTABLE | api::HOST_MALLOC_MAPPED;
        let function = self.api()?.host_malloc;
        // SAFETY: the function writes one address.
        let status = unsafe { function(&mut address, bytes.max(1), flags) };
        let address = self.allocated(status, "hipHostMalloc", address, label, Kind::Pinned, bytes)?;
        PinnedBuffer::allocated(self, address, bytes, label)
    }

    /// Page-locks memory that exists, such as a ring in shared memory, until the returned value is dropped.
    ///
    /// # Errors
    /// The driver refuses: some do for memory that they did not allocate. The caller then stages through a buffer of its
    /// own.
    ///
    /// # Safety
    /// `len` bytes at `address` must stay mapped while the returned value lives. Other processes may write there; the
    /// value only ever copies in and out.
    pub unsafe fn register_pinned(
        &self,
        label: &str,
        address: NonNull<u8>,
        len: usize,
    ) -> Result<PinnedBuffer, HipError> {
        let flags = api::HOST_REGISTER_PORTABLE | api::HOST_REGISTER_MAPPED;
        let function = self.api()?.host_register;
        // SAFETY: the caller vouches for the memory.
        let status = unsafe { function(address.as_ptr().cast(), len, flags) };
        self.check(status, "hipHostRegister", || format!("page-locking {len} bytes of {label}"))?;
        PinnedBuffer::registered(self, address, len, label)
    }

    /// Copies bytes to the device and waits. Work queued on streams is not waited for.
    ///
    /// # Errors
    /// The sizes differ, or the copy fails.
    pub fn write(&self, to: DeviceSlice, from: &[u8]) -> Result<(), HipError> {
        to.expect_len("writing to the device", from.len())?;
        let function = self.api()?.memcpy;
        let kind = api::CopyKind::HOST_TO_DEVICE;
        // SAFETY: the sizes agree; the driver validates the device's address.
        let status = unsafe { function(to.as_ptr(), from.as_ptr().cast(), from.len(), kind) };
        self.check(status, "hipMemcpy", || format!("writing {} bytes to the device", from.len()))
    }

    /// Copies bytes from the device and waits. Work queued on streams is not waited for.
    ///
    /// # Errors
    /// The sizes differ, or the copy fails.
    pub fn read(&self, to: &mut [u8], from: DeviceSlice) -> Result<(), HipError> {
        from.expect_len("reading from the device", to.len())?;
        let function = self.api()?.memcpy;
        let kind = api::CopyKind::DEVICE_TO_HOST;
        // SAFETY: as in `write`.
        let status = unsafe { function(to.as_mut_ptr().cast(), from.as_ptr(), to.len(), kind) };
        self.check(status, "hipMemcpy", || format!("reading {} bytes from the device", to.len()))
    }

    /// Waits for everything queued on the device.
    ///
    /// # Errors
    /// A kernel or copy failed since the last wait.
    pub fn synchronize(&self) -> Result<(), HipError> {
        let function = self.api()?.device_synchronize;
        // SAFETY: takes nothing.
        let status = unsafe { function() };
        self.check(status, "hipDeviceSynchronize", || "waiting for the device".to_owned())
    }

    /// The table, with this device chosen.
    pub(super) fn api(&self) -> Result<&api::HipApi, HipError> {
        self.inner.driver.activate(self.inner.info.ordinal)?;
        Ok(self.inner.driver.api())
    }

    /// See [`Driver::check`].
    pub(super) fn check(
        &self,
        status: Status,
        call: &'static str,
        what: impl FnOnce() -> String,
    ) -> Result<(), HipError> {
        self.inner.driver.check(status, call, what)
    }

    /// Runs a releasing call in a destructor.
    pub(super) fn release(&self, call: &'static str, function: impl FnOnce(&api::HipApi) -> Status) {
        match self.api() {
            Ok(api) => self.inner.driver.check_drop(function(api), call),
            Err(error) => tracing::warn!(call, %error, "a device resource could not be released"),
        }
    }

    fn allocated(
        &self,
        status: Status,
        call: &'static str,
        address: *mut c_void,
        label: &str,
        kind: Kind,
        bytes: usize,
    ) -> Result<NonNull<u8>, HipError> {
        match NonNull::new(address.cast::<u8>()) {
            Some(address) if status.is_success() => Ok(address),
            _ if status.is_success() || status == status::OUT_OF_MEMORY => {
                let Memory { free, total } = self.memory()?;
                Err(HipError::OutOfMemory { label: label.to_owned(), kind: kind.name(), bytes, free, total })
            }
            _ => {
                let what = format!("allocating {bytes} bytes of {} memory for {label}", kind.name());
                Err(self.inner.driver.failure(status, call, what))
            }
        }
    }
}
