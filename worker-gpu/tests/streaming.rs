//! Which steps take weights in host memory through device memory, counted in bytes that the emulated device copied.
//!
//! The kernels need a C++ compiler; without one the test prints a note and passes, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

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

/// Bytes that go to the device in a step of 20 tokens, in a second one (whose first groups came with the first one), and in one of 16; and those of weights in host memory.
fn uploaded(model: &Arc<ModelFile>, residency: Residency) -> ([u64; 3], u64) {
    let driver = Driver::open(&"emulated:".parse().unwrap()).unwrap();
    let device = Device::open(&driver, 0).unwrap();
    let layers = 0..LAYERS as usize;
    let residency = vec![residency; layers.len()];
    let spec = BandSpec { layers, embed: true, head: false, residency, limits: LIMITS };
    let mut band =
        Band::load(model, spec, &device, compiler(), &mut |_, _| ControlFlow::Continue(())).unwrap();
    let mapped = band.layer_bytes().iter().map(|layer| layer.pinned).sum();
    let program = model.program();
    let limits = FrameLimits::new(&LIMITS, program.d_model, program.vocab);
    let mut frame = StepFrame::with_limits(&limits);
    let mut start = 0;
    let steps = [20, 20, 16].map(|tokens| {
        let shape = SpanShape { sequence: 1, state_slot: 0, start, tokens, logits: LogitRows::None };
        frame.begin(1, u64::from(start) + 1);
        start += tokens;
        let blocks = (start as usize).div_ceil(KV_BLOCK_TOKENS);
        frame.push(shape, &[0, 1][..blocks], &limits).unwrap();
        let before = emulated::counters().uploaded;
        band.embed(&vec![1; tokens as usize]).unwrap();
        band.run(&frame, None).unwrap();
        emulated::counters().uploaded - before
    });
    (steps, mapped)
}

/// A large step copies every matrix once, a small one none: it reads them where they are.
#[test]
fn large_steps_copy_every_matrix_once_and_small_ones_none() {
    if compiler().describe(&Arch::Emulated { wave: 32 }).is_err_and(|error| skip(&error)) {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    TinyModel::new("qwen3").layers(LAYERS).write(file.path()).unwrap();
    let model = Arc::new(ModelFile::open(file.path()).unwrap());
    let (resident, none) = uploaded(&model, Residency::Device);
    let (mapped, weights) = uploaded(&model, Residency::HostMapped);
    assert!(none == 0 && weights > 0);
    let [first, second, small] = [0, 1, 2].map(|step| mapped[step] - resident[step]);
    assert_eq!(small, 0, "of 16 tokens");
    assert!(second > weights / 2 && second <= weights, "{second} of {weights}, norms among them");
    assert!(first > second, "two groups are copied ahead: {first} and {second}");
}
