//! Attention against the CPU's, both ways, and the same bits however a prompt is cut.

use super::numbers::Numbers;
use super::operations::{Span, close, facts};
use super::{Bench, cpu};
use spillway_kernels::ops::attention::{AttentionDims, AttentionRows, AttentionScratch, KvDims, KvSpan};
use spillway_kernels::ops::{self, RopePairing, RopeTable};
use spillway_worker_gpu::hip::DeviceBuffer;
use spillway_worker_gpu::launch::{
    Attention, AttentionBuffers, HeadSteps, Heads, Kernels, KvCache, KvElement, Pairing, Rope, StepSize,
};

/// Blocks of a cache.
const BLOCKS: usize = 24;
/// Of the f32 way: another order of sums.
const EXACT: f32 = 2e-5;
/// Of the way over matrix units: queries and weights rounded to 11 bits.
const ROUNDED: f32 = 2e-3;

/// The operations, attending on matrix units where they can, or never.
fn kernels(bench: &Bench<'_>, matrix_units: bool) -> Kernels {
    Kernels::load(&bench.device, bench.compiler, &[]).unwrap().with_matrix_units(matrix_units)
}

/// An attention layer, on a device and on the CPU.
struct Layer<'b> {
    bench: &'b Bench<'b>,
    kernels: &'b Kernels,
    heads: usize,
    dims: KvDims,
    element: KvElement,
    memory: DeviceBuffer,
}

/// Inputs of an attention step.
struct Values {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    gate: Vec<f32>,
}

impl<'b> Layer<'b> {
    /// With an empty cache.
    fn new(
        bench: &'b Bench<'b>,
        kernels: &'b Kernels,
        heads: usize,
        dims: KvDims,
        element: KvElement,
    ) -> Self {
        let bytes = KvCache::bytes_for(element, dims.kv_heads, dims.key_dim, dims.value_dim, BLOCKS);
        Self { bench, kernels, heads, dims, element, memory: bench.empty::<u8>(bytes) }
    }

    /// Width of a row's queries, keys, values and gates.
    fn widths(&self) -> [usize; 4] {
        let KvDims { kv_heads, key_dim, value_dim } = self.dims;
        [self.heads * key_dim, kv_heads * key_dim, kv_heads * value_dim, self.heads * value_dim]
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dims.key_dim as f32).sqrt()
    }

    fn values(&self, numbers: &mut Numbers, rows: usize) -> Values {
        let [q, k, v, gate] = self.widths().map(|width| numbers.units(rows * width));
        Values { q: q.iter().map(|v| v * 3.0).collect(), k, v, gate }
    }

    /// The inputs of some rows.
    fn part(&self, x: &Values, rows: std::ops::Range<usize>) -> Values {
        let part = |values: &[f32], width: usize| values[rows.start * width..rows.end * width].to_vec();
        let [q, k, v, gate] = self.widths();
        Values { q: part(&x.q, q), k: part(&x.k, k), v: part(&x.v, v), gate: part(&x.gate, gate) }
    }

    /// Runs a step on the device; `scratch` is in rows times partitions.
    fn run(&self, spans: &[Span], x: &Values, scratch: usize) -> Vec<f32> {
        let facts = facts(self.bench, spans);
        let [q, k, v, gate] = [&x.q, &x.k, &x.v, &x.gate].map(|values| self.bench.upload(values));
        let KvDims { kv_heads, key_dim, value_dim } = self.dims;
        let out = self.bench.empty::<f32>(facts.rows * self.heads * value_dim);
        let scratch = self.bench.empty::<u8>(Attention::scratch_bytes(self.heads, value_dim, scratch, 1));
        let buffers = AttentionBuffers {
            q: Heads { memory: q.slice(), stride: key_dim },
            prepared: q.slice(),
            k: k.slice(),
            v: v.slice(),
            gate: Some(Heads { memory: gate.slice(), stride: value_dim }),
            out: out.slice(),
            row_meta: facts.row_meta.slice(),
            span_meta: facts.span_meta.slice(),
            tables: facts.tables.slice(),
            scratch: scratch.slice(),
        };
        let cache = KvCache::new(self.element, kv_heads, key_dim, value_dim, self.memory.slice()).unwrap();
        let layer = Attention { heads: self.heads, scale: self.scale() };
        let context = spans.iter().map(|span| span.start + span.tokens).max().unwrap();
        let size = StepSize { rows: facts.rows, spans: spans.len(), context };
        let steps = HeadSteps::default();
        self.kernels.attention(&self.bench.stream, &layer, &cache, &buffers, [&steps, &steps], size).unwrap();
        self.bench.download(&out)
    }

    fn cpu_cache(&self) -> ops::attention::KvCache {
        let element = match self.element {
            KvElement::F32 => ops::attention::KvElement::F32,
            KvElement::F16 => ops::attention::KvElement::F16,
        };
        ops::attention::KvCache::new(self.dims, BLOCKS, element).unwrap()
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
        let mut out = vec![0.0; first_row * self.heads * self.dims.value_dim];
        let rows = AttentionRows { q: &x.q, k: &x.k, v: &x.v, gate: Some(&x.gate), out: &mut out };
        let dims = AttentionDims { heads: self.heads, scale: self.scale() };
        cpu.attention(pool, cache, dims, &kv_spans, rows, &mut AttentionScratch::new()).unwrap();
        out
    }
}

