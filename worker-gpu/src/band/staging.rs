//! Page-locked memory that this process fills or reads, turn and turn about with the device.

use crate::hip::{Device, DeviceSlice, Event, HipError, PinnedBuffer, Stream};

/// A page-locked buffer and the event after which the device is done with it.
#[derive(Debug)]
pub(super) struct Staging {
    memory: PinnedBuffer,
    moved: Event,
}

impl Staging {
    pub fn new(device: &Device, label: &str, bytes: usize) -> Result<Self, HipError> {
        Ok(Self { memory: device.allocate_pinned(label, bytes)?, moved: Event::new(device)? })
    }

    /// Its bytes, once the device has finished the last copy.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], HipError> {
        self.moved.synchronize()?;
        let len = self.memory.len();
        let start = self.memory.host_ptr(0, len)?;
        // SAFETY: the allocation has `len` bytes and lives as long as the result; the buffer is private to this value, and
        // the device touches it only between a queued copy and its event, which has passed; `&mut self` bars new copies.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) })
    }

    /// The same as f32 values.
    pub fn values_mut(&mut self) -> Result<&mut [f32], HipError> {
        Ok(bytemuck::cast_slice_mut(self.bytes_mut()?))
    }

    /// Queues a copy of `to.len()` bytes at `offset` to the device.
    pub fn upload(&mut self, stream: &Stream, offset: usize, to: DeviceSlice) -> Result<(), HipError> {
        stream.upload(to, &self.memory, offset)?;
        stream.record(&self.moved)
    }

    /// Queues a copy of `from.len()` bytes from the device to `offset`.
    pub fn download(&mut self, stream: &Stream, offset: usize, from: DeviceSlice) -> Result<(), HipError> {
        stream.download(&self.memory, offset, from)?;
        stream.record(&self.moved)
    }
}
