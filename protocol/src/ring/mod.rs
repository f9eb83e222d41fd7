//! The ring: a single-producer single-consumer queue of fixed-size slots between two processes, in sealed shared memory.
//!
//! One ring carries the step frames of one pipeline edge, in one direction. The coordinator makes it, both processes
//! inherit it by descriptor number and attach to their end. A side that waits spins for up to [`SPIN_LIMIT`] (not
//! at all when its last wait ended empty), offering its processor to other threads, then sleeps in the kernel. Bytes cross
//! by copy only. Either side can close; the other notices at once, and goes on when another process takes the closed end over.
//! The death of the other process is *not* noticed here: that is the control socket's end-of-file, hence every wait has a
//! timeout.

mod core;

use self::core::{Cursor, Look, Role, Words};
use crate::frame::{FrameError, SlotRead, SlotWrite};
use crate::shm::{Segment, ShmError};
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longest time a waiting side burns CPU before it sleeps.
pub const SPIN_LIMIT: Duration = Duration::from_micros(50);
/// A wait of this length says that nothing is going on.
const IDLE: Duration = Duration::from_millis(50);
/// Time for an answer that comes at once, before the processor is offered: an offer takes a microsecond itself.
const POLITE: Duration = Duration::from_micros(3);
/// Looks between two offers of the processor while spinning.
const LOOKS_PER_CLOCK: u32 = 32;

const MAGIC: u32 = u32::from_le_bytes(*b"SPWR");
const VERSION: u32 = 1;
/// Slots begin on a page, and every slot on a cache line pair.
const HEADER_BYTES: usize = 4096;
const SLOT_ALIGN: usize = 128;
const MAX_SLOTS: u32 = 1 << 16;

/// Why a ring cannot be made, attached or used.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The shared memory itself.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// A shape that no ring can have.
    #[error(
        "ring: {slots} slots of {slot_bytes} bytes is not a ring: slots must be a power of two up to 65536, bytes not zero"
    )]
    Shape {
        /// Slots asked for.
        slots: u32,
        /// Bytes per slot asked for.
        slot_bytes: usize,
    },
    /// The segment does not begin with a header that this build understands.
    #[error(
        "ring: the inherited segment is not a ring of this version: {0}; coordinator and worker must be the same build"
    )]
    Foreign(&'static str),
    /// The other process broke the protocol of the ring.
    #[error(
        "ring: the other process moved its counter beyond the slots; its memory is not trustworthy, the pipeline must end"
    )]
    Corrupt,
}

impl RingError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            RingError::Shm(error) => error.code(),
            RingError::Shape { .. } => "ring_shape",
            RingError::Foreign(_) => "ring_foreign",
            RingError::Corrupt => "ring_corrupt",
        }
    }
}

/// First page of the segment. The shape is written once, before any other process knows of the segment.
#[repr(C)]
struct Header {
    magic: AtomicU32,
    version: AtomicU32,
    slots: AtomicU32,
    /// In units of [`SLOT_ALIGN`] bytes.
    slot_lines: AtomicU32,
    words: Words,
}

const _: () = assert!(size_of::<Header>() <= HEADER_BYTES);

/// The mapping of a ring with its shape, as it was checked: later changes of the shared header are not looked at.
#[derive(Debug)]
struct Mapping {
    segment: Arc<Segment>,
    slots: u32,
    slot_bytes: usize,
}

impl Deref for Mapping {
    type Target = Words;
    fn deref(&self) -> &Words {
        // SAFETY: the segment holds a `Header` (its size was checked), page aligned, all of it atomics for which any bit
        // pattern is valid; it lives as long as `self`.
        unsafe { &(*self.segment.base().cast::<Header>().as_ptr()).words }
    }
}

impl Mapping {
    fn header(segment: &Segment) -> &Header {
        // SAFETY: as in `deref`; callers have checked that the segment is at least `HEADER_BYTES` long.
        unsafe { segment.base().cast::<Header>().as_ref() }
    }

