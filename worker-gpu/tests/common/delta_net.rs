//! DeltaNet layers, against the CPU's and against themselves in other steps.

use super::numbers::Numbers;
use super::operations::{Span, close, facts};
use super::{Bench, cpu};
use spillway_kernels::ops;
use spillway_kernels::ops::deltanet::{DeltaNetRows, DeltaNetScratch, RecurrentState, StateSpan};
use spillway_worker_gpu::hip::DeviceBuffer;
use spillway_worker_gpu::launch::{DeltaNet, DeltaNetBuffers, DeltaNetDims, Int8Rows};

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
        let forms = [(); 2].map(|()| bench.empty::<u8>(Int8Rows::bytes_for(facts.rows, self.widths()[1])));
        let [int8, separate] = &forms;
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
            int8: Some(Int8Rows::new(int8.slice(), facts.rows, self.widths()[1]).unwrap()),
            row_meta: facts.row_meta.slice(),
            span_meta: facts.span_meta.slice(),
            scratch: scratch.slice(),
        };
        bench.kernels().delta_net(&bench.stream, &layer, &buffers, facts.rows, spans.len()).unwrap();
        let rows = Int8Rows::new(separate.slice(), facts.rows, self.widths()[1]).unwrap();
        bench.kernels().quantize_rows(&bench.stream, out.slice(), &rows).unwrap();
        let [together, separate] = forms.each_ref().map(|form| bench.download::<u8>(form));
        assert!(together == separate, "the 8-bit form of the outputs");
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
            // What the next step reads; before the sequence, which slot 2 began again, the CPU keeps zeros.
            let (past, channels, next) = (taps - 1, dims.channels(), if slot == 0 { 4 } else { 1 });
            for (i, expected) in cpu_state.conv_state(slot).unwrap().iter().enumerate() {
                let channel = i / past;
                match (next + i % past).checked_sub(past) {
                    Some(position) => {
                        let at = (slot * taps + position % taps) * channels + channel;
                        assert_eq!(history[at], *expected, "position {position}");
                    }
                    None => assert_eq!(*expected, 0.0),
                }
            }
        }
    }
}

/// Rows `from` to `to` of inputs.
fn part(test: &DeltaTest, x: &DeltaInputs, from: usize, to: usize) -> DeltaInputs {
    let widths = test.widths();
    std::array::from_fn(|i| x[i][from * widths[i]..to * widths[i]].to_vec())
}

/// Prompts of two sequences in one step each, in pieces, and token by token, one after the other and beside each other: the
/// same bits for all head widths, so also from the kernel for single tokens and from those for any step.
pub fn delta_net_is_chunk_invariant(bench: &Bench<'_>) {
    const TOKENS: usize = 19;
    let mut numbers = Numbers::new(36);
    for (key_heads, head_dim) in [(2, 32), (1, 64), (1, 128), (1, 256)] {
        let dims = DeltaNetDims { key_heads, value_heads: 2, head_dim, taps: 4, epsilon: 1e-6 };
        let test = DeltaTest::new(&mut numbers, dims);
        let sequences = [(); 2].map(|()| test.inputs(&mut numbers, TOKENS));
        let state = || [dims.history_len(), dims.matrix_len()].map(|len| bench.empty::<f32>(2 * len));
        let span = |start, tokens, slot| Span { start, tokens, blocks: &[], slot };
        let run = |slot: usize, chunks: &[usize]| {
            let (state, mut start, mut out) = (state(), 0, Vec::new());
            for &tokens in chunks {
                let x = part(&test, &sequences[slot], start, start + tokens);
                out.extend(test.run(bench, &state, &[span(start, tokens, slot)], &x));
                start += tokens;
            }
            out
        };
        let whole = [run(0, &[TOKENS]), run(1, &[TOKENS])];
        assert_eq!(run(0, &[8, 11]), whole[0], "head width {head_dim}");
        assert_eq!(run(0, &[3, 1, 15]), whole[0], "head width {head_dim}");
        assert_eq!(run(1, &[1; TOKENS]), whole[1], "head width {head_dim}");
        let (state, width) = (state(), test.widths()[1]);
        for token in 0..TOKENS {
            let both = sequences.each_ref().map(|x| part(&test, x, token, token + 1));
            let [first, second] = &both;
            let x = std::array::from_fn(|i| [first[i].as_slice(), second[i].as_slice()].concat());
            let out = test.run(bench, &state, &[span(token, 1, 0), span(token, 1, 1)], &x);
            for (out, whole) in out.chunks(width).zip(&whole) {
                assert_eq!(out, &whole[token * width..(token + 1) * width], "head width {head_dim}");
            }
        }
    }
}
