//! Everything but products, against the CPU's operations.

use super::numbers::Numbers;
use super::{Bench, cpu};
use spillway_kernels::ops::deltanet::{DeltaNetRows, DeltaNetScratch, RecurrentState, StateSpan};
use spillway_kernels::ops::{self, RopePairing, RopeTable};
use spillway_worker_gpu::hip::DeviceBuffer;
use spillway_worker_gpu::launch::{
    DeltaNet, DeltaNetBuffers, DeltaNetDims, Pairing, Rope, RowMeta, SpanMeta,
};

pub fn close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let allowed = tolerance * expected.abs().max(1.0);
        assert!((got - expected).abs() <= allowed, "{what} at {i}: {got} for {expected}");
    }
}

/// Activations, head splitting and gathering.
pub fn rows(bench: &Bench<'_>) {
    let (pool, _, cpu) = cpu();
    let (kernels, stream) = (bench.kernels(), &bench.stream);
    let mut numbers = Numbers::new(30);
    let n = 1000;
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
    kernels.split_heads(stream, source.slice(), first.slice(), second.slice(), n / 40, 20).unwrap();
    let (mut one, mut two) = (vec![0.0; n / 2], vec![0.0; n / 2]);
    cpu.split_heads(pool, &a, 20, &mut one, &mut two).unwrap();
    assert_eq!((bench.download::<f32>(&first), bench.download::<f32>(&second)), (one, two));

    let (indices, out) = (bench.upload(&[2u32, 0]), bench.empty::<f32>(600));
    kernels.gather_rows(stream, source.slice(), indices.slice(), out.slice(), 2, 300).unwrap();
    assert_eq!(bench.download::<f32>(&out), [&a[600..900], &a[..300]].concat());
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

/// A layer of both sides, with its weights and the inputs of some rows.
struct DeltaTest {
    dims: DeltaNetDims,
    conv: Vec<f32>,
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

/// Inputs: qkv, gate, alpha, beta.
type DeltaInputs = [Vec<f32>; 4];

const SLOTS: usize = 3;

impl DeltaTest {
    fn new(numbers: &mut Numbers, dims: DeltaNetDims) -> Self {
        Self {
            dims,
            conv: numbers.units(dims.channels() * dims.taps),
            decay: numbers.units(dims.value_heads).iter().map(|v| -v.abs()).collect(),
            dt_bias: numbers.units(dims.value_heads),
            norm: numbers.units(dims.head_dim),
        }
    }

    fn widths(&self) -> [usize; 4] {
        let DeltaNetDims { value_heads, head_dim, .. } = self.dims;
        [self.dims.channels(), value_heads * head_dim, value_heads, value_heads]
    }

    fn inputs(&self, numbers: &mut Numbers, rows: usize) -> DeltaInputs {
        self.widths().map(|width| numbers.units(rows * width))
    }

    fn cpu_layer(&self) -> ops::deltanet::DeltaNet {
        let DeltaNetDims { key_heads, value_heads, head_dim, taps, epsilon } = self.dims;
        let dims =
            ops::deltanet::DeltaNetDims { key_heads, value_heads, head_dim, conv_kernel: taps, eps: epsilon };
        ops::deltanet::DeltaNet::new(dims, &self.conv, &self.decay, &self.dt_bias, &self.norm).unwrap()
    }

    fn run(&self, bench: &Bench<'_>, state: &[DeviceBuffer; 2], spans: &[Span], x: &DeltaInputs) -> Vec<f32> {
        let facts = facts(bench, spans);
        let [qkv, gate, alpha, beta] = x.each_ref().map(|values| bench.upload(values));
        let weights = [&self.conv, &self.decay, &self.dt_bias, &self.norm].map(|values| bench.upload(values));
        let out = bench.empty::<f32>(facts.rows * self.widths()[1]);
        let scratch = bench.empty::<u8>(self.dims.scratch_bytes(facts.rows));
        let [conv, decay, dt_bias, norm] = weights.each_ref().map(DeviceBuffer::slice);
        let [history, matrix] = state.each_ref().map(DeviceBuffer::slice);
        let layer = DeltaNet { dims: self.dims, conv, decay, dt_bias, norm, history, matrix };
        let buffers = DeltaNetBuffers {
            qkv: qkv.slice(),
            gate: gate.slice(),
            alpha: alpha.slice(),
            beta: beta.slice(),
            out: out.slice(),
            row_meta: facts.row_meta.slice(),
            span_meta: facts.span_meta.slice(),
            scratch: scratch.slice(),
        };
        bench.kernels().delta_net(&bench.stream, &layer, &buffers, facts.rows, spans.len()).unwrap();
        bench.download(&out)
    }

    fn cpu(&self, state: &mut RecurrentState, spans: &[Span], x: &DeltaInputs) -> Vec<f32> {
        let (pool, _, cpu) = cpu();
        let mut first_row = 0;
        let spans: Vec<StateSpan> = spans
            .iter()
            .map(|&Span { start, tokens, slot, .. }| {
                first_row += tokens;
                StateSpan { first_row: first_row - tokens, tokens, slot, reset: start == 0 }
            })
            .collect();
        let mut out = vec![0.0; first_row * self.widths()[1]];
        let [qkv, gate, alpha, beta] = x;
        let rows = DeltaNetRows { qkv, gate, alpha, beta, out: &mut out };
        cpu.delta_net(pool, &self.cpu_layer(), state, &spans, rows, &mut DeltaNetScratch::new()).unwrap();
        out
    }
}

/// Head widths of all kinds, prompts and single tokens beside each other, states carried over; then the states themselves.
pub fn delta_net(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(35);
    for (key_heads, value_heads, head_dim, taps) in
        [(2, 4, 64, 4), (1, 3, 32, 2), (1, 1, 128, 5), (1, 1, 256, 4)]
    {
        let dims = DeltaNetDims { key_heads, value_heads, head_dim, taps, epsilon: 1e-6 };
        let test = DeltaTest::new(&mut numbers, dims);
        let state = [dims.history_len(), dims.matrix_len()].map(|len| bench.empty::<f32>(SLOTS * len));
        let mut cpu_state = RecurrentState::new(test.cpu_layer().dims(), SLOTS).unwrap();
        let span = |start, tokens, slot| Span { start, tokens, blocks: &[], slot };
        for spans in
            [[span(0, 6, 2), span(0, 1, 0)], [span(1, 2, 0), span(6, 5, 2)], [span(0, 1, 2), span(3, 1, 0)]]
        {
            let x = test.inputs(&mut numbers, spans.iter().map(|span| span.tokens).sum());
            let expected = test.cpu(&mut cpu_state, &spans, &x);
            close("delta net", &test.run(bench, &state, &spans, &x), &expected, 1e-4);
        }
        let [history, matrix] = state.each_ref().map(|buffer| bench.download::<f32>(buffer));
        for slot in [0, 2] {
            let len = dims.matrix_len();
            let expected = cpu_state.matrix_state(slot).unwrap();
            close("matrix state", &matrix[slot * len..(slot + 1) * len], &expected, 1e-4);
            let (past, channels) = (taps - 1, dims.channels());
            for (i, expected) in cpu_state.conv_state(slot).unwrap().iter().enumerate() {
                assert_eq!(history[slot * past * channels + i % past * channels + i / past], *expected);
            }
        }
    }
    delta_net_is_chunk_invariant(bench);
}

/// A prompt in one step, in two, and token by token: the same bits.
fn delta_net_is_chunk_invariant(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(36);
    let dims = DeltaNetDims { key_heads: 1, value_heads: 2, head_dim: 64, taps: 4, epsilon: 1e-6 };
    let test = DeltaTest::new(&mut numbers, dims);
    let x = test.inputs(&mut numbers, 7);
    let run = |chunks: &[usize]| {
        let state = [dims.history_len(), dims.matrix_len()].map(|len| bench.empty::<f32>(len));
        let (mut start, mut out) = (0, Vec::new());
        for &tokens in chunks {
            let widths = test.widths();
            let part: DeltaInputs =
                std::array::from_fn(|i| x[i][start * widths[i]..(start + tokens) * widths[i]].to_vec());
            out.extend(test.run(bench, &state, &[Span { start, tokens, blocks: &[], slot: 0 }], &part));
            start += tokens;
        }
        out
    };
    let whole = run(&[7]);
    assert_eq!(run(&[2, 5]), whole);
    assert_eq!(run(&[1; 7]), whole);
}
