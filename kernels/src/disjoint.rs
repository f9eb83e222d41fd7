//! A slice that several threads write at once, each its own part.

use std::marker::PhantomData;

/// Borrows a slice exclusively and hands out parts of it from a shared reference.
#[derive(Debug)]
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is `part`, whose caller promises that no two parts overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Takes the slice for `'a`.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Elements of the whole slice.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time may overlap, on any thread.
    ///
    /// # Panics
    /// When the part leaves the slice.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part leaves the slice");
        // SAFETY: inside the slice borrowed for `'a` (checked above); exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
