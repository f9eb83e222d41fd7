//! Memory that lives and goes together.

use super::{Device, DeviceBuffer, DeviceSlice, HipError};

/// Owns device buffers and frees them in reverse order of allocation, which drivers' allocators take best. A band's
/// weights, caches and scratch live in one; its users hold plain [`DeviceSlice`]s.
#[derive(Debug)]
pub struct Arena {
    device: Device,
    buffers: Vec<DeviceBuffer>,
}

impl Arena {
    /// An empty arena on a device.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), buffers: Vec::new() }
    }

    /// Allocates device memory that lives as long as the arena.
    ///
    /// # Errors
    /// See [`Device::allocate`].
    pub fn allocate(&mut self, label: &str, bytes: usize) -> Result<DeviceSlice, HipError> {
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
