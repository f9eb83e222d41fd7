//! Residual rows on their way between a band and the rings next to it.
//!
//! The rows `[tokens, d_model]` of a step lie in a slot, behind a head that has been checked; or, where the stage before can write
//! to this one's device, in the device's memory. A band moves them as it likes: through its own memory, or with a device that
//! reads and writes the ring itself.

use spillway_protocol::frame::{
    FrameError, FrameLimits, Place, StepFrame, read_residual, residual_offset, write_residual,
    write_residual_head,
};
use spillway_protocol::ring::{SlotReader, SlotWriter};

/// The rows of a step that has come. Dropping them gives the slot, and what belongs to it, back to the stage before.
#[derive(Debug)]
pub struct Incoming<'a> {
    slot: SlotReader<'a>,
    frame: &'a StepFrame,
    limits: &'a FrameLimits,
}

impl<'a> Incoming<'a> {
    /// The rows of `frame`, which was read from `slot`.
    pub fn new(slot: SlotReader<'a>, frame: &'a StepFrame, limits: &'a FrameLimits) -> Self {
        Self { slot, frame, limits }
    }

    /// Tokens of the step.
    pub fn tokens(&self) -> usize {
        self.frame.tokens()
    }

    /// Where the rows lie.
    pub fn place(&self) -> Place {
        self.frame.place()
    }

    /// Number of the slot in its ring.
    pub fn slot(&self) -> usize {
        self.slot.index()
    }

    /// Where the rows begin in the memory of the ring.
    ///
    /// # Errors
    /// They lie elsewhere, or do not fit the slot.
    pub fn in_ring(&self) -> Result<usize, FrameError> {
        self.slot.locate(residual_offset(self.frame)?, row_bytes(self.frame, self.limits))
    }

    /// Copies the rows out of the slot; `rows` has exactly their length.
    ///
    /// # Errors
    /// They lie elsewhere, or `rows` has another length.
    pub fn copy_to(&self, rows: &mut [f32]) -> Result<(), FrameError> {
        read_residual(&self.slot, self.frame, self.limits, rows)
    }
}

/// The rows of a step that are to go out, in a free slot. Exactly one of its methods is called.
#[derive(Debug)]
pub struct Outgoing<'s, 'r> {
    slot: &'s mut SlotWriter<'r>,
    frame: &'s StepFrame,
    limits: &'s FrameLimits,
}

impl<'s, 'r> Outgoing<'s, 'r> {
    /// The rows of `frame`, for `slot`.
    pub fn new(slot: &'s mut SlotWriter<'r>, frame: &'s StepFrame, limits: &'s FrameLimits) -> Self {
        Self { slot, frame, limits }
    }

    /// Tokens of the step.
    pub fn tokens(&self) -> usize {
        self.frame.tokens()
    }

    /// Number of the slot in its ring.
    pub fn slot(&self) -> usize {
        self.slot.index()
    }

    /// Copies the rows into the slot.
    ///
    /// # Errors
    /// `rows` has not exactly their length, or the slot is too small.
    pub fn copy_from(self, rows: &[f32]) -> Result<(), FrameError> {
        write_residual(self.slot, self.frame, self.limits.d_model, rows)
    }

    /// Where the rows begin in the memory of the ring, for a device that writes them there.
    ///
    /// # Errors
    /// The slot is too small.
    pub fn in_ring(self) -> Result<usize, FrameError> {
        let offset = write_residual_head(self.slot, self.frame, self.limits.d_model, Place::Slot)?;
        self.slot.locate(offset, row_bytes(self.frame, self.limits))
    }

    /// Says that the rows lie in the next stage's device.
    ///
    /// # Errors
    /// The slot is too small.
    pub fn on_device(self) -> Result<(), FrameError> {
        write_residual_head(self.slot, self.frame, self.limits.d_model, Place::Device).map(|_| ())
    }
}

fn row_bytes(frame: &StepFrame, limits: &FrameLimits) -> usize {
    frame.tokens() * limits.d_model * size_of::<f32>()
}
