//! Memory in which a sequence's keys, values and states lie for two processes: a CPU worker, which computes on them where they
//! are, and a GPU worker that runs the CPU worker's layers for prompts ([`crate::plan::Lift`]).
//!
//! The two take turns, sequence by sequence: what belongs to a span of a step (its state slot, its KV blocks) is touched by the
//! worker that runs the span, and by no other meanwhile. Steps reach the GPU's worker through the CPU's, which has done its part by then; and
//! after a span that the GPU runs, the coordinator sends the CPU nothing of the sequence before that step has been answered. So the
//! rings order all accesses.

use crate::shm::{Segment, ShmError};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Shared memory for states, zero when it is made. Clones share one mapping.
#[derive(Debug, Clone)]
pub struct StateMemory {
    segment: Arc<Segment>,
}

impl StateMemory {
    /// Makes memory of `bytes` bytes, at least one.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn create(bytes: u64) -> Result<Self, ShmError> {
        let len = usize::try_from(bytes.max(1)).ok().and_then(NonZeroUsize::new);
        let segment = Segment::create(c"spillway-states", len.ok_or(ShmError::TooLarge(bytes))?)?;
        Ok(Self { segment: Arc::new(segment) })
    }

    /// Maps inherited memory of at least `bytes` bytes.
    ///
    /// # Errors
    /// The descriptor is something else, or its memory is too small.
    pub fn attach(fd: OwnedFd, bytes: usize) -> Result<Self, ShmError> {
        Ok(Self { segment: Arc::new(Segment::attach(fd, bytes)?) })
    }

    /// First byte, on a page; [`StateMemory::len`] bytes stay mapped while this value or a clone lives.
    pub fn base(&self) -> NonNull<u8> {
        self.segment.base()
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "this memory is never empty")]
    pub fn len(&self) -> usize {
        self.segment.len()
    }

    /// Copies bytes out, if all of them are inside.
    #[must_use]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let Some(start) = self.locate(offset, bytes.len()) else { return false };
        // SAFETY: the range is inside the mapping; `bytes` is private memory. By the order described above nobody writes it now.
        unsafe { std::ptr::copy_nonoverlapping(start.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        true
    }

    /// Copies bytes in, if there is room for all of them.
    #[must_use]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        let Some(start) = self.locate(offset, bytes.len()) else { return false };
        // SAFETY: the range is inside the mapping; `bytes` is private memory. By the order described above nobody uses it now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr(), bytes.len()) };
        true
    }

    /// Where a range begins that is inside.
    fn locate(&self, offset: usize, bytes: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: the offset is at most the length of the mapping.
        (end <= self.len()).then(|| unsafe { self.base().add(offset) })
    }
}

impl AsFd for StateMemory {
    /// The descriptor, for a worker to inherit.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_mapping_writes_another_reads_and_nothing_lies_outside() {
        let memory = StateMemory::create(100).unwrap();
        let other = StateMemory::attach(memory.as_fd().try_clone_to_owned().unwrap(), 100).unwrap();
        let mut found = [7; 4];
        assert!(other.read(96, &mut found) && found == [0; 4], "it is zero at first");
        assert!(memory.write(96, &[1, 2, 3, 4]) && other.read(96, &mut found));
        assert_eq!(found, [1, 2, 3, 4]);
        for (offset, len) in [(97, 4), (usize::MAX, 4), (101, 0)] {
            assert!(!memory.write(offset, &vec![0; len]) && !memory.read(offset, &mut vec![0; len]));
        }
    }
}
