//! States of lifted layers on their way between a CPU worker's memory and the device.
//!
//! The CPU worker computes on keys, values and states where they lie, in memory that both workers reach. The device has a copy of its own
//! for the layers it lifts. Before a step it is given what the CPU has computed of its spans' sequences since it saw them last; after
//! the lifted layers, what it has computed goes back, while the device runs its own layers. The host turns one layout into the
//! other; values keep their bits.

use super::error::BandError;
use super::plan::Op;
use super::staging::Staging;
use crate::hip::{Device, DeviceSlice, Event, HipError, Stream};
use crate::launch::{DeltaNet, KvCache, KvElement};
use bytemuck::{cast_slice, cast_slice_mut};
use spillway_kernels::ops::attention::KvDims;
use spillway_kernels::ops::deltanet::DeltaNetDims;
use spillway_model::program::{Layer, Step};
use spillway_protocol::frame::{Span, StepFrame};
use spillway_protocol::plan::KV_BLOCK_TOKENS;
use spillway_protocol::states::StateMemory;
use spillway_worker::states::{Area, SharedStates, delta_net_dims, kv_dims};
use std::ops::Range;

/// Alignment of everything in the buffer between the two.
const ALIGN: usize = 256;

/// What one step of a lifted layer keeps, on both sides.
#[derive(Debug)]
enum Kept {
    Keys { cache: KvCache, dims: KvDims, area: Area },
    States { layer: DeltaNet, dims: DeltaNetDims, conv: Area, matrix: Area },
}

/// The least that is handed over.
#[derive(Debug, Clone)]
enum Unit<'k> {
    /// Rows of a KV block.
    Block { cache: &'k KvCache, dims: KvDims, area: Area, block: usize, rows: Range<usize> },
    /// Past inputs of a convolution, of a sequence whose next position is given.
    Inputs { dims: DeltaNetDims, device: DeviceSlice, at: usize, position: usize },
    /// Matrices of a sequence.
    Matrices { dims: DeltaNetDims, device: DeviceSlice, at: usize },
}

/// Which way values go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToDevice,
    FromDevice,
}

/// The states of lifted layers.
#[derive(Debug)]
pub(super) struct Lift {
    memory: StateMemory,
    kept: Vec<Kept>,
    staging: Staging,
    capacity: usize,
    copies: Stream,
    /// The lifted layers of the step in hand have run.
    ran: Event,
    /// By state slot: up to which position the device knows the sequence.
    known: Vec<usize>,
    /// A unit as the CPU has it.
    unit: Vec<u32>,
}

impl Lift {
    /// For layers with the operations `ops`, in order; `capacity` is the size of the buffer between the two.
    pub fn new<'a>(
        device: &Device,
        states: &SharedStates,
        layers: impl Iterator<Item = (usize, &'a Layer, &'a [Op])>,
        slots: usize,
        capacity: usize,
    ) -> Result<Self, BandError> {
        let mut kept = Vec::new();
        for (index, layer, ops) in layers {
            kept.extend(kept_by(states.of(index), layer, ops)?);
        }
        Ok(Self {
            memory: states.memory.clone(),
            kept,
            staging: Staging::new(device, "states between CPU and device", capacity)?,
            capacity,
            copies: Stream::new(device)?,
            ran: Event::new(device)?,
            known: vec![0; slots],
            unit: Vec::new(),
        })
    }

    /// Notes that the CPU runs these spans.
    pub fn passed(&mut self, spans: &[Span]) {
        for span in spans {
            if let Some(known) = self.known.get_mut(span.shape.state_slot as usize) {
                *known = (*known).min(span.shape.start as usize);
            }
        }
    }

    /// Queues on `stream` what the device does not know of the sequences of `spans`; `gets_on` is called as that gets on.
    pub fn bring(
        &mut self,
        stream: &Stream,
        frame: &StepFrame,
        spans: &[Span],
        gets_on: &mut dyn FnMut(),
    ) -> Result<(), BandError> {
        let Self { memory, kept, staging, capacity, known, unit, .. } = self;
        let mut units = Vec::new();
        for span in spans {
            let (slot, start) = (span.shape.state_slot as usize, span.shape.start as usize);
            let Some(known) = known.get_mut(slot) else { return Err(outside("a state slot")) };
            if start > 0 && *known != start {
                let rows = (*known).min(start)..start;
                for kept in &*kept {
                    kept.units(slot, frame.blocks(span), rows.clone(), Way::ToDevice, &mut units)?;
                }
            }
            *known = start + span.shape.tokens as usize;
        }
        for batch in batches(&units, *capacity)? {
            // Waits for the batch before.
            let bytes = staging.bytes_mut()?;
            for (offset, one) in &batch {
                let part = &mut bytes[*offset..][..one.device()?.len()];
                one.hand_over(memory, unit, part, Way::ToDevice)?;
            }
            for (offset, one) in &batch {
                staging.upload(stream, *offset, one.device()?)?;
            }
            gets_on();
        }
        Ok(())
    }

    /// Marks that the lifted layers of a step are queued on `stream`.
    pub fn mark(&self, stream: &Stream) -> Result<(), HipError> {
        stream.record(&self.ran)
    }

    /// Waits for the lifted layers and gives back what they have computed for `spans`; `gets_on` is called as that gets on.
    pub fn give_back(
        &mut self,
        frame: &StepFrame,
        spans: &[Span],
        gets_on: &mut dyn FnMut(),
    ) -> Result<(), BandError> {
        let Self { memory, kept, staging, capacity, copies, ran, unit, .. } = self;
        let mut units = Vec::new();
        for span in spans {
            let start = span.shape.start as usize;
            let rows = start..start + span.shape.tokens as usize;
            for kept in &*kept {
                let slot = span.shape.state_slot as usize;
                kept.units(slot, frame.blocks(span), rows.clone(), Way::FromDevice, &mut units)?;
            }
        }
        copies.wait_for(ran)?;
        for batch in batches(&units, *capacity)? {
            for (offset, one) in &batch {
                staging.download(copies, *offset, one.device()?)?;
            }
            let bytes = staging.bytes_mut()?;
            for (offset, one) in &batch {
                let part = &mut bytes[*offset..][..one.device()?.len()];
                one.hand_over(memory, unit, part, Way::FromDevice)?;
            }
            gets_on();
        }
        Ok(())
    }
}

