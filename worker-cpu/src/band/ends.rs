//! The two ends of a pipeline: token ids to residual rows at the beginning, residual rows to logits at the end.

use super::BandError;
use crate::load::{LoadError, Loader, Need, format_of};
use spillway_kernels::activations::{Activations, Codes, Forms};
use spillway_kernels::formats::Format;
use spillway_kernels::matmul::{Kernels, MatmulJob};
use spillway_kernels::ops::Ops;
use spillway_kernels::pack::PackedMatrix;
use spillway_kernels::pool::ThreadPool;
use spillway_model::file::ModelFile;
use spillway_model::gguf::TensorInfo;
use spillway_model::program::{self, Program};
use std::sync::Arc;

/// The embedding, read row by row from the mapped file: page cache instead of private memory.
#[derive(Debug)]
pub(super) struct Embedding {
    model: Arc<ModelFile>,
    tensor: TensorInfo,
    vocab: usize,
    d_model: usize,
    format: Format,
    row_bytes: usize,
}

impl Embedding {
    pub(super) fn new(model: &Arc<ModelFile>) -> Result<Self, LoadError> {
        let weight = &model.program().embed;
        let source = model.weight(weight)?;
        let format = format_of(weight, &source)?;
        let named = |source| LoadError::Format { name: weight.name.clone(), source };
        let row_bytes = format.row_bytes(weight.cols).map_err(named)?;
        let (tensor, vocab, d_model) = (source.info.clone(), weight.rows, weight.cols);
        Ok(Self { model: Arc::clone(model), tensor, vocab, d_model, format, row_bytes })
    }

    /// Bytes of the embedding in the file.
    pub(super) fn file_bytes(&self) -> usize {
        self.row_bytes * self.vocab
    }

    /// Writes the rows of `ids` to `residual`, `[ids, d_model]`.
    pub(super) fn rows(&self, ids: &[u32], residual: &mut [f32]) -> Result<(), BandError> {
        let bytes = self.model.gguf().bytes(&self.tensor);
        for (&id, row) in ids.iter().zip(residual.chunks_exact_mut(self.d_model)) {
            let start = (id as usize).saturating_mul(self.row_bytes);
            let encoded = bytes.get(start..).and_then(|rest| rest.get(..self.row_bytes));
            let encoded = encoded.ok_or(BandError::TokenId { id, vocab: self.vocab })?;
            self.format.decode(encoded, row)?;
        }
        Ok(())
    }
}

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
