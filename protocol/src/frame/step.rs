//! The spans of a step: which tokens of which sequences, where their state lives, and which rows want logits.

use super::limits::payload_offset;
use super::slot::{SlotRead, SlotReadExt, SlotWrite, SlotWriteExt};
use super::{FrameError, FrameKind, FrameLimits, HEADER_BYTES, Header, MAGIC, narrow, within};
use crate::plan::KV_BLOCK_TOKENS;

/// Which rows of a span go through the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LogitRows {
    /// None: a prefill chunk that is not the last.
    None = 0,
    /// The last token's: decoding, the end of a prompt.
    Last = 1,
    /// Every token's: scoring.
    All = 2,
}

impl LogitRows {
    /// How many rows that is for a span of `tokens` tokens.
    pub fn count(self, tokens: usize) -> usize {
        match self {
            LogitRows::None => 0,
            LogitRows::Last => tokens.min(1),
            LogitRows::All => tokens,
        }
    }

    fn from_u32(value: u32) -> Option<Self> {
        [LogitRows::None, LogitRows::Last, LogitRows::All].into_iter().find(|rows| *rows as u32 == value)
    }
}

/// Where the rows of a residual frame lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Place {
    /// In the slot, behind the block tables.
    #[default]
    Slot = 0,
    /// In the memory of the receiving stage's device that belongs to the slot (see [`crate::control::DeviceShare`]).
    Device = 1,
}

impl Place {
    fn from_u32(value: u32) -> Option<Self> {
        [Place::Slot, Place::Device].into_iter().find(|place| *place as u32 == value)
    }
}

/// Consecutive tokens of one sequence in a step, without the block table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanShape {
    /// Identity of the sequence, for logs; workers key nothing by it.
    pub sequence: u64,
    /// State slot of the sequence. A span that starts at position 0 begins the slot afresh.
    pub state_slot: u32,
    /// Position of the first token.
    pub start: u32,
    /// Tokens, at least one.
    pub tokens: u32,
    /// Rows that want logits.
    pub logits: LogitRows,
    /// Whether spilled layers are lifted for it: CPU workers pass its rows on, and the GPU behind them runs their layers
    /// ([`crate::plan::Lift`]). Such spans are the last of a step.
    pub lifted: bool,
}

/// A span inside a [`StepFrame`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The span.
    pub shape: SpanShape,
    /// Row of its first token among all tokens of the step.
    pub first_token: usize,
    first_block: usize,
    block_count: usize,
}

/// A span as it lies in a slot.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct SpanRecord {
    sequence: u64,
    state_slot: u32,
    start: u32,
    tokens: u32,
    logits: u32,
    blocks: u32,
    lifted: u32,
}

/// The spans of one step. Reused from step to step; allocates only while it grows to its largest step.
#[derive(Debug, Clone, Default)]
pub struct StepFrame {
    epoch: u64,
    step: u64,
    spans: Vec<Span>,
    blocks: Vec<u32>,
    tokens: usize,
    place: Place,
}

impl StepFrame {
    /// An empty step with room for the largest one.
    pub fn with_limits(limits: &FrameLimits) -> Self {
        let blocks = limits.max_blocks().min(limits.kv_blocks.saturating_mul(limits.max_spans));
        Self {
            spans: Vec::with_capacity(limits.max_spans),
            blocks: Vec::with_capacity(blocks),
            ..Self::default()
        }
    }

    /// Empties the frame for a new step.
    pub fn begin(&mut self, epoch: u64, step: u64) {
        self.epoch = epoch;
        self.step = step;
        self.spans.clear();
        self.blocks.clear();
        self.tokens = 0;
        self.place = Place::Slot;
    }

    /// Appends a span. `blocks[i]` is the KV block of positions `32 i .. 32 i + 32` of the sequence, and the table reaches
    /// exactly to the span's last token; it may be empty for a model that keeps no keys and values.
    pub fn push(&mut self, shape: SpanShape, blocks: &[u32], limits: &FrameLimits) -> Result<(), FrameError> {
        let first_block = self.blocks.len();
        self.check(&shape, blocks.len(), limits)?;
        check_block_ids(blocks, limits)?;
        self.blocks.extend_from_slice(blocks);
        self.append(shape, first_block, blocks.len());
        Ok(())
    }

    fn append(&mut self, shape: SpanShape, first_block: usize, block_count: usize) {
        self.spans.push(Span { shape, first_token: self.tokens, first_block, block_count });
        self.tokens += shape.tokens as usize;
    }

    /// Pipeline incarnation the step belongs to.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Number of the step, counted by the coordinator.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Where the rows of the frame lie that was read last.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The spans in row order.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The spans for which no layers are lifted, and those for which they are, with the row of the first token of the latter.
    pub fn by_lift(&self) -> (&[Span], &[Span], usize) {
        let (here, lifted) = self.spans.split_at(self.spans.partition_point(|span| !span.shape.lifted));
        (here, lifted, lifted.first().map_or(self.tokens, |span| span.first_token))
    }

    /// KV block table of a span of this frame.
    pub fn blocks(&self, span: &Span) -> &[u32] {
        &self.blocks[span.first_block..span.first_block + span.block_count]
    }

    /// Tokens of all spans together.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Logit rows of all spans together.
    pub fn logit_rows(&self) -> usize {
        self.spans.iter().map(|span| span.shape.logits.count(span.shape.tokens as usize)).sum()
    }

