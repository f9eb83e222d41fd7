//! Layers that are lifted from a CPU worker for some spans and not for others: both workers find the states that the other one left,
//! and who runs a span changes nothing but rounding.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

mod common;

use common::{compiler, skip};
use spillway_kernels::pool::ThreadPool;
use spillway_model::file::ModelFile;
use spillway_model::testing::TinyModel;
use spillway_protocol::frame::{
    FrameKind, FrameLimits, LogitRows, SpanShape, StepFrame, read_step, write_residual,
};
use spillway_protocol::plan::{ActivationType, KV_BLOCK_TOKENS, KvType, Lift, Limits, Residency};
use spillway_protocol::ring::{Ring, RingConsumer, RingProducer, Wait};
use spillway_protocol::states::StateMemory;
use spillway_worker::band::Logits;
use spillway_worker::residual::Incoming;
use spillway_worker::states::{AreaSize, SharedStates, areas};
use spillway_worker_cpu::band as cpu;
use spillway_worker_gpu::band::{Band, BandSpec};
use spillway_worker_gpu::compile::Arch;
use spillway_worker_gpu::hip::{Device, Driver};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const LAYERS: usize = 6;
/// Of which so many are on the CPU: an attention layer of every architecture is among them.
const SPILLED: usize = 4;
const SLOTS: usize = 3;

fn limits(kv_type: KvType) -> Limits {
    Limits {
        max_seq: 128,
        max_sequences: SLOTS,
        kv_blocks: SLOTS * 4,
        kv_type,
        activations: ActivationType::Int8,
        max_step_tokens: 100,
        max_logit_rows: 64,
    }
}

/// Tokens of one sequence in a step.
#[derive(Clone, Copy)]
struct Piece {
    slot: u32,
    start: u32,
    tokens: u32,
    lifted: bool,
}

fn piece(slot: u32, start: u32, end: u32, lifted: bool) -> Piece {
    Piece { slot, start, tokens: end - start, lifted }
}

/// A CPU worker's band and a GPU's behind it, with a ring between them.
struct Pipeline {
    cpu: cpu::Band,
    gpu: Band,
    to_gpu: RingProducer,
    from_cpu: RingConsumer,
    limits: FrameLimits,
    frame: StepFrame,
    steps: u64,
}

impl Pipeline {
    fn new(model: &Arc<ModelFile>, limits: Limits) -> Self {
        let program = model.program();
        let sizes: Vec<_> = program.layers[..SPILLED].iter().map(AreaSize::of_layer).collect();
        let (bytes, _) = areas(sizes.iter().map(Vec::as_slice), &limits);
        let shared = bytes as u64;
        let lift = Lift { layers: 0..SPILLED, stage: 1, from: 1, shared, why: String::new() };
        let memory = StateMemory::create(shared).unwrap();
        let states = SharedStates::new(&memory, &lift, &program.layers, &limits).unwrap();
        let spec = cpu::BandSpec { layers: 0..SPILLED, embed: true, head: false, limits };
        let pool = ThreadPool::new(2).unwrap();
        let cpu = cpu::Band::load(model, spec, Some(&states), pool, &mut |_, _| ControlFlow::Continue(()));
        let spec = BandSpec {
            layers: SPILLED..LAYERS,
            lifted: 0..SPILLED,
            embed: false,
            head: true,
            residency: vec![Residency::Device; LAYERS - SPILLED],
            limits,
        };
        let driver = Driver::open(&"emulated:".parse().unwrap()).unwrap();
        let device = Device::open(&driver, 0).unwrap();
        let gpu =
            Band::load(
                model,
                spec,
                Some(&states),
                &device,
                compiler(),
                &mut |_, _| ControlFlow::Continue(()),
            );
        let limits = FrameLimits::new(&limits, program.d_model, program.vocab);
        let ring = Ring::create(2, limits.slot_bytes(FrameKind::Residual)).unwrap();
        Self {
            cpu: cpu.unwrap(),
            gpu: gpu.unwrap(),
            to_gpu: RingProducer::attach(ring.dup().unwrap()).unwrap(),
            from_cpu: RingConsumer::attach(ring.dup().unwrap()).unwrap(),
            frame: StepFrame::with_limits(&limits),
            limits,
            steps: 0,
        }
    }

