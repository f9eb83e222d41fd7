//! Another device's memory: in this process, or in another one through a handle.
//!
//! Drivers report success for peer copies that deliver garbage. Whoever uses these first runs a checksummed test copy.

use super::api::{self, HipApi, RawIpcHandle};
use super::memory::DeviceSlice;
use super::status;
use super::{Device, DeviceBuffer, HipError};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Names device memory of this process to others: bytes that travel in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle {
    bytes: [u8; 64],
    len: u64,
}

impl IpcHandle {
    /// The handle and the size of what it names.
    pub fn to_parts(self) -> ([u8; 64], u64) {
        (self.bytes, self.len)
    }

    /// A handle that another process made.
    pub fn from_parts(bytes: [u8; 64], len: u64) -> Self {
        Self { bytes, len }
    }
}

impl DeviceBuffer {
    /// A handle with which another process can open this buffer.
    ///
    /// # Errors
    /// The driver cannot share memory between processes.
    pub fn share(&self) -> Result<IpcHandle, HipError> {
        let function = HipApi::optional(self.device().api()?.ipc_get_mem_handle, "hipIpcGetMemHandle")?;
        let mut raw = RawIpcHandle { reserved: [0; 64] };
        // SAFETY: the function writes one handle; the address is the start of an allocation.
        let status = unsafe { function(&mut raw, self.slice().as_ptr()) };
        self.device().check(status, "hipIpcGetMemHandle", || "sharing device memory".to_owned())?;
        Ok(IpcHandle { bytes: raw.reserved, len: self.len() as u64 })
    }
}

/// Memory that another process shares. Closed on drop; the owner must keep it until then.
#[derive(Debug)]
pub struct PeerBuffer {
    device: Device,
    address: NonNull<c_void>,
    len: usize,
}

impl PeerBuffer {
    /// Opens memory of another process.
    ///
    /// # Errors
    /// The driver refuses the handle.
    pub fn open(device: &Device, handle: IpcHandle) -> Result<Self, HipError> {
        let function = HipApi::optional(device.api()?.ipc_open_mem_handle, "hipIpcOpenMemHandle")?;
        HipApi::optional(device.api()?.ipc_close_mem_handle, "hipIpcCloseMemHandle")?;
        let mut address: *mut c_void = std::ptr::null_mut();
        let raw = RawIpcHandle { reserved: handle.bytes };
        // SAFETY: the function writes one address; a foreign handle is validated by the driver.
        let status = unsafe { function(&mut address, raw, api::IPC_LAZY_PEER_ACCESS) };
        device.check(status, "hipIpcOpenMemHandle", || "opening another process's memory".to_owned())?;
        let too_long =
            HipError::OutOfRange { what: "opening shared memory", offset: 0, bytes: usize::MAX, len: 0 };
        match (NonNull::new(address), usize::try_from(handle.len)) {
            (Some(address), Ok(len)) => Ok(Self { device: device.clone(), address, len }),
            _ => Err(too_long),
        }
    }

    /// The whole buffer.
    pub fn slice(&self) -> DeviceSlice {
        DeviceSlice::new(self.address.as_ptr().expose_provenance() as u64, self.len)
    }
}

impl Drop for PeerBuffer {
    fn drop(&mut self) {
        if let Ok(HipApi { ipc_close_mem_handle: Some(close), .. }) = self.device.api() {
            // SAFETY: the address came from hipIpcOpenMemHandle and is closed once.
            self.device.driver().check_drop(unsafe { close(self.address.as_ptr()) }, "hipIpcCloseMemHandle");
        }
    }
}

impl Device {
    /// Lets this device address `peer`'s memory. Enabling twice is no error.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn enable_peer(&self, peer: &Device) -> Result<(), HipError> {
        let function = HipApi::optional(self.api()?.device_enable_peer_access, "hipDeviceEnablePeerAccess")?;
        let ordinal = peer.info().ordinal;
        // SAFETY: takes numbers.
        match unsafe { function(ordinal as std::ffi::c_int, 0) } {
            status::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            status => self.check(status, "hipDeviceEnablePeerAccess", || {
                format!("reaching the memory of device {ordinal}")
            }),
        }
    }

    /// Takes that back.
    ///
    /// # Errors
    /// It was not enabled.
    pub fn disable_peer(&self, peer: &Device) -> Result<(), HipError> {
        let function =
            HipApi::optional(self.api()?.device_disable_peer_access, "hipDeviceDisablePeerAccess")?;
        let ordinal = peer.info().ordinal;
        // SAFETY: takes a number.
        let status = unsafe { function(ordinal as std::ffi::c_int) };
        self.check(status, "hipDeviceDisablePeerAccess", || format!("leaving the memory of device {ordinal}"))
    }
}
