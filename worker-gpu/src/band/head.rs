//! Final norm and output projection, for groups of up to `Limits::max_logit_rows` rows.

use super::error::BandError;
use super::exec::{Scratch, prepare};
use super::facts::Placed;
use super::needs::ScratchBytes;
use super::plan::Builder;
use super::staging::Staging;
use crate::hip::{Device, DeviceSlice, Stream};
use crate::launch::{Kernels, Matrix, Output};
use spillway_model::program;
use spillway_protocol::frame::LogitsFrame;

#[derive(Debug)]
pub(super) struct Head {
    norm: DeviceSlice,
    eps: f32,
    output: Matrix,
    /// Residual rows that want logits, then normed, `[group, d_model]`.
    gathered: DeviceSlice,
    /// `[group, vocab]`.
    logits: DeviceSlice,
    host: Staging,
    group: usize,
}

impl Head {
    pub fn load(
        builder: &mut Builder<'_, '_, '_>,
        device: &Device,
        head: &program::Head,
        bytes: &ScratchBytes,
        group: usize,
    ) -> Result<Self, BandError> {
        Ok(Self {
            output: builder.matrix(&head.output)?,
            norm: builder.values(&head.norm)?,
            eps: head.eps,
            gathered: builder.arena.allocate("rows for logits", bytes.gathered)?,
            logits: builder.arena.allocate("logits", bytes.logits)?,
            host: Staging::new(device, "logits", bytes.logits)?,
            group,
        })
    }

    /// Rows of a group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Computes the logits `[rows, vocab]` of a group of the step's rows and waits for them.
    pub fn run(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        scratch: &Scratch,
        placed: &Placed,
        about: &LogitsFrame,
    ) -> Result<&[f32], BandError> {
        let (rows, d_model, vocab) = (about.rows, self.output.cols(), self.output.rows());
        if rows == 0 {
            return Ok(&[]);
        }
        let wanted = placed.wanted.part(about.first_row * size_of::<u32>(), rows * size_of::<u32>())?;
        let residual = scratch.buffers[0];
        kernels.gather_rows(stream, residual, wanted, self.gathered, rows, d_model)?;
        kernels.rms_norm(stream, self.gathered, self.norm, self.gathered, rows, d_model, self.eps)?;
        let inputs = prepare(kernels, stream, scratch, self.gathered, rows, std::iter::once(&self.output))?;
        let to = Output::store(self.logits);
        kernels.matmul(stream, &self.output, inputs.of(&self.output), rows, to)?;
        self.host.download(stream, self.logits.part(0, rows * vocab * size_of::<f32>())?)?;
        Ok(&self.host.values_mut()?[..rows * vocab])
    }
}
