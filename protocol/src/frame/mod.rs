//! Step frames: what a ring slot holds.
//!
//! A **step** is one forward of a set of tokens through the pipeline. Its tokens are grouped in [`Span`]s, one per
//! sequence. The coordinator sends the spans with token ids to stage 0; every stage passes the spans on with the residual
//! rows `[tokens, d_model]` as f32; the last stage answers with one or more logits frames `[rows, vocab]`. A step from
//! which nobody wants logits is answered by one logits frame of zero rows, so that its end is always seen.
//!
//! Frames are written into a slot and read out of it in place: the payload is copied once between the caller's buffer
//! and the slot, and decoding into a reused [`StepFrame`] allocates nothing. Processes of one build on one machine talk
//! here, so numbers are in native byte order. A peer is not trusted: every count is checked against [`FrameLimits`]
//! before it is used, and a bad frame is an error value.

mod limits;
mod slot;
mod step;

pub use limits::{FrameKind, FrameLimits};
pub use slot::{SlotRead, SlotWrite};
pub use step::{LogitRows, Place, Span, SpanShape, StepFrame};

use slot::{SlotReadExt, SlotWriteExt};

/// Why a frame cannot be written or is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The slot is too small, which means that the two sides disagree on the limits.
    #[error(
        "step frame: {need} bytes do not fit a slot of {have}; both sides must use the limits of the same plan"
    )]
    SlotTooSmall {
        /// Bytes needed.
        need: usize,
        /// Bytes of the slot.
        have: usize,
    },
    /// Not a frame of this version.
    #[error("step frame: the slot does not begin with a frame header of this version (found {0:#010x})")]
    Magic(u32),
    /// A kind that this ring does not carry.
    #[error("step frame: kind {found} where {expected:?} belongs; the pipeline is wired wrongly")]
    Kind {
        /// Kind the ring carries.
        expected: FrameKind,
        /// Kind number found.
        found: u32,
    },
    /// A number beyond its limit.
    #[error("step frame: {what} is {found}, the limit is {limit}; the sender does not keep to the plan")]
    Limit {
        /// What was counted.
        what: &'static str,
        /// Value found.
        found: u64,
        /// Largest value allowed.
        limit: u64,
    },
    /// Numbers that contradict one another.
    #[error("step frame: {0}; the sender is at fault, the step cannot run")]
    Inconsistent(&'static str),
    /// A caller's buffer has the wrong length.
    #[error("step frame: a buffer of {have} values was given for {need}")]
    Buffer {
        /// Values of the payload.
        need: usize,
        /// Values of the buffer.
        have: usize,
    },
}

impl FrameError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            FrameError::SlotTooSmall { .. } => "frame_slot_too_small",
            FrameError::Magic(_) => "frame_magic",
            FrameError::Kind { .. } => "frame_kind",
            FrameError::Limit { .. } => "frame_limit",
            FrameError::Inconsistent(_) => "frame_inconsistent",
            FrameError::Buffer { .. } => "frame_buffer",
        }
    }
}

const MAGIC: u32 = u32::from_le_bytes(*b"SPF1");
/// Payloads begin on a cache line.
const PAYLOAD_ALIGN: usize = 64;

/// The first 64 bytes of every frame.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Header {
    magic: u32,
    kind: u32,
    epoch: u64,
    step: u64,
    spans: u32,
    blocks: u32,
    /// Rows of the payload: tokens, or logit rows.
    rows: u32,
    /// Values per row.
    width: u32,
    /// Index of the first row among all logit rows of the step.
    first_row: u32,
    /// 1 on the last logits frame of a step.
    last: u32,
    /// [`Place`] of the payload.
    place: u32,
    reserved: [u32; 3],
}

const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 64);

/// Sends the spans with their token ids to stage 0. `ids` holds one id per token, in span order.
pub fn write_tokens(slot: &mut impl SlotWrite, frame: &StepFrame, ids: &[u32]) -> Result<(), FrameError> {
    let at = frame.write(slot, FrameKind::Tokens, 1, Place::Slot)?;
    expect_len(frame.tokens(), ids.len())?;
    slot.put_slice(at, ids)
}

/// Sends the spans with their residual rows `[tokens, d_model]` to the next stage.
pub fn write_residual(
    slot: &mut impl SlotWrite,
    frame: &StepFrame,
    d_model: usize,
    rows: &[f32],
) -> Result<(), FrameError> {
    let at = write_residual_head(slot, frame, d_model, Place::Slot)?;
    expect_len(frame.tokens().saturating_mul(d_model), rows.len())?;
    slot.put_slice(at, rows)
}

/// Writes all of a residual frame but the rows, for someone else to put where `place` says. The result is where they begin
/// in the slot.
pub fn write_residual_head(
    slot: &mut impl SlotWrite,
    frame: &StepFrame,
    d_model: usize,
    place: Place,
) -> Result<usize, FrameError> {
    frame.write(slot, FrameKind::Residual, d_model, place)
}

/// Reads the spans of a [`FrameKind::Tokens`] or [`FrameKind::Residual`] frame into `frame`, replacing what it held.
///
/// Check `frame.epoch()` against the own epoch next, then fetch the payload with [`read_tokens`] or [`read_residual`].
pub fn read_step(
    slot: &impl SlotRead,
    kind: FrameKind,
    limits: &FrameLimits,
    frame: &mut StepFrame,
) -> Result<(), FrameError> {
    let header = read_header(slot, kind)?;
    let width = match kind {
        FrameKind::Tokens => 1,
        FrameKind::Residual => limits.d_model,
        FrameKind::Logits => return Err(FrameError::Inconsistent("a logits frame has no spans")),
    };
    if header.width as usize != width {
        return Err(FrameError::Inconsistent("its rows have another width than the model"));
    }
    if header.place != Place::Slot as u32 && kind == FrameKind::Tokens {
        return Err(FrameError::Inconsistent("token ids never lie on a device"));
    }
    frame.read(slot, &header, limits)
}

