//! Everything but products, against the CPU's operations.

use super::numbers::Numbers;
use super::{Bench, cpu};
use spillway_kernels::ops::attention::{AttentionDims, AttentionRows, AttentionScratch, KvDims, KvSpan};
use spillway_kernels::ops::{self, RopePairing, RopeTable};
use spillway_worker_gpu::hip::DeviceBuffer;
use spillway_worker_gpu::launch::{
    Attention, AttentionBuffers, KvCache, KvElement, Pairing, Rope, RowMeta, SpanMeta,
};

pub fn close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let allowed = tolerance * expected.abs().max(1.0);
        assert!((got - expected).abs() <= allowed, "{what} at {i}: {got} for {expected}");
    }
}

/// Activations and head splitting.
pub fn rows(bench: &Bench<'_>) {
    let (pool, _, cpu) = cpu();
    let (kernels, stream) = (bench.kernels(), &bench.stream);
    let mut numbers = Numbers::new(30);
    let n = 1002; // neither whole quads nor whole blocks
    let (a, b): (Vec<f32>, _) = (numbers.units(n).iter().map(|v| v * 20.0).collect(), numbers.units(n));
    let [left, right] = [&a, &b].map(|values| bench.upload(values));
    kernels.silu_mul(stream, left.slice(), right.slice(), n).unwrap();
    let mut expected = a.clone();
    cpu.silu_mul(pool, &mut expected, &b).unwrap();
    close("silu_mul", &bench.download(&left), &expected, 1e-6);

    let [left, right] = [&b, &a].map(|values| bench.upload(values));
    kernels.sigmoid_mul(stream, left.slice(), right.slice(), n).unwrap();
    let mut expected = b.clone();
    cpu.sigmoid_mul(pool, &mut expected, &a).unwrap();
    close("sigmoid_mul", &bench.download(&left), &expected, 1e-6);

    let (first, second) = (bench.empty::<f32>(n / 2), bench.empty::<f32>(n / 2));
    let source = bench.upload(&a);
    kernels.split_heads(stream, source.slice(), first.slice(), second.slice(), n / 6, 3).unwrap();
    let (mut one, mut two) = (vec![0.0; n / 2], vec![0.0; n / 2]);
    cpu.split_heads(pool, &a, 3, &mut one, &mut two).unwrap();
    assert_eq!((bench.download::<f32>(&first), bench.download::<f32>(&second)), (one, two));
    rope(bench);
}

fn rope(bench: &Bench<'_>) {
    let (pool, _, cpu) = cpu();
    let mut numbers = Numbers::new(31);
    let (positions, heads, head_dim, pairs) = ([0u32, 7, 100_000], 3, 24, 8);
    let frequencies: Vec<f32> = (0..pairs).map(|i| 0.3f32.powi(i)).collect();
    let x = numbers.units(positions.len() * heads * head_dim);
    let angles = || positions.iter().flat_map(|p| frequencies.iter().map(move |f| f64::from(*p as f32 * f)));
    let cos = bench.upload(&angles().map(|a| a.cos() as f32).collect::<Vec<_>>());
    let sin = bench.upload(&angles().map(|a| a.sin() as f32).collect::<Vec<_>>());
    for (pairing, cpu_pairing) in
        [(Pairing::Halves, RopePairing::Halves), (Pairing::Adjacent, RopePairing::Adjacent)]
    {
        let buffer = bench.upload(&x);
        let rope = Rope { pairing, pairs: frequencies.len(), cos: cos.slice(), sin: sin.slice() };
        let rows = positions.len();
        bench.kernels().rope(&bench.stream, buffer.slice(), &rope, rows, heads, head_dim).unwrap();
        let mut table = RopeTable::new(cpu_pairing, &frequencies, 1.0);
        table.prepare(&positions);
        let mut expected = x.clone();
        cpu.rope(pool, &mut expected, head_dim, &table).unwrap();
        close("rope", &bench.download(&buffer), &expected, 1e-6);
    }
}

/// The first of equal values, in rows shorter and longer than a block; NaNs do not win.
pub fn argmax(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(32);
    for width in [1, 70, 5000] {
        let mut x = numbers.units(3 * width);
        x[0] = f32::NAN;
        if width > 1 {
            x[width + width / 3] = 2.0;
            x[width + width / 2] = 2.0;
            x[3 * width - 1] = 5.0;
        }
        let (input, out) = (bench.upload(&x), bench.empty::<u32>(3));
        bench.kernels().argmax(&bench.stream, input.slice(), out.slice(), 3, width).unwrap();
        let got = bench.download::<u32>(&out);
        for (row, got) in x.chunks(width).zip(got) {
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = row.iter().position(|v| *v == best).unwrap_or(0);
            assert_eq!(got as usize, first, "width {width}");
        }
    }
}

