//! Measured speed of matrix products of many rows: the yardstick for prompts, which use every weight once per token.

use crate::activations::{ActivationError, Activations, Codes, Forms};
use crate::formats::{Format, FormatError};
use crate::isa::IsaError;
use crate::matmul::{Kernels, MatmulError, MatmulJob};
use crate::pack::{PackError, PackedMatrix};
use crate::pool::ThreadPool;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The format that most files have most of.
const FORMAT: Format = Format::Q4_K;
/// Sides of the matrix, which the last caches hold, and rows of the input: enough that weights are read seldom.
const SIDE: usize = 2048;
const TOKENS: usize = 64;
/// Passes that are timed; the first one is not.
const PASSES: usize = 5;

/// Why products could not be measured.
#[derive(Debug, Error)]
pub enum ProductsError {
    /// The kernel set that was asked for.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// The size of the matrix.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Memory for it.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The input.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// The product.
    #[error(transparent)]
    Matmul(#[from] MatmulError),
}

impl ProductsError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            ProductsError::Isa(error) => error.code(),
            ProductsError::Format(error) => error.code(),
            ProductsError::Pack(error) => error.code(),
            ProductsError::Activation(error) => error.code(),
            ProductsError::Matmul(error) => error.code(),
        }
    }
}

/// Multiplications of a weight and an input a second, with all threads of the pool: the fastest pass of a few. Takes some hundredths
/// of a second.
///
/// # Errors
/// There is no memory, or no kernel set.
pub fn multiplications(pool: &ThreadPool) -> Result<f64, ProductsError> {
    let kernels = Kernels::from_env()?;
    let mut matrix = PackedMatrix::new(FORMAT, SIDE, SIDE)?;
    // Any bytes are weights; small ones keep the numbers finite.
    let weights: Vec<u8> = (0..59u8).cycle().take(SIDE * FORMAT.row_bytes(SIDE)?).collect();
    matrix.pack(pool, &weights)?;
    let rows = vec![0.5; TOKENS * SIDE];
    let mut inputs = Activations::default();
    kernels.prepare(pool, &rows, SIDE, Forms::of([FORMAT], Codes::Int8), &mut inputs)?;
    let mut out = vec![0.0; TOKENS * SIDE];
    let mut best = Duration::MAX;
    for pass in 0..=PASSES {
        let start = Instant::now();
        kernels.matmul(pool, &inputs, &mut [MatmulJob::store(&matrix, &mut out)])?;
        if pass > 0 {
            best = best.min(start.elapsed());
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let count = (TOKENS * SIDE * SIDE) as f64;
    Ok(count / best.as_secs_f64().max(f64::MIN_POSITIVE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number is that of a processor: whatever it runs, not a thousandth and not a thousand times of what one does.
    #[test]
    fn measures_a_plausible_rate() {
        let rate = multiplications(&ThreadPool::new(2).unwrap()).unwrap();
        assert!((1e7..1e14).contains(&rate), "{rate}");
    }
}
