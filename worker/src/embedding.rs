//! The embedding, read row by row from the mapped file: page cache instead of private or device memory.

use crate::weights::{WeightError, format_of};
use spillway_kernels::formats::{Format, FormatError};
use spillway_model::file::ModelFile;
use spillway_model::gguf::TensorInfo;
use std::sync::Arc;

/// Why token ids have no rows.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddingError {
    /// An embedding row does not decode.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A token that the vocabulary does not have.
    #[error(
        "token id {id} is not in the vocabulary of {vocab}; the request must be refused before it gets here"
    )]
    TokenId {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
}

impl EmbeddingError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            EmbeddingError::Format(error) => error.code(),
            EmbeddingError::TokenId { .. } => "token_id",
        }
    }
}

/// The embedding of a model.
#[derive(Debug)]
pub struct Embedding {
    model: Arc<ModelFile>,
    tensor: TensorInfo,
    vocab: usize,
    d_model: usize,
    format: Format,
    row_bytes: usize,
}

impl Embedding {
    /// The embedding of `model`; nothing is read yet.
    ///
    /// # Errors
    /// Its format has no kernels or does not fit its shape.
    pub fn new(model: &Arc<ModelFile>) -> Result<Self, WeightError> {
        let weight = &model.program().embed;
        let source = model.weight(weight)?;
        let format = format_of(weight, &source)?;
        let row_bytes = format.row_bytes(weight.cols).map_err(WeightError::named(weight))?;
        let (tensor, vocab, d_model) = (source.info.clone(), weight.rows, weight.cols);
        Ok(Self { model: Arc::clone(model), tensor, vocab, d_model, format, row_bytes })
    }

    /// Bytes of the embedding in the file.
    pub fn file_bytes(&self) -> usize {
        self.row_bytes * self.vocab
    }

    /// Writes the rows of `ids` to `residual`, `[ids, d_model]`.
    ///
    /// # Errors
    /// An id is outside the vocabulary.
    pub fn rows(&self, ids: &[u32], residual: &mut [f32]) -> Result<(), EmbeddingError> {
        let bytes = self.model.gguf().bytes(&self.tensor);
        for (&id, row) in ids.iter().zip(residual.chunks_exact_mut(self.d_model)) {
            let start = (id as usize).saturating_mul(self.row_bytes);
            let encoded = bytes.get(start..).and_then(|rest| rest.get(..self.row_bytes));
            let encoded = encoded.ok_or(EmbeddingError::TokenId { id, vocab: self.vocab })?;
            self.format.decode(encoded, row)?;
        }
        Ok(())
    }
}
