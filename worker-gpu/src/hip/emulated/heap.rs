//! Memory of the emulated devices and of the host that the driver knows about.

use super::super::status::{self, Status};
use super::ipc::{Handle, Imported, PAGE, Shared};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// Addresses of device memory are aligned as real drivers align them.
const ALIGN: usize = 256;

/// What a range of addresses is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// Memory of a device.
    Device(u32),
    /// Pinned memory that the driver allocated.
    Pinned,
    /// Memory that was registered.
    Registered,
    /// Memory of a device in another process.
    Imported(u32),
}

#[derive(Debug)]
struct Range {
    len: usize,
    owner: Owner,
    number: u64,
    /// Once other processes may open it.
    shared: Option<Shared>,
    /// What keeps another process's memory mapped.
    _imported: Option<Imported>,
}

impl Range {
    fn new(len: usize, owner: Owner, number: u64) -> Self {
        Self { len, owner, number, shared: None, _imported: None }
    }
}

/// All known ranges by first address.
#[derive(Debug, Default)]
pub(super) struct Heap {
    ranges: BTreeMap<usize, Range>,
    next: u64,
    out_of_order_frees: u64,
}

impl Heap {
    /// Allocates; fresh memory is all ones, so that reading it yields NaN.
    pub fn allocate(&mut self, len: usize, owner: Owner) -> Result<*mut u8, Status> {
        let layout = layout(len).ok_or(status::OUT_OF_MEMORY)?;
        // SAFETY: the size is not zero.
        let address = unsafe { std::alloc::alloc(layout) };
        if address.is_null() {
            return Err(status::OUT_OF_MEMORY);
        }
        // SAFETY: the allocation has `len` bytes.
        unsafe { address.write_bytes(0xff, len) };
        self.insert(address.expose_provenance(), len, owner);
        Ok(address)
    }

    fn insert(&mut self, address: usize, len: usize, owner: Owner) {
        self.ranges.insert(address, Range::new(len, owner, self.next));
        self.next += 1;
    }

    /// Gives back what `allocate` made.
    pub fn free(&mut self, address: usize, allowed: impl Fn(Owner) -> bool) -> Result<(), Status> {
        match self.ranges.get_mut(&address) {
            Some(range)
                if allowed(range.owner) && !matches!(range.owner, Owner::Registered | Owner::Imported(_)) =>
            {
                if let (Some(shared), Some(start)) =
                    (range.shared.take(), NonNull::new(std::ptr::with_exposed_provenance_mut(address)))
                {
                    // SAFETY: the pages were replaced when the range was shared, and it is given up here.
                    unsafe { shared.restore(start) }?;
                }
                if let Some(layout) = layout(range.len) {
                    // SAFETY: made by `allocate` with this layout, and struck off below.
                    unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(address), layout) };
                }
                let (owner, number) = (range.owner, range.number);
                self.ranges.remove(&address);
                let is_older = |other: &Range| other.owner == owner && other.number > number;
                self.out_of_order_frees += u64::from(self.ranges.values().any(is_older));
                Ok(())
            }
            _ => Err(status::INVALID_VALUE),
        }
    }

    /// Notes host memory.
    pub fn register(&mut self, address: usize, len: usize) -> Result<(), Status> {
        let end = address.checked_add(len).ok_or(status::INVALID_VALUE)?;
        if len == 0 {
            return Err(status::INVALID_VALUE);
        }
        let before = self.ranges.range(..end).next_back();
        if before.is_some_and(|(start, range)| start + range.len > address) {
            return Err(status::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.insert(address, len, Owner::Registered);
        Ok(())
    }

    /// Forgets host memory.
    pub fn unregister(&mut self, address: usize) -> Result<(), Status> {
        match self.ranges.get(&address) {
            Some(Range { owner: Owner::Registered, .. }) => {
                self.ranges.remove(&address);
                Ok(())
            }
            _ => Err(status::HOST_MEMORY_NOT_REGISTERED),
        }
    }

    /// A handle of a device's memory for other processes.
    pub fn share(&mut self, address: usize) -> Result<Handle, Status> {
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address));
        match (self.ranges.get_mut(&address), start) {
            (Some(Range { owner: Owner::Device(ordinal), shared, len, .. }), Some(start)) => {
                if shared.is_none() {
                    // SAFETY: the range is ours, and kernels and copies run on this thread alone.
                    *shared = Some(unsafe { Shared::replace(start, *len) }?);
                }
                shared.as_ref().map(|shared| shared.handle(*ordinal)).ok_or(status::INVALID_VALUE)
            }
            _ => Err(status::INVALID_VALUE),
        }
    }

    /// Maps another process's memory; the result is its first address here.
    pub fn import(&mut self, handle: &Handle) -> Result<usize, Status> {
        let imported = Imported::open(handle)?;
        let address = imported.address();
        let range = Range::new(imported.len(), Owner::Imported(handle.ordinal), self.next);
        self.ranges.insert(address, Range { _imported: Some(imported), ..range });
        self.next += 1;
        Ok(address)
    }

    /// Forgets another process's memory.
    pub fn close(&mut self, address: usize) -> Result<(), Status> {
        match self.ranges.get(&address) {
            Some(Range { owner: Owner::Imported(_), .. }) => {
                self.ranges.remove(&address);
                Ok(())
            }
            _ => Err(status::INVALID_VALUE),
        }
    }

    /// Whom all of a range belongs to: `None` when it touches no known range.
    ///
    /// # Errors
    /// It runs over the edge of a known range.
    pub fn owner(&self, address: usize, len: usize) -> Result<Option<Owner>, Status> {
        let end = address.checked_add(len).ok_or(status::INVALID_VALUE)?;
        match self.ranges.range(..end.max(address + 1)).next_back() {
            Some((start, range)) if address >= *start && end <= start + range.len => Ok(Some(range.owner)),
            Some((start, range)) if start + range.len > address => Err(status::INVALID_VALUE),
            _ => Ok(None),
        }
    }

    /// Bytes of one device in use, in whole pages of so many bytes.
    pub fn device_bytes(&self, ordinal: u32, page: usize) -> u64 {
        let of_device = self.ranges.values().filter(|range| range.owner == Owner::Device(ordinal));
        of_device.map(|range| range.len.next_multiple_of(page) as u64).sum()
    }

    /// How often memory was given back before something of the same owner that was allocated later.
    pub fn out_of_order_frees(&self) -> u64 {
        self.out_of_order_frees
    }

    /// Number of known ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }
}

/// Whole pages begin on a page, so that they can be shared.
fn layout(len: usize) -> Option<Layout> {
    let align = if len > 0 && len.is_multiple_of(PAGE) { PAGE } else { ALIGN };
    Layout::from_size_align(len.max(1), align).ok()
}

impl Drop for Heap {
    fn drop(&mut self) {
        for address in self.ranges.keys().copied().collect::<Vec<_>>() {
            // Registered and other processes' memory is its owner's; the rest was leaked by the driver's user.
            let _ = self.free(address, |_| true);
        }
    }
}