/// In f32 throughout: groups of all sizes, head widths of all kinds, also where matrix units do not serve.
pub fn attention(bench: &Bench<'_>) {
    use KvElement::{F16, F32};
    for (matrix_units, shapes) in [
        (false, &[(2, 2, 64, 64, F32), (6, 1, 32, 32, F16), (4, 2, 128, 128, F16), (9, 1, 24, 40, F32)][..]),
        (true, &[(3, 1, 64, 64, F32), (3, 1, 64, 32, F16), (2, 1, 96, 96, F16)]),
    ] {
        let kernels = kernels(bench, matrix_units);
        for shape in shapes {
            sequences_go_on(bench, &kernels, *shape, EXACT);
        }
    }
}

/// On matrix units: groups of one head, of many, and of more than a tile has rows.
pub fn attention_tiles(bench: &Bench<'_>) {
    use KvElement::F16;
    let kernels = kernels(bench, true);
    for shape in [(1, 1, 64, 64, F16), (20, 1, 64, 64, F16), (10, 2, 128, 128, F16), (6, 1, 256, 256, F16)] {
        sequences_go_on(bench, &kernels, shape, ROUNDED);
    }
}

/// A prompt over two blocks beside a short one; then both go on, with single tokens and with more.
fn sequences_go_on(
    bench: &Bench<'_>,
    kernels: &Kernels,
    (heads, kv_heads, key_dim, value_dim, element): (usize, usize, usize, usize, KvElement),
    tolerance: f32,
) {
    let mut numbers = Numbers::new(33);
    let layer = Layer::new(bench, kernels, heads, KvDims { kv_heads, key_dim, value_dim }, element);
    let mut cpu_cache = layer.cpu_cache();
    let span = |start, tokens, blocks| Span { start, tokens, blocks, slot: 0 };
    for spans in [
        [span(0, 37, &[5, 2]), span(0, 3, &[9])],
        [span(37, 1, &[5, 2]), span(3, 2, &[9])],
        [span(38, 1, &[5, 2]), span(5, 19, &[9])],
    ] {
        let x = layer.values(&mut numbers, spans.iter().map(|span| span.tokens).sum());
        let what = format!("attention of {heads}:{kv_heads} heads of {key_dim}, {element:?}");
        close(&what, &layer.run(&spans, &x, 0), &layer.cpu(&mut cpu_cache, &spans, &x), tolerance);
    }
}

/// A context of several partitions: as a prompt, in chunks, beside another sequence, token by token, split over blocks in one
/// pass and in several, to the same bits.
pub fn attention_is_chunk_invariant(bench: &Bench<'_>) {
    let [tiles, threads] = [true, false].map(|matrix_units| kernels(bench, matrix_units));
    for (kernels, heads, dim, tokens, tolerance) in
        [(&threads, 2, 16, 532, EXACT), (&tiles, 2, 64, 278, ROUNDED), (&tiles, 5, 128, 150, ROUNDED)]
    {
        const TABLE: &[u32] = &[18, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0, 1, 2];
        let dims = KvDims { kv_heads: 1, key_dim: dim, value_dim: dim };
        let layer = Layer::new(bench, kernels, heads, dims, KvElement::F16);
        let x = layer.values(&mut Numbers::new(34), tokens);
        let span = |start, tokens| Span { start, tokens, blocks: TABLE, slot: 0 };
        let whole = layer.run(&[span(0, tokens)], &x, 0);
        let expected = layer.cpu(&mut layer.cpu_cache(), &[span(0, tokens)], &x);
        close("a prompt of several partitions", &whole, &expected, tolerance);
        let width = layer.widths()[3];
        let rows = |from: usize, to: usize| whole[from * width..to * width].iter().map(|v| v.to_bits());
        let same = |what: &str, from: usize, to: usize, got: &[f32]| {
            let got = got[..(to - from) * width].iter().map(|v| v.to_bits());
            assert!(got.eq(rows(from, to)), "{what}: {heads} heads of {dim}, rows {from}..{to}");
        };

        let again = Layer::new(bench, kernels, heads, dims, KvElement::F16);
        let cuts = [0, 17, 60, tokens - 22, tokens - 2, tokens];
        for (from, to) in cuts.into_iter().zip(cuts.into_iter().skip(1)) {
            same("chunks", from, to, &again.run(&[span(from, to - from)], &again.part(&x, from..to), 8));
        }
        let last = tokens - 2;
        for scratch in [0, 4, 8] {
            same(
                "the last two",
                last,
                tokens,
                &again.run(&[span(last, 2)], &again.part(&x, last..tokens), scratch),
            );
        }
        for row in last..tokens {
            same("alone", row, row + 1, &again.run(&[span(row, 1)], &again.part(&x, row..row + 1), 4));
        }
        // Beside it, 18 tokens of another sequence.
        let from = tokens - 40;
        let mut both = again.part(&x, from..tokens);
        let other = again.values(&mut Numbers::new(35), 18);
        for (one, more) in [
            (&mut both.q, other.q),
            (&mut both.k, other.k),
            (&mut both.v, other.v),
            (&mut both.gate, other.gate),
        ] {
            one.extend(more);
        }
        let beside = Span { start: 0, tokens: 18, blocks: &[20], slot: 0 };
        same("beside another", from, tokens, &again.run(&[span(from, 40), beside], &both, 8));
    }
}

