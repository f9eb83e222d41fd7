//! What supervision costs while nothing fails: a worker counts every layer and says what it does four times a step; the coordinator
//! reads a page of each worker every 20 ms of waiting. Floor: a store each, and a copy of two cache lines.

use criterion::{Criterion, criterion_group, criterion_main};
use spillway_protocol::status::{StatusReader, StatusWriter, WorkerState};
use std::hint::black_box;
use std::os::fd::AsFd;

fn pulse(criterion: &mut Criterion) {
    let ends = || {
        let reader = StatusReader::create().ok()?;
        let writer = StatusWriter::attach(reader.as_fd().try_clone_to_owned().ok()?).ok()?;
        Some((reader, writer))
    };
    let Some((reader, writer)) = ends() else {
        eprintln!("no shared memory for a status page; skipped");
        return;
    };
    let mut group = criterion.benchmark_group("supervision");
    group.bench_function("layer_done", |bencher| bencher.iter(|| black_box(&writer).layer_done()));
    group.bench_function("set_state", |bencher| {
        bencher.iter(|| black_box(&writer).set_state(black_box(WorkerState::Stepping)));
    });
    group.bench_function("read", |bencher| bencher.iter(|| black_box(&reader).read()));
    group.finish();
}

criterion_group!(benches, pulse);
criterion_main!(benches);
