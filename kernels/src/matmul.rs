//! Matrix products `y = W · x`, for any mix of weight formats, on whatever vector instructions the CPU has.
//!
//! **The promise.** An output element is computed by one fixed sequence of operations that depends on its row of
//! weights and its token alone, not on the batch, the threads, or the kernel set. Per block of 32 columns, with `x`
//! the codes ([in one plane or two](crate::activations)) and `xs` the scale of the input, integer sums exact and then
//! rounded to f32, every `fma` and `*` rounded once to f32, starting from `y = 0`:
//!
//! | weights | per block of 32 |
//! |---|---|
//! | quantised | `t =` the sum, in this order, of `dmin·m_j · −Σx` for each run `j` if there are mins, then `d·s_j · Σ(u − bias)·x` for each run (the first product rounded, the others fused into the sum); then `y = fma(xs, t, y)` |
//! | floating point | `t = 0`; for each column `t = fma(w, x, t)`; then `y = y + t` |
//!
//! So all kernel sets return the same bits, which the tests check against the scalar set.
//!
//! **The work.** A call computes a group of matrices that share an input in one fork and join. Tokens are processed
//! in blocks whose inputs stay in the second-level cache; for each block every tile of weights is read once from
//! memory and applied to panel after panel from the first-level cache.

/// The [`TileTable`] of a kernel `$kernel::<F, P>`, where `F` is an index into [`Format::ALL`] and `P` the planes of codes.
macro_rules! tile_table {
    ($kernel:ident) => {
        [tile_table!($kernel, 1), tile_table!($kernel, 2)]
    };
    ($kernel:ident, $planes:literal) => {
        [
            $kernel::<0, $planes>,
            $kernel::<1, $planes>,
            $kernel::<2, $planes>,
            $kernel::<3, $planes>,
            $kernel::<4, $planes>,
            $kernel::<5, $planes>,
            $kernel::<6, $planes>,
            $kernel::<7, $planes>,
            $kernel::<8, $planes>,
            $kernel::<9, $planes>,
            $kernel::<10, $planes>,
            $kernel::<11, $planes>,
            $kernel::<12, $planes>,
            $kernel::<13, $planes>,
            $kernel::<14, $planes>,
        ]
    };
}

mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;
mod work;

use crate::activations::{ActivationError, Activations, Codes, Forms};
use crate::disjoint::Disjoint;
use crate::formats::Format;
use crate::isa::{IsaError, KernelSet};
use crate::pack::{PackedMatrix, TILE_ROWS};
use crate::pool::ThreadPool;
use thiserror::Error;

/// Multiplies one tile with one panel: `out[token][row]`.
///
/// # Safety
/// The CPU has the instructions of the kernel set that the function belongs to; `tile` is a tile of the function's
/// format, `panel` a panel of as many columns: for quantised weights with the function's planes of codes, otherwise of
/// f32 values; `out` has the panel's width, 1 or [`PANEL`](crate::activations::PANEL).
type TileKernel = unsafe fn(tile: &[u8], panel: &[i32], out: &mut [[f32; TILE_ROWS]]);

/// One kernel per kind of codes and format.
type TileTable = [[TileKernel; Format::ALL.len()]; Codes::ALL.len()];

/// What happens to a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Output {
    /// `out = W·x + bias`.
    Store,
    /// `out += W·x + bias`.
    Add,
}

/// One matrix of a group, and where its product goes.
#[derive(Debug)]
pub struct MatmulJob<'a> {
    weight: &'a PackedMatrix,
    bias: Option<&'a [f32]>,
    out: Disjoint<'a, f32>,
    output: Output,
}

impl<'a> MatmulJob<'a> {
    /// `out = weight · x` with `out` as `[tokens, rows]`, row by row.
    pub fn store(weight: &'a PackedMatrix, out: &'a mut [f32]) -> Self {
        Self { weight, bias: None, out: Disjoint::new(out), output: Output::Store }
    }

    /// `out += weight · x`, as for a projection back into the residual stream.
    pub fn add(weight: &'a PackedMatrix, out: &'a mut [f32]) -> Self {
        Self { output: Output::Add, ..Self::store(weight, out) }
    }

    /// The same with one value per row added to the product.
    pub fn with_bias(self, bias: Option<&'a [f32]>) -> Self {
        Self { bias, ..self }
    }
}

