//! How fast operations that are no products are on a device. Figures are printed, not judged: they belong to a device.

use super::Bench;
use spillway_worker_gpu::hip::{Event, HipError};
use spillway_worker_gpu::launch::{
    DeltaNet, DeltaNetBuffers, DeltaNetDims, Int8Rows, Norm, NormRows, RowMeta, SpanMeta,
};

/// Rows of a chunk of a prompt.
const CHUNK: usize = 512;
/// Layers that calls take turns with, so that what decode reads from memory is in no cache.
const LAYERS: usize = 24;

/// Microseconds of one call of `queue`, which gets 0, 1, 2, …: calls are captured as a graph, as decode steps are, and replayed.
fn in_graph(bench: &Bench<'_>, calls: usize, mut queue: impl FnMut(usize)) -> f32 {
    bench.kernels(); // loading them cannot be captured
    let capture = || {
        (0..calls).for_each(&mut queue);
        Ok::<(), HipError>(())
    };
    let graph = bench.stream.capture(capture).unwrap();
    let [start, end] = std::array::from_fn(|_| Event::timed(&bench.device).unwrap());
    let replay = || {
        bench.stream.record(&start).unwrap();
        // SAFETY: the callers' buffers are alive.
        unsafe { graph.launch(&bench.stream) }.unwrap();
        bench.stream.record(&end).unwrap();
        end.synchronize().unwrap();
        end.milliseconds_since(&start).unwrap() * 1e3 / calls as f32
    };
    (0..4).map(|_| replay()).skip(1).fold(f32::INFINITY, f32::min)
}

fn report(what: &str, rows: usize, us: f32, bytes: usize) {
    println!("{what}, {rows} rows: {us:.2} us, {:.0} GB/s", bytes as f32 / us / 1e3);
}

/// Norms with their 8-bit form, activations and quantisation, of widths of a 27B model.
pub fn rows(bench: &Bench<'_>) {
    const WIDTH: usize = 5120;
    const HIDDEN: usize = 17408;
    let kernels = bench.kernels();
    let [x, out, up] = std::array::from_fn(|_| bench.upload(&vec![0.5f32; CHUNK * HIDDEN]));
    let memory = bench.empty::<u8>(Int8Rows::bytes_for(CHUNK, HIDDEN));
    let weight = bench.upload(&vec![1.0f32; WIDTH]);
    let norm = Norm { weight: weight.slice(), width: WIDTH, epsilon: 1e-6 };
    for (count, calls) in [(1, 100), (CHUNK, 10)] {
        let int8 = Int8Rows::new(memory.slice(), count, WIDTH).unwrap();
        let rows = NormRows { count, x: x.slice(), indices: None, out: out.slice(), int8: Some(int8) };
        let us = in_graph(bench, calls, |_| kernels.rms_norm(&bench.stream, &norm, &rows).unwrap());
        report("norm and quantise 5120", count, us, count * WIDTH * 9);
        let int8 = Int8Rows::new(memory.slice(), count, HIDDEN).unwrap();
        let us = in_graph(bench, calls, |_| kernels.quantize_rows(&bench.stream, x.slice(), &int8).unwrap());
        report("quantise 17408", count, us, count * HIDDEN * 5);
        let us = in_graph(bench, calls, |_| {
            kernels.silu_mul(&bench.stream, out.slice(), up.slice(), count * HIDDEN).unwrap();
        });
        report("silu_mul 17408", count, us, count * HIDDEN * 12);
    }
}

/// DeltaNet layers of a 27B and a 9B model: a token of one sequence, of eight, and a chunk of a prompt.
pub fn delta_net(bench: &Bench<'_>) {
    for value_heads in [48, 32] {
        let dims = DeltaNetDims { key_heads: 16, value_heads, head_dim: 128, taps: 4, epsilon: 1e-6 };
        for (rows, spans, calls) in [(1, 1, 4 * LAYERS), (8, 8, LAYERS), (CHUNK, 1, 6)] {
            let us = delta_net_step(bench, dims, rows, spans, calls);
            // States in and out; inputs, gate and both forms of the output of every row.
            let values = 2 * spans * dims.matrix_len() + rows * (dims.channels() + 9 * value_heads * 128 / 4);
            report(&format!("DeltaNet of {value_heads} heads, {spans} sequences"), rows, us, 4 * values);
        }
    }
}

fn delta_net_step(bench: &Bench<'_>, dims: DeltaNetDims, rows: usize, spans: usize, calls: usize) -> f32 {
    let width = dims.value_heads * dims.head_dim;
    let floats = |count: usize, value: f32| bench.upload(&vec![value; count]);
    let [conv, history, matrix] = [dims.channels() * dims.taps, dims.history_len(), dims.matrix_len()]
        .map(|len| floats(LAYERS * spans.min(8) * len, 0.01));
    let [qkv, gate, out] = [dims.channels(), width, width].map(|width| floats(rows * width, 0.5));
    let [alpha, beta, decay, dt_bias] = [rows, rows, 1, 1].map(|rows| floats(rows * dims.value_heads, -0.5));
    let norm = floats(dims.head_dim, 1.0);
    let int8 = bench.empty::<u8>(Int8Rows::bytes_for(rows, width));
    let per_span = rows / spans;
    let row_meta: Vec<RowMeta> = (0..rows)
        .map(|row| RowMeta {
            position: 100 + (row % per_span) as u32,
            table: 0,
            span: (row / per_span) as u32,
        })
        .collect();
    let span_meta: Vec<SpanMeta> = (0..spans as u32)
        .map(|slot| SpanMeta { first_row: slot * per_span as u32, tokens: per_span as u32, slot, reset: 0 })
        .collect();
    let (row_meta, span_meta) = (bench.upload(&row_meta), bench.upload(&span_meta));
    let scratch = bench.empty::<u8>(dims.scratch_bytes(rows));
    let buffers = DeltaNetBuffers {
        qkv: qkv.slice(),
        gate: gate.slice(),
        alpha: alpha.slice(),
        beta: beta.slice(),
        out: out.slice(),
        int8: Some(Int8Rows::new(int8.slice(), rows, width).unwrap()),
        row_meta: row_meta.slice(),
        span_meta: span_meta.slice(),
        scratch: scratch.slice(),
    };
    in_graph(bench, calls, |call| {
        let of_layer = |buffer: &spillway_worker_gpu::hip::DeviceBuffer| {
            let bytes = buffer.len() / LAYERS;
            buffer.slice().part(call % LAYERS * bytes, bytes).unwrap()
        };
        let layer = DeltaNet {
            dims,
            conv: of_layer(&conv),
            decay: decay.slice(),
            dt_bias: dt_bias.slice(),
            norm: norm.slice(),
            history: of_layer(&history),
            matrix: of_layer(&matrix),
        };
        bench.kernels().delta_net(&bench.stream, &layer, &buffers, rows, spans).unwrap();
    })
}
