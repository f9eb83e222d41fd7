//! A band in bytes: what steps copy of weights in host memory, and what its memory takes of a device that hands out pages.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

mod common;

use common::{compiler, skip};
use spillway_model::file::ModelFile;
use spillway_model::testing::TinyModel;
use spillway_protocol::frame::{FrameLimits, LogitRows, SpanShape, StepFrame};
use spillway_protocol::plan::{ActivationType, KV_BLOCK_TOKENS, KvType, Limits, Residency};
use spillway_worker_gpu::band::{Band, BandSpec};
use spillway_worker_gpu::compile::Arch;
use spillway_worker_gpu::hip::{Device, Driver, emulated};
use std::ops::ControlFlow;
use std::sync::Arc;

const LAYERS: u32 = 4;
const LIMITS: Limits = Limits {
    max_seq: 64,
    max_sequences: 1,
    kv_blocks: 2,
    kv_type: KvType::F32,
    activations: ActivationType::Int8,
    max_step_tokens: 20,
    max_logit_rows: 1,
};

fn device(provider: &str) -> Device {
    Device::open(&Driver::open(&provider.parse().unwrap()).unwrap(), 0).unwrap()
}

fn load(model: &Arc<ModelFile>, residency: Residency, device: &Device) -> Band {
    load_for(model, residency, device, LIMITS)
}

fn load_for(model: &Arc<ModelFile>, residency: Residency, device: &Device, limits: Limits) -> Band {
    let layers = 0..LAYERS as usize;
    let residency = vec![residency; layers.len()];
    let lifted = 0..0;
    let spec = BandSpec { layers, lifted, embed: true, head: true, residency, limits };
    Band::load(model, spec, None, device, compiler(), &mut |_, _| ControlFlow::Continue(())).unwrap()
}

/// A model in a file; none, with a note, where kernels cannot be compiled.
fn model() -> Option<(tempfile::NamedTempFile, Arc<ModelFile>)> {
    if compiler().describe(&Arch::Emulated { wave: 32 }).is_err_and(|error| skip(&error)) {
        return None;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    TinyModel::new("qwen3").layers(LAYERS).write(file.path()).unwrap();
    let model = Arc::new(ModelFile::open(file.path()).unwrap());
    Some((file, model))
}

/// Bytes that go to the device in a step of 20 tokens, in a second one (whose first groups came with the first one), and in one of 16; and those of weights in host memory.
fn uploaded(model: &Arc<ModelFile>, residency: Residency) -> ([u64; 3], u64) {
    let mut band = load(model, residency, &device("emulated:"));
    let mapped = band.layer_bytes().iter().map(|layer| layer.pinned).sum();
    let program = model.program();
    let limits = FrameLimits::new(&LIMITS, program.d_model, program.vocab);
    let mut frame = StepFrame::with_limits(&limits);
    let mut start = 0;
    let steps = [20, 20, 16].map(|tokens| {
        let shape =
            SpanShape { sequence: 1, state_slot: 0, start, tokens, logits: LogitRows::None, lifted: false };
        frame.begin(1, u64::from(start) + 1);
        start += tokens;
        let blocks = (start as usize).div_ceil(KV_BLOCK_TOKENS);
        frame.push(shape, &[0, 1][..blocks], &limits).unwrap();
        let before = emulated::counters().uploaded;
        band.embed(&vec![1; tokens as usize]).unwrap();
        band.run(&frame, None, &mut || ()).unwrap();
        emulated::counters().uploaded - before
    });
    (steps, mapped)
}

/// A large step copies every matrix once, a small one none: it reads them where they are.
#[test]
fn large_steps_copy_every_matrix_once_and_small_ones_none() {
    let Some((_file, model)) = model() else { return };
    let (resident, none) = uploaded(&model, Residency::Device);
    let (mapped, weights) = uploaded(&model, Residency::HostMapped);
    assert!(none == 0 && weights > 0);
    let [first, second, small] = [0, 1, 2].map(|step| mapped[step] - resident[step]);
    assert_eq!(small, 0, "of 16 tokens");
    assert!(second > weights / 2 && second <= weights, "{second} of {weights}, norms among them");
    assert!(first > second, "two groups are copied ahead: {first} and {second}");
}

/// A band loses one end of a page, and not one for every matrix.
#[test]
fn a_band_takes_its_memory_at_once() {
    let Some((_file, model)) = model() else { return };
    const PAGE: usize = 1 << 20;
    for residency in [Residency::Device, Residency::HostMapped] {
        let exact = device("emulated:");
        let band = load(&model, residency, &exact);
        let (bytes, allocations) = (exact.ledger().device_bytes(), exact.ledger().entries().len());
        drop((band, exact));
        let paged = device("emulated:page=1MiB");
        let before = paged.memory().unwrap().free;
        let band = load(&model, residency, &paged);
        let taken = before - paged.memory().unwrap().free;
        assert!(allocations > 20, "{allocations}");
        // 256 bytes at most are lost at the end of each part.
        assert!(taken < bytes + allocations * 256 + PAGE, "{taken} for {bytes}, {residency:?}");
        drop(band);
        assert_eq!(paged.memory().unwrap().free, before, "{residency:?}");
    }
}

/// What is left of a device's memory is more by every byte of the layers in host memory: these take none of it.
#[test]
fn layers_in_host_memory_leave_the_device_all_of_theirs() {
    let Some((_file, model)) = model() else { return };
    // Larger steps would have places for weights on their way.
    let limits = Limits { max_step_tokens: 16, ..LIMITS };
    let used = |residency| {
        let device = device("emulated:");
        let before = device.memory().unwrap().free;
        let band = load_for(&model, residency, &device, limits);
        let bytes = band
            .layer_bytes()
            .iter()
            .fold((0, 0), |(on_device, pinned), layer| (on_device + layer.device, pinned + layer.pinned));
        ((before - device.memory().unwrap().free) as u64, bytes)
    };
    let (resident, (weights, none)) = used(Residency::Device);
    let (mapped, (zero, pinned)) = used(Residency::HostMapped);
    assert!(weights > 0 && pinned >= weights);
    assert_eq!((none, zero, resident - mapped), (0, 0, weights));
}
