//! What attention computes for one tile of query rows and one partition of the context.
//!
//! Every number here comes from a chain of operations that belongs to one query row alone: a score is a sum over the
//! key's dimensions in order, a row's softmax runs over the partition's positions in a fixed lane order, and an output
//! value is a sum over positions in order. So a row's result does not depend on the rows that share its tile.
//!
//! Register tiles are indexed, not iterated: an iterator's methods are functions without the vector instructions, and
//! one that is not inlined sends every sum through memory.
#![expect(clippy::needless_range_loop, reason = "see above")]

use super::{BLOCK, PARTITION};
use crate::lanes::{LANES, Lanes, load_first, store_first};
use crate::ops::math::{exp, sigmoid};
use crate::ops::rows::for_each_vector;
use half::f16;

/// Vectors across one block of keys.
const BLOCK_VECTORS: usize = BLOCK / LANES;

/// What keys and values are stored as.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {
    /// # Safety
    /// As [`Lanes::load`].
    unsafe fn load<V: Lanes>(p: *const Self) -> V;
    /// # Safety
    /// As [`Lanes::store`].
    unsafe fn store<V: Lanes>(v: V, p: *mut Self);
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load(p) }
    }
    #[inline(always)]
    unsafe fn store<V: Lanes>(v: V, p: *mut Self) {
        // SAFETY: the caller's contract.
        unsafe { v.store(p) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<V: Lanes>(v: V, p: *mut Self) {
        // SAFETY: the caller's contract.
        unsafe { v.store_f16(p) }
    }
}

/// Keys and values of consecutive tokens, one kv head, as rows of f32.
pub(crate) struct Rows<'a> {
    /// From the first token's key to the end of the buffer.
    pub(crate) k: &'a [f32],
    /// From one token's key to the next.
    pub(crate) k_stride: usize,
    /// From the first token's value to the end of the buffer.
    pub(crate) v: &'a [f32],
    /// From one token's value to the next.
    pub(crate) v_stride: usize,
    /// Tokens.
    pub(crate) tokens: usize,
}

/// One block of one kv head, to be written from token `first` on.
pub(crate) struct BlockMut<E> {
    /// Keys, `[key_dim][BLOCK]`.
    pub(crate) k: *mut E,
    /// Values, `[BLOCK][value_stride]`.
    pub(crate) v: *mut E,
    /// First token slot to write.
    pub(crate) first: usize,
    /// Width of a key.
    pub(crate) key_dim: usize,
    /// Width of a value.
    pub(crate) value_dim: usize,
    /// From one token's value to the next, a multiple of [`LANES`].
    pub(crate) value_stride: usize,
}

/// Stores keys (transposed) and values of some tokens into a block.
///
/// # Safety
/// The rows are inside their buffers, `first + tokens <= BLOCK`, the block's pointers are valid for writing a whole
/// block and nobody else uses those token slots; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn append<V: Lanes, E: Element>(from: &Rows<'_>, to: BlockMut<E>) {
    for token in 0..from.tokens {
        let slot = to.first + token;
        let (key, value) = (&from.k[token * from.k_stride..][..to.key_dim], &from.v[token * from.v_stride..]);
        for (i, part) in key.chunks(LANES).enumerate() {
            let mut stored = [E::zeroed(); LANES];
            // SAFETY: the array holds LANES elements, `part` at most LANES values; keys `0..key_dim` of slot `slot`
            // are inside the block.
            unsafe {
                E::store(load_first::<V>(part.as_ptr(), part.len()), stored.as_mut_ptr());
                for (d, &element) in stored[..part.len()].iter().enumerate() {
                    to.k.add((i * LANES + d) * BLOCK + slot).write(element);
                }
            }
        }
        for (i, part) in value[..to.value_dim].chunks(LANES).enumerate() {
            // SAFETY: a slot is `value_stride` long, whole vectors; the padding gets zeros.
            unsafe {
                let at = to.v.add(slot * to.value_stride + i * LANES);
                E::store(load_first::<V>(part.as_ptr(), part.len()), at);
            }
        }
    }
}

