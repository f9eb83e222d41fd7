//! Time to choose a token from a row of 248,320 logits, the largest vocabulary of the models that are run here. It is added to
//! every step of a sequence, since the next step needs the token: a few dozen microseconds of the several thousand that a step of
//! a large model takes. Without `top_k` and `min_p` an exponential of every logit is needed, about 0.4 ns each.
//!
//! Rows are noise of a standard deviation of 2.5, in `peaked` ones with sixty likely tokens. Processor time of one thread, so that
//! other work on the machine counts little. `read` adds a row up: the floor. `copy` is a copy of a row, as it is made out of the
//! ring from the last worker before a choice.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use nix::time::{ClockId, clock_gettime};
use spillway::sampler::{Sampler, SamplingParams};
use std::hint::black_box;
use std::time::Duration;

const VOCAB: usize = 248_320;

/// Sums of twelve uniform numbers: nearly a normal distribution.
fn noise() -> Vec<f32> {
    let mut state = 1u32;
    let mut unit = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(0x3f80_0000 | state >> 9) - 1.0
    };
    (0..VOCAB).map(|_| ((0..12).map(|_| unit()).sum::<f32>() - 6.0) * 2.5).collect()
}

fn peaked() -> Vec<f32> {
    let mut row = noise();
    row.iter_mut().step_by(4001).zip(0u8..60).for_each(|(logit, rank)| *logit = 20.0 - f32::from(rank) / 4.0);
    row
}

/// Settings that people use.
fn settings() -> [(&'static str, SamplingParams); 7] {
    let greedy = SamplingParams::default();
    let warm = SamplingParams { temperature: 0.8, ..greedy.clone() };
    let top_k = SamplingParams { top_k: 40, ..warm.clone() };
    [
        ("greedy", greedy.clone()),
        ("greedy, repeat_penalty", SamplingParams { repeat_penalty: 1.1, ..greedy }),
        ("temperature", warm.clone()),
        ("top_p", SamplingParams { top_p: 0.95, ..warm.clone() }),
        ("min_p", SamplingParams { min_p: 0.05, ..warm }),
        ("top_k", top_k.clone()),
        ("top_k, top_p, min_p", SamplingParams { top_p: 0.95, min_p: 0.05, ..top_k }),
    ]
}

/// Processor time of so many calls with a copy of the row, which is not counted.
fn processor_time(times: u64, row: &[f32], mut call: impl FnMut(&mut [f32])) -> Duration {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from);
    let mut scratch = row.to_vec();
    let mut total = Duration::ZERO;
    for _ in 0..times {
        scratch.copy_from_slice(row);
        let start = now();
        call(&mut scratch);
        total += now() - start;
    }
    total
}

fn sample(c: &mut Criterion) {
    let mut group = c.benchmark_group("sample");
    for (kind, row) in [("flat", noise()), ("peaked", peaked())] {
        let mut bench = |name: &str, call: &mut dyn FnMut(&mut [f32])| {
            let id = BenchmarkId::new(name, kind);
            group.bench_function(id, |b| b.iter_custom(|times| processor_time(times, &row, &mut *call)));
        };
        bench("read", &mut |row| {
            black_box(row.iter().fold(0u32, |sum, value| sum.wrapping_add(value.to_bits())));
        });
        bench("copy", &mut |to| to.copy_from_slice(black_box(&row)));
        for (name, params) in settings() {
            let mut sampler = Sampler::new(params, &[]);
            bench(name, &mut |row| {
                let _ = black_box(sampler.sample(row));
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(700));
    targets = sample
}
criterion_main!(benches);