/// What a layer keeps: its steps, operations and areas come in one order.
fn kept_by(areas: &[Area], layer: &Layer, ops: &[Op]) -> Result<Vec<Kept>, BandError> {
    let mut areas = areas.iter().copied();
    let mut area = || areas.next().ok_or_else(|| outside("the states of a layer"));
    let keeps = |step: &&Step| matches!(step, Step::Attention { .. } | Step::DeltaNet { .. });
    let ops = ops.iter().filter(|op| matches!(op, Op::Attention { .. } | Op::DeltaNet { .. }));
    let mut kept = Vec::new();
    for (step, op) in layer.steps.iter().filter(keeps).zip(ops) {
        kept.push(match (step, op) {
            (Step::Attention { spec, .. }, Op::Attention { cache, .. }) => {
                Kept::Keys { cache: *cache, dims: kv_dims(spec), area: area()? }
            }
            (Step::DeltaNet { spec, .. }, Op::DeltaNet { layer, .. }) => {
                let (conv, matrix) = (area()?, area()?);
                Kept::States { layer: *layer, dims: delta_net_dims(spec), conv, matrix }
            }
            _ => return Err(BandError::NotHere("operation for a step that keeps states")),
        });
    }
    Ok(kept)
}

impl Kept {
    /// Adds what is handed over of a sequence for `rows`, which end at its next position. To the device go whole blocks: rows that it
    /// has already are the same there, those beyond the end will be written before they are read.
    fn units<'k>(
        &'k self,
        slot: usize,
        blocks: &[u32],
        rows: Range<usize>,
        way: Way,
        units: &mut Vec<Unit<'k>>,
    ) -> Result<(), BandError> {
        match self {
            Kept::Keys { cache, dims, area } => {
                for index in rows.start / KV_BLOCK_TOKENS..rows.end.div_ceil(KV_BLOCK_TOKENS) {
                    let block = *blocks.get(index).ok_or_else(|| outside("a KV block"))? as usize;
                    let first = index * KV_BLOCK_TOKENS;
                    let rows = match way {
                        Way::ToDevice => 0..KV_BLOCK_TOKENS,
                        Way::FromDevice => {
                            rows.start.max(first) - first..rows.end.min(first + KV_BLOCK_TOKENS) - first
                        }
                    };
                    units.push(Unit::Block { cache, dims: *dims, area: *area, block, rows });
                }
            }
            Kept::States { layer, dims, conv, matrix } => {
                let [inputs, matrices] = layer.slot(slot)?;
                let at = |area: &Area, values: usize| area.at + slot * values * size_of::<f32>();
                units.push(Unit::Inputs {
                    dims: *dims,
                    device: inputs,
                    at: at(conv, dims.conv_len()),
                    position: rows.end,
                });
                units.push(Unit::Matrices {
                    dims: *dims,
                    device: matrices,
                    at: at(matrix, dims.matrix_len()),
                });
            }
        }
        Ok(())
    }
}