    fn attach(fd: OwnedFd) -> Result<Self, RingError> {
        let segment = Segment::attach(fd, HEADER_BYTES)?;
        let header = Self::header(&segment);
        if header.magic.load(Ordering::Relaxed) != MAGIC {
            return Err(RingError::Foreign("no ring header"));
        }
        if header.version.load(Ordering::Relaxed) != VERSION {
            return Err(RingError::Foreign("another version"));
        }
        let slots = header.slots.load(Ordering::Relaxed);
        let slot_bytes = header.slot_lines.load(Ordering::Relaxed) as usize * SLOT_ALIGN;
        let fits = checked_bytes(slots, slot_bytes).is_some_and(|bytes| bytes.get() <= segment.len());
        if !fits {
            return Err(RingError::Foreign("its slots do not fit into it"));
        }
        Ok(Self { segment: Arc::new(segment), slots, slot_bytes })
    }

    fn memory(&self) -> RingMemory {
        RingMemory { segment: Arc::clone(&self.segment), slots: self.slots }
    }

    fn slot(&self, index: usize) -> Slot {
        debug_assert!(index < self.slots as usize);
        let offset = HEADER_BYTES + index * self.slot_bytes;
        // SAFETY: `checked_bytes` held for this shape, so slot `index` lies inside the segment.
        let base = unsafe { self.segment.base().as_ptr().add(offset) };
        Slot { base, len: self.slot_bytes, index, offset }
    }
}

/// Bytes of a segment for this shape; `None` when it is no valid shape.
fn checked_bytes(slots: u32, slot_bytes: usize) -> Option<NonZeroUsize> {
    let valid = slots.is_power_of_two() && slots <= MAX_SLOTS && slot_bytes > 0;
    let bytes = slot_bytes.checked_mul(slots as usize)?.checked_add(HEADER_BYTES)?;
    NonZeroUsize::new(bytes).filter(|_| valid)
}

/// A ring as its maker holds it: a descriptor for children to inherit, and ends to attach in this process.
#[derive(Debug)]
pub struct Ring {
    segment: Segment,
}

impl Ring {
    /// Makes an empty ring of `slots` (a power of two) slots that hold at least `slot_bytes` each.
    pub fn create(slots: u32, slot_bytes: usize) -> Result<Self, RingError> {
        let lines = slot_bytes.div_ceil(SLOT_ALIGN);
        let len = lines.checked_mul(SLOT_ALIGN).and_then(|aligned| checked_bytes(slots, aligned));
        let (Ok(slot_lines), Some(len)) = (u32::try_from(lines), len) else {
            return Err(RingError::Shape { slots, slot_bytes });
        };
        let segment = Segment::create(c"spillway-ring", len)?;
        let header = Mapping::header(&segment);
        header.slots.store(slots, Ordering::Relaxed);
        header.slot_lines.store(slot_lines, Ordering::Relaxed);
        header.version.store(VERSION, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(Self { segment })
    }

    /// Bytes that [`Ring::create`] takes for this shape, for a plan that charges them.
    pub fn bytes(slots: u32, slot_bytes: usize) -> usize {
        let aligned = slot_bytes.div_ceil(SLOT_ALIGN).saturating_mul(SLOT_ALIGN);
        HEADER_BYTES.saturating_add(aligned.saturating_mul(slots as usize))
    }

    /// A duplicate of the descriptor, for an end in this process.
    pub fn dup(&self) -> Result<OwnedFd, RingError> {
        self.as_fd().try_clone_to_owned().map_err(|error| {
            let source = nix::Error::from_raw(error.raw_os_error().unwrap_or_default());
            ShmError::System { action: "dup", bytes: self.segment.len(), source }.into()
        })
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }
}

/// The mapped memory of a ring, for a device driver that is to copy from and to its slots itself. Holding it keeps the mapping.
///
/// Both processes write here at any time: it is for addresses, not for references.
#[derive(Debug, Clone)]
pub struct RingMemory {
    segment: Arc<Segment>,
    slots: u32,
}

impl RingMemory {
    /// First byte, on a page; [`RingMemory::len`] bytes stay mapped while this value lives.
    pub fn base(&self) -> NonNull<u8> {
        self.segment.base()
    }

    /// Bytes of header and slots.
    #[expect(clippy::len_without_is_empty, reason = "a ring's memory is never empty")]
    pub fn len(&self) -> usize {
        self.segment.len()
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots as usize
    }
}

/// How a wait ended.
#[derive(Debug)]
pub enum Wait<T> {
    /// A slot.
    Ready(T),
    /// Nothing within the time given.
    TimedOut,
    /// The other side closed its end, and for a consumer everything it had published was read.
    Closed,
}

/// Shared by both ends: the cursor and how long to spin.
#[derive(Debug)]
struct End {
    cursor: Cursor<Mapping>,
    /// Longest spin, and how long the last wait took, which says what to expect of the next one.
    patience: Duration,
    last: Duration,
}

impl End {
    fn attach(fd: OwnedFd, role: Role) -> Result<Self, RingError> {
        let mapping = Mapping::attach(fd)?;
        let slots = mapping.slots;
        let cursor = Cursor::attach(mapping, role, slots);
        Ok(Self { cursor, patience: SPIN_LIMIT, last: Duration::ZERO })
    }

