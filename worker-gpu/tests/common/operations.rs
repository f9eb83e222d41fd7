//! Everything but products, against the CPU's operations.

use super::numbers::Numbers;
use super::{Bench, cpu};
use spillway_kernels::ops::{RopePairing, RopeTable};
use spillway_worker_gpu::hip::DeviceBuffer;
use spillway_worker_gpu::launch::{Pairing, Rope, RowMeta, SpanMeta};

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
