//! The account of what one device's owner has allocated.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Kinds of memory that are charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Memory of the device.
    Device,
    /// Page-locked memory of the host that the driver allocated.
    Pinned,
    /// Memory of someone else that is page-locked as long as we use it: a ring.
    Registered,
}

impl Kind {
    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Device => "device",
            Kind::Pinned => "pinned host",
            Kind::Registered => "registered host",
        }
    }
}

/// One live allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is for.
    pub label: String,
    /// Which memory.
    pub kind: Kind,
    /// Size in bytes.
    pub bytes: usize,
}

/// All live allocations, in the order they were made.
#[derive(Debug, Default)]
pub struct Ledger {
    entries: RefCell<BTreeMap<u64, Entry>>,
    next: Cell<u64>,
    peak_device: Cell<usize>,
}

impl Ledger {
    /// Bytes of device memory in use.
    pub fn device_bytes(&self) -> usize {
        self.sum(Kind::Device)
    }

    /// Bytes of pinned host memory in use.
    pub fn pinned_bytes(&self) -> usize {
        self.sum(Kind::Pinned)
    }

    /// Most device memory that was ever in use at once.
    pub fn peak_device_bytes(&self) -> usize {
        self.peak_device.get()
    }

    /// The live allocations.
    pub fn entries(&self) -> Vec<Entry> {
        self.entries.borrow().values().cloned().collect()
    }

    fn sum(&self, kind: Kind) -> usize {
        self.entries.borrow().values().filter(|entry| entry.kind == kind).map(|entry| entry.bytes).sum()
    }

    /// Notes an allocation; the number is for [`Ledger::remove`].
    pub(super) fn add(&self, label: &str, kind: Kind, bytes: usize) -> u64 {
        let number = self.next.replace(self.next.get() + 1);
        self.entries.borrow_mut().insert(number, Entry { label: label.to_owned(), kind, bytes });
        self.peak_device.set(self.peak_device.get().max(self.device_bytes()));
        number
    }

    /// Strikes an allocation off.
    pub(super) fn remove(&self, number: u64) {
        self.entries.borrow_mut().remove(&number);
    }
}