/// Sequences of a step: start position, tokens, and their blocks or slot.
pub struct Span {
    pub start: usize,
    pub tokens: usize,
    pub blocks: &'static [u32],
    pub slot: usize,
}

/// The step's facts on the device.
pub struct Facts {
    pub rows: usize,
    pub row_meta: DeviceBuffer,
    pub span_meta: DeviceBuffer,
    pub tables: DeviceBuffer,
}

pub fn facts(bench: &Bench<'_>, spans: &[Span]) -> Facts {
    let (mut row_meta, mut span_meta, mut tables) = (Vec::new(), Vec::new(), Vec::new());
    for (index, span) in spans.iter().enumerate() {
        let first_row = row_meta.len() as u32;
        for position in span.start..span.start + span.tokens {
            let (position, table) = (position as u32, tables.len() as u32);
            row_meta.push(RowMeta { position, table, span: index as u32 });
        }
        let (tokens, slot) = (span.tokens as u32, span.slot as u32);
        span_meta.push(SpanMeta { first_row, tokens, slot, reset: u32::from(span.start == 0) });
        tables.extend_from_slice(span.blocks);
    }
    Facts {
        rows: row_meta.len(),
        row_meta: bench.upload(&row_meta),
        span_meta: bench.upload(&span_meta),
        tables: bench.upload(if tables.is_empty() { &[0] } else { &tables }),
    }
}

/// One layer's cache on both sides.
struct AttentionTest {
    heads: usize,
    dims: KvDims,
    scale: f32,
    element: KvElement,
}

const BLOCKS: usize = 24;

impl AttentionTest {
    fn q_width(&self) -> usize {
        self.heads * self.dims.key_dim
    }
    fn out_width(&self) -> usize {
        self.heads * self.dims.value_dim
    }
    fn cache(&self, memory: &DeviceBuffer) -> KvCache {
        let KvDims { kv_heads, key_dim, value_dim } = self.dims;
        KvCache::new(self.element, kv_heads, key_dim, value_dim, memory.slice()).unwrap()
    }
    fn memory(&self, bench: &Bench<'_>) -> DeviceBuffer {
        let KvDims { kv_heads, key_dim, value_dim } = self.dims;
        bench.empty::<u8>(KvCache::bytes_for(self.element, kv_heads, key_dim, value_dim, BLOCKS))
    }
    fn cpu_cache(&self) -> ops::attention::KvCache {
        let element = match self.element {
            KvElement::F32 => ops::attention::KvElement::F32,
            KvElement::F16 => ops::attention::KvElement::F16,
        };
        ops::attention::KvCache::new(self.dims, BLOCKS, element).unwrap()
    }

    /// Runs a step on the device. `scratch` is in partitions.
    fn run(
        &self,
        bench: &Bench<'_>,
        cache: &KvCache,
        spans: &[Span],
        x: &Values,
        scratch: usize,
    ) -> Vec<f32> {
        let facts = facts(bench, spans);
        let [q, k, v, gate] = [&x.q, &x.k, &x.v, &x.gate].map(|values| bench.upload(values));
        let out = bench.empty::<f32>(facts.rows * self.out_width());
        let layer = Attention { heads: self.heads, scale: self.scale };
        let bytes = Attention::scratch_bytes(self.heads, self.dims.value_dim, facts.rows, scratch);
        let scratch = bench.empty::<u8>(bytes);
        let buffers = AttentionBuffers {
            q: q.slice(),
            k: k.slice(),
            v: v.slice(),
            gate: Some(gate.slice()),
            out: out.slice(),
            row_meta: facts.row_meta.slice(),
            tables: facts.tables.slice(),
            scratch: scratch.slice(),
        };
        let context = spans.iter().map(|span| span.start + span.tokens).max().unwrap();
        bench.kernels().attention(&bench.stream, &layer, cache, &buffers, facts.rows, context).unwrap();
        bench.download(&out)
    }

    fn cpu(&self, cache: &mut ops::attention::KvCache, spans: &[Span], x: &Values) -> Vec<f32> {
        let (pool, _, cpu) = cpu();
        let mut first_row = 0;
        let kv_spans: Vec<KvSpan<'_>> = spans
            .iter()
            .map(|&Span { start, tokens, blocks, .. }| {
                first_row += tokens;
                KvSpan { first_row: first_row - tokens, tokens, start, blocks }
            })
            .collect();
        let mut out = vec![0.0; first_row * self.out_width()];
        let rows = AttentionRows { q: &x.q, k: &x.k, v: &x.v, gate: Some(&x.gate), out: &mut out };
        let dims = AttentionDims { heads: self.heads, scale: self.scale };
        cpu.attention(pool, cache, dims, &kv_spans, rows, &mut AttentionScratch::new()).unwrap();
        out
    }

