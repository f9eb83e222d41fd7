//! Rotary position embedding.
//!
//! Cosines and sines of a step's positions are computed once and shared by all layers and heads: the angle is
//! `position * inv_freq` in f32, as transformers computes it, then cosine and sine are taken in f64 and rounded.

use super::OpsError;
use crate::lanes::Lanes;
use crate::pool::ThreadPool;

/// Which dimensions of the rotated part form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// `(i, i + rotary_dim / 2)`.
    Halves,
    /// `(2 i, 2 i + 1)`.
    Adjacent,
}

/// Cosines and sines for the rows of the current step.
#[derive(Debug, Clone)]
pub struct RopeTable {
    pairing: RopePairing,
    inv_freq: Vec<f32>,
    magnitude: f32,
    rows: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// A table without rows. `inv_freq` holds radians per position of each pair, `magnitude` multiplies cosine and
    /// sine. `2 * inv_freq.len()` leading dimensions of a head are rotated.
    pub fn new(pairing: RopePairing, inv_freq: &[f32], magnitude: f32) -> Self {
        Self { pairing, inv_freq: inv_freq.to_vec(), magnitude, rows: 0, cos: Vec::new(), sin: Vec::new() }
    }

    /// Rotated dimensions of each head.
    pub fn rotary_dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Rows the table was last prepared for.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Computes the rows of a step, `positions[row]` being the position of a row's token. Allocates only when the
    /// step is larger than every earlier one.
    #[expect(clippy::cast_precision_loss, reason = "positions are rounded to f32 as transformers does")]
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
    pub fn prepare(&mut self, positions: &[u32]) {
        self.rows = positions.len();
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for &frequency in &self.inv_freq {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                self.cos.push(cos as f32 * self.magnitude);
                self.sin.push(sin as f32 * self.magnitude);
            }
        }
    }

    /// Which dimensions form a pair.
    pub fn pairing(&self) -> RopePairing {
        self.pairing
    }

    /// Cosines, `[rows, rotary_dim / 2]`.
    pub fn cosines(&self) -> &[f32] {
        &self.cos
    }

    /// Sines, `[rows, rotary_dim / 2]`.
    pub fn sines(&self) -> &[f32] {
        &self.sin
    }

    /// Cosines and sines of one row.
    fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let pairs = self.inv_freq.len();
        let range = row * pairs..(row + 1) * pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

impl super::Ops {
    /// Rotates every head of `buf`, `[table.rows(), heads * head_dim]`, in place.
    ///
    /// # Errors
    /// [`OpsError::Shape`] when `buf` is not whole heads for every row, or a head is narrower than the rotated part.
    pub fn rope(
        &self,
        pool: &ThreadPool,
        buf: &mut [f32],
        head_dim: usize,
        table: &RopeTable,
    ) -> Result<(), OpsError> {
        if table.rows == 0 || head_dim == 0 {
            return super::check("rope rows", buf.len(), 0);
        }
        let width = buf.len() / table.rows;
        super::check("rope width", buf.len(), width * table.rows)?;
        super::check("rope heads", width % head_dim, 0)?;
        if head_dim < table.rotary_dim() {
            return Err(OpsError::Shape { what: "rope head", got: head_dim, want: table.rotary_dim() });
        }
        let kernel = match table.pairing {
            RopePairing::Halves => self.table.rope_halves,
            RopePairing::Adjacent => self.table.rope_adjacent,
        };
        super::for_rows(pool, table.rows, width, buf, |row, values| {
            let (cos, sin) = table.row(row);
            // SAFETY: the row is whole heads at least as wide as the rotated part (checked above); `self` proves
            // that the instruction set is there.
            unsafe { kernel(values, head_dim, cos, sin) }
        });
        Ok(())
    }
}

/// Rotates pairs `(i, i + n)`, `n = cos.len()`, of every head of a row.
///
/// # Safety
/// `row` is whole heads, `2 * cos.len() <= head_dim`, `sin` as long as `cos`; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn halves<V: Lanes>(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    let pairs = cos.len();
    for head in row.chunks_exact_mut(head_dim) {
        let (first, rest) = head.split_at_mut(pairs);
        let second = &mut rest[..pairs];
        for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Rotates pairs `(2 i, 2 i + 1)` of every head of a row.
///
/// # Safety
/// As [`halves`].
#[inline(always)]
pub(crate) unsafe fn adjacent<V: Lanes>(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    for head in row.chunks_exact_mut(head_dim) {
        let (pairs, _) = head[..2 * cos.len()].as_chunks_mut::<2>();
        for (([a, b], &cos), &sin) in pairs.iter_mut().zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
