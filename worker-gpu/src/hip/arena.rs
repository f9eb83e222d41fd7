//! Memory that lives and goes together.

use super::{Device, DeviceBuffer, DeviceSlice, HipError};

/// Alignment of every allocation: that of drivers.
pub const ALIGN: usize = 256;

/// Owns device buffers and frees them in reverse order of allocation, which drivers' allocators take best. A band's
/// weights, caches and scratch live in one; its users hold plain [`DeviceSlice`]s.
///
/// Drivers hand out whole pages. A model has hundreds of matrices, and what is lost at their ends is several hundred MB: memory
/// that is [reserved](Arena::reserve) together loses one end. Hence a band takes all of its memory at once.
#[derive(Debug)]
pub struct Arena {
    device: Device,
    buffers: Vec<DeviceBuffer>,
    /// What is left of the last reservation.
    reserved: Option<DeviceSlice>,
}

impl Arena {
    /// An empty arena on a device.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), buffers: Vec::new(), reserved: None }
    }

    /// Takes `bytes` bytes at once for the next allocations, each of which counts as a multiple of [`ALIGN`]; those that do not fit
    /// any more are made one by one. Where memory has no pages nothing happens: every allocation then has bounds of its own.
    ///
    /// # Errors
    /// See [`Device::allocate`].
    pub fn reserve(&mut self, label: &str, bytes: usize) -> Result<(), HipError> {
        self.reserved = None;
        if self.device.page_bytes() > 1 && bytes > 0 {
            self.reserved = Some(self.own(label, bytes)?);
        }
        Ok(())
    }

    /// Allocates device memory that lives as long as the arena.
    ///
    /// # Errors
    /// See [`Device::allocate`].
    pub fn allocate(&mut self, label: &str, bytes: usize) -> Result<DeviceSlice, HipError> {
        match self.reserved {
            Some(left) if bytes <= left.len() => {
                let taken = bytes.next_multiple_of(ALIGN).min(left.len());
                self.reserved = Some(left.part(taken, left.len() - taken)?);
                left.part(0, bytes)
            }
            _ => self.own(label, bytes),
        }
    }

    fn own(&mut self, label: &str, bytes: usize) -> Result<DeviceSlice, HipError> {
        let buffer = self.device.allocate(label, bytes)?;
        let slice = buffer.slice();
        self.buffers.push(buffer);
        Ok(slice)
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(DeviceBuffer::len).sum()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        while self.buffers.pop().is_some() {}
    }
}
