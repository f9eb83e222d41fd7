//! Weights in host memory on their way through device memory.
//!
//! A step of a few rows reads every weight once, and may as well read it over the bus. Kernels for many rows read weights
//! again and again: for them, the matrices of one operation after the other are copied to the device, each while the one before
//! it is being multiplied. The kernels and their order are those of resident weights, and so are the results.
//!
//! Floor: a layer's bytes over the bus's bandwidth, or its products' time on the device, whichever is longer.

use super::error::BandError;
use super::mapped::{MappedBlock, mapped_bytes};
use super::plan::Op;
use crate::hip::{ALIGN, Arena, Device, DeviceSlice, Event, HipError, Stream};
use crate::launch::{MAX_ALONE, Matrix};
use spillway_model::program::{Layer, WeightRef};
use spillway_worker::fuse::{Fused, fuse};

/// Layers in host memory from which on they are streamed. Two groups take about as much memory as a layer: to keep a few
/// layers resident instead would take hardly more.
pub(super) const FEWEST_STREAMED: usize = 4;
/// Groups on the device at a time: one that is multiplied, one that is copied.
const PLACES: usize = 2;

/// Whether a step of so many tokens takes weights through device memory. Others are captured as graphs, which name the
/// addresses of weights.
pub(super) fn is_streamed(tokens: usize) -> bool {
    tokens > MAX_ALONE
}

/// Bytes of the largest group of a layer's matrices that is copied at once, with `bytes` of each matrix as stored.
///
/// # Errors
/// Those of `bytes`.
pub fn largest_group<E>(layer: &Layer, bytes: impl Fn(&WeightRef) -> Result<u64, E>) -> Result<u64, E> {
    let sum = |weights: &[&WeightRef]| -> Result<u64, E> {
        weights.iter().map(|weight| Ok(mapped_bytes(bytes(weight)?))).sum()
    };
    let mut largest = 0;
    for fused in fuse(&layer.steps) {
        let groups: Vec<Vec<&WeightRef>> = match fused {
            Fused::Project { parts, .. } => vec![parts.iter().map(|part| part.weight).collect()],
            Fused::Mlp { gate, up, down, .. } => vec![vec![gate, up], vec![down]],
            Fused::Single(_) => vec![],
        };
        for group in groups {
            largest = sum(&group)?.max(largest);
        }
    }
    Ok(largest)
}

/// Matrices that are copied together, in the order in which operations use them.
#[derive(Debug)]
struct Group {
    /// Number of the layer, hence of its block.
    layer: usize,
    matrices: Vec<Matrix>,
}

/// Memory for a group on the device.
#[derive(Debug)]
struct Place {
    memory: DeviceSlice,
    /// The group has arrived.
    filled: Event,
    /// The group has been multiplied.
    free: Event,
}

/// Copies groups in turn, for ever: after the last one, the first ones are fetched for the step after.
#[derive(Debug)]
pub(super) struct Streaming {
    copies: Stream,
    places: [Place; PLACES],
    groups: Vec<Group>,
    /// Groups that were queued to be copied, since the beginning.
    fetched: usize,
    /// Groups that were multiplied, since the beginning.
    used: usize,
}

impl Streaming {
    /// For layers in host memory, in order; `bytes` is the size of each place.
    pub fn new<'a>(
        device: &Device,
        arena: &mut Arena,
        bytes: usize,
        layers: impl Iterator<Item = &'a [Op]>,
    ) -> Result<Self, HipError> {
        let mut place = || {
            let memory = arena.allocate("weights on their way", bytes)?;
            Ok::<_, HipError>(Place { memory, filled: Event::new(device)?, free: Event::new(device)? })
        };
        let places = [place()?, place()?];
        let of_layer = |(layer, ops): (usize, &'a [Op])| {
            ops.iter().flat_map(groups).map(move |matrices| Group { layer, matrices })
        };
        let groups = layers.enumerate().flat_map(of_layer).collect();
        Ok(Self { copies: Stream::new(device)?, places, groups, fetched: 0, used: 0 })
    }

    /// Lets `matrices`, the next group, be read from device memory by what is queued on `stream` from now on, until
    /// [`Streaming::leave`].
    pub fn enter<'m>(
        &mut self,
        stream: &Stream,
        blocks: &[MappedBlock],
        matrices: impl Iterator<Item = &'m mut Matrix>,
    ) -> Result<(), BandError> {
        self.fetch_ahead(blocks)?;
        let place = &self.places[self.used % PLACES];
        stream.wait_for(&place.filled)?;
        let matrices: Vec<&mut Matrix> = matrices.collect();
        let group = self.groups[self.used % self.groups.len()].matrices.iter().map(Matrix::memory);
        debug_assert!(
            matrices.iter().map(|matrix| matrix.memory()).eq(group),
            "operations enter groups in order"
        );
        for (matrix, to) in matrices.into_iter().zip(self.spots(self.used)) {
            *matrix = matrix.moved_to(to?)?;
        }
        Ok(())
    }

    /// Everything that reads the group is queued.
    pub fn leave(&mut self, stream: &Stream, blocks: &[MappedBlock]) -> Result<(), BandError> {
        stream.record(&self.places[self.used % PLACES].free)?;
        self.used += 1;
        self.fetch_ahead(blocks)
    }

    fn fetch_ahead(&mut self, blocks: &[MappedBlock]) -> Result<(), BandError> {
        while self.fetched < self.used + PLACES {
            let place = &self.places[self.fetched % PLACES];
            self.copies.wait_for(&place.free)?;
            let group = &self.groups[self.fetched % self.groups.len()];
            let from = group.matrices.iter().map(Matrix::memory);
            let pairs = from.zip(self.spots(self.fetched)).map(|(from, to)| Ok((from, to?)));
            blocks[group.layer].copy(&self.copies, &pairs.collect::<Result<Vec<_>, HipError>>()?)?;
            self.copies.record(&place.filled)?;
            self.fetched += 1;
        }
        Ok(())
    }

    /// Where the matrices of the n-th group since the beginning go.
    fn spots(&self, number: usize) -> impl Iterator<Item = Result<DeviceSlice, HipError>> {
        let memory = self.places[number % PLACES].memory;
        let mut offset = 0;
        self.groups[number % self.groups.len()].matrices.iter().map(move |matrix| {
            let bytes = matrix.memory().len();
            let spot = memory.part(offset, bytes);
            offset += bytes.next_multiple_of(ALIGN);
            spot
        })
    }
}

/// The groups of an operation, in the order in which it enters them.
fn groups(op: &Op) -> Vec<Vec<Matrix>> {
    match op {
        Op::Project { parts, .. } => vec![parts.iter().map(|part| part.weight).collect()],
        Op::Mlp { gate, up, down, .. } => vec![vec![*gate, *up], vec![down.weight]],
        _ => vec![],
    }
}
