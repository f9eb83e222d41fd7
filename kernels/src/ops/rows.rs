//! Norms and elementwise operations on one run of values.

use super::math;
use crate::lanes::{LANES, Lanes, load_first, store_first};

/// Sum of products, in one order that depends on the length only: four interleaved accumulators of vectors, then
/// whole vectors, then the zero-padded rest, all folded in a fixed tree.
///
/// # Safety
/// `a` and `b` are valid for reading `len` values, and the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn dot<V: Lanes>(a: *const f32, b: *const f32, len: usize) -> f32 {
    let mut sums = [V::splat(0.0); 4];
    let mut at = 0;
    // SAFETY: every access stays below `len`.
    unsafe {
        while at + 4 * LANES <= len {
            // Indexed, not iterated: see the vector kernels' headers.
            #[expect(
                clippy::needless_range_loop,
                reason = "an iterator that is not inlined costs a lot here"
            )]
            for i in 0..sums.len() {
                let offset = at + i * LANES;
                sums[i] = V::load(a.add(offset)).mul_add(V::load(b.add(offset)), sums[i]);
            }
            at += 4 * LANES;
        }
        while at + LANES <= len {
            sums[0] = V::load(a.add(at)).mul_add(V::load(b.add(at)), sums[0]);
            at += LANES;
        }
        if at < len {
            let rest = len - at;
            sums[1] = load_first::<V>(a.add(at), rest).mul_add(load_first(b.add(at), rest), sums[1]);
        }
    }
    sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
}

/// Applies `$value` to every vector of a run of `$len` values: `$at` is the offset, and `$load`s read at it. The last
/// partial vector is padded with zeros, so that a value is computed the same way wherever it sits.
macro_rules! for_each_vector {
    ($len:expr, $out:expr, ($($name:ident = $from:expr),*) => $value:expr) => {{
        let len = $len;
        let mut at = 0;
        while at + LANES <= len {
            $(let $name = V::load($from.add(at));)*
            $value.store($out.add(at));
            at += LANES;
        }
        if at < len {
            let rest = len - at;
            $(let $name = load_first::<V>($from.add(at), rest);)*
            store_first($value, $out.add(at), rest);
        }
    }};
}
pub(crate) use for_each_vector;

/// `dst = src / sqrt(mean(src^2) + eps) * weight`; `dst` may be `src`.
///
/// # Safety
/// `src` and `dst` are valid for `weight.len()` values; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn rms_norm<V: Lanes>(src: *const f32, dst: *mut f32, weight: &[f32], eps: f32) {
    let n = weight.len();
    // SAFETY: all runs are `n` long.
    unsafe {
        let scale = V::splat(inverse_rms(dot::<V>(src, src, n), n, eps));
        let weight = weight.as_ptr();
        for_each_vector!(n, dst, (x = src, w = weight) => x.mul(scale).mul(w));
    }
}

/// `1 / sqrt(sum / n + eps)`.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "row widths are far below 2^24")]
pub(crate) fn inverse_rms(sum_of_squares: f32, n: usize, eps: f32) -> f32 {
    1.0 / (sum_of_squares / n as f32 + eps).sqrt()
}

/// `gate = silu(gate) * up`.
///
/// # Safety
/// The slices have the same length; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn silu_mul<V: Lanes>(gate: &mut [f32], up: &[f32]) {
    let (len, gate, up) = (gate.len(), gate.as_mut_ptr(), up.as_ptr());
    // SAFETY: both runs are `len` long.
    unsafe { for_each_vector!(len, gate, (g = gate, u = up) => math::silu(g).mul(u)) }
}

/// `dst *= sigmoid(gate)`.
///
/// # Safety
/// The slices have the same length; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn sigmoid_mul<V: Lanes>(dst: &mut [f32], gate: &[f32]) {
    let (len, dst, gate) = (dst.len(), dst.as_mut_ptr(), gate.as_ptr());
    // SAFETY: both runs are `len` long.
    unsafe { for_each_vector!(len, dst, (d = dst, g = gate) => d.mul(math::sigmoid(g))) }
}

/// Exponents of weights: `(value - offset) * factor`, and the least that counts.
#[derive(Debug, Clone, Copy)]
pub struct Exponents {
    /// What is taken off every value.
    pub offset: f32,
    /// What the difference is multiplied with.
    pub factor: f32,
    /// Values with an exponent below this weigh nothing.
    pub least: f32,
}

/// `values = e^exponent`, or 0; `sum` is their sum, in an order that depends on the length only.
///
/// # Safety
/// The instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn weigh<V: Lanes>(values: &mut [f32], exponents: Exponents, sum: &mut f32) {
    let (len, at_values) = (values.len(), values.as_mut_ptr());
    let Exponents { offset, factor, least } = exponents;
    let mut sums = [V::splat(0.0); 2];
    let mut at = 0;
    // SAFETY: every access stays below `len`.
    unsafe {
        while at + LANES <= len {
            let weights = weights(V::load(at_values.add(at)), offset, factor, least);
            weights.store(at_values.add(at));
            let turn = at / LANES % 2;
            sums[turn] = sums[turn].add(weights);
            at += LANES;
        }
        if at < len {
            let rest = len - at;
            store_first(
                weights::<V>(load_first(at_values.add(at), rest), offset, factor, least),
                at_values.add(at),
                rest,
            );
            sums[0] = sums[0].add(load_first(at_values.add(at), rest));
        }
    }
    *sum = sums[0].add(sums[1]).sum();
}

#[inline(always)]
fn weights<V: Lanes>(values: V, offset: f32, factor: f32, least: f32) -> V {
    let exponents = values.sub(V::splat(offset)).mul(V::splat(factor));
    exponents.sub(V::splat(least)).if_negative(V::splat(0.0), math::exp(exponents))
}

/// `dst += src`.
///
/// # Safety
/// The slices have the same length; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn add<V: Lanes>(dst: &mut [f32], src: &[f32]) {
    let (len, dst, src) = (dst.len(), dst.as_mut_ptr(), src.as_ptr());
    // SAFETY: both runs are `len` long.
    unsafe { for_each_vector!(len, dst, (d = dst, s = src) => d.add(s)) }
}
