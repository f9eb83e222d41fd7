//! The end of a pipeline: residual rows to logits.

use super::BandError;
use crate::load::{LoadError, Loader, Need};
use spillway_kernels::activations::{Activations, Codes, Forms};
use spillway_kernels::matmul::{Kernels, MatmulJob};
use spillway_kernels::ops::Ops;
use spillway_kernels::pack::PackedMatrix;
use spillway_kernels::pool::ThreadPool;
use spillway_model::program::{self, Program};

/// Final norm and output projection, for groups of up to `Limits::max_logit_rows` rows.
#[derive(Debug)]
pub(super) struct Head {
    norm: Vec<f32>,
    eps: f32,
    output: PackedMatrix,
    forms: Forms,
    /// Residual rows that want logits, `[group, d_model]`, then normed.
    gathered: Vec<f32>,
    normed: Vec<f32>,
    /// `[group, vocab]`.
    logits: Vec<f32>,
    inputs: Activations,
}

impl Head {
    /// What [`Head::load`] asks the loader for, in order.
    pub(super) fn needs(program: &Program) -> [Need<'_>; 2] {
        [Need::Matrix(&program.head.output), Need::Values(&program.head.norm)]
    }

    pub(super) fn load(
        head: &program::Head,
        loader: &mut Loader<'_>,
        rows: usize,
        codes: Codes,
    ) -> Result<Self, LoadError> {
        let output = loader.matrix(&head.output)?;
        let norm = loader.values(&head.norm)?;
        let (d_model, vocab) = (output.cols(), output.rows());
        let forms = Forms::of([output.format()], codes);
        Ok(Self {
            norm,
            eps: head.eps,
            forms,
            gathered: vec![0.0; rows * d_model],
            normed: vec![0.0; rows * d_model],
            logits: vec![0.0; rows * vocab],
            inputs: Activations::with_capacity(rows, d_model, forms),
            output,
        })
    }

    /// Private bytes of the buffers.
    pub(super) fn scratch_bytes(&self) -> usize {
        let values = self.gathered.len() + self.normed.len() + self.logits.len();
        values * size_of::<f32>() + self.inputs.bytes()
    }

    /// Width of the residual.
    fn d_model(&self) -> usize {
        self.output.cols()
    }

    /// Rows of a group.
    pub(super) fn group(&self) -> usize {
        self.gathered.len() / self.d_model()
    }

    /// Logits `[rows, vocab]` of the given rows of `residual`; takes at most [`Head::group`] rows from the iterator.
    pub(super) fn run(
        &mut self,
        pool: &ThreadPool,
        kernels: &Kernels,
        ops: &Ops,
        residual: &[f32],
        rows: impl Iterator<Item = usize>,
    ) -> Result<&[f32], BandError> {
        let d_model = self.d_model();
        let mut count = 0;
        for (row, gathered) in rows.zip(self.gathered.chunks_exact_mut(d_model)) {
            gathered.copy_from_slice(&residual[row * d_model..][..d_model]);
            count += 1;
        }
        let gathered = &self.gathered[..count * d_model];
        let normed = &mut self.normed[..count * d_model];
        let logits = &mut self.logits[..count * self.output.rows()];
        ops.rms_norm(pool, gathered, &self.norm, self.eps, normed)?;
        kernels.prepare(pool, normed, d_model, self.forms, &mut self.inputs)?;
        kernels.matmul(pool, &self.inputs, &mut [MatmulJob::store(&self.output, logits)])?;
        Ok(logits)
    }
}
