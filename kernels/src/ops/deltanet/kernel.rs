//! What the DeltaNet layer computes for one head (or one group of channels) over consecutive tokens.
//!
//! Tokens are processed one after the other, so cutting a sequence into chunks changes no operation and no bit.
//!
//! Register tiles are indexed, not iterated: an iterator's methods are functions without the vector instructions, and
//! one that is not inlined sends every sum through memory.
#![expect(clippy::needless_range_loop, reason = "see above")]

use crate::lanes::{LANES, Lanes};
use crate::ops::math::{exp, sigmoid, silu, softplus};
use crate::ops::rows::{dot, inverse_rms};

/// Value columns of a state tile, at most: its `[key][columns]` matrix stays in the first-level cache.
pub(super) const TILE_COLUMNS: usize = 2 * LANES;

/// Convolution of one head's channels for some tokens of a span.
pub(crate) struct Conv<'a> {
    /// The span's inputs from its first token and the head's first channel on.
    pub(crate) inputs: &'a [f32],
    /// From one token's input to the next.
    pub(crate) stride: usize,
    /// Inputs before the span, oldest first, `[taps - 1]` rows of `history_stride`, from the head's first channel on.
    pub(crate) history: &'a [f32],
    /// From one past input to the next.
    pub(crate) history_stride: usize,
    /// Weights, `[taps]` rows of `history_stride`, from the head's first channel on.
    pub(crate) weights: &'a [f32],
    /// Weights per channel, the current token's included.
    pub(crate) taps: usize,
    /// First token to compute, counted from the span's first.
    pub(crate) token: usize,
    /// Channels of the head, whole vectors.
    pub(crate) channels: usize,
    /// When present, every output row is divided by its L2 norm: `x * scale / sqrt(sum of squares + eps)`.
    pub(crate) norm: Option<L2Norm>,
}

/// Parameters of the L2 norm of queries and keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct L2Norm {
    pub(crate) eps: f32,
    pub(crate) scale: f32,
}

/// `out[t] = silu(sum over j of weights[j] * input[t - (taps - 1) + j])`, then the norm; `out` is `[tokens, channels]`.
///
/// # Safety
/// All rows named by the job are inside their slices, `out` is whole rows of whole vectors; the instruction set of `V`
/// is there.
#[inline(always)]
pub(crate) unsafe fn conv<V: Lanes>(job: &Conv<'_>, out: &mut [f32]) {
    for (i, out) in out.chunks_exact_mut(job.channels).enumerate() {
        let token = job.token + i;
        for at in (0..job.channels).step_by(LANES) {
            let mut sum = V::splat(0.0);
            for tap in 0..job.taps {
                let weight = &job.weights[tap * job.history_stride + at..][..LANES];
                // Row `token + tap` of history and inputs put one after the other.
                let row = token + tap;
                let input = match row.checked_sub(job.taps - 1) {
                    Some(row) => &job.inputs[row * job.stride + at..][..LANES],
                    None => &job.history[row * job.history_stride + at..][..LANES],
                };
                // SAFETY: both slices are one vector long.
                unsafe { sum = V::load(weight.as_ptr()).mul_add(V::load(input.as_ptr()), sum) };
            }
            // SAFETY: `out` is whole vectors.
            unsafe { silu(sum).store(out.as_mut_ptr().add(at)) };
        }
        if let Some(L2Norm { eps, scale }) = job.norm {
            // SAFETY: the row is `channels` long.
            let squares = unsafe { dot::<V>(out.as_ptr(), out.as_ptr(), out.len()) };
            let factor = scale / (squares + eps).sqrt();
            out.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

/// One value head of one span: everything after the convolution.
pub(crate) struct Head<'a> {
    /// Queries, keys, values of the span's tokens, `[tokens, head_dim]` each; queries and keys normalised.
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    /// Per token: input of the decay and of the update strength, then their values. Whole vectors long.
    pub(crate) alpha: &'a mut [f32],
    pub(crate) beta: &'a mut [f32],
    /// Decay rate of the head, `-exp(A_log)`, and bias of its time step.
    pub(crate) rate: f32,
    pub(crate) bias: f32,
    /// State, tiles of `[head_dim keys][columns]`.
    pub(crate) state: &'a mut [f32],
    /// Gate and output of the span's first token, this head; next tokens follow at `stride`.
    pub(crate) gate: &'a [f32],
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
    /// Weight and epsilon of the gated norm.
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) tokens: usize,
    pub(crate) head_dim: usize,
}

/// Gates, recurrence and gated norm of one head.
///
/// # Safety
/// Slices are as long as described, `head_dim` is whole vectors, `out` is valid for writing `head_dim` values per token
/// and nobody else uses them; the instruction set of `V` is there.
#[inline(always)]
pub(crate) unsafe fn delta_rule<V: Lanes>(head: &mut Head<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        gates::<V>(head);
        if head.head_dim.is_multiple_of(TILE_COLUMNS) {
            recur::<V, { TILE_COLUMNS / LANES }>(head);
        } else {
            recur::<V, 1>(head);
        }
        gated_norm::<V>(head);
    }
}

