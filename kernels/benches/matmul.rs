//! Speed of matrix products, per format: `decode` reads a matrix larger than the caches for one token (bytes per
//! second of packed weights, to be compared with `read`, a plain read of as many bytes), `prefill` multiplies it with
//! 512 tokens (multiplications per second); both once per kind of codes for the quantised formats.
//!
//! Floors, on 2 threads of a Zen 4 server core (AVX-512 VNNI, about 33 GB/s of read bandwidth) that is otherwise
//! idle: `decode` of Q4_K, Q6_K, Q8_0 and Q4_1 reaches 80 % of `read`, `prefill` of Q4_K 120 Gmul/s, `pack` 1 GB/s of
//! file bytes per thread. Compare numbers of one run only. `SPILLWAY_KERNELS` chooses the kernel set.

#![allow(
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "a benchmark stops by panicking; its numbers are small"
)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use spillway_kernels::activations::{Activations, Codes, Forms};
use spillway_kernels::formats::Format;
use spillway_kernels::matmul::{Kernels, MatmulJob};
use spillway_kernels::pack::PackedMatrix;
use spillway_kernels::pool::{ThreadPool, partition};
use spillway_kernels::topology::available_threads;
use std::hint::black_box;
use std::time::Duration;

const COLS: usize = 2560;
const TOKENS: usize = 512;
/// Bytes of a matrix for `decode`: several times a third-level cache.
const DECODE_BYTES: usize = 160 << 20;
const PREFILL_ROWS: usize = 2560;
/// What an input may be prepared as.
const FORMS: [(&str, Forms); 3] = [
    ("int8", Forms { codes: Some(Codes::Int8), float: false }),
    ("int16", Forms { codes: Some(Codes::Int16), float: false }),
    ("f32", Forms { codes: None, float: true }),
];

/// File bytes of `rows` rows. Any bytes are weights; small ones keep the numbers finite.
fn file_bytes(format: Format, rows: usize) -> Vec<u8> {
    let len = rows * format.row_bytes(COLS).expect("2560 columns suit every format");
    (0..len).map(|i| (i * 37 % 59) as u8).collect()
}

fn matrix(pool: &ThreadPool, format: Format, rows: usize) -> PackedMatrix {
    let mut matrix = PackedMatrix::new(format, rows, COLS).expect("memory for a matrix");
    matrix.pack(pool, &file_bytes(format, rows)).expect("whole rows");
    matrix
}

fn inputs(kernels: Kernels, pool: &ThreadPool, tokens: usize, forms: Forms) -> Activations {
    let rows: Vec<f32> = (0..tokens * COLS).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
    let mut inputs = Activations::default();
    kernels.prepare(pool, &rows, COLS, forms, &mut inputs).expect("whole rows");
    inputs
}

fn product(c: &mut Criterion, group: &str, tokens: usize, rows: impl Fn(Format) -> usize, decode: bool) {
    let kernels = Kernels::from_env().expect("a kernel set this CPU has");
    let pool = ThreadPool::new(available_threads()).expect("a pool");
    let inputs = FORMS.map(|(name, forms)| (name, inputs(kernels, &pool, tokens, forms)));
    let mut group = c.benchmark_group(format!("{group}/{}", kernels.set()));
    for format in Format::ALL {
        let matrix = matrix(&pool, format, rows(format));
        let mut out = vec![0.0; tokens * matrix.rows()];
        let macs = (tokens * matrix.rows() * COLS) as u64;
        group.throughput(if decode {
            Throughput::Bytes(matrix.bytes() as u64)
        } else {
            Throughput::Elements(macs)
        });
        for (name, inputs) in inputs.iter().filter(|(_, inputs)| inputs.forms().serve(format)) {
            group.bench_function(BenchmarkId::new(format.name(), name), |b| {
                b.iter(|| kernels.matmul(&pool, inputs, &mut [MatmulJob::store(&matrix, &mut out)]));
            });
        }
    }
}

fn decode(c: &mut Criterion) {
    let pool = ThreadPool::new(available_threads()).expect("a pool");
    let words = vec![1u64; DECODE_BYTES / 8];
    let mut group = c.benchmark_group("decode");
    group.throughput(Throughput::Bytes(DECODE_BYTES as u64));
    group.bench_function("read", |b| {
        b.iter(|| {
            pool.run(&|thread| {
                let part = &words[partition(words.len(), pool.threads(), thread)];
                black_box(part.iter().fold(0u64, |sum, &word| sum.wrapping_add(word)));
            });
        });
    });
    group.finish();
    drop(words);
    let rows =
        |format: Format| DECODE_BYTES / format.row_bytes(COLS).expect("2560 columns suit every format");
    product(c, "decode", 1, rows, true);
}

fn prefill(c: &mut Criterion) {
    product(c, "prefill", TOKENS, |_| PREFILL_ROWS, false);
}

fn pack(c: &mut Criterion) {
    let pool = ThreadPool::new(1).expect("a pool");
    let mut group = c.benchmark_group("pack");
    for format in Format::ALL {
        let bytes = file_bytes(format, 1024);
        let mut matrix = PackedMatrix::new(format, 1024, COLS).expect("memory for a matrix");
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(format.name()), |b| {
            b.iter(|| matrix.pack(&pool, &bytes))
        });
    }
}

fn prepare(c: &mut Criterion) {
    let kernels = Kernels::from_env().expect("a kernel set this CPU has");
    let pool = ThreadPool::new(1).expect("a pool");
    let mut group = c.benchmark_group(format!("prepare/{}", kernels.set()));
    for tokens in [1, TOKENS] {
        let rows: Vec<f32> = (0..tokens * COLS).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
        let mut inputs = Activations::default();
        group.throughput(Throughput::Elements(rows.len() as u64));
        for (name, forms) in FORMS {
            group.bench_function(BenchmarkId::new(name, tokens), |b| {
                b.iter(|| kernels.prepare(&pool, &rows, COLS, forms, &mut inputs));
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = decode, prefill, pack, prepare
}
criterion_main!(benches);
