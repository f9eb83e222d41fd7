//! A decode step allocates nothing, on any thread.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the program is a test")]

mod support;

use spillway_kernels::pool::ThreadPool;
use spillway_model::testing::TinyModel;
use spillway_protocol::frame::{FrameLimits, LogitRows, LogitsFrame, SpanShape, StepFrame};
use spillway_worker_cpu::band::{Band, BandError, BandSpec};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use support::{Rounding, limits, open};

/// The system's allocator, counting while asked to.
struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Ordering::Relaxed) {
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Attention and recurrent layers, two threads, logits included; the context stays within one attention partition.
#[test]
fn a_decode_step_allocates_nothing() {
    let path = std::env::temp_dir().join(format!("spillway-allocations-{}.gguf", std::process::id()));
    TinyModel::new("qwen35").q8_0().write(&path).unwrap();
    let model = open(&path);
    std::fs::remove_file(&path).unwrap();
    let program = model.program();
    let spec = BandSpec {
        layers: 0..program.layers.len(),
        embed: true,
        head: true,
        limits: limits(Rounding::COARSE),
    };
    let frames = FrameLimits::new(&spec.limits, program.d_model, program.vocab);
    let pool = ThreadPool::new(2).unwrap();
    let mut band = Band::load(&model, spec, None, pool, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let mut frame = StepFrame::with_limits(&frames);
    let table = [0, 1, 2, 3];
    for position in 0..100 {
        let logits = LogitRows::Last;
        let shape =
            SpanShape { sequence: 7, state_slot: 0, start: position, tokens: 1, logits, lifted: false };
        frame.begin(1, position.into());
        frame.push(shape, &table[..=position as usize / 32], &frames).unwrap();
        // What grows to its size in the first steps has grown by now.
        COUNTING.store(position >= 50, Ordering::Relaxed);
        let mut sum = 0.0;
        band.embed(&[position]).unwrap();
        band.run(&frame, &mut ()).unwrap();
        let sink = |_: &LogitsFrame, logits: &[f32]| {
            sum += logits.iter().sum::<f32>();
            Ok::<(), BandError>(())
        };
        band.logits(&frame, sink).unwrap();
        COUNTING.store(false, Ordering::Relaxed);
        assert!(sum.is_finite());
    }
    assert_eq!(COUNT.load(Ordering::Relaxed), 0);
}
