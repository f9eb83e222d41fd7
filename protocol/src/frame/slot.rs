//! Bytes of a slot, wherever they lie: a ring's slot in shared memory, or plain memory in tests and in-process use.

use super::FrameError;
use bytemuck::{AnyBitPattern, NoUninit, Pod};

/// A slot that can be filled.
pub trait SlotWrite {
    /// Copies `bytes` into the slot at `offset`.
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<(), FrameError>;
}

/// A slot that can be read.
pub trait SlotRead {
    /// Copies bytes at `offset` out of the slot, filling `bytes`.
    fn get(&self, offset: usize, bytes: &mut [u8]) -> Result<(), FrameError>;
}

fn too_small(offset: usize, len: usize, have: usize) -> FrameError {
    FrameError::SlotTooSmall { need: offset.saturating_add(len), have }
}

impl SlotWrite for [u8] {
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<(), FrameError> {
        let error = too_small(offset, bytes.len(), self.len());
        let target = self.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes.len())).ok_or(error)?;
        target.copy_from_slice(bytes);
        Ok(())
    }
}

impl SlotRead for [u8] {
    fn get(&self, offset: usize, bytes: &mut [u8]) -> Result<(), FrameError> {
        let error = too_small(offset, bytes.len(), self.len());
        let source = self.get(offset..).and_then(|rest| rest.get(..bytes.len())).ok_or(error)?;
        bytes.copy_from_slice(source);
        Ok(())
    }
}

impl SlotWrite for Vec<u8> {
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<(), FrameError> {
        self.as_mut_slice().put(offset, bytes)
    }
}

impl SlotRead for Vec<u8> {
    fn get(&self, offset: usize, bytes: &mut [u8]) -> Result<(), FrameError> {
        SlotRead::get(self.as_slice(), offset, bytes)
    }
}

/// Plain values instead of bytes.
pub(super) trait SlotWriteExt: SlotWrite {
    fn put_slice<T: NoUninit>(&mut self, offset: usize, values: &[T]) -> Result<(), FrameError> {
        self.put(offset, bytemuck::cast_slice(values))
    }
}

impl<S: SlotWrite + ?Sized> SlotWriteExt for S {}

/// Plain values instead of bytes.
pub(super) trait SlotReadExt: SlotRead {
    fn get_slice<T: Pod + AnyBitPattern>(&self, offset: usize, values: &mut [T]) -> Result<(), FrameError> {
        self.get(offset, bytemuck::cast_slice_mut(values))
    }
}

impl<S: SlotRead + ?Sized> SlotReadExt for S {}
