//! Weights that stay in host memory: page-locked blocks that kernels read over the bus, with the layout that device memory
//! would have, so that results are the same to the bit.

use super::error::BandError;
use crate::hip::{ALIGN, Arena, Device, DeviceSlice, HipError, PinnedBuffer, Stream};
use std::ptr::NonNull;

/// Bytes that a weight of `bytes` bytes takes in a block. The planner charges with it and a block is sized by it.
pub fn mapped_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN as u64)
}

/// The weights of one layer, page-locked.
#[derive(Debug)]
pub(super) struct MappedBlock {
    memory: PinnedBuffer,
    used: usize,
}

impl MappedBlock {
    /// A block of `bytes` bytes, the sum of [`mapped_bytes`] of its weights.
    pub fn new(device: &Device, label: &str, bytes: u64) -> Result<Self, BandError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(Self { memory: device.allocate_pinned(label, bytes)?, used: 0 })
    }

    /// Bytes of the block.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Queues copies of weights of this block, given as kernels address them, each to its own place.
    pub fn copy(&self, stream: &Stream, weights: &[(DeviceSlice, DeviceSlice)]) -> Result<(), HipError> {
        let start = self.memory.on_device().address();
        weights.iter().try_for_each(|(from, to)| {
            // An offset that is none is refused as outside the block.
            let offset = from.address().checked_sub(start).and_then(|offset| usize::try_from(offset).ok());
            stream.upload(*to, &self.memory, offset.unwrap_or(usize::MAX))
        })
    }

    fn take(&mut self, bytes: usize) -> Result<Place, HipError> {
        let on_device = self.memory.on_device().part(self.used, bytes)?;
        let in_host = self.memory.host_ptr(self.used, bytes)?;
        self.used = (self.used + bytes).next_multiple_of(ALIGN);
        Ok(Place { on_device, in_host: Some(in_host) })
    }
}

/// Memory for weights.
#[derive(Debug)]
pub(super) enum Store<'m> {
    Device(&'m mut Arena),
    Host(&'m mut MappedBlock),
}

impl Store<'_> {
    /// Memory for a weight.
    pub fn allocate(&mut self, label: &str, bytes: usize) -> Result<Place, HipError> {
        match self {
            Store::Device(arena) => Ok(Place { on_device: arena.allocate(label, bytes)?, in_host: None }),
            Store::Host(block) => block.take(bytes),
        }
    }
}

/// Memory of one weight. It borrows nothing: whoever fills it holds the [`Store`] that it came from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// As kernels address it.
    pub on_device: DeviceSlice,
    /// As this process addresses it, if it can.
    in_host: Option<NonNull<u8>>,
}

impl Place {
    /// `bytes` bytes at `offset`, to be filled in place; none in device memory.
    ///
    /// # Errors
    /// They are not all inside.
    pub fn host_part(&mut self, offset: usize, bytes: usize) -> Result<Option<&mut [u8]>, HipError> {
        self.on_device.part(offset, bytes)?;
        let Some(start) = self.in_host else { return Ok(None) };
        // SAFETY: the range is inside the weight's part of the block, which outlives the load; no other place has that part, and
        // nothing that is queued on the device reads weights before the load has ended.
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr().add(offset), bytes) }))
    }
}
