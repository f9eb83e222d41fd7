//! Everything a layer computes besides matrix products: norms, activations, rotary embedding, attention, DeltaNet.
//!
//! All operations work on rows: a buffer of width `w` holds `[rows, w]` f32 values, dense. They run on a
//! [`ThreadPool`], allocate nothing once their scratch has grown to the largest step, and are *batch-invariant*: a row's
//! result is the same bits for any batch, any chunking of a sequence, any number of threads, and any kernel set.

pub mod attention;
pub mod deltanet;
mod math;
mod memory;
mod rope;
mod rows;
mod table;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use memory::SharedPart;
pub use rope::{RopePairing, RopeTable};
pub use rows::Exponents;

use crate::disjoint::Disjoint;
use crate::isa::KernelSet;
use crate::pool::{ThreadPool, partition};
use std::fmt;
use table::{KernelTable, kernel_table};
use thiserror::Error;

/// Elements below which a fork costs more than it saves.
const SERIAL_BELOW: usize = 1 << 15;

/// Why an operation was refused. Nothing was computed and no state was changed.
#[derive(Debug, Error)]
pub enum OpsError {
    /// A buffer or dimension does not match the others.
    #[error("{what}: {got} values where the operation needs {want}; pass buffers of the same step and layer")]
    Shape {
        /// What was measured.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The size that fits.
        want: usize,
    },
    /// A block table names a block that the cache lacks.
    #[error("KV block {block} does not exist: the cache has {blocks}; check the step's block table")]
    KvBlock {
        /// The block asked for.
        block: u32,
        /// Blocks of the cache.
        blocks: usize,
    },
    /// A block table ends before the span does.
    #[error("a span up to position {end} needs {want} KV blocks but its table has {got}")]
    KvTable {
        /// End of the span, exclusive.
        end: usize,
        /// Blocks given.
        got: usize,
        /// Blocks needed.
        want: usize,
    },
    /// Two spans of a step would write the same block.
    #[error("two spans of one step write KV block {block}; give every sequence blocks of its own")]
    KvBlockShared {
        /// The block named twice.
        block: u32,
    },
    /// A span names a state slot that does not exist, or two spans name the same one.
    #[error("state slot {slot} is out of range or named twice in one step: there are {slots} slots")]
    StateSlot {
        /// The slot asked for.
        slot: usize,
        /// Slots there are.
        slots: usize,
    },
    /// A dimension that the kernels cannot handle.
    #[error("{what} is {got}, which the CPU kernels do not support: it must be {rule}")]
    Unsupported {
        /// The dimension.
        what: &'static str,
        /// Its value.
        got: usize,
        /// What would be possible.
        rule: &'static str,
    },
    /// The system refused memory.
    #[error("cannot reserve {bytes} bytes for {what}: {source}; use a shorter max-seq or fewer sequences")]
    Memory {
        /// Purpose of the memory.
        what: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl OpsError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            OpsError::Shape { .. } => "op_shape",
            OpsError::KvBlock { .. } => "kv_block_out_of_range",
            OpsError::KvBlockShared { .. } => "kv_block_shared",
            OpsError::KvTable { .. } => "kv_table_too_short",
            OpsError::StateSlot { .. } => "state_slot_invalid",
            OpsError::Unsupported { .. } => "op_dimension_unsupported",
            OpsError::Memory { .. } => "op_out_of_memory",
        }
    }
}

/// `Ok` when a size is what it has to be.
fn check(what: &'static str, got: usize, want: usize) -> Result<(), OpsError> {
    if got == want { Ok(()) } else { Err(OpsError::Shape { what, got, want }) }
}

/// The operations of one kernel set. Holding the value proves that this CPU can run them.
#[derive(Clone, Copy)]
pub struct Ops {
    set: KernelSet,
    table: &'static KernelTable,
}

impl fmt::Debug for Ops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ops").field("set", &self.set).finish_non_exhaustive()
    }
}

impl Ops {
    /// The operations of `set`, or `None` where this CPU lacks it.
    pub fn new(set: KernelSet) -> Option<Self> {
        kernel_table(set).map(|table| Self { set, table })
    }

    /// The operations of the fastest set that this CPU has. None computes other bits.
    pub fn fastest() -> Self {
        let set = KernelSet::detect();
        kernel_table(set)
            .map_or(Self { set: KernelSet::Scalar, table: table::plain() }, |table| Self { set, table })
    }

    /// The kernel set in use.
    pub fn set(&self) -> KernelSet {
        self.set
    }

    /// `dst = src / sqrt(mean(src^2) + eps) * weight` for every row of `weight.len()` values.
    ///
    /// # Errors
    /// [`OpsError::Shape`] when `src` is not whole rows or `dst` has another length.
    pub fn rms_norm(
        &self,
        pool: &ThreadPool,
        src: &[f32],
        weight: &[f32],
        eps: f32,
        dst: &mut [f32],
    ) -> Result<(), OpsError> {
        let width = weight.len();
        let rows = whole_rows("norm rows", src.len(), width)?;
        check("norm output", dst.len(), src.len())?;
        for_rows(pool, rows, width, dst, |row, dst| {
            let src = &src[row * width..(row + 1) * width];
            // SAFETY: both rows are as long as the weight; `self` proves the instruction set.
            unsafe { (self.table.rms_norm)(src.as_ptr(), dst.as_mut_ptr(), weight, eps) }
        });
        Ok(())
    }

