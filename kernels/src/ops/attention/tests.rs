//! Attention against an f64 reference, and the promise that nothing but position and contents matters.

use super::*;
use crate::isa::KernelSet;
use crate::ops::testing::{Noise, bits, fastest};
use proptest::prelude::*;

/// One layer's shape.
#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: usize,
    kv: KvDims,
}

impl Shape {
    fn new(heads: usize, kv_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        Self { heads, kv: KvDims { kv_heads, key_dim, value_dim } }
    }

    #[expect(clippy::cast_precision_loss, reason = "small widths")]
    fn dims(self) -> AttentionDims {
        AttentionDims { heads: self.heads, scale: 1.0 / (self.kv.key_dim as f32).sqrt() }
    }
}

/// Queries, keys, values and gates of whole sequences.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gate: Vec<f32>,
    len: usize,
}

impl Sequence {
    fn new(shape: Shape, len: usize, seed: u64) -> Self {
        let mut noise = Noise(seed);
        let Shape { heads, kv } = shape;
        // Queries are large, so that the softmax is far from uniform.
        let q = noise.take(len * heads * kv.key_dim).iter().map(|x| 4.0 * x).collect();
        let k = noise.take(len * kv.kv_heads * kv.key_dim);
        let v = noise.take(len * kv.kv_heads * kv.value_dim);
        let gate = noise.take(len * heads * kv.value_dim);
        Self { q, k, v, gate, len }
    }