/// Splitting, norm, rotation and the gate in attention's own launch, against the CPU's separate operations.
pub fn attention_prepares_heads(bench: &Bench<'_>) {
    let (pool, _, cpu) = cpu();
    let kernels = kernels(bench, true);
    let (heads, kv_heads, epsilon, rows) = (3, 1, 1e-6, 5);
    for (dim, pairing, pairs, normed, joined, element) in [
        (64, Pairing::Halves, 16, true, true, KvElement::F16),
        (256, Pairing::Halves, 32, true, true, KvElement::F16),
        (128, Pairing::Adjacent, 64, false, false, KvElement::F32),
        (24, Pairing::Adjacent, 6, true, false, KvElement::F32),
    ] {
        let mut numbers = Numbers::new(36);
        let dims = KvDims { kv_heads, key_dim: dim, value_dim: dim };
        let layer = Layer::new(bench, &kernels, heads, dims, element);
        let x = layer.values(&mut numbers, rows);
        let [q_norm, k_norm] = [0; 2].map(|_| numbers.units(dim));
        let frequencies: Vec<f32> = (0..pairs).map(|i| 0.7f32.powi(i)).collect();
        let cpu_pairing = match pairing {
            Pairing::Halves => RopePairing::Halves,
            Pairing::Adjacent => RopePairing::Adjacent,
        };
        let mut table = RopeTable::new(cpu_pairing, &frequencies, 1.0);
        table.prepare(&[0, 1, 2, 3, 4]);

        let interleaved: Vec<f32> =
            x.q.chunks(dim).zip(x.gate.chunks(dim)).flat_map(|(q, gate)| [q, gate].concat()).collect();
        let [q, q_norm_buffer, k_norm_buffer, cos, sin] =
            [if joined { &interleaved } else { &x.q }, &q_norm, &k_norm, table.cosines(), table.sines()]
                .map(|values| bench.upload(values));
        let [k, v, gate] = [&x.k, &x.v, &x.gate].map(|values| bench.upload(values));
        let spans = [Span { start: 0, tokens: rows, blocks: &[3], slot: 0 }];
        let facts = facts(bench, &spans);
        let [prepared, out] = [0; 2].map(|_| bench.empty::<f32>(rows * heads * dim));
        let joined_gate = q.slice().part(dim * 4, q.len() - dim * 4).unwrap();
        let buffers = AttentionBuffers {
            q: Heads { memory: q.slice(), stride: if joined { 2 * dim } else { dim } },
            prepared: prepared.slice(),
            k: k.slice(),
            v: v.slice(),
            gate: Some(match joined {
                true => Heads { memory: joined_gate, stride: 2 * dim },
                false => Heads { memory: gate.slice(), stride: dim },
            }),
            out: out.slice(),
            row_meta: facts.row_meta.slice(),
            span_meta: facts.span_meta.slice(),
            tables: facts.tables.slice(),
            scratch: out.slice(),
        };
        let rope = Some(Rope { pairing, pairs: frequencies.len(), cos: cos.slice(), sin: sin.slice() });
        let steps =
            |weight: &DeviceBuffer| HeadSteps { norm: normed.then_some((weight.slice(), epsilon)), rope };
        let cache = KvCache::new(element, kv_heads, dim, dim, layer.memory.slice()).unwrap();
        let size = StepSize { rows, spans: 1, context: rows };
        let steps = [&steps(&q_norm_buffer), &steps(&k_norm_buffer)];
        let attention = Attention { heads, scale: layer.scale() };
        kernels.attention(&bench.stream, &attention, &cache, &buffers, steps, size).unwrap();

        let mut expected = x;
        for (values, weight) in [(&mut expected.q, &q_norm), (&mut expected.k, &k_norm)] {
            if normed {
                cpu.head_norm(pool, values, weight, epsilon).unwrap();
            }
            cpu.rope(pool, values, dim, &table).unwrap();
        }
        close("prepared queries", &bench.download(&prepared), &expected.q, 1e-5);
        let tolerance = if element == KvElement::F16 { ROUNDED } else { EXACT };
        let expected = layer.cpu(&mut layer.cpu_cache(), &spans, &expected);
        close("attention on prepared heads", &bench.download(&out), &expected, tolerance);
    }
}