    /// Runs one step; the logits of every token, in order.
    fn step(&mut self, pieces: &[Piece]) -> Vec<Vec<f32>> {
        let Self { cpu, gpu, to_gpu, from_cpu, limits, frame, steps } = self;
        *steps += 1;
        frame.begin(1, *steps);
        let mut ids = Vec::new();
        for &Piece { slot, start, tokens, lifted } in pieces {
            let (sequence, logits) = (slot.into(), LogitRows::All);
            let shape = SpanShape { sequence, state_slot: slot, start, tokens, logits, lifted };
            // Blocks of the sequences interleave, as they do after a while of serving.
            let blocks = (start + tokens).div_ceil(u32::try_from(KV_BLOCK_TOKENS).unwrap());
            let table: Vec<u32> = (0..blocks).map(|i| i * u32::try_from(SLOTS).unwrap() + slot).collect();
            frame.push(shape, &table, limits).unwrap();
            ids.extend((start..start + tokens).map(|position| (position * 37 + slot * 11) % 200 + 3));
        }
        cpu.embed(&ids).unwrap();
        cpu.run(frame, &mut ()).unwrap();
        let Wait::Ready(mut slot) = to_gpu.wait(Duration::from_secs(1)).unwrap() else { panic!("no slot") };
        write_residual(&mut slot, frame, limits.d_model, cpu.residual(ids.len())).unwrap();
        slot.publish();
        let Wait::Ready(slot) = from_cpu.wait(Duration::from_secs(1)).unwrap() else { panic!("no rows") };
        let mut arrived = StepFrame::with_limits(limits);
        read_step(&slot, FrameKind::Residual, limits, &mut arrived).unwrap();
        let pending = gpu.receive(Incoming::new(slot, &arrived, limits)).unwrap();
        gpu.run(&arrived, pending, &mut || ()).unwrap();
        let mut rows = Vec::new();
        let mut sink = |_: &_, logits: Logits<'_>| {
            let Logits::Values(values) = logits else { panic!("there is no ring") };
            rows.extend(values.chunks_exact(limits.vocab).map(<[f32]>::to_vec));
            Ok(())
        };
        gpu.logits(&arrived, &mut sink).unwrap();
        rows
    }

    /// Steps one after the other; the logits of all.
    fn steps(&mut self, steps: &[&[Piece]]) -> Vec<Vec<f32>> {
        steps.iter().flat_map(|pieces| self.step(pieces)).collect()
    }
}

