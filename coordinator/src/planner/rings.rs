//! Sizes of the rings between the stages: the incoming ring of stage 0 carries token ids, every other one residual rows,
//! the last one logits.

use super::ModelSummary;
use spillway_protocol::frame::{FrameKind, FrameLimits};
use spillway_protocol::plan::Limits;
use spillway_protocol::ring::Ring;

/// Slots of every ring: one that the consumer reads while the producer fills the other.
pub const RING_SLOTS: u32 = 2;

/// Bytes of the ring that leaves a stage.
pub(super) fn outgoing_bytes(model: &ModelSummary, limits: &Limits, head: bool) -> u64 {
    ring_bytes(model, limits, if head { FrameKind::Logits } else { FrameKind::Residual })
}

/// Bytes of the ring that brings token ids to stage 0.
pub(super) fn incoming_bytes(model: &ModelSummary, limits: &Limits) -> u64 {
    ring_bytes(model, limits, FrameKind::Tokens)
}

fn ring_bytes(model: &ModelSummary, limits: &Limits, kind: FrameKind) -> u64 {
    let frames = FrameLimits::new(limits, model.model.d_model, model.model.vocab);
    Ring::bytes(RING_SLOTS, frames.slot_bytes(kind)) as u64
}
