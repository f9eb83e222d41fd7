//! What kernels know of a step: rows, spans, block tables, which rows want logits, rotations. All of it is put together
//! in page-locked memory and goes to the device in one copy.
//!
//! Where a part lies depends on the number of rows alone, so that a captured step can be replayed with other facts.

use super::error::BandError;
use super::staging::Staging;
use crate::hip::{Device, DeviceSlice, HipError, Stream};
use crate::launch::{Pairing, Rope, RowMeta, SpanMeta};
use bytemuck::cast_slice;
use spillway_kernels::ops::{RopePairing, RopeTable};
use spillway_model::program::{self, RopeSpec};
use spillway_protocol::frame::{Span, StepFrame};

/// Alignment of every part.
const ALIGN: usize = 64;
/// Parts with an alignment of their own, at most.
const MAX_PARTS: usize = 16;
/// Bytes that alignment may cost.
pub(super) const PADDING: usize = ALIGN * MAX_PARTS;

/// The facts of the step in hand, on both sides.
#[derive(Debug)]
pub(super) struct Facts {
    host: Staging,
    device: DeviceSlice,
    ropes: Vec<RopeTable>,
    max_spans: usize,
    rows: Vec<RowMeta>,
    spans: Vec<SpanMeta>,
    tables: Vec<u32>,
    wanted: Vec<u32>,
    positions: Vec<u32>,
}

/// Where the facts of a step of some number of rows are on the device.
#[derive(Debug, Clone)]
pub(super) struct Placed {
    pub row_meta: DeviceSlice,
    pub span_meta: DeviceSlice,
    /// Rows that want logits.
    pub wanted: DeviceSlice,
    pub tables: DeviceSlice,
}

/// Offsets of the parts, in the order in which they lie.
#[derive(Debug, Clone, Copy)]
struct Offsets {
    span_meta: usize,
    wanted: usize,
    ropes: usize,
    tables: usize,
}

impl Facts {
    pub fn new(
        device: &Device,
        memory: DeviceSlice,
        ropes: &[RopeSpec],
        max_spans: usize,
    ) -> Result<Self, HipError> {
        Ok(Self {
            host: Staging::new(device, "step facts", memory.len())?,
            device: memory,
            ropes: ropes.iter().map(rope_table).collect(),
            max_spans,
            rows: Vec::new(),
            spans: Vec::new(),
            tables: Vec::new(),
            wanted: Vec::new(),
            positions: Vec::new(),
        })
    }

    /// Collects the facts of a step and queues their copy.
    pub fn upload(&mut self, stream: &Stream, frame: &StepFrame) -> Result<(), BandError> {
        self.upload_of(stream, frame, frame.spans())
    }

    /// The same for the last `spans` of a step, as if they were all of it.
    pub fn upload_of(&mut self, stream: &Stream, frame: &StepFrame, spans: &[Span]) -> Result<(), BandError> {
        self.collect(frame, spans);
        let offsets = self.offsets(self.rows.len());
        let end = offsets.tables + size_of_val(self.tables.as_slice());
        let mut parts: Vec<(usize, &[u8])> = vec![
            (0, cast_slice(&self.rows)),
            (offsets.span_meta, cast_slice(&self.spans)),
            (offsets.wanted, cast_slice(&self.wanted)),
            (offsets.tables, cast_slice(&self.tables)),
        ];
        let mut at = offsets.ropes;
        for table in &self.ropes {
            for values in [table.cosines(), table.sines()] {
                parts.push((at, cast_slice(values)));
                at = (at + size_of_val(values)).next_multiple_of(ALIGN);
            }
        }
        let bytes = self.host.bytes_mut()?;
        for (offset, part) in parts {
            bytes[offset..][..part.len()].copy_from_slice(part);
        }
        Ok(self.host.upload(stream, 0, self.device.part(0, end)?)?)
    }

    fn collect(&mut self, frame: &StepFrame, of_step: &[Span]) {
        let before = of_step.first().map_or(0, |span| span.first_token);
        let Self { rows, spans, tables, wanted, positions, ropes, .. } = self;
        rows.clear();
        spans.clear();
        tables.clear();
        wanted.clear();
        positions.clear();
        for (index, span) in of_step.iter().enumerate() {
            let shape = span.shape;
            let (index, table) = (number(index), number(tables.len()));
            for position in shape.start..shape.start + shape.tokens {
                rows.push(RowMeta { position, table, span: index });
                positions.push(position);
            }
            tables.extend_from_slice(frame.blocks(span));
            spans.push(SpanMeta {
                first_row: number(span.first_token - before),
                tokens: shape.tokens,
                slot: shape.state_slot,
                reset: u32::from(shape.start == 0),
            });
        }
        wanted.extend(frame.logit_token_rows().filter_map(|row| row.checked_sub(before)).map(number));
        for table in ropes {
            table.prepare(positions);
        }
    }

    /// Where the facts of a step of `rows` rows lie.
    pub fn placed(&self, rows: usize) -> Result<Placed, HipError> {
        let Offsets { span_meta, wanted, ropes, tables } = self.offsets(rows);
        let part = |from: usize, to: usize| self.device.part(from, to - from);
        Ok(Placed {
            row_meta: part(0, span_meta)?,
            span_meta: part(span_meta, wanted)?,
            wanted: part(wanted, ropes)?,
            tables: part(tables, self.device.len())?,
        })
    }

    /// A rotary embedding of a step of `rows` rows.
    pub fn rope(&self, rope: usize, rows: usize) -> Result<Rope, HipError> {
        let mut at = self.offsets(rows).ropes;
        for table in &self.ropes[..rope] {
            at += 2 * table_bytes(table, rows);
        }
        let table = &self.ropes[rope];
        let pairs = table.rotary_dim() / 2;
        let bytes = rows * pairs * size_of::<f32>();
        Ok(Rope {
            pairing: match table.pairing() {
                RopePairing::Halves => Pairing::Halves,
                RopePairing::Adjacent => Pairing::Adjacent,
            },
            pairs,
            cos: self.device.part(at, bytes)?,
            sin: self.device.part(at + table_bytes(table, rows), bytes)?,
        })
    }

    fn offsets(&self, rows: usize) -> Offsets {
        let after = |offset: usize, bytes: usize| (offset + bytes).next_multiple_of(ALIGN);
        let span_meta = after(0, rows * size_of::<RowMeta>());
        let wanted = after(span_meta, rows.min(self.max_spans) * size_of::<SpanMeta>());
        let ropes = after(wanted, rows * size_of::<u32>());
        let tables = ropes + self.ropes.iter().map(|table| 2 * table_bytes(table, rows)).sum::<usize>();
        Offsets { span_meta, wanted, ropes, tables }
    }
}

/// Bytes of the cosines, or the sines, of a table.
fn table_bytes(table: &RopeTable, rows: usize) -> usize {
    (rows * table.rotary_dim() / 2 * size_of::<f32>()).next_multiple_of(ALIGN)
}

/// Counts of a step, which the frame's limits keep far below 2^32.
fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn rope_table(spec: &RopeSpec) -> RopeTable {
    let pairing = match spec.pairing {
        program::RopePairing::Halves => RopePairing::Halves,
        program::RopePairing::Adjacent => RopePairing::Adjacent,
    };
    RopeTable::new(pairing, &spec.inv_freq, spec.magnitude)
}
