//! DeltaNet against an f64 reference, and the promise that chunking, batching and threads do not matter.

use super::*;
use crate::isa::KernelSet;
use crate::ops::testing::{Noise, bits, every_set, fastest};
use proptest::prelude::*;

fn dims(key_heads: usize, value_heads: usize, head_dim: usize) -> DeltaNetDims {
    DeltaNetDims { key_heads, value_heads, head_dim, conv_kernel: 4, eps: 1e-6 }
}

/// A layer's weights as the file has them.
struct Weights {
    conv: Vec<f32>,
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl Weights {
    fn new(dims: DeltaNetDims) -> Self {
        let mut noise = Noise(11);
        Self {
            conv: noise.take(dims.channels() * dims.conv_kernel),
            decay: noise.take(dims.value_heads).iter().map(|x| -(2.0 * x).exp()).collect(),
            dt_bias: noise.take(dims.value_heads),
            norm: noise.take(dims.head_dim),
        }
    }

    fn layer(&self, dims: DeltaNetDims) -> DeltaNet {
        DeltaNet::new(dims, &self.conv, &self.decay, &self.dt_bias, &self.norm).unwrap()
    }
}

/// Inputs of a whole sequence.
struct Sequence {
    qkv: Vec<f32>,
    gate: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
    len: usize,
}

impl Sequence {
    fn new(dims: DeltaNetDims, len: usize, seed: u64) -> Self {
        let mut noise = Noise(seed);
        let mut take = |width: usize| noise.take(len * width).iter().map(|x| 2.0 * x).collect();
        let values = dims.value_heads * dims.head_dim;
        let (qkv, gate) = (take(dims.channels()), take(values));
        Self { qkv, gate, alpha: take(dims.value_heads), beta: take(dims.value_heads), len }
    }
}

/// What the reference leaves behind.
struct Reference {
    out: Vec<f64>,
    conv_state: Vec<f64>,
    matrix_state: Vec<f64>,
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn l2_normalised(x: &[f64], eps: f64) -> Vec<f64> {
    let norm = (x.iter().map(|x| x * x).sum::<f64>() + eps).sqrt();
    x.iter().map(|x| x / norm).collect()
}

/// The layer by its definition, token by token in f64; the state is `[value][key]`.
#[expect(clippy::cast_precision_loss, reason = "small widths")]
fn reference(dims: DeltaNetDims, weights: &Weights, sequence: &Sequence) -> Reference {
    let DeltaNetDims { key_heads, value_heads, head_dim: d, conv_kernel: taps, .. } = dims;
    let eps = f64::from(dims.eps);
    let channels = dims.channels();
    let input = |t: isize, c: usize| match usize::try_from(t) {
        Ok(t) => f64::from(sequence.qkv[t * channels + c]),
        Err(_) => 0.0,
    };
    let mut state = vec![vec![0f64; d * d]; value_heads];
    let mut out = Vec::new();
    for t in 0..sequence.len {
        let convolved: Vec<f64> = (0..channels)
            .map(|c| {
                let tap = |j: usize| {
                    let past = (t + j).cast_signed() - (taps - 1).cast_signed();
                    f64::from(weights.conv[c * taps + j]) * input(past, c)
                };
                silu((0..taps).map(tap).sum())
            })
            .collect();
        let head = |h: usize| &convolved[h * d..(h + 1) * d];
        for (j, state) in state.iter_mut().enumerate() {
            let q: Vec<f64> =
                l2_normalised(head(j % key_heads), eps).iter().map(|q| q / (d as f64).sqrt()).collect();
            let k = l2_normalised(head(key_heads + j % key_heads), eps);
            let v = head(2 * key_heads + j);
            let at = t * value_heads + j;
            let step = f64::from(sequence.alpha[at]) + f64::from(weights.dt_bias[j]);
            let decay = (f64::from(weights.decay[j]) * step.exp().ln_1p()).exp();
            let strength = 1.0 / (1.0 + (-f64::from(sequence.beta[at])).exp());
            let mut o = vec![0.0; d];
            for (row, (v, o)) in state.chunks_exact_mut(d).zip(v.iter().zip(&mut o)) {
                row.iter_mut().for_each(|s| *s *= decay);
                let read: f64 = row.iter().zip(&k).map(|(s, k)| s * k).sum();
                let delta = strength * (v - read);
                row.iter_mut().zip(&k).for_each(|(s, k)| *s += k * delta);
                *o = row.iter().zip(&q).map(|(s, q)| s * q).sum();
            }
            let mean = o.iter().map(|o| o * o).sum::<f64>() / d as f64;
            for (i, o) in o.iter().enumerate() {
                let gate = silu(f64::from(sequence.gate[at * d + i]));
                out.push(o / (mean + eps).sqrt() * f64::from(weights.norm[i]) * gate);
            }
        }
    }
    let past = |c: usize, j: usize| input((sequence.len + j).cast_signed() - (taps - 1).cast_signed(), c);
    let conv_state = (0..channels).flat_map(|c| (0..taps - 1).map(move |j| (c, j)));
    Reference { out, conv_state: conv_state.map(|(c, j)| past(c, j)).collect(), matrix_state: state.concat() }
}

/// Runs whole sequences side by side in steps of `chunk` tokens; sequence `i` uses slot `n - 1 - i`.
fn run(
    ops: &Ops,
    threads: usize,
    dims: DeltaNetDims,
    sequences: &[Sequence],
    chunk: usize,
) -> (Vec<Vec<f32>>, RecurrentState) {
    let pool = ThreadPool::new(threads).unwrap();
    let layer = Weights::new(dims).layer(dims);
    let mut state = RecurrentState::new(dims, sequences.len()).unwrap();
    // What an earlier sequence left in a slot must not matter.
    state.conv.values_mut().fill(f32::NAN);
    state.matrix.values_mut().fill(f32::NAN);
    let mut scratch = DeltaNetScratch::new();
    let width = dims.value_heads * dims.head_dim;
    let mut outs = vec![Vec::new(); sequences.len()];
    let longest = sequences.iter().map(|s| s.len).max().unwrap_or(0);
    for start in (0..longest).step_by(chunk) {
        let (mut qkv, mut gate, mut alpha, mut beta) = (vec![], vec![], vec![], vec![]);
        let mut spans = Vec::new();
        let mut rows = 0;
        for (i, s) in sequences.iter().enumerate().filter(|(_, s)| s.len > start) {
            let tokens = chunk.min(s.len - start);
            let part = |values: &[f32], to: &mut Vec<f32>| {
                let width = values.len() / s.len;
                to.extend_from_slice(&values[start * width..(start + tokens) * width]);
            };
            part(&s.qkv, &mut qkv);
            part(&s.gate, &mut gate);
            part(&s.alpha, &mut alpha);
            part(&s.beta, &mut beta);
            spans.push(StateSpan {
                first_row: rows,
                tokens,
                slot: sequences.len() - 1 - i,
                reset: start == 0,
            });
            rows += tokens;
        }
        let mut out = vec![0.0; rows * width];
        let io = DeltaNetRows { qkv: &qkv, gate: &gate, alpha: &alpha, beta: &beta, out: &mut out };
        ops.delta_net(&pool, &layer, &mut state, &spans, io, &mut scratch).unwrap();
        for span in &spans {
            let rows = &out[span.first_row * width..(span.first_row + span.tokens) * width];
            outs[sequences.len() - 1 - span.slot].extend_from_slice(rows);
        }
    }
    (outs, state)
}

fn assert_close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(got) - want).abs() <= tolerance * (1.0 + want.abs()),
            "{what} {i}: {got} for {want}"
        );
    }
}

