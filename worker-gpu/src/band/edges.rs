//! Where residual rows come from and go to.
//!
//! A ring that the driver accepts is page-locked, and the device copies from and to its slots itself. Where the neighbour's
//! device can be reached, rows are written straight into memory that belongs to the slot there. Everything else (token ids become rows on
//! the host; drivers may refuse) goes through a page-locked buffer of our own.

use super::staging::Staging;
use crate::hip::{
    Device, DeviceBuffer, DeviceSlice, Event, HipError, IpcHandle, PeerBuffer, PinnedBuffer, Stream,
};
use spillway_protocol::control::DeviceShare;
use spillway_protocol::frame::Place;
use spillway_protocol::ring::RingMemory;
use spillway_worker::ProcessError;
use spillway_worker::residual::{Incoming, Outgoing};

/// Shared memory is allocated in whole units of what drivers share: a smaller allocation may let the other process see its
/// neighbours.
const SHARE_UNIT: usize = 2 << 20;
/// Alignment of every slot's area.
const AREA_ALIGN: usize = 256;

/// A ring that the driver has page-locked.
#[derive(Debug)]
struct PinnedRing {
    // Before the mapping that it names.
    memory: PinnedBuffer,
    _ring: RingMemory,
}

impl PinnedRing {
    fn register(device: &Device, label: &str, ring: &RingMemory) -> Result<Self, HipError> {
        // SAFETY: the ring stays mapped as long as this value holds it, which is longer than the registration.
        let memory = unsafe { device.register_pinned(label, ring.base(), ring.len()) }?;
        Ok(Self { memory, _ring: ring.clone() })
    }
}

/// Memory with an area for every slot of a ring.
#[derive(Debug)]
struct Areas<M> {
    memory: M,
    area_bytes: usize,
}

impl<M> Areas<M> {
    fn part(&self, whole: DeviceSlice, slot: usize, bytes: usize) -> Result<DeviceSlice, HipError> {
        whole.part(slot * self.area_bytes, self.area_bytes)?.part(0, bytes)
    }
}

/// Both sides of a band.
#[derive(Debug)]
pub(super) struct Edges {
    /// Room for the rows of the largest step.
    pub staging: Staging,
    largest: usize,
    slots_in: usize,
    slots_out: usize,
    incoming: Option<PinnedRing>,
    outgoing: Option<PinnedRing>,
    /// Written by the stage before.
    landing: Option<Areas<DeviceBuffer>>,
    /// The next stage's landing.
    next: Option<Areas<PeerBuffer>>,
    /// When the device has read the rows of a slot.
    taken: Event,
    notes: Vec<String>,
}

impl Edges {
    /// Edges of a band whose largest step has residual rows of `largest` bytes; nothing is registered yet.
    pub fn new(device: &Device, largest: usize) -> Result<Self, HipError> {
        Ok(Self {
            staging: Staging::new(device, "residual", largest)?,
            largest,
            slots_in: 0,
            slots_out: 0,
            incoming: None,
            outgoing: None,
            landing: None,
            next: None,
            taken: Event::new(device)?,
            notes: Vec::new(),
        })
    }

    /// Lets the device copy from and to rings; an `incoming` one carries residual rows. A driver that refuses costs a copy a
    /// step, and a note.
    pub fn register(&mut self, device: &Device, incoming: Option<&RingMemory>, outgoing: &RingMemory) {
        self.slots_in = incoming.map_or(0, RingMemory::slots);
        self.slots_out = outgoing.slots();
        let mut register = |label: &str, ring: Option<&RingMemory>| {
            PinnedRing::register(device, label, ring?)
                .inspect_err(|error| {
                    self.notes
                        .push(format!("{label} cannot be page-locked, rows are copied once more: {error}"));
                })
                .ok()
        };
        self.incoming = register("the incoming ring", incoming);
        self.outgoing = register("the outgoing ring", Some(outgoing));
    }

