//! Memory of keys, values and states: private, where only what was touched exists, or shared with another process.

use super::OpsError;
use memmap2::{Advice, MmapMut, MmapOptions};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

/// Size from which huge pages pay; below, they would only make a small state large.
const HUGE_FROM: usize = 32 << 20;

/// Memory that another process reaches, too.
#[derive(Debug, Clone)]
pub struct SharedPart {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps it mapped.
    _keeper: Arc<dyn Debug + Send + Sync>,
}

// SAFETY: the memory belongs to the process, not to a thread, and `keeper` may go from thread to thread.
unsafe impl Send for SharedPart {}
// SAFETY: as above; a shared value gives nothing out.
unsafe impl Sync for SharedPart {}

impl SharedPart {
    /// `bytes` bytes at `start`.
    ///
    /// # Safety
    /// They are initialised and stay mapped as long as `keeper` lives, no other part has any of them, and no other process
    /// touches bytes of a slot or block while an operation on it is under way here.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, keeper: Arc<dyn Debug + Send + Sync>) -> Self {
        Self { start, bytes, _keeper: keeper }
    }
}

/// Where the elements are.
#[derive(Debug)]
enum Home {
    Private(MmapMut),
    Shared(SharedPart),
}

/// An array of plain numbers in memory of its own, page-aligned. Private memory is zero at first, and a page costs nothing until it
/// is written. `T` must be valid as all bits and need no drop, which the bound ensures.
#[derive(Debug)]
pub(crate) struct Lazy<T> {
    home: Home,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: bytemuck::Pod> Lazy<T> {
    /// `len` zeros for `what`, or what `shared` memory holds.
    pub(crate) fn new(what: &'static str, len: usize, shared: Option<SharedPart>) -> Result<Self, OpsError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let home = match shared {
            Some(part) if part.bytes < bytes || !part.start.cast::<T>().is_aligned() => {
                return Err(OpsError::Shape { what, got: part.bytes, want: bytes });
            }
            Some(part) => Home::Shared(part),
            None => Home::Private(private(what, bytes)?),
        };
        Ok(Self { home, len, kind: PhantomData })
    }

    /// The values.
    pub(crate) fn values(&self) -> &[T] {
        match &self.home {
            Home::Private(map) => &bytemuck::cast_slice(&map[..self.len * size_of::<T>()])[..self.len],
            // SAFETY: the part is mapped, aligned and large enough (`new`), and any bits are a `T`. Others write only what no operation
            // here reads (`SharedPart::new`).
            Home::Shared(part) => unsafe { std::slice::from_raw_parts(part.start.cast().as_ptr(), self.len) },
        }
    }

    /// The values, to write.
    pub(crate) fn values_mut(&mut self) -> &mut [T] {
        match &mut self.home {
            Home::Private(map) => bytemuck::cast_slice_mut(&mut map[..self.len * size_of::<T>()]),
            // SAFETY: as in `values`; no other part has these bytes, and `&mut self` bars a second borrow of this one.
            Home::Shared(part) => unsafe {
                std::slice::from_raw_parts_mut(part.start.cast().as_ptr(), self.len)
            },
        }
    }
}

fn private(what: &'static str, bytes: usize) -> Result<MmapMut, OpsError> {
    let map = MmapOptions::new()
        .len(bytes.max(1))
        .no_reserve_swap()
        .map_anon()
        .map_err(|source| OpsError::Memory { what, bytes, source })?;
    if bytes >= HUGE_FROM {
        // Advice only: without huge pages everything works, a little slower.
        let _ = map.advise(Advice::HugePage);
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that stays mapped while anyone holds it, as pages.
    fn part(bytes: usize, skipped: usize) -> SharedPart {
        let mut map = MmapOptions::new().len(bytes + skipped).map_anon().unwrap();
        map.fill(0);
        let start = NonNull::new(map.as_mut_ptr()).unwrap();
        // SAFETY: the part is inside the mapping, which the keeper holds, and nobody else has it.
        unsafe { SharedPart::new(start.add(skipped), bytes, Arc::new(map)) }
    }

    #[test]
    fn shared_memory_is_written_where_it_is_and_must_be_large_enough_and_aligned() {
        let memory = part(64, 0);
        let mut one = Lazy::<f32>::new("some", 16, Some(memory.clone())).unwrap();
        one.values_mut()[15] = 7.0;
        drop(one);
        assert_eq!(Lazy::<f32>::new("some", 16, Some(memory.clone())).unwrap().values()[15], 7.0);
        let refused = |part| Lazy::<f32>::new("some", 17, Some(part)).unwrap_err().code();
        assert_eq!((refused(memory), refused(part(68, 1))), ("op_shape", "op_shape"));
        assert_eq!(Lazy::<f32>::new("some", 3, None).unwrap().values(), [0.0; 3]);
    }
}