    /// RMS norm in place of every run of `weight.len()` values: the norm of query and key heads.
    ///
    /// # Errors
    /// [`OpsError::Shape`] when `buf` is not whole heads.
    pub fn head_norm(
        &self,
        pool: &ThreadPool,
        buf: &mut [f32],
        weight: &[f32],
        eps: f32,
    ) -> Result<(), OpsError> {
        let width = weight.len();
        let heads = whole_rows("head norm rows", buf.len(), width)?;
        for_rows(pool, heads, width, buf, |_, head| {
            let head = head.as_mut_ptr();
            // SAFETY: the head is as long as the weight, source and target may coincide; `self` proves the
            // instruction set.
            unsafe { (self.table.rms_norm)(head, head, weight, eps) }
        });
        Ok(())
    }

    /// `gate = silu(gate) * up`.
    ///
    /// # Errors
    /// [`OpsError::Shape`] when the lengths differ.
    pub fn silu_mul(&self, pool: &ThreadPool, gate: &mut [f32], up: &[f32]) -> Result<(), OpsError> {
        check("gated activation", up.len(), gate.len())?;
        for_runs(pool, gate, up, |gate, up| {
            // SAFETY: equal lengths; `self` proves the instruction set.
            unsafe { (self.table.silu_mul)(gate, up) }
        });
        Ok(())
    }

    /// `dst *= sigmoid(gate)`.
    ///
    /// # Errors
    /// [`OpsError::Shape`] when the lengths differ.
    pub fn sigmoid_mul(&self, pool: &ThreadPool, dst: &mut [f32], gate: &[f32]) -> Result<(), OpsError> {
        check("gate", gate.len(), dst.len())?;
        for_runs(pool, dst, gate, |dst, gate| {
            // SAFETY: equal lengths; `self` proves the instruction set.
            unsafe { (self.table.sigmoid_mul)(dst, gate) }
        });
        Ok(())
    }

    /// Turns values into weights, `e^exponent` with an error of 1 ulp; their sum, in an order that depends on their number only.
    pub fn weigh(&self, values: &mut [f32], exponents: Exponents) -> f32 {
        let mut sum = 0.0;
        // SAFETY: `self` proves the instruction set.
        unsafe { (self.table.weigh)(values, exponents, &mut sum) };
        sum
    }

    /// `dst += src`.
    ///
    /// # Errors
    /// [`OpsError::Shape`] when the lengths differ.
    pub fn add(&self, pool: &ThreadPool, dst: &mut [f32], src: &[f32]) -> Result<(), OpsError> {
        check("residual", src.len(), dst.len())?;
        for_runs(pool, dst, src, |dst, src| {
            // SAFETY: equal lengths; `self` proves the instruction set.
            unsafe { (self.table.add)(dst, src) }
        });
        Ok(())
    }

    /// `src` holds per head `[first | second]`, each `head_dim` wide; copies them apart.
    ///
    /// # Errors
    /// [`OpsError::Shape`] when `src` is not whole pairs, or a target is not half as long.
    pub fn split_heads(
        &self,
        pool: &ThreadPool,
        src: &[f32],
        head_dim: usize,
        first: &mut [f32],
        second: &mut [f32],
    ) -> Result<(), OpsError> {
        let heads = whole_rows("split heads", src.len(), 2 * head_dim)?;
        check("first half", first.len(), heads * head_dim)?;
        check("second half", second.len(), heads * head_dim)?;
        let second = Disjoint::new(second);
        for_rows(pool, heads, head_dim, first, |head, first| {
            let pair = &src[2 * head * head_dim..2 * (head + 1) * head_dim];
            first.copy_from_slice(&pair[..head_dim]);
            // SAFETY: every head is visited once, and heads do not overlap.
            unsafe { second.part(head * head_dim, head_dim) }.copy_from_slice(&pair[head_dim..]);
        });
        Ok(())
    }
}

/// Rows of `width` in `len` values.
fn whole_rows(what: &'static str, len: usize, width: usize) -> Result<usize, OpsError> {
    let rows = len.checked_div(width).unwrap_or(0);
    check(what, len, rows * width)?;
    Ok(rows)
}

/// Runs `f(row, values)` for every row of `width` values of `buf`, on the pool when that pays.
fn for_rows(
    pool: &ThreadPool,
    rows: usize,
    width: usize,
    buf: &mut [f32],
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    if rows * width < SERIAL_BELOW {
        buf.chunks_exact_mut(width.max(1)).enumerate().for_each(|(row, values)| f(row, values));
        return;
    }
    let buf = Disjoint::new(buf);
    pool.run(&|thread| {
        for row in partition(rows, pool.threads(), thread) {
            // SAFETY: threads have disjoint ranges of rows.
            f(row, unsafe { buf.part(row * width, width) });
        }
    });
}

/// Runs `f` on corresponding runs of `dst` and `src`, on the pool when that pays.
fn for_runs(pool: &ThreadPool, dst: &mut [f32], src: &[f32], f: impl Fn(&mut [f32], &[f32]) + Sync) {
    if dst.len() < SERIAL_BELOW {
        return f(dst, src);
    }
    let dst = Disjoint::new(dst);
    pool.run(&|thread| {
        let run = partition(dst.len(), pool.threads(), thread);
        // SAFETY: threads have disjoint runs.
        f(unsafe { dst.part(run.start, run.len()) }, &src[run]);
    });
}