    /// Attention by its definition, in f64, without blocks, partitions or running maxima.
    fn reference(&self, shape: Shape) -> Vec<f64> {
        let Shape { heads, kv: KvDims { kv_heads, key_dim, value_dim } } = shape;
        let mut out = Vec::new();
        for token in 0..self.len {
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let query = &self.q[(token * heads + head) * key_dim..][..key_dim];
                let scores: Vec<f64> = (0..=token)
                    .map(|t| {
                        let key = &self.k[(t * kv_heads + kv_head) * key_dim..][..key_dim];
                        let dot: f64 =
                            query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                        dot * f64::from(shape.dims().scale)
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..value_dim {
                    let value = |t: usize| f64::from(self.v[(t * kv_heads + kv_head) * value_dim + d]);
                    let mean: f64 = weights.iter().enumerate().map(|(t, w)| w * value(t)).sum::<f64>() / sum;
                    let gate = f64::from(self.gate[(token * heads + head) * value_dim + d]);
                    out.push(mean / (1.0 + (-gate).exp()));
                }
            }
        }
        out
    }
}

/// Runs whole sequences side by side in steps of `chunk` tokens each, with interleaved blocks.
fn run(
    ops: &Ops,
    threads: usize,
    shape: Shape,
    element: KvElement,
    sequences: &[Sequence],
    chunk: usize,
) -> Vec<Vec<f32>> {
    let pool = ThreadPool::new(threads).unwrap();
    let longest = sequences.iter().map(|s| s.len).max().unwrap_or(0);
    let per_sequence = longest.div_ceil(BLOCK);
    let count = sequences.len();
    let mut cache = KvCache::new(shape.kv, per_sequence * count, element).unwrap();
    // Stale contents: what is left in a block must not matter.
    match &mut cache.store {
        Store::F32(store) => store.values_mut().fill(f32::NAN),
        Store::F16(store) => store.values_mut().fill(half::f16::NAN),
    }
    let tables: Vec<Vec<u32>> = (0..count)
        .map(|s| (0..per_sequence).rev().map(|b| u32::try_from(b * count + s).unwrap()).collect())
        .collect();
    let mut scratch = AttentionScratch::new();
    let mut outs: Vec<Vec<f32>> = sequences.iter().map(|_| Vec::new()).collect();
    for start in (0..longest).step_by(chunk) {
        let (mut q, mut k, mut v, mut gate) = (vec![], vec![], vec![], vec![]);
        let mut spans = Vec::new();
        let mut rows = 0;
        for (sequence, blocks) in sequences.iter().zip(&tables) {
            let tokens = chunk.min(sequence.len.saturating_sub(start));
            let part = |values: &[f32], to: &mut Vec<f32>| {
                let width = values.len() / sequence.len;
                let start = start.min(sequence.len);
                to.extend_from_slice(&values[start * width..(start + tokens) * width]);
            };
            part(&sequence.q, &mut q);
            part(&sequence.k, &mut k);
            part(&sequence.v, &mut v);
            part(&sequence.gate, &mut gate);
            spans.push(KvSpan { first_row: rows, tokens, start, blocks });
            rows += tokens;
        }
        let width = shape.heads * shape.kv.value_dim;
        let mut out = vec![0.0; rows * width];
        let io = AttentionRows { q: &q, k: &k, v: &v, gate: Some(&gate), out: &mut out };
        let spans: Vec<_> = spans.into_iter().filter(|span| span.tokens > 0).collect();
        ops.attention(&pool, &mut cache, shape.dims(), &spans, io, &mut scratch).unwrap();
        let mut rest = out.as_slice();
        for (sequence, to) in sequences.iter().zip(&mut outs) {
            let tokens = chunk.min(sequence.len.saturating_sub(start));
            let (mine, others) = rest.split_at(tokens * width);
            to.extend_from_slice(mine);
            rest = others;
        }
    }
    outs
}

/// Every head shape that models use, and odd ones, agrees with the definition.
#[test]
fn agrees_with_the_definition() {
    let shapes = [
        Shape::new(9, 3, 64, 64),
        Shape::new(4, 2, 80, 80),
        Shape::new(6, 1, 96, 96),
        Shape::new(4, 4, 128, 128),
        Shape::new(8, 2, 256, 256),
        Shape::new(3, 1, 72, 40),
        Shape::new(7, 7, 8, 8),
    ];
    for shape in shapes {
        let sequence = Sequence::new(shape, 300, 7);
        let want = sequence.reference(shape);
        for (element, tolerance) in [(KvElement::F32, 2e-6), (KvElement::F16, 2e-3)] {
            let got = run(&fastest(), 2, shape, element, std::slice::from_ref(&sequence), 300);
            for (i, (got, want)) in got[0].iter().zip(&want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(error < tolerance, "{shape:?} {element:?} value {i}: {got} for {want}");
            }
        }
    }
}

/// Any chunking, any number of threads, alone or in a batch: the same bits. The context is longer than two partitions.
#[test]
fn chunks_threads_and_batches_do_not_matter() {
    let ops = fastest();
    for (shape, element) in
        [(Shape::new(6, 2, 64, 64), KvElement::F16), (Shape::new(4, 1, 80, 48), KvElement::F32)]
    {
        let sequences: Vec<_> =
            [600, 1, 257, 33].iter().zip(1..).map(|(&len, seed)| Sequence::new(shape, len, seed)).collect();
        let alone: Vec<Vec<u32>> = sequences
            .iter()
            .map(|s| bits(&run(&ops, 1, shape, element, std::slice::from_ref(s), s.len)[0]))
            .collect();
        for (chunk, threads) in [(1, 1), (1, 4), (7, 2), (7, 3), (64, 1), (64, 4), (600, 3)] {
            let together = run(&ops, threads, shape, element, &sequences, chunk);
            for (s, (got, want)) in together.iter().zip(&alone).enumerate() {
                assert!(&bits(got) == want, "chunk {chunk}, {threads} threads, sequence {s}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Every kernel set of this CPU gives the bits of the scalar one, for any shape.
    #[test]
    fn kernel_sets_agree(
        kv_heads in 1usize..3,
        group in 1usize..7,
        key_dim in (1usize..12).prop_map(|n| 8 * n),
        value_dim in (1usize..12).prop_map(|n| 8 * n),
        len in 1usize..290,
        chunk in 1usize..300,
        half in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let shape = Shape::new(kv_heads * group, kv_heads, key_dim, value_dim);
        let element = if half { KvElement::F16 } else { KvElement::F32 };
        let sequences = [Sequence::new(shape, len, seed)];
        // Steps of one token are slow on the scalar set: chunking is proven above.
        let chunk = chunk.max(len / 8);
        let want = run(&Ops::new(KernelSet::Scalar).unwrap(), 2, shape, element, &sequences, chunk);
        for set in KernelSet::available() {
            let got = run(&Ops::new(set).unwrap(), 2, shape, element, &sequences, chunk);
            prop_assert!(bits(&got[0]) == bits(&want[0]), "{set}");
        }
    }
}

/// Steps that do not fit the cache are refused by name, and nothing is written.
#[test]
fn refuses_what_does_not_fit() {
    let shape = Shape::new(2, 1, 16, 16);
    let pool = ThreadPool::new(1).unwrap();
    let attend = |heads: usize, q: usize, spans: &[KvSpan<'_>]| {
        let mut cache = KvCache::new(shape.kv, 4, KvElement::F32).unwrap();
        let (q, kv, mut out) = (vec![0.0; q], vec![0.0; 2 * 16], vec![0.0; 2 * 32]);
        let rows = AttentionRows { q: &q, k: &kv, v: &kv, gate: None, out: &mut out };
        let dims = AttentionDims { heads, scale: 1.0 };
        let mut scratch = AttentionScratch::new();
        fastest().attention(&pool, &mut cache, dims, spans, rows, &mut scratch).map_err(|error| error.code())
    };
    let span = |first_row, start, blocks| KvSpan { first_row, tokens: 1, start, blocks };
    assert_eq!(attend(2, 64, &[span(0, 0, &[0]), span(1, 32, &[1, 2])]), Ok(()));
    assert_eq!(attend(2, 64, &[span(0, 0, &[0]), span(1, 0, &[0])]), Err("kv_block_shared"));
    assert_eq!(attend(2, 64, &[span(0, 0, &[4])]), Err("kv_block_out_of_range"));
    assert_eq!(attend(2, 64, &[span(0, 32, &[1])]), Err("kv_table_too_short"));
    assert_eq!(attend(2, 64, &[span(2, 0, &[1])]), Err("op_shape"));
    assert_eq!(attend(2, 63, &[span(0, 0, &[1])]), Err("op_shape"));
    assert_eq!(attend(0, 64, &[span(0, 0, &[1])]), Err("op_dimension_unsupported"));
    let none = KvDims { kv_heads: 0, ..shape.kv };
    assert_eq!(KvCache::new(none, 1, KvElement::F32).unwrap_err().code(), "op_dimension_unsupported");
}

/// The address space of a long context is reserved, not touched.
#[test]
fn memory_is_taken_when_written() {
    let dims = KvDims { kv_heads: 8, key_dim: 128, value_dim: 128 };
    let bytes = KvCache::bytes_for(dims, 1 << 14, KvElement::F32);
    assert_eq!(bytes, 4 << 30);
    let cache = KvCache::new(dims, 1 << 14, KvElement::F32).unwrap();
    assert_eq!(cache.blocks(), 1 << 14);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: usize = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 2 << 20, "{kib} KiB resident");
}