    fn wait(&mut self, timeout: Duration) -> Result<Wait<Slot>, RingError> {
        if let Some(found) = self.look()? {
            self.last = Duration::ZERO;
            return Ok(found);
        }
        let start = Instant::now();
        let spun = self.spin(start, timeout)?;
        let found = match spun {
            Some(found) => found,
            None => self.sleep(start, timeout)?,
        };
        self.last = start.elapsed();
        Ok(found)
    }

    /// Looks again and again for a while, giving way to any thread that wants the processor: that may be the one waited for.
    fn spin(&self, start: Instant, timeout: Duration) -> Result<Option<Wait<Slot>>, RingError> {
        // When nothing is going on, spinning would only keep a processor warm.
        let budget = if self.last > self.patience.max(IDLE) { Duration::ZERO } else { self.patience };
        let budget = budget.min(timeout);
        while !budget.is_zero() {
            for _ in 0..LOOKS_PER_CLOCK {
                if let Some(found) = self.look()? {
                    return Ok(Some(found));
                }
                std::hint::spin_loop();
            }
            let spent = start.elapsed();
            if spent >= budget {
                break;
            }
            if spent >= POLITE {
                std::thread::yield_now();
            }
        }
        Ok(None)
    }

    fn sleep(&self, start: Instant, timeout: Duration) -> Result<Wait<Slot>, RingError> {
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            match self.cursor.look() {
                Look::Nothing(_) if left.is_zero() => return Ok(Wait::TimedOut),
                Look::Nothing(seen) => self.cursor.sleep(seen, left),
                _ => return Ok(self.look()?.unwrap_or(Wait::TimedOut)),
            }
        }
    }

    fn look(&self) -> Result<Option<Wait<Slot>>, RingError> {
        match self.cursor.look() {
            Look::Slot(index) => Ok(Some(Wait::Ready(self.cursor.words().slot(index)))),
            Look::Nothing(_) => Ok(None),
            Look::Closed => Ok(Some(Wait::Closed)),
            Look::Corrupt => Err(RingError::Corrupt),
        }
    }
}

/// Where a slot lies. Only this module makes one, for a slot that its end owns at that time.
#[derive(Debug, Clone, Copy)]
struct Slot {
    base: *mut u8,
    len: usize,
    index: usize,
    /// From the beginning of the ring's memory.
    offset: usize,
}

impl Slot {
    fn check(&self, offset: usize, len: usize) -> Result<(), FrameError> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if fits {
            Ok(())
        } else {
            Err(FrameError::SlotTooSmall { need: offset.saturating_add(len), have: self.len })
        }
    }

    fn locate(&self, offset: usize, len: usize) -> Result<usize, FrameError> {
        self.check(offset, len)?;
        Ok(self.offset + offset)
    }
}

/// The sending end.
#[derive(Debug)]
pub struct RingProducer {
    end: End,
}

/// The receiving end.
#[derive(Debug)]
pub struct RingConsumer {
    end: End,
}

impl RingProducer {
    /// Attaches to the sending end of an inherited ring.
    pub fn attach(fd: OwnedFd) -> Result<Self, RingError> {
        Ok(Self { end: End::attach(fd, Role::Producer)? })
    }

    /// The memory that the slots lie in.
    pub fn memory(&self) -> RingMemory {
        self.end.cursor.words().memory()
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.end.cursor.words().slot_bytes
    }

    /// Waits for a free slot.
    pub fn wait(&mut self, timeout: Duration) -> Result<Wait<SlotWriter<'_>>, RingError> {
        let found = self.end.wait(timeout)?;
        Ok(self.writer(found))
    }

    /// Takes a free slot if there is one; `TimedOut` means the ring is full.
    pub fn try_next(&mut self) -> Result<Wait<SlotWriter<'_>>, RingError> {
        let found = self.end.look()?.unwrap_or(Wait::TimedOut);
        Ok(self.writer(found))
    }

    fn writer(&mut self, found: Wait<Slot>) -> Wait<SlotWriter<'_>> {
        match found {
            Wait::Ready(slot) => Wait::Ready(SlotWriter { end: &mut self.end, slot }),
            Wait::TimedOut => Wait::TimedOut,
            Wait::Closed => Wait::Closed,
        }
    }
}

