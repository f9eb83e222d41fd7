//! Speed of the operations besides matrix products, at the shapes of Qwen3.5-4B (attention: 16 query and 4 kv heads of
//! 256; DeltaNet: 16 key and 32 value heads of 128) on all processors this process may use.
//!
//! What to compare with: decoding attention reads every key and value once, so its throughput should be near the read
//! bandwidth that `spillway bench` prints. The other figures are elements or tokens per second in one run on one
//! machine; compare two commits in the same run, never across machines.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use spillway_kernels::isa::KernelSet;
use spillway_kernels::membw::{BUFFER_BYTES, read_bandwidth};
use spillway_kernels::ops::attention::{
    AttentionDims, AttentionRows, AttentionScratch, BLOCK, KvCache, KvDims, KvElement, KvSpan,
};
use spillway_kernels::ops::deltanet::{
    DeltaNet, DeltaNetDims, DeltaNetRows, DeltaNetScratch, RecurrentState, StateSpan,
};
use spillway_kernels::ops::{Ops, OpsError};
use spillway_kernels::pool::{PoolError, ThreadPool};
use spillway_kernels::topology::available_threads;
use std::time::Duration;

const KV: KvDims = KvDims { kv_heads: 4, key_dim: 256, value_dim: 256 };
const DIMS: AttentionDims = AttentionDims { heads: 16, scale: 0.0625 };
const D_MODEL: usize = 2560;

fn pool() -> Result<ThreadPool, PoolError> {
    ThreadPool::new(available_threads())
}

fn ops() -> Ops {
    let set = KernelSet::from_env().unwrap_or(KernelSet::Scalar);
    Ops::new(set).into_iter().chain(Ops::new(KernelSet::Scalar)).next().unwrap_or_else(|| unreachable!())
}

/// Values that look like activations.
fn noise(n: usize) -> Vec<f32> {
    let mut seed = 1u32;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(0x3f80_0000 | seed >> 9) - 1.5
    };
    (0..n).map(|_| next()).collect()
}

/// One attention call of `tokens` tokens at `depth`, repeatedly on the same positions.
struct Attention {
    cache: KvCache,
    blocks: Vec<u32>,
    q: Vec<f32>,
    kv: Vec<f32>,
    out: Vec<f32>,
    scratch: AttentionScratch,
}

impl Attention {
    fn new(depth: usize, tokens: usize, element: KvElement) -> Result<Self, OpsError> {
        let blocks = (depth + tokens).div_ceil(BLOCK);
        Ok(Self {
            cache: KvCache::new(KV, blocks, element)?,
            blocks: (0..u32::try_from(blocks).unwrap_or(u32::MAX)).collect(),
            q: noise(tokens * DIMS.heads * KV.key_dim),
            kv: noise(tokens * KV.kv_heads * KV.key_dim),
            out: vec![0.0; tokens * DIMS.heads * KV.value_dim],
            scratch: AttentionScratch::new(),
        })
    }

    /// Writes every block once: memory that was never touched would be read from the cache.
    fn fill(&mut self, ops: &Ops, pool: &ThreadPool) -> Result<(), OpsError> {
        let mut step = Attention::new(0, BLOCK, KvElement::F32)?;
        for block in &self.blocks {
            let span = KvSpan { first_row: 0, tokens: BLOCK, start: 0, blocks: std::slice::from_ref(block) };
            let rows = AttentionRows { q: &step.q, k: &step.kv, v: &step.kv, gate: None, out: &mut step.out };
            ops.attention(pool, &mut self.cache, DIMS, &[span], rows, &mut step.scratch)?;
        }
        Ok(())
    }

    fn run(&mut self, ops: &Ops, pool: &ThreadPool, start: usize, tokens: usize) -> Result<(), OpsError> {
        let span = KvSpan { first_row: 0, tokens, start, blocks: &self.blocks };
        let rows = AttentionRows { q: &self.q, k: &self.kv, v: &self.kv, gate: None, out: &mut self.out };
        ops.attention(pool, &mut self.cache, DIMS, &[span], rows, &mut self.scratch)
    }
}