impl Unit<'_> {
    /// Where it is on the device.
    fn device(&self) -> Result<DeviceSlice, HipError> {
        match self {
            Unit::Block { cache, block, .. } => cache.block(*block),
            Unit::Inputs { device, .. } | Unit::Matrices { device, .. } => Ok(*device),
        }
    }

    /// Offset and bytes where the CPU has it.
    fn shared(&self) -> (usize, usize) {
        match self {
            Unit::Block { cache, dims, area, block, .. } => {
                let bytes = dims.block_len() * cache.element().bytes();
                (area.at + block * bytes, bytes)
            }
            Unit::Inputs { dims, at, .. } => (*at, dims.conv_len() * size_of::<f32>()),
            Unit::Matrices { dims, at, .. } => (*at, dims.matrix_len() * size_of::<f32>()),
        }
    }

    /// Turns the unit from one layout into the other; `device` holds it as the device has it, `unit` is working memory.
    fn hand_over(
        &self,
        memory: &StateMemory,
        unit: &mut Vec<u32>,
        device: &mut [u8],
        way: Way,
    ) -> Result<(), BandError> {
        let (at, bytes) = self.shared();
        unit.resize(bytes.div_ceil(size_of::<u32>()), 0);
        let shared = &mut cast_slice_mut::<u32, u8>(unit)[..bytes];
        // The way back changes a part of it.
        if !memory.read(at, shared) {
            return Err(outside("states"));
        }
        match self {
            Unit::Block { cache, dims, rows, .. } => match cache.element() {
                KvElement::F16 => {
                    let (shared, device) = (cast_slice_mut::<u8, u16>(shared), cast_slice_mut(device));
                    convert_block(cache, *dims, rows.clone(), shared, device, way);
                }
                KvElement::F32 => {
                    let (shared, device) = (cast_slice_mut::<u8, u32>(shared), cast_slice_mut(device));
                    convert_block(cache, *dims, rows.clone(), shared, device, way);
                }
            },
            Unit::Inputs { dims, position, .. } => {
                convert_inputs(*dims, *position, cast_slice_mut(shared), cast_slice_mut(device), way);
            }
            Unit::Matrices { dims, .. } => {
                convert_matrices(*dims, cast_slice_mut(shared), cast_slice_mut(device), way);
            }
        }
        match way {
            Way::FromDevice if !memory.write(at, &cast_slice::<u32, u8>(unit)[..bytes]) => {
                Err(outside("states"))
            }
            _ => Ok(()),
        }
    }
}

/// Units that go through the buffer together, each with its offset there.
fn batches<'u, 'k>(
    units: &'u [Unit<'k>],
    capacity: usize,
) -> Result<Vec<Vec<(usize, &'u Unit<'k>)>>, BandError> {
    let (mut batches, mut batch, mut end) = (Vec::new(), Vec::new(), 0);
    for unit in units {
        let bytes = unit.device()?.len();
        if end + bytes > capacity {
            batches.push(std::mem::take(&mut batch));
            end = 0;
        }
        batch.push((end, unit));
        end = (end + bytes).next_multiple_of(ALIGN);
    }
    batches.push(batch);
    Ok(batches)
}

fn convert_block<E: Copy>(
    cache: &KvCache,
    dims: KvDims,
    rows: Range<usize>,
    shared: &mut [E],
    device: &mut [E],
    way: Way,
) {
    for head in 0..dims.kv_heads {
        for row in rows.clone() {
            for dim in 0..dims.key_dim {
                let (one, other) = (dims.key_at(head, dim, row), cache.key_at(head, dim, row));
                convert(&mut shared[one], &mut device[other], way);
            }
            for dim in 0..dims.value_dim {
                let (one, other) = (dims.value_at(head, dim, row), cache.value_at(head, dim, row));
                convert(&mut shared[one], &mut device[other], way);
            }
        }
    }
}

/// The device keeps the input of position `p` at place `p % taps`, the CPU the last ones in order. Before the first position they are
/// zero, and the device does not read them.
fn convert_inputs(dims: DeltaNetDims, position: usize, shared: &mut [f32], device: &mut [f32], way: Way) {
    let (taps, channels) = (dims.conv_kernel, dims.channels());
    for (past, shared) in shared.chunks_exact_mut(channels).enumerate() {
        match (position + past).checked_sub(taps - 1) {
            Some(of) => {
                let device = &mut device[of % taps * channels..][..channels];
                match way {
                    Way::ToDevice => device.copy_from_slice(shared),
                    Way::FromDevice => shared.copy_from_slice(device),
                }
            }
            None => shared.fill(0.0),
        }
    }
}

/// The device has a row of a matrix in one piece, the CPU columns of several rows side by side.
fn convert_matrices(dims: DeltaNetDims, shared: &mut [f32], device: &mut [f32], way: Way) {
    let dim = dims.head_dim;
    for (row, device) in device.chunks_exact_mut(dim).enumerate() {
        let (head, value) = (row / dim, row % dim);
        for (key, device) in device.iter_mut().enumerate() {
            convert(&mut shared[dims.matrix_at(head, value, key)], device, way);
        }
    }
}

fn convert<E: Copy>(shared: &mut E, device: &mut E, way: Way) {
    match way {
        Way::ToDevice => *device = *shared,
        Way::FromDevice => *shared = *device,
    }
}

fn outside(what: &'static str) -> BandError {
    BandError::Lift(what)
}