/// A tile of query rows against one partition of one kv head. Row `r` is head `r % group` of the kv head's group at
/// token `r / group` of the tile.
pub(crate) struct Tile<'a, E> {
    /// The whole cache.
    pub(crate) cache: &'a [E],
    /// Where the kv head's keys start in each block of the partition, in positions' order. Values follow the keys.
    pub(crate) blocks: &'a [usize],
    /// Width of a key.
    pub(crate) key_dim: usize,
    /// Width of a stored value, a multiple of [`LANES`].
    pub(crate) value_stride: usize,
    /// Query rows.
    pub(crate) rows: usize,
    /// Query rows per token.
    pub(crate) group: usize,
    /// Positions of the partition that the tile's first token sees; later tokens see one more each. Negative when the
    /// partition starts after it.
    pub(crate) visible: isize,
}

/// Working memory of one tile: inputs and results of [`attend`], and the running state over partitions.
#[derive(Debug, Default)]
pub(crate) struct TileScratch {
    /// Queries times scale, `[rows][key_dim]`.
    pub(crate) q: Vec<f32>,
    /// Scores, then probabilities, `[rows][PARTITION]`.
    pub(crate) scores: Vec<f32>,
    /// The partition's unnormalised outputs, `[rows][value_stride]`.
    pub(crate) part: Vec<f32>,
    /// The partition's largest score per row.
    pub(crate) part_max: Vec<f32>,
    /// The partition's sum of exponentials per row; 0 where the row sees none of it.
    pub(crate) part_sum: Vec<f32>,
    /// Outputs over the partitions so far, `[rows][value_stride]`.
    pub(crate) acc: Vec<f32>,
    /// Largest score so far per row.
    pub(crate) max: Vec<f32>,
    /// Sum of exponentials so far per row.
    pub(crate) sum: Vec<f32>,
    /// Offsets of the partition's blocks.
    pub(crate) blocks: Vec<usize>,
}

impl<E> Tile<'_, E> {
    /// Positions of the partition that row `row` sees.
    #[inline(always)]
    fn visible_to(&self, row: usize) -> usize {
        let token = row / self.group;
        self.visible.saturating_add_unsigned(token).clamp(0, PARTITION.cast_signed()).cast_unsigned()
    }
}

/// Computes `part`, `part_max` and `part_sum` of a tile from `q`.
///
/// # Safety
/// Every block offset leaves room for a whole block in the cache, every vector of the scratch is large enough for the
/// tile, the blocks cover what the last row sees; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn attend<V: Lanes, E: Element>(tile: &Tile<'_, E>, scratch: &mut TileScratch) {
    // SAFETY: passed on from the caller.
    unsafe {
        score_blocks::<V, E>(tile, scratch);
        for row in 0..tile.rows {
            let scores = &mut scratch.scores[row * PARTITION..(row + 1) * PARTITION];
            (scratch.part_max[row], scratch.part_sum[row]) = softmax::<V>(scores, tile.visible_to(row));
        }
        scratch.part[..tile.rows * tile.value_stride].fill(0.0);
        weigh_blocks::<V, E>(tile, scratch);
    }
}

/// Scores of all rows against all blocks, [`score`] by register tiles.
#[inline(always)]
unsafe fn score_blocks<V: Lanes, E: Element>(tile: &Tile<'_, E>, scratch: &mut TileScratch) {
    let (q, scores) = (scratch.q.as_ptr(), scratch.scores.as_mut_ptr());
    for (b, &block) in tile.blocks.iter().enumerate() {
        let mut row = 0;
        while row < tile.rows {
            let left = tile.rows - row;
            // SAFETY: rows `row..row + R` exist, the block is inside the cache.
            unsafe {
                let k = tile.cache.as_ptr().add(block);
                let q = q.add(row * tile.key_dim);
                let out = scores.add(row * PARTITION + b * BLOCK);
                row += if V::REGISTERS >= 32 && left >= 8 {
                    score::<V, E, 8>(q, k, tile.key_dim, out)
                } else if V::REGISTERS >= 32 && left >= 4 {
                    score::<V, E, 4>(q, k, tile.key_dim, out)
                } else if V::REGISTERS >= 8 && left >= 2 {
                    score::<V, E, 2>(q, k, tile.key_dim, out)
                } else {
                    score::<V, E, 1>(q, k, tile.key_dim, out)
                };
            }
        }
    }
}