/// Outputs and states agree with the definition, for equal and grouped heads and both tile widths.
#[test]
fn agrees_with_the_definition() {
    for dims in [dims(2, 4, 64), dims(1, 1, 16), dims(2, 2, 48), dims(2, 6, 128)] {
        let sequence = Sequence::new(dims, 200, 3);
        let want = reference(dims, &Weights::new(dims), &sequence);
        let (out, state) = run(&fastest(), 2, dims, std::slice::from_ref(&sequence), 200);
        assert_close("out", &out[0], &want.out, 2e-4);
        assert_close("convolution state", &state.conv_state(0).unwrap(), &want.conv_state, 0.0);
        assert_close("matrix state", &state.matrix_state(0).unwrap(), &want.matrix_state, 5e-6);
    }
}

/// Any chunking, any number of threads, alone or in a batch: the same bits in outputs and states.
#[test]
fn chunks_threads_and_batches_do_not_matter() {
    let (ops, dims) = (fastest(), dims(2, 4, 32));
    let sequences: Vec<_> =
        [150, 1, 2, 70].iter().zip(1..).map(|(&len, seed)| Sequence::new(dims, len, seed)).collect();
    let alone: Vec<_> = sequences
        .iter()
        .map(|s| {
            let (out, state) = run(&ops, 1, dims, std::slice::from_ref(s), s.len);
            (bits(&out[0]), bits(&state.matrix_state(0).unwrap()), bits(&state.conv_state(0).unwrap()))
        })
        .collect();
    for (chunk, threads) in [(1, 1), (1, 4), (2, 2), (7, 3), (64, 1), (64, 4), (150, 3)] {
        let (outs, state) = run(&ops, threads, dims, &sequences, chunk);
        for (i, (out, (want, matrix, conv))) in outs.iter().zip(&alone).enumerate() {
            let slot = sequences.len() - 1 - i;
            assert!(&bits(out) == want, "chunk {chunk}, {threads} threads, sequence {i}");
            assert!(&bits(&state.matrix_state(slot).unwrap()) == matrix, "matrix state {i}");
            assert!(&bits(&state.conv_state(slot).unwrap()) == conv, "convolution state {i}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    /// Every kernel set of this CPU gives the bits of the scalar one.
    #[test]
    fn kernel_sets_agree(
        key_heads in 1usize..3,
        group in 1usize..4,
        head_dim in (1usize..6).prop_map(|n| 16 * n),
        conv_kernel in 2usize..6,
        len in 1usize..40,
        seed in any::<u64>(),
    ) {
        let dims = DeltaNetDims { conv_kernel, ..dims(key_heads, key_heads * group, head_dim) };
        let sequences = [Sequence::new(dims, len, seed)];
        let (want, want_state) = run(&Ops::new(KernelSet::Scalar).unwrap(), 1, dims, &sequences, len);
        for ops in every_set() {
            let (got, state) = run(&ops, 2, dims, &sequences, len.div_ceil(2));
            prop_assert!(bits(&got[0]) == bits(&want[0]), "{}", ops.set());
            let (matrix, want) = (state.matrix_state(0).unwrap(), want_state.matrix_state(0).unwrap());
            prop_assert!(bits(&matrix) == bits(&want), "{}", ops.set());
        }
    }
}

/// Shapes and spans that do not fit are refused by name.
#[test]
fn refuses_what_does_not_fit() {
    let good = dims(1, 2, 16);
    for bad in [
        DeltaNetDims { key_heads: 0, ..good },
        DeltaNetDims { value_heads: 0, ..good },
        DeltaNetDims { key_heads: 2, value_heads: 3, ..good },
        DeltaNetDims { head_dim: 24, ..good },
        DeltaNetDims { conv_kernel: 1, ..good },
    ] {
        assert_eq!(RecurrentState::new(bad, 1).unwrap_err().code(), "op_dimension_unsupported");
    }
    assert_eq!(DeltaNet::new(good, &[0.0; 3], &[], &[], &[]).unwrap_err().code(), "op_shape");
    let layer = Weights::new(good).layer(good);
    let pool = ThreadPool::new(1).unwrap();
    let run = |state: DeltaNetDims, qkv: usize, spans: &[StateSpan]| {
        let mut state = RecurrentState::new(state, 2).unwrap();
        let (qkv, values, heads) = (vec![0.0; qkv], vec![0.0; 2 * 32], vec![0.0; 2 * 2]);
        let mut out = values.clone();
        let rows = DeltaNetRows { qkv: &qkv, gate: &values, alpha: &heads, beta: &heads, out: &mut out };
        let mut scratch = DeltaNetScratch::new();
        fastest()
            .delta_net(&pool, &layer, &mut state, spans, rows, &mut scratch)
            .map_err(|error| error.code())
    };
    let span = |first_row, slot| StateSpan { first_row, tokens: 1, slot, reset: true };
    assert_eq!(run(good, 128, &[span(0, 0), span(1, 1)]), Ok(()));
    assert_eq!(run(good, 128, &[span(0, 1), span(1, 1)]), Err("state_slot_invalid"));
    assert_eq!(run(good, 128, &[span(0, 2)]), Err("state_slot_invalid"));
    assert_eq!(run(good, 128, &[span(1, 0), span(0, 1)]), Err("op_shape"));
    assert_eq!(run(good, 127, &[span(0, 0)]), Err("op_shape"));
    assert_eq!(run(dims(1, 1, 16), 128, &[span(0, 0)]), Err("op_shape"));
}