fn attention(c: &mut Criterion) {
    let (ops, Ok(pool)) = (ops(), pool()) else { return };
    let mut group = c.benchmark_group("attention decode");
    for depth in [4096, 32_768] {
        for (name, element) in [("f16", KvElement::F16), ("f32", KvElement::F32)] {
            let Ok(mut one) = Attention::new(depth, 1, element) else { continue };
            if one.fill(&ops, &pool).is_err() {
                continue;
            }
            group.throughput(Throughput::Bytes(
                KvCache::bytes_for(KV, depth / BLOCK, element).try_into().unwrap_or(u64::MAX),
            ));
            group
                .bench_function(BenchmarkId::new(name, depth), |b| b.iter(|| one.run(&ops, &pool, depth, 1)));
        }
    }
    group.finish();
    let mut group = c.benchmark_group("attention prefill 512");
    for (name, element) in [("f16", KvElement::F16), ("f32", KvElement::F32)] {
        let Ok(mut prompt) = Attention::new(0, 512, element) else { continue };
        // Multiply-adds of scores and outputs over the causal triangle.
        let macs = DIMS.heads * (512 * 513 / 2) * (KV.key_dim + KV.value_dim);
        group.throughput(Throughput::Elements(macs.try_into().unwrap_or(u64::MAX)));
        group.bench_function(name, |b| b.iter(|| prompt.run(&ops, &pool, 0, 512)));
    }
    group.finish();
}

fn delta_net(c: &mut Criterion) {
    let (ops, Ok(pool)) = (ops(), pool()) else { return };
    let dims = DeltaNetDims { key_heads: 16, value_heads: 32, head_dim: 128, conv_kernel: 4, eps: 1e-6 };
    let weights = (noise(dims.channels() * dims.conv_kernel), noise(dims.value_heads), noise(dims.head_dim));
    let layer = DeltaNet::new(dims, &weights.0, &weights.1, &weights.1, &weights.2);
    let (Ok(layer), Ok(mut state)) = (layer, RecurrentState::new(dims, 1)) else { return };
    let mut scratch = DeltaNetScratch::new();
    let mut group = c.benchmark_group("deltanet");
    for tokens in [1, 512] {
        let (qkv, values) =
            (noise(tokens * dims.channels()), noise(tokens * dims.value_heads * dims.head_dim));
        let heads = noise(tokens * dims.value_heads);
        let mut out = values.clone();
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::from_parameter(tokens), |b| {
            b.iter(|| {
                let rows =
                    DeltaNetRows { qkv: &qkv, gate: &values, alpha: &heads, beta: &heads, out: &mut out };
                let spans = [StateSpan { first_row: 0, tokens, slot: 0, reset: false }];
                ops.delta_net(&pool, &layer, &mut state, &spans, rows, &mut scratch)
            });
        });
    }
    group.finish();
}

fn rows(c: &mut Criterion) {
    let (ops, Ok(pool)) = (ops(), pool()) else { return };
    let mut group = c.benchmark_group("rows");
    for tokens in [1, 512] {
        let (src, weight) = (noise(tokens * D_MODEL), noise(D_MODEL));
        let mut dst = src.clone();
        group.throughput(Throughput::Elements((tokens * D_MODEL) as u64));
        group.bench_function(BenchmarkId::new("rms_norm", tokens), |b| {
            b.iter(|| ops.rms_norm(&pool, &src, &weight, 1e-6, &mut dst));
        });
        group.bench_function(BenchmarkId::new("silu_mul", tokens), |b| {
            dst.copy_from_slice(&src);
            b.iter(|| ops.silu_mul(&pool, &mut dst, &src));
        });
    }
    group.finish();
}

fn machine(c: &mut Criterion) {
    let Ok(pool) = pool() else { return };
    if let Ok(rate) = read_bandwidth(&pool, BUFFER_BYTES) {
        println!("read bandwidth: best {:.1} GB/s, median {:.1} GB/s", rate.best / 1e9, rate.median / 1e9);
    }
    c.bench_function("fork and join", |b| b.iter(|| pool.run(&|_| ())));
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1)).without_plots();
    targets = machine, rows, delta_net, attention
}
criterion_main!(benches);