/// `out[r][t] = sum over d of q[r][d] * k[d][t]` for `R` rows and one block; returns `R`.
#[inline(always)]
unsafe fn score<V: Lanes, E: Element, const R: usize>(
    q: *const f32,
    k: *const E,
    key_dim: usize,
    out: *mut f32,
) -> usize {
    let mut sums = [[V::splat(0.0); BLOCK_VECTORS]; R];
    // SAFETY: the caller's contract: `R` rows of `key_dim` queries, a block of keys, `R` rows of scores.
    unsafe {
        for d in 0..key_dim {
            let keys: [V; BLOCK_VECTORS] = [E::load(k.add(d * BLOCK)), E::load(k.add(d * BLOCK + LANES))];
            for r in 0..R {
                let query = V::splat(*q.add(r * key_dim + d));
                for i in 0..BLOCK_VECTORS {
                    sums[r][i] = query.mul_add(keys[i], sums[r][i]);
                }
            }
        }
        for r in 0..R {
            for i in 0..BLOCK_VECTORS {
                sums[r][i].store(out.add(r * PARTITION + i * LANES));
            }
        }
    }
    R
}

/// Turns the first `visible` scores into `exp(score - max)` and the rest of their vector into 0; returns the largest
/// score and the sum.
#[inline(always)]
unsafe fn softmax<V: Lanes>(scores: &mut [f32], visible: usize) -> (f32, f32) {
    if visible == 0 {
        return (f32::NEG_INFINITY, 0.0);
    }
    let end = visible.next_multiple_of(LANES);
    scores[visible..end].fill(f32::NEG_INFINITY);
    let scores = scores.as_mut_ptr();
    let mut max = V::splat(f32::NEG_INFINITY);
    let mut sum = V::splat(0.0);
    // SAFETY: `end` is at most the length of the row, which is whole vectors.
    unsafe {
        for at in (0..end).step_by(LANES) {
            max = max.max(V::load(scores.add(at)));
        }
        let max = max.max_lane();
        for at in (0..end).step_by(LANES) {
            let p = exp(V::load(scores.add(at)).sub(V::splat(max)));
            p.store(scores.add(at));
            sum = sum.add(p);
        }
        (max, sum.sum())
    }
}

/// Outputs of all rows over all blocks, by register tiles. A block that not all rows of a tile see whole is done row
/// by row, so that a row never touches a value after its own position: not even to multiply it by zero.
#[inline(always)]
unsafe fn weigh_blocks<V: Lanes, E: Element>(tile: &Tile<'_, E>, scratch: &mut TileScratch) {
    let rows_at_once = match V::REGISTERS {
        32.. => 4,
        8.. => 2,
        _ => 1,
    };
    for (b, &block) in tile.blocks.iter().enumerate() {
        let mut row = 0;
        while row < tile.rows {
            let seen = tile.visible_to(row).saturating_sub(b * BLOCK).min(BLOCK);
            let left = tile.rows - row;
            let rows = if seen < BLOCK || left < rows_at_once { 1 } else { rows_at_once };
            // SAFETY: rows `row..row + rows` exist, the block is inside the cache.
            unsafe {
                let weights = scratch.scores.as_ptr().add(row * PARTITION + b * BLOCK);
                let values = tile.cache.as_ptr().add(block + tile.key_dim * BLOCK);
                let out = scratch.part.as_mut_ptr().add(row * tile.value_stride);
                match rows {
                    4 => weigh_row_tile::<V, E, 4>(weights, values, tile.value_stride, seen, out),
                    2 => weigh_row_tile::<V, E, 2>(weights, values, tile.value_stride, seen, out),
                    _ => weigh_row_tile::<V, E, 1>(weights, values, tile.value_stride, seen, out),
                }
            }
            row += rows;
        }
    }
}