/// Why a product could not be computed. Nothing was written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MatmulError {
    /// Weights and inputs have different widths.
    #[error("a matrix of {cols} columns cannot take inputs of {inputs} values")]
    Columns {
        /// Columns of the matrix.
        cols: usize,
        /// Values of an input row.
        inputs: usize,
    },
    /// The output has the wrong size.
    #[error("the product of {tokens} inputs with {rows} rows needs exactly that many outputs, not {outputs}")]
    Outputs {
        /// Input rows.
        tokens: usize,
        /// Rows of the matrix.
        rows: usize,
        /// Values the output has room for.
        outputs: usize,
    },
    /// The bias has the wrong size.
    #[error("a matrix of {rows} rows cannot take {bias} bias values")]
    Bias {
        /// Rows of the matrix.
        rows: usize,
        /// Values of the bias.
        bias: usize,
    },
    /// The inputs were not prepared for this format.
    #[error("the inputs were not prepared in the form that {format} weights read; name the format when preparing", format = format.name())]
    Form {
        /// Format of the weights.
        format: Format,
    },
}

impl MatmulError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            MatmulError::Columns { .. } => "matmul_columns",
            MatmulError::Outputs { .. } => "matmul_outputs",
            MatmulError::Bias { .. } => "matmul_bias",
            MatmulError::Form { .. } => "matmul_input_form",
        }
    }
}

/// The kernels of one set. Holding the value proves that the CPU can run them.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    set: KernelSet,
    tiles: &'static TileTable,
}

impl Kernels {
    /// The kernels of `set`, or `None` when this CPU lacks its instructions.
    pub fn for_set(set: KernelSet) -> Option<Self> {
        let tiles = match set {
            _ if !set.is_supported() => return None,
            KernelSet::Scalar => &scalar::TILES,
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx2 => &simd::AVX2,
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx512 => &simd::AVX512,
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx512Vnni => &simd::AVX512_VNNI,
            #[cfg(not(target_arch = "x86_64"))]
            _ => return None,
        };
        Some(Self { set, tiles })
    }

    /// Every set this CPU can run, slowest first.
    pub fn available() -> Vec<Self> {
        KernelSet::ALL.into_iter().filter_map(Self::for_set).collect()
    }

    /// The set that [`ENV`](crate::isa::ENV) names, else the fastest one.
    ///
    /// # Errors
    /// An unknown name, or a set this CPU lacks.
    pub fn from_env() -> Result<Self, IsaError> {
        let set = KernelSet::from_env()?;
        Self::for_set(set).ok_or(IsaError::Unsupported { set, available: KernelSet::available() })
    }

    /// Which set this is.
    pub fn set(&self) -> KernelSet {
        self.set
    }

    /// Prepares `rows` (`[tokens, cols]`, row by row) as inputs in the given forms, replacing what `into` held. Does
    /// not allocate within the buffer's capacity.
    ///
    /// # Errors
    /// When the values are no whole number of rows.
    pub fn prepare(
        &self,
        pool: &ThreadPool,
        rows: &[f32],
        cols: usize,
        forms: Forms,
        into: &mut Activations,
    ) -> Result<(), ActivationError> {
        into.prepare(self.set, pool, rows, cols, forms)
    }

    /// Computes every job of a group from the same inputs, in one fork and join of the pool.
    ///
    /// # Errors
    /// When a shape does not fit or an input form is missing; then nothing is written.
    pub fn matmul(
        &self,
        pool: &ThreadPool,
        inputs: &Activations,
        jobs: &mut [MatmulJob<'_>],
    ) -> Result<(), MatmulError> {
        jobs.iter().try_for_each(|job| check(inputs, job))?;
        work::run(self.tiles, pool, inputs, jobs);
        Ok(())
    }
}

/// Checks the shapes of a job, on which the kernels rely.
fn check(inputs: &Activations, job: &MatmulJob<'_>) -> Result<(), MatmulError> {
    let (rows, cols) = (job.weight.rows(), job.weight.cols());
    let format = job.weight.format();
    if cols != inputs.cols() {
        return Err(MatmulError::Columns { cols, inputs: inputs.cols() });
    }
    if inputs.tokens().checked_mul(rows) != Some(job.out.len()) {
        return Err(MatmulError::Outputs { tokens: inputs.tokens(), rows, outputs: job.out.len() });
    }
    if let Some(bias) = job.bias.filter(|bias| bias.len() != rows) {
        return Err(MatmulError::Bias { rows, bias: bias.len() });
    }
    if !inputs.forms().serve(format) {
        return Err(MatmulError::Form { format });
    }
    Ok(())
}
