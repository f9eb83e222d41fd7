//! What a frame may contain at most, and how large a slot must be for it. Follows from the plan.

use super::step::SpanRecord;
use super::{HEADER_BYTES, PAYLOAD_ALIGN};
use crate::plan::{KV_BLOCK_TOKENS, Limits};

/// What a ring carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum FrameKind {
    /// Coordinator to stage 0: spans and token ids.
    Tokens = 1,
    /// Stage to stage: spans and residual rows.
    Residual = 2,
    /// Last stage to coordinator: logit rows.
    Logits = 3,
}

/// Upper bounds of every count in a frame. Both ends of a ring compute them from the same plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameLimits {
    /// Spans of a step, and state slots: one per live sequence.
    pub max_spans: usize,
    /// Tokens of a step.
    pub max_tokens: usize,
    /// Positions of a sequence.
    pub max_seq: usize,
    /// KV blocks of the pool; ids are below this.
    pub kv_blocks: usize,
    /// Width of a residual row.
    pub d_model: usize,
    /// Width of a logit row.
    pub vocab: usize,
    /// Rows of a logits frame.
    pub max_logit_rows: usize,
}

impl FrameLimits {
    /// The limits of a plan.
    pub fn new(limits: &Limits, d_model: usize, vocab: usize) -> Self {
        Self {
            max_spans: limits.max_sequences,
            max_tokens: limits.max_step_tokens,
            max_seq: limits.max_seq,
            kv_blocks: limits.kv_blocks,
            d_model,
            vocab,
            max_logit_rows: limits.max_logit_rows,
        }
    }

    /// Entries of the longest block table.
    pub fn max_blocks_per_span(&self) -> usize {
        self.max_seq.div_ceil(KV_BLOCK_TOKENS)
    }

    /// Entries of all block tables of a step together.
    pub fn max_blocks(&self) -> usize {
        self.max_blocks_per_span().saturating_mul(self.max_spans)
    }

    /// Bytes that a slot needs for any frame of this kind.
    pub fn slot_bytes(&self, kind: FrameKind) -> usize {
        let values = match kind {
            FrameKind::Tokens => self.max_tokens,
            FrameKind::Residual => self.max_tokens.saturating_mul(self.d_model),
            FrameKind::Logits => {
                return values_bytes(self.max_logit_rows.saturating_mul(self.vocab), HEADER_BYTES);
            }
        };
        values_bytes(values, payload_offset(self.max_spans, self.max_blocks()))
    }
}

/// Where the payload begins after this many spans and block table entries.
pub(super) fn payload_offset(spans: usize, blocks: usize) -> usize {
    let spans = spans.saturating_mul(size_of::<SpanRecord>());
    let head = values_bytes(blocks, spans.saturating_add(HEADER_BYTES));
    head.div_ceil(PAYLOAD_ALIGN).saturating_mul(PAYLOAD_ALIGN)
}

/// All payloads and block tables are 4-byte values.
fn values_bytes(values: usize, before: usize) -> usize {
    values.saturating_mul(size_of::<u32>()).saturating_add(before)
}