    fn values(&self, numbers: &mut Numbers, rows: usize) -> Values {
        let kv = self.dims.kv_heads;
        Values {
            q: numbers.units(rows * self.q_width()).iter().map(|v| v * 3.0).collect(),
            k: numbers.units(rows * kv * self.dims.key_dim),
            v: numbers.units(rows * kv * self.dims.value_dim),
            gate: numbers.units(rows * self.out_width()),
        }
    }
}

/// Inputs of an attention step.
struct Values {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gate: Vec<f32>,
}

impl Values {
    /// One row of them.
    fn row(&self, test: &AttentionTest, row: usize) -> Self {
        let part = |values: &[f32], width: usize| values[row * width..(row + 1) * width].to_vec();
        let kv = test.dims.kv_heads;
        Self {
            q: part(&self.q, test.q_width()),
            k: part(&self.k, kv * test.dims.key_dim),
            v: part(&self.v, kv * test.dims.value_dim),
            gate: part(&self.gate, test.out_width()),
        }
    }
}

/// Groups of all sizes, head widths of all kinds, contexts of several partitions, and sequences of mixed lengths.
pub fn attention(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(33);
    for (heads, kv_heads, key_dim, value_dim, element) in [
        (2, 2, 64, 64, KvElement::F32),
        (6, 1, 32, 32, KvElement::F16),
        (4, 2, 128, 128, KvElement::F16),
        (9, 1, 24, 40, KvElement::F32),
    ] {
        let dims = KvDims { kv_heads, key_dim, value_dim };
        let test = AttentionTest { heads, dims, scale: 1.0 / (key_dim as f32).sqrt(), element };
        let (memory, mut cpu_cache) = (test.memory(bench), test.cpu_cache());
        let cache = test.cache(&memory);
        // A prompt over two blocks beside a short one, then both go on.
        let steps: [[Span; 2]; 2] = [
            [
                Span { start: 0, tokens: 37, blocks: &[5, 2], slot: 0 },
                Span { start: 0, tokens: 3, blocks: &[9], slot: 1 },
            ],
            [
                Span { start: 37, tokens: 1, blocks: &[5, 2], slot: 0 },
                Span { start: 3, tokens: 2, blocks: &[9], slot: 1 },
            ],
        ];
        for spans in &steps {
            let rows = spans.iter().map(|span| span.tokens).sum();
            let x = test.values(&mut numbers, rows);
            let got = test.run(bench, &cache, spans, &x, 0);
            close("attention", &got, &test.cpu(&mut cpu_cache, spans, &x), 2e-5);
        }
    }
    long_attention(bench);
}

/// A context of three partitions: split over blocks, folded in one block, and token by token, all to the same bits.
fn long_attention(bench: &Bench<'_>) {
    const TABLE: &[u32] = &[17, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0, 1, 2];
    let mut numbers = Numbers::new(34);
    let dims = KvDims { kv_heads: 1, key_dim: 16, value_dim: 16 };
    let test = AttentionTest { heads: 2, dims, scale: 0.25, element: KvElement::F16 };
    let (memory, mut cpu_cache) = (test.memory(bench), test.cpu_cache());
    let cache = test.cache(&memory);
    let prompt = [Span { start: 0, tokens: 530, blocks: TABLE, slot: 0 }];
    let x = test.values(&mut numbers, 530);
    let got = test.run(bench, &cache, &prompt, &x, 0);
    close("a long prompt", &got, &test.cpu(&mut cpu_cache, &prompt, &x), 2e-5);
    let next = [Span { start: 530, tokens: 2, blocks: TABLE, slot: 0 }];
    let x = test.values(&mut numbers, 2);
    let whole = test.run(bench, &cache, &next, &x, 0);
    close("a long context", &whole, &test.cpu(&mut cpu_cache, &next, &x), 2e-5);
    assert_eq!(test.run(bench, &cache, &next, &x, 3), whole, "split over blocks");
    for row in 0..2 {
        let one = [Span { start: 530 + row, tokens: 1, blocks: TABLE, slot: 0 }];
        let width = test.out_width();
        let got = test.run(bench, &cache, &one, &x.row(&test, row), 3);
        assert_eq!(got, whole[row * width..(row + 1) * width], "token by token");
    }
}