/// Fetches the token ids of the frame just read; `ids` must be exactly `frame.tokens()` long. Every id is below `vocab`.
pub fn read_tokens(
    slot: &impl SlotRead,
    frame: &StepFrame,
    limits: &FrameLimits,
    ids: &mut [u32],
) -> Result<(), FrameError> {
    expect_len(frame.tokens(), ids.len())?;
    slot.get_slice(frame.payload_offset(), ids)?;
    let largest = ids.iter().copied().max().unwrap_or_default();
    within("a token id", largest as usize, limits.vocab.saturating_sub(1))
}

/// Fetches the residual rows of the frame just read, which lie in the slot; `rows` must be exactly `[frame.tokens(), d_model]` long.
pub fn read_residual(
    slot: &impl SlotRead,
    frame: &StepFrame,
    limits: &FrameLimits,
    rows: &mut [f32],
) -> Result<(), FrameError> {
    expect_len(frame.tokens() * limits.d_model, rows.len())?;
    slot.get_slice(residual_offset(frame)?, rows)
}

/// Where the residual rows of the frame just read begin in the slot.
pub fn residual_offset(frame: &StepFrame) -> Result<usize, FrameError> {
    match frame.place() {
        Place::Slot => Ok(frame.payload_offset()),
        Place::Device => {
            Err(FrameError::Inconsistent("its rows lie on a device that this stage does not have"))
        }
    }
}

/// What a logits frame says about its rows. Rows of a step are numbered in span order, then token order, counting only
/// the rows that were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitsFrame {
    /// Pipeline incarnation.
    pub epoch: u64,
    /// Step the rows belong to.
    pub step: u64,
    /// Number of the first row in the frame.
    pub first_row: usize,
    /// Rows in the frame, at most `Limits::max_logit_rows`.
    pub rows: usize,
    /// Whether the step ends with this frame.
    pub last: bool,
}

/// Sends logit rows `[about.rows, vocab]` to the coordinator.
pub fn write_logits(
    slot: &mut impl SlotWrite,
    about: &LogitsFrame,
    vocab: usize,
    logits: &[f32],
) -> Result<(), FrameError> {
    expect_len(about.rows.saturating_mul(vocab), logits.len())?;
    let offset = write_logits_head(slot, about, vocab)?;
    slot.put_slice(offset, logits)
}

/// The same without the rows, which whoever has them puts at the offset in the slot that is returned.
pub fn write_logits_head(
    slot: &mut impl SlotWrite,
    about: &LogitsFrame,
    vocab: usize,
) -> Result<usize, FrameError> {
    let header = Header {
        magic: MAGIC,
        kind: FrameKind::Logits as u32,
        epoch: about.epoch,
        step: about.step,
        rows: narrow("logit rows", about.rows)?,
        width: narrow("the vocabulary", vocab)?,
        first_row: narrow("the first row", about.first_row)?,
        last: about.last.into(),
        ..Header::default()
    };
    slot.put_slice(0, &[header])?;
    Ok(HEADER_BYTES)
}

/// Reads the header of a logits frame; fetch the rows with [`read_logit_row`].
pub fn read_logits(slot: &impl SlotRead, limits: &FrameLimits) -> Result<LogitsFrame, FrameError> {
    let header = read_header(slot, FrameKind::Logits)?;
    let (rows, first_row) = (header.rows as usize, header.first_row as usize);
    within("logit rows", rows, limits.max_logit_rows)?;
    within("the end of the logit rows", first_row.saturating_add(rows), limits.max_tokens)?;
    within("the last flag", header.last as usize, 1)?;
    if header.width as usize != limits.vocab {
        return Err(FrameError::Inconsistent("its rows have another width than the vocabulary"));
    }
    Ok(LogitsFrame { epoch: header.epoch, step: header.step, first_row, rows, last: header.last == 1 })
}

/// Fetches row `row` (0-based inside the frame) of a logits frame; `logits` must be exactly `vocab` long.
pub fn read_logit_row(
    slot: &impl SlotRead,
    about: &LogitsFrame,
    row: usize,
    limits: &FrameLimits,
    logits: &mut [f32],
) -> Result<(), FrameError> {
    expect_len(limits.vocab, logits.len())?;
    within("the row", row, about.rows.saturating_sub(1))?;
    slot.get_slice(HEADER_BYTES + row * limits.vocab * size_of::<f32>(), logits)
}

fn read_header(slot: &impl SlotRead, expected: FrameKind) -> Result<Header, FrameError> {
    let mut header = [Header::default()];
    slot.get_slice(0, &mut header)?;
    let [header] = header;
    if header.magic != MAGIC {
        return Err(FrameError::Magic(header.magic));
    }
    if header.kind != expected as u32 {
        return Err(FrameError::Kind { expected, found: header.kind });
    }
    Ok(header)
}

fn expect_len(need: usize, have: usize) -> Result<(), FrameError> {
    if need == have { Ok(()) } else { Err(FrameError::Buffer { need, have }) }
}

fn within(what: &'static str, found: usize, limit: usize) -> Result<(), FrameError> {
    if found <= limit {
        return Ok(());
    }
    Err(FrameError::Limit { what, found: found as u64, limit: limit as u64 })
}

fn narrow(what: &'static str, value: usize) -> Result<u32, FrameError> {
    u32::try_from(value).map_err(|_| FrameError::Limit { what, found: value as u64, limit: u32::MAX.into() })
}

#[cfg(test)]
mod tests;
