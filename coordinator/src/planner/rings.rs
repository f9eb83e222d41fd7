//! Sizes of the rings between the stages: the incoming ring of stage 0 carries token ids, every other one residual rows,
//! the last one logits.

use super::ModelSummary;
use spillway_protocol::plan::Limits;

/// Slots of every ring: one being read, one being written, one ready.
pub const RING_SLOTS: usize = 3;

/// Room for a frame's header and spans; checked against the frame layout where rings are made.
const FRAME_OVERHEAD: u64 = 64 << 10;

/// Bytes of the ring that leaves a stage.
pub(super) fn outgoing_bytes(model: &ModelSummary, limits: &Limits, head: bool) -> u64 {
    let values = if head {
        limits.max_logit_rows * model.model.vocab
    } else {
        limits.max_step_tokens * model.model.d_model
    };
    RING_SLOTS as u64 * (FRAME_OVERHEAD + (values * size_of::<f32>()) as u64)
}

/// Bytes of the ring that brings token ids to stage 0.
pub(super) fn incoming_bytes(limits: &Limits) -> u64 {
    RING_SLOTS as u64 * (FRAME_OVERHEAD + (limits.max_step_tokens * size_of::<u32>()) as u64)
}