    /// What does not work as well as it might.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Queues the copy of rows that have come into `residual`. Rows that the device reads where they lie are given back: they are
    /// needed until [`Edges::wait_taken`].
    pub fn receive<'a>(
        &mut self,
        stream: &Stream,
        residual: DeviceSlice,
        rows: Incoming<'a>,
    ) -> Result<Option<Incoming<'a>>, ProcessError> {
        match (rows.place(), &self.landing, &self.incoming) {
            (Place::Device, Some(areas), _) => {
                let landed = areas.part(areas.memory.slice(), rows.slot(), residual.len())?;
                stream.copy_within(residual, landed)?;
            }
            (Place::Slot, _, Some(ring)) => stream.upload(residual, &ring.memory, rows.in_ring()?)?,
            _ => {
                let values = residual.len() / size_of::<f32>();
                rows.copy_to(&mut self.staging.values_mut()?[..values])?;
                self.staging.upload(stream, 0, residual)?;
                return Ok(None);
            }
        }
        stream.record(&self.taken)?;
        Ok(Some(rows))
    }

    /// Waits until the device has read the rows that [`Edges::receive`] gave back.
    pub fn wait_taken(&self) -> Result<(), HipError> {
        self.taken.synchronize()
    }

    /// Copies `residual` to where the next stage finds it, and waits.
    pub fn send(
        &mut self,
        stream: &Stream,
        residual: DeviceSlice,
        rows: Outgoing<'_, '_>,
    ) -> Result<(), ProcessError> {
        if let Some(areas) = &self.next {
            let area = areas.part(areas.memory.slice(), rows.slot(), residual.len())?;
            stream.copy_within(area, residual)?;
            stream.synchronize()?;
            return Ok(rows.on_device()?);
        }
        if let Some(ring) = &self.outgoing {
            stream.download(&ring.memory, rows.in_ring()?, residual)?;
            return Ok(stream.synchronize()?);
        }
        self.staging.download(stream, 0, residual)?;
        let values = residual.len() / size_of::<f32>();
        Ok(rows.copy_from(&self.staging.values_mut()?[..values])?)
    }

    /// The outgoing ring, if the device may write into it.
    pub fn ring_out(&self) -> Option<&PinnedBuffer> {
        self.outgoing.as_ref().map(|ring| &ring.memory)
    }

    /// Shares memory for the stage before to write into; allocated once.
    pub fn offer(&mut self, device: &Device) -> Result<DeviceShare, HipError> {
        let areas = match self.landing.take() {
            Some(areas) => areas,
            None => Areas {
                memory: device
                    .allocate("rows from the stage before", landing_bytes(self.largest, self.slots_in))?,
                area_bytes: area_bytes(self.largest),
            },
        };
        let (handle, bytes) = areas.memory.share()?.to_parts();
        let share = DeviceShare { handle: handle.to_vec(), bytes, area_bytes: areas.area_bytes as u64 };
        self.landing = Some(areas);
        Ok(share)
    }

    /// Opens the next stage's memory for writing; without any, rows go into the ring again.
    pub fn connect(&mut self, device: &Device, share: Option<&DeviceShare>) -> Result<(), String> {
        self.next = None;
        let Some(share) = share else { return Ok(()) };
        let handle =
            share.handle.as_slice().try_into().map_err(|_| "the handle has another size".to_owned())?;
        let area_bytes = usize::try_from(share.area_bytes).unwrap_or(usize::MAX);
        let fits = area_bytes
            .checked_mul(self.slots_out)
            .is_some_and(|all| all as u64 <= share.bytes && self.largest <= area_bytes);
        if !fits {
            return Err("the next stage's memory is too small for the rows of a step".into());
        }
        let memory = PeerBuffer::open(device, IpcHandle::from_parts(handle, share.bytes));
        self.next = Some(Areas { memory: memory.map_err(|error| error.to_string())?, area_bytes });
        Ok(())
    }
}

/// Bytes from one slot's area to the next, for steps of up to `largest` bytes.
fn area_bytes(largest: usize) -> usize {
    largest.next_multiple_of(AREA_ALIGN)
}

/// Device memory that the stage before writes into, for a ring of `slots` slots.
pub(super) fn landing_bytes(largest: usize, slots: usize) -> usize {
    (area_bytes(largest) * slots).next_multiple_of(SHARE_UNIT)
}