/// The largest difference between two lists of values.
fn apart(one: &[Vec<f32>], other: &[Vec<f32>]) -> f32 {
    assert_eq!(one.len(), other.len());
    let pairs = one.iter().flatten().zip(other.iter().flatten());
    pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

fn can_compile() -> bool {
    !compiler().describe(&Arch::Emulated { wave: 32 }).is_err_and(|error| skip(&error))
}

fn model(path: &Path, architecture: &'static str) -> Arc<ModelFile> {
    TinyModel::new(architecture).layers(u32::try_from(LAYERS).unwrap()).write(path).unwrap();
    Arc::new(ModelFile::open(path).unwrap())
}

/// A conversation: a prompt in two chunks, an answer, another prompt, another answer. Whoever runs what, the logits are the same but for
/// rounding, of every position; so states and keys and values arrive, both ways, and in the middle of KV blocks.
#[test]
fn each_worker_goes_on_from_what_the_other_one_left() {
    if !can_compile() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    // f16 keys and values differ where sums differ in the last bits.
    for (architecture, kv_type, tolerance) in
        [("qwen3", KvType::F32, 1e-4), ("qwen35", KvType::F32, 1e-4), ("qwen35", KvType::F16, 5e-3)]
    {
        let model = model(file.path(), architecture);
        let talk = |lifted: [bool; 6]| {
            let mut pipeline = Pipeline::new(&model, limits(kv_type));
            let ends = [0, 30, 41, 42, 43, 75, 76];
            let step = |index: usize| [piece(1, ends[index], ends[index + 1], lifted[index])];
            let logits = pipeline.steps(&[0, 1, 2, 3, 4, 5].map(step).each_ref().map(<[Piece; 1]>::as_slice));
            (logits, pipeline.cpu.recurrent_state(0, 1))
        };
        let (on_cpu, state) = talk([false; 6]);
        assert!(on_cpu.iter().flatten().any(|logit| logit.abs() > 0.1), "there is something to compare");
        for lifted in [
            [true, true, false, false, true, false],
            [true, false, false, false, false, false],
            [false, false, true, false, true, true],
            [true; 6],
        ] {
            let (logits, other) = talk(lifted);
            let off = apart(&logits, &on_cpu);
            assert!(off < tolerance, "{architecture} {kv_type:?} {lifted:?}: {off}");
            assert!(off > 0.0, "{lifted:?}: rounding tells who ran it");
            assert!(talk(lifted).0 == logits, "{lifted:?}: once more, the same bits");
            if let (Some((inputs, matrices)), Some((other_inputs, other_matrices))) = (&state, other) {
                let off = apart(&[inputs.clone(), matrices.clone()], &[other_inputs, other_matrices]);
                assert!(off < tolerance, "{lifted:?}, the CPU's state: {off}");
            }
        }
    }
}

/// Sequences of both kinds in one step, in chunks of any size: each computes what it computes alone, to the bit.
#[test]
fn what_shares_a_step_and_how_it_is_cut_changes_no_bit() {
    if !can_compile() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    for architecture in ["qwen3", "qwen35"] {
        let model = model(file.path(), architecture);
        let run = |steps: &[&[Piece]]| Pipeline::new(&model, limits(KvType::F16)).steps(steps);
        let lifted = run(&[&[piece(2, 0, 50, true)], &[piece(2, 50, 51, false)]]);
        let on_cpu = run(&[&[piece(0, 0, 20, false)], &[piece(0, 20, 21, false)]]);
        let together = run(&[
            &[piece(0, 0, 20, false), piece(2, 0, 33, true)],
            &[piece(2, 33, 34, true)],
            &[piece(0, 20, 21, false), piece(2, 34, 50, true)],
            &[piece(2, 50, 51, false)],
        ]);
        let rows = |ranges: &[std::ops::Range<usize>]| -> Vec<Vec<f32>> {
            ranges.iter().flat_map(|range| together[range.clone()].to_vec()).collect()
        };
        assert!(rows(&[0..20, 54..55]) == on_cpu, "{architecture}: on the CPU");
        assert!(rows(&[20..53, 53..54, 55..71, 71..72]) == lifted, "{architecture}: lifted");
    }
}

/// A slot that another sequence takes over is begun afresh, whoever had it and whoever gets it.
#[test]
fn a_slot_is_begun_afresh() {
    if !can_compile() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let model = model(file.path(), "qwen35");
    let mut pipeline = Pipeline::new(&model, limits(KvType::F32));
    let mut run = |lifted: [bool; 3]| {
        let [first, second, third] = lifted;
        pipeline.steps(&[&[piece(0, 0, 40, first)], &[piece(0, 40, 42, second)], &[piece(0, 42, 43, third)]])
    };
    let ways = [[true, false, false], [false, false, true], [true, true, true], [false, true, false]];
    let first = ways.map(&mut run);
    for (way, before) in ways.iter().zip(&first) {
        assert!(run(*way) == *before, "{way:?}");
    }
}

/// CPU bands that have no part in it refuse what is lifted, and what cannot be loaded is refused.
#[test]
fn lifting_without_shared_memory_is_refused() {
    if !can_compile() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let model = model(file.path(), "qwen3");
    let (limits, program) = (limits(KvType::F32), model.program());
    let spec = cpu::BandSpec { layers: 0..SPILLED, embed: true, head: false, limits };
    let pool = ThreadPool::new(1).unwrap();
    let mut alone = cpu::Band::load(&model, spec, None, pool, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let frames = FrameLimits::new(&limits, program.d_model, program.vocab);
    let mut frame = StepFrame::with_limits(&frames);
    frame.begin(1, 1);
    let logits = LogitRows::None;
    let shape = SpanShape { sequence: 1, state_slot: 0, start: 0, tokens: 1, logits, lifted: true };
    frame.push(shape, &[0], &frames).unwrap();
    alone.embed(&[1]).unwrap();
    assert_eq!(alone.run(&frame, &mut ()).unwrap_err().code(), "band_has_no_such_end");
    let driver = Driver::open(&"emulated:".parse().unwrap()).unwrap();
    let device = Device::open(&driver, 0).unwrap();
    let load = |lifted: std::ops::Range<usize>, home: Residency| {
        let residency = vec![home; LAYERS - SPILLED];
        let spec = BandSpec { layers: SPILLED..LAYERS, lifted, embed: false, head: true, residency, limits };
        let loaded =
            Band::load(&model, spec, None, &device, compiler(), &mut |_, _| ControlFlow::Continue(()));
        loaded.unwrap_err().code()
    };
    assert_eq!(load(0..SPILLED, Residency::Device), "band_has_no_such_end");
    assert_eq!(load(0..SPILLED - 1, Residency::Device), "band_spec");
    assert_eq!(load(0..SPILLED, Residency::HostMapped), "band_spec");
    assert_eq!(device.ledger().device_bytes(), 0);
    let lift = Lift { layers: 0..SPILLED, stage: 1, from: 1, shared: 0, why: String::new() };
    let small = StateMemory::create(4096).unwrap();
    assert!(SharedStates::new(&small, &lift, &program.layers, &limits).is_none(), "too small");
}