    /// The rows that want logits, in order, among all tokens of the step.
    pub fn logit_token_rows(&self) -> impl Iterator<Item = usize> {
        self.spans.iter().flat_map(|span| {
            let tokens = span.shape.tokens as usize;
            let wanted = span.shape.logits.count(tokens);
            span.first_token + tokens - wanted..span.first_token + tokens
        })
    }

    /// Where the payload of this frame begins in a slot.
    pub(super) fn payload_offset(&self) -> usize {
        payload_offset(self.spans.len(), self.blocks.len())
    }

    /// Writes header, spans and block tables; returns where the payload goes.
    pub(super) fn write(
        &self,
        slot: &mut (impl SlotWrite + ?Sized),
        kind: FrameKind,
        width: usize,
        place: Place,
    ) -> Result<usize, FrameError> {
        let header = Header {
            magic: MAGIC,
            kind: kind as u32,
            epoch: self.epoch,
            step: self.step,
            spans: narrow("spans", self.spans.len())?,
            blocks: narrow("KV blocks", self.blocks.len())?,
            rows: narrow("tokens", self.tokens)?,
            width: narrow("the row width", width)?,
            place: place as u32,
            ..Header::default()
        };
        slot.put_slice(0, &[header])?;
        for (index, span) in self.spans.iter().enumerate() {
            let record = SpanRecord {
                sequence: span.shape.sequence,
                state_slot: span.shape.state_slot,
                start: span.shape.start,
                tokens: span.shape.tokens,
                logits: span.shape.logits as u32,
                blocks: narrow("KV blocks", span.block_count)?,
                lifted: span.shape.lifted.into(),
            };
            slot.put_slice(record_offset(index), &[record])?;
        }
        slot.put_slice(record_offset(self.spans.len()), &self.blocks)?;
        Ok(self.payload_offset())
    }

    /// Reads spans and block tables, checking every number.
    pub(super) fn read(
        &mut self,
        slot: &(impl SlotRead + ?Sized),
        header: &Header,
        limits: &FrameLimits,
    ) -> Result<(), FrameError> {
        let (spans, blocks) = (header.spans as usize, header.blocks as usize);
        within("spans", spans, limits.max_spans)?;
        within("KV blocks", blocks, limits.max_blocks())?;
        self.begin(header.epoch, header.step);
        let place = Place::from_u32(header.place);
        self.place = place.ok_or(FrameError::Inconsistent("its rows lie in an unknown place"))?;
        let mut first_block = 0;
        for index in 0..spans {
            let mut record = [SpanRecord::default()];
            slot.get_slice(record_offset(index), &mut record)?;
            let (shape, count) = record[0].decode()?;
            self.check(&shape, count, limits)?;
            self.append(shape, first_block, count);
            first_block += count;
        }
        if first_block != blocks {
            return Err(FrameError::Inconsistent("the block tables of its spans do not add up"));
        }
        if self.tokens != header.rows as usize || self.tokens == 0 {
            return Err(FrameError::Inconsistent("the tokens of its spans do not add up"));
        }
        self.blocks.resize(blocks, 0);
        slot.get_slice(record_offset(spans), &mut self.blocks)?;
        check_block_ids(&self.blocks, limits)
    }

    /// Whether a span may be appended.
    fn check(&self, shape: &SpanShape, blocks: usize, limits: &FrameLimits) -> Result<(), FrameError> {
        let tokens = shape.tokens as usize;
        let end = (shape.start as usize).saturating_add(tokens);
        if tokens == 0 {
            return Err(FrameError::Inconsistent("a span has no tokens"));
        }
        within("spans", self.spans.len() + 1, limits.max_spans)?;
        within("tokens", self.tokens.saturating_add(tokens), limits.max_tokens)?;
        within("the end position of a span", end, limits.max_seq)?;
        within("a state slot", shape.state_slot as usize, limits.max_spans.saturating_sub(1))?;
        if blocks != 0 && blocks != end.div_ceil(KV_BLOCK_TOKENS) {
            return Err(FrameError::Inconsistent(
                "a block table does not reach exactly to its span's last token",
            ));
        }
        if self.spans.iter().any(|span| span.shape.state_slot == shape.state_slot) {
            return Err(FrameError::Inconsistent("two spans use the same state slot"));
        }
        if !shape.lifted && self.spans.last().is_some_and(|span| span.shape.lifted) {
            return Err(FrameError::Inconsistent("a span for which layers are lifted is not the last"));
        }
        Ok(())
    }
}

impl SpanRecord {
    fn decode(&self) -> Result<(SpanShape, usize), FrameError> {
        let logits = LogitRows::from_u32(self.logits);
        let shape = SpanShape {
            sequence: self.sequence,
            state_slot: self.state_slot,
            start: self.start,
            tokens: self.tokens,
            logits: logits
                .ok_or(FrameError::Inconsistent("a span asks for an unknown choice of logit rows"))?,
            lifted: match self.lifted {
                0 => false,
                1 => true,
                _ => return Err(FrameError::Inconsistent("a span is lifted in an unknown way")),
            },
        };
        Ok((shape, self.blocks as usize))
    }
}

fn record_offset(index: usize) -> usize {
    HEADER_BYTES + index * size_of::<SpanRecord>()
}

fn check_block_ids(blocks: &[u32], limits: &FrameLimits) -> Result<(), FrameError> {
    let largest = blocks.iter().copied().max().unwrap_or_default() as usize;
    if blocks.is_empty() {
        Ok(())
    } else {
        within("a KV block id", largest, limits.kv_blocks.saturating_sub(1))
    }
}
