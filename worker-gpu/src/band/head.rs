//! Final norm and output projection, for groups of up to `Limits::max_logit_rows` rows.

use super::error::BandError;
use super::exec::{Prepared, Scratch};
use super::facts::Placed;
use super::load::Need;
use super::mapped::mapped_bytes;
use super::needs::ScratchBytes;
use super::plan::{Builder, reads_int8};
use super::staging::Staging;
use crate::hip::{Device, DeviceSlice, HipError, Stream};
use crate::launch::{Int8Rows, Kernels, Matrix, Norm, NormRows, Output};
use spillway_model::file::ModelFile;
use spillway_model::program;
use spillway_protocol::frame::LogitsFrame;

#[derive(Debug)]
pub(super) struct Head {
    norm: Norm,
    output: Matrix,
    /// Residual rows that want logits, normed, `[group, d_model]`.
    gathered: DeviceSlice,
    /// `[group, vocab]`.
    logits: DeviceSlice,
    host: Staging,
    group: usize,
}

impl Head {
    /// Bytes of device memory that it takes, as memory is reserved for it.
    pub fn bytes(model: &ModelFile, head: &program::Head, bytes: &ScratchBytes) -> Result<u64, BandError> {
        let weights = [Need::Matrix(&head.output), Need::Values(&head.norm)];
        let weights = weights.iter().map(|need| Ok(mapped_bytes(need.stored_bytes(model)?)));
        let rows = [bytes.gathered, bytes.logits].map(|rows| mapped_bytes(rows as u64));
        Ok(weights.sum::<Result<u64, BandError>>()? + rows.iter().sum::<u64>())
    }

    pub fn load(
        builder: &mut Builder<'_, '_, '_>,
        device: &Device,
        head: &program::Head,
        bytes: &ScratchBytes,
        group: usize,
    ) -> Result<Self, BandError> {
        let output = builder.matrix(&head.output)?;
        let norm = Norm { weight: builder.values(&head.norm)?, width: output.cols(), epsilon: head.eps };
        Ok(Self {
            output,
            norm,
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

    /// Queues the logits `[rows, vocab]` of a group of the step's rows; where they will be on the device, none without rows.
    pub fn queue(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        scratch: &Scratch,
        placed: &Placed,
        about: &LogitsFrame,
    ) -> Result<Option<DeviceSlice>, BandError> {
        let (rows, d_model, vocab) = (about.rows, self.output.cols(), self.output.rows());
        if rows == 0 {
            return Ok(None);
        }
        let wanted = placed.wanted.part(about.first_row * size_of::<u32>(), rows * size_of::<u32>())?;
        let int8 =
            reads_int8(&self.output).then(|| Int8Rows::new(scratch.int8, rows, d_model)).transpose()?;
        let (indices, out) = (Some(wanted), self.gathered);
        kernels.rms_norm(
            stream,
            &self.norm,
            &NormRows { count: rows, x: scratch.buffers[0], indices, out, int8 },
        )?;
        let inputs = Prepared { values: out, int8 };
        let to = Output::store(self.logits);
        kernels.matmul(stream, &self.output, inputs.of(&self.output), rows, to)?;
        Ok(Some(self.logits.part(0, rows * vocab * size_of::<f32>())?))
    }

    /// Fetches logits and waits for them.
    pub fn fetch(&mut self, stream: &Stream, logits: DeviceSlice) -> Result<&[f32], HipError> {
        self.host.download(stream, 0, logits)?;
        Ok(&self.host.values_mut()?[..logits.len() / size_of::<f32>()])
    }
}