/// `alpha = exp(rate * softplus(alpha + bias))`, `beta = sigmoid(beta)`.
#[inline(always)]
unsafe fn gates<V: Lanes>(head: &mut Head<'_>) {
    let (rate, bias) = (V::splat(head.rate), V::splat(head.bias));
    let (alpha, beta) = (head.alpha.as_mut_ptr(), head.beta.as_mut_ptr());
    for at in (0..head.alpha.len()).step_by(LANES) {
        // SAFETY: both are whole vectors of the same length.
        unsafe {
            let decay = exp(rate.mul(softplus(V::load(alpha.add(at)).add(bias))));
            decay.store(alpha.add(at));
            sigmoid(V::load(beta.add(at))).store(beta.add(at));
        }
    }
}

/// The recurrence, by tiles of `W` vectors of value columns: for each tile all tokens, so that the tile stays in the
/// first-level cache.
///
/// With decay `g`, update strength `b` and the state `S` before the token: `d = b (v - g S k)`, `S' = g S + k d`, and the
/// output is `S' q = g (S q) + d (k · q)`, so one pass over the state reads and a second one updates.
#[inline(always)]
unsafe fn recur<V: Lanes, const W: usize>(head: &mut Head<'_>) {
    let dim = head.head_dim;
    let columns = W * LANES;
    for (tile, state) in head.state.chunks_exact_mut(dim * columns).enumerate() {
        let state = state.as_mut_ptr();
        for token in 0..head.tokens {
            let (q, k) = (&head.q[token * dim..][..dim], &head.k[token * dim..][..dim]);
            let v = &head.v[token * dim + tile * columns..][..columns];
            // SAFETY: the tile of the state is `dim` rows of `columns`; the output column range belongs to this head.
            unsafe {
                let out = head.out.add(token * head.stride + tile * columns);
                step::<V, W>(state, q, k, v, head.alpha[token], head.beta[token], out);
            }
        }
    }
}

/// One token of the recurrence on one tile of the state.
#[inline(always)]
unsafe fn step<V: Lanes, const W: usize>(
    state: *mut f32,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: f32,
    strength: f32,
    out: *mut f32,
) {
    let (mut by_k, mut by_q) = ([V::splat(0.0); W], [V::splat(0.0); W]);
    let (decay, strength) = (V::splat(decay), V::splat(strength));
    // SAFETY: the caller's contract: `k.len()` rows of `W` vectors, `W` vectors of `v` and `out`.
    unsafe {
        for i in 0..k.len() {
            let (k, q) = (V::splat(*k.as_ptr().add(i)), V::splat(*q.as_ptr().add(i)));
            for w in 0..W {
                let s = V::load(state.add((i * W + w) * LANES));
                by_k[w] = s.mul_add(k, by_k[w]);
                by_q[w] = s.mul_add(q, by_q[w]);
            }
        }
        let overlap = V::splat(dot::<V>(k.as_ptr(), q.as_ptr(), k.len()));
        let mut delta = [V::splat(0.0); W];
        for w in 0..W {
            let value = V::load(v.as_ptr().add(w * LANES));
            delta[w] = strength.mul(value.sub(decay.mul(by_k[w])));
            decay.mul(by_q[w]).add(delta[w].mul(overlap)).store(out.add(w * LANES));
        }
        for i in 0..k.len() {
            let k = V::splat(*k.as_ptr().add(i));
            for w in 0..W {
                let at = state.add((i * W + w) * LANES);
                V::load(at).mul(decay).add(k.mul(delta[w])).store(at);
            }
        }
    }
}

/// `out = out / sqrt(mean(out^2) + eps) * norm * silu(gate)`, token by token.
#[inline(always)]
unsafe fn gated_norm<V: Lanes>(head: &mut Head<'_>) {
    for token in 0..head.tokens {
        let gate = &head.gate[token * head.stride..][..head.head_dim];
        // SAFETY: `head_dim` values of the output belong to this head at every token.
        unsafe {
            let out = head.out.add(token * head.stride);
            let squares = dot::<V>(out, out, head.head_dim);
            let scale = V::splat(inverse_rms(squares, head.head_dim, head.eps));
            for at in (0..head.head_dim).step_by(LANES) {
                let weight = V::load(head.norm.as_ptr().add(at));
                let gate = silu(V::load(gate.as_ptr().add(at)));
                V::load(out.add(at)).mul(scale).mul(weight).mul(gate).store(out.add(at));
            }
        }
    }
}
