//! Speed of repacking weights for GPUs, per format: file bytes per second of processor time, one thread, from memory to memory
//! (16 MiB, more than second-level caches hold). `copy` is a plain copy of as many bytes, the floor.
//!
//! On a Zen 4 server core that is otherwise idle every format reaches 1 GB/s, those of common files several. Compare numbers of
//! one run only.

#![allow(
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "a benchmark stops by panicking; its numbers are small"
)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use nix::time::{ClockId, clock_gettime};
use spillway_kernels::device_layout::{DeviceLayout, TILE_ROWS};
use spillway_kernels::formats::Format;
use std::hint::black_box;
use std::time::Duration;

const COLS: usize = 5120;
/// File bytes of one pass.
const BYTES: usize = 16 << 20;

/// Processor time that `times` calls take: what other processes take of the machine is not counted.
fn processor_time(times: u64, mut call: impl FnMut()) -> Duration {
    let now = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock"));
    let start = now();
    (0..times).for_each(|_| call());
    now() - start
}

fn repack(c: &mut Criterion) {
    let mut group = c.benchmark_group("repack");
    let (from, mut to) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    group.throughput(Throughput::Bytes(BYTES as u64));
    group.bench_function("copy", |b| {
        b.iter_custom(|times| processor_time(times, || to.copy_from_slice(black_box(&from))))
    });
    for format in Format::ALL {
        let layout = DeviceLayout::new(format, COLS).expect("5120 columns suit every format");
        let tile_rows_bytes = TILE_ROWS * format.row_bytes(COLS).expect("5120 columns suit every format");
        let tiles = BYTES / tile_rows_bytes;
        let file: Vec<u8> = (0..tiles * tile_rows_bytes).map(|i| (i * 37 % 251) as u8).collect();
        let mut device = vec![0; tiles * layout.tile_bytes()];
        group.throughput(Throughput::Bytes(file.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(format.name()), |b| {
            let mut pass = || {
                let tiles = device.chunks_exact_mut(layout.tile_bytes());
                for (rows, tile) in file.chunks_exact(tile_rows_bytes).zip(tiles) {
                    layout.repack_tile(rows, tile).expect("whole tiles");
                }
            };
            b.iter_custom(|times| processor_time(times, &mut pass));
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(700));
    targets = repack
}
criterion_main!(benches);