impl RingConsumer {
    /// Attaches to the receiving end of an inherited ring.
    pub fn attach(fd: OwnedFd) -> Result<Self, RingError> {
        Ok(Self { end: End::attach(fd, Role::Consumer)? })
    }

    /// The memory that the slots lie in.
    pub fn memory(&self) -> RingMemory {
        self.end.cursor.words().memory()
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.end.cursor.words().slot_bytes
    }

    /// Spins for up to `patience` instead of [`SPIN_LIMIT`] while slots keep coming: for a process whose work is done elsewhere, on a
    /// device, so that a processor is free for it, and for which a wake-up is long beside a step.
    pub fn set_patience(&mut self, patience: Duration) {
        self.end.patience = patience;
    }

    /// Waits for a published slot.
    pub fn wait(&mut self, timeout: Duration) -> Result<Wait<SlotReader<'_>>, RingError> {
        let found = self.end.wait(timeout)?;
        Ok(self.reader(found))
    }

    /// Takes a published slot if there is one; `TimedOut` means the ring is empty.
    pub fn try_next(&mut self) -> Result<Wait<SlotReader<'_>>, RingError> {
        let found = self.end.look()?.unwrap_or(Wait::TimedOut);
        Ok(self.reader(found))
    }

    fn reader(&mut self, found: Wait<Slot>) -> Wait<SlotReader<'_>> {
        match found {
            Wait::Ready(slot) => Wait::Ready(SlotReader { end: &mut self.end, slot }),
            Wait::TimedOut => Wait::TimedOut,
            Wait::Closed => Wait::Closed,
        }
    }
}

impl Drop for End {
    /// Closes this side.
    fn drop(&mut self) {
        self.cursor.close();
    }
}

/// A free slot. Dropped without [`SlotWriter::publish`], nothing is sent and the slot stays free.
#[derive(Debug)]
pub struct SlotWriter<'a> {
    end: &'a mut End,
    slot: Slot,
}

impl SlotWriter<'_> {
    /// Hands the slot to the consumer.
    pub fn publish(self) {
        self.end.cursor.advance();
    }

    /// Number of the slot in its ring.
    pub fn index(&self) -> usize {
        self.slot.index
    }

    /// Where `len` bytes at `offset` lie in the [`RingMemory`].
    pub fn locate(&self, offset: usize, len: usize) -> Result<usize, FrameError> {
        self.slot.locate(offset, len)
    }
}

impl SlotWrite for SlotWriter<'_> {
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<(), FrameError> {
        self.slot.check(offset, bytes.len())?;
        // SAFETY: the range lies in the slot, which belongs to this end until `publish`; `bytes` is private memory, so
        // they do not overlap. A misbehaving peer may write here too: it garbles bytes that nothing here reads back.
        unsafe { self.slot.base.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// A published slot. Dropping it gives it back to the producer.
#[derive(Debug)]
pub struct SlotReader<'a> {
    end: &'a mut End,
    slot: Slot,
}

impl SlotReader<'_> {
    /// Number of the slot in its ring.
    pub fn index(&self) -> usize {
        self.slot.index
    }

    /// Where `len` bytes at `offset` lie in the [`RingMemory`].
    pub fn locate(&self, offset: usize, len: usize) -> Result<usize, FrameError> {
        self.slot.locate(offset, len)
    }
}

impl SlotRead for SlotReader<'_> {
    fn get(&self, offset: usize, bytes: &mut [u8]) -> Result<(), FrameError> {
        self.slot.check(offset, bytes.len())?;
        // SAFETY: the range lies in the slot, which belongs to this end until drop; `bytes` is private memory. A
        // misbehaving peer may change the bytes during the copy: any value is valid for `u8`, and they are checked
        // after the copy, never twice.
        unsafe { self.slot.base.add(offset).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for SlotReader<'_> {
    fn drop(&mut self) {
        self.end.cursor.advance();
    }
}

// SAFETY: a slot is an address inside the segment that the end next to it keeps mapped.
unsafe impl Send for Slot {}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
