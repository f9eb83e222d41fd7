//! Loading: from the model file to packed matrices, one weight at a time.
//!
//! While the pool packs a weight, the kernel is already reading the next one; the file's pages of a packed weight are
//! given back at once. So a load runs at the speed of the disk and the process never holds much more than the packed
//! weights.

use spillway_kernels::ops::OpsError;
use spillway_kernels::pack::{PackError, PackedMatrix};
use spillway_kernels::pool::ThreadPool;
use spillway_model::error::ModelError;
use spillway_model::file::{ModelFile, Weight};
use spillway_model::gguf::Advice;
use spillway_model::program::WeightRef;
use spillway_worker::weights::{self, WeightError, format_of};
use std::ops::ControlFlow;

/// Why a weight could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The model file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A weight in the file.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A weight could not be packed.
    #[error("weight `{name}`: {source}")]
    Pack {
        /// Tensor name.
        name: String,
        /// What the kernels said.
        source: PackError,
    },
    /// State or weights of an operation.
    #[error(transparent)]
    Ops(#[from] OpsError),
    /// The load was given up on request.
    #[error("the load was cancelled")]
    Cancelled,
}

impl LoadError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            LoadError::Model(error) => error.code(),
            LoadError::Weight(error) => error.code(),
            LoadError::Pack { source, .. } => source.code(),
            LoadError::Ops(error) => error.code(),
            LoadError::Cancelled => "load_cancelled",
        }
    }
}

pub use spillway_worker::LoadProgress as Progress;

/// A weight and the form in which it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need<'a> {
    /// Packed for the matrix kernels.
    Matrix(&'a WeightRef),
    /// Decoded to f32.
    Values(&'a WeightRef),
}

impl<'a> Need<'a> {
    fn weight(self) -> &'a WeightRef {
        match self {
            Need::Matrix(weight) | Need::Values(weight) => weight,
        }
    }

    /// Bytes once stored.
    pub(crate) fn stored_bytes(self, model: &ModelFile) -> Result<u64, LoadError> {
        let weight = self.weight();
        let bytes = match self {
            Need::Values(_) => weight.rows * weight.cols * size_of::<f32>(),
            Need::Matrix(_) => {
                let format = format_of(weight, &model.weight(weight)?)?;
                let packed = PackedMatrix::packed_bytes(format, weight.rows, weight.cols);
                packed.map_err(WeightError::named(weight))?
            }
        };
        Ok(bytes as u64)
    }
}

/// Stores the weights of a band, in the order in which they are asked for.
pub(crate) struct Loader<'a> {
    model: &'a ModelFile,
    pool: &'a ThreadPool,
    progress: &'a mut Progress<'a>,
    /// Weights in the order of use, to read ahead.
    order: Vec<Need<'a>>,
    next: usize,
    done: u64,
    total: u64,
}

impl<'a> Loader<'a> {
    /// A loader for exactly the weights in `order`.
    pub(crate) fn new(
        model: &'a ModelFile,
        pool: &'a ThreadPool,
        order: Vec<Need<'a>>,
        progress: &'a mut Progress<'a>,
    ) -> Result<Self, LoadError> {
        let mut total = 0;
        for need in &order {
            total += need.stored_bytes(model)?;
        }
        Ok(Self { model, pool, progress, order, next: 0, done: 0, total })
    }

    /// Bytes stored so far.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// A matrix, packed for the kernels.
    pub(crate) fn matrix(&mut self, weight: &WeightRef) -> Result<PackedMatrix, LoadError> {
        let source = self.begin(weight)?;
        let named = |source| LoadError::Pack { name: weight.name.clone(), source };
        let mut packed =
            PackedMatrix::new(format_of(weight, &source)?, weight.rows, weight.cols).map_err(named)?;
        packed.pack(self.pool, source.bytes).map_err(|error| named(error.into()))?;
        self.end(&source, packed.bytes() as u64)?;
        Ok(packed)
    }

    /// A vector or a small table, decoded to f32, row by row.
    pub(crate) fn values(&mut self, weight: &WeightRef) -> Result<Vec<f32>, LoadError> {
        let source = self.begin(weight)?;
        let values = weights::decode(weight, &source)?;
        self.end(&source, size_of_val(values.as_slice()) as u64)?;
        Ok(values)
    }

    /// Finds the weight and starts reading the one after it.
    fn begin(&mut self, weight: &WeightRef) -> Result<Weight<'a>, LoadError> {
        let source = self.model.weight(weight)?;
        self.next += 1;
        if let Some(after) = self.order.get(self.next) {
            self.model.gguf().advise(self.model.weight(after.weight())?.info, Advice::WillNeed);
        }
        Ok(source)
    }

    /// Gives the file's pages back and reports.
    fn end(&mut self, source: &Weight<'_>, bytes: u64) -> Result<(), LoadError> {
        self.model.gguf().advise(source.info, Advice::DontNeed);
        self.done += bytes;
        match (self.progress)(self.done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(LoadError::Cancelled),
        }
    }
}
