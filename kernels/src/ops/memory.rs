//! Anonymous memory that exists only where it was touched.

use super::OpsError;
use memmap2::{Advice, MmapMut, MmapOptions};
use std::marker::PhantomData;

/// Size from which huge pages pay; below, they would only make a small state large.
const HUGE_FROM: usize = 32 << 20;

/// A zeroed array of plain numbers in private memory of its own: page-aligned, and a page costs nothing until it is
/// written. `T` must be valid as all zero bits and need no drop, which [`Lazy::new`]'s bound ensures.
#[derive(Debug)]
pub(crate) struct Lazy<T> {
    map: MmapMut,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: bytemuck::Pod> Lazy<T> {
    /// `len` zeros for `what`.
    pub(crate) fn new(what: &'static str, len: usize) -> Result<Self, OpsError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let map = MmapOptions::new()
            .len(bytes.max(1))
            .no_reserve_swap()
            .map_anon()
            .map_err(|source| OpsError::Memory { what, bytes, source })?;
        if bytes >= HUGE_FROM {
            // Advice only: without huge pages everything works, a little slower.
            let _ = map.advise(Advice::HugePage);
        }
        Ok(Self { map, len, kind: PhantomData })
    }

    /// The values.
    pub(crate) fn values(&self) -> &[T] {
        &bytemuck::cast_slice(&self.map[..self.len * size_of::<T>()])[..self.len]
    }

    /// The values, to write.
    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.map[..self.len * size_of::<T>()])
    }
}