/// [`weigh`] over the whole width of a value.
#[inline(always)]
unsafe fn weigh_row_tile<V: Lanes, E: Element, const R: usize>(
    weights: *const f32,
    values: *const E,
    stride: usize,
    tokens: usize,
    out: *mut f32,
) {
    let mut at = 0;
    while at < stride {
        let vectors = (stride - at) / LANES;
        // SAFETY: `at` plus the width of the call stays within `stride`.
        unsafe {
            let (values, out) = (values.add(at), out.add(at));
            at += LANES
                * if V::REGISTERS >= 32 && vectors >= 4 {
                    weigh::<V, E, R, 4>(weights, values, stride, tokens, out)
                } else if V::REGISTERS >= 8 && vectors >= 2 {
                    weigh::<V, E, R, 2>(weights, values, stride, tokens, out)
                } else {
                    weigh::<V, E, R, 1>(weights, values, stride, tokens, out)
                };
        }
    }
}

/// `out[r][c] += sum over t of weights[r][t] * values[t][c]` for `R` rows and `C` vectors; returns `C`.
#[inline(always)]
unsafe fn weigh<V: Lanes, E: Element, const R: usize, const C: usize>(
    weights: *const f32,
    values: *const E,
    stride: usize,
    tokens: usize,
    out: *mut f32,
) -> usize {
    let mut sums = [[V::splat(0.0); C]; R];
    // SAFETY: the caller's contract: `R` rows of weights and outputs, `tokens` values of `stride`.
    unsafe {
        for r in 0..R {
            for c in 0..C {
                sums[r][c] = V::load(out.add(r * stride + c * LANES));
            }
        }
        for t in 0..tokens {
            let mut value = [V::splat(0.0); C];
            for c in 0..C {
                value[c] = E::load(values.add(t * stride + c * LANES));
            }
            for r in 0..R {
                let weight = V::splat(*weights.add(r * PARTITION + t));
                for c in 0..C {
                    sums[r][c] = weight.mul_add(value[c], sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                sums[r][c].store(out.add(r * stride + c * LANES));
            }
        }
    }
    C
}

/// A row's running state over partitions.
pub(crate) struct RowState<'a> {
    pub(crate) acc: &'a mut [f32],
    pub(crate) max: &'a mut f32,
    pub(crate) sum: &'a mut f32,
}

/// A row's result over one partition.
pub(crate) struct RowPart<'a> {
    pub(crate) acc: &'a [f32],
    pub(crate) max: f32,
    pub(crate) sum: f32,
}

/// Takes the next partition into the state. The state before the first has `acc = 0`, `max = -inf`, `sum = 0`.
///
/// # Safety
/// Both `acc` have the same length, whole vectors, and `part.sum > 0`; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn fold<V: Lanes>(into: RowState<'_>, part: RowPart<'_>) {
    let max = V::splat(*into.max).max(V::splat(part.max));
    let (old, new) = (exp(V::splat(*into.max).sub(max)), exp(V::splat(part.max).sub(max)));
    let (len, acc, part_acc) = (into.acc.len(), into.acc.as_mut_ptr(), part.acc.as_ptr());
    // SAFETY: equal lengths by contract.
    unsafe { for_each_vector!(len, acc, (a = acc, p = part_acc) => a.mul(old).add(p.mul(new))) }
    let sum = V::splat(*into.sum).mul(old).add(V::splat(part.sum).mul(new));
    *into.max = max.max_lane();
    *into.sum = sum.max_lane();
}

/// Writes a row's output: the state divided by its sum, times `sigmoid(gate)` where there is a gate.
///
/// # Safety
/// `out` is at most as long as the state, `gate` as long as `out`; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn finish<V: Lanes>(state: RowState<'_>, gate: Option<&[f32]>, out: &mut [f32]) {
    let sum = V::splat(*state.sum);
    let (len, acc, out) = (out.len(), state.acc.as_ptr(), out.as_mut_ptr());
    // SAFETY: all runs are at least `len` long by contract.
    unsafe {
        match gate {
            None => for_each_vector!(len, out, (a = acc) => a.div(sum)),
            Some(gate) => {
                let gate = gate.as_ptr();
                for_each_vector!(len, out, (a = acc, g = gate) => a.div(sum).mul(sigmoid(g)));
            }
        }
    }
}
