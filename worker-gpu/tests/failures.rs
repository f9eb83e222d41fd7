//! A band on an emulated device that fails: every refusal is an error with a code, and nothing stays behind.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;

use common::{compiler, skip};
use spillway_model::file::ModelFile;
use spillway_model::testing::TinyModel;
use spillway_protocol::control::DeviceShare;
use spillway_protocol::frame::{FrameLimits, LogitRows, SpanShape, StepFrame};
use spillway_protocol::plan::{ActivationType, KvType, Limits, Residency};
use spillway_protocol::ring::{Ring, RingProducer};
use spillway_worker::Rings;
use spillway_worker::band::Logits;
use spillway_worker_gpu::band::{Band, BandError, BandSpec};
use spillway_worker_gpu::compile::Arch;
use spillway_worker_gpu::hip::{Device, Driver, HipError, emulated};
use std::ops::{ControlFlow, Range};
use std::rc::Rc;
use std::sync::Arc;
use tempfile::NamedTempFile;

/// A model with attention and recurrent layers, and the step that is run on it.
struct Fixture {
    model: Arc<ModelFile>,
    _file: NamedTempFile,
    limits: Limits,
}

const PROMPT: [u32; 5] = [5, 9, 2, 7, 1];

impl Fixture {
    /// `None` without a C++ compiler.
    fn new() -> Option<Self> {
        if compiler().describe(&Arch::Emulated { wave: 32 }).is_err_and(|error| skip(&error)) {
            return None;
        }
        let file = NamedTempFile::new().unwrap();
        TinyModel::new("qwen35").write(file.path()).unwrap();
        let limits = Limits {
            max_seq: 64,
            max_sequences: 2,
            kv_blocks: 4,
            kv_type: KvType::F32,
            activations: ActivationType::Int8,
            max_step_tokens: 8,
            max_logit_rows: 2,
        };
        Some(Self { model: Arc::new(ModelFile::open(file.path()).unwrap()), _file: file, limits })
    }

    fn load(&self, device: &Device) -> Result<Band, BandError> {
        self.load_layers(device, 0..self.model.program().layers.len())
    }

    fn load_layers(&self, device: &Device, layers: Range<usize>) -> Result<Band, BandError> {
        let (embed, head) = (layers.start == 0, layers.end == self.model.program().layers.len());
        let residency = vec![Residency::Device; layers.len()];
        let lifted = 0..0;
        let spec = BandSpec { layers, lifted, embed, head, residency, limits: self.limits };
        Band::load(&self.model, spec, None, device, compiler(), &mut |_, _| ControlFlow::Continue(()))
    }

    /// A prompt and three decode steps, the last of which are captured and replayed.
    fn run(&self, band: &mut Band) -> Result<f32, String> {
        let program = self.model.program();
        let limits = FrameLimits::new(&self.limits, program.d_model, program.vocab);
        let mut frame = StepFrame::with_limits(&limits);
        let mut last = 0.0;
        let steps = [&PROMPT[..], &[3], &[4], &[6]];
        let mut start = 0;
        for (step, ids) in (1..).zip(steps) {
            let tokens = u32::try_from(ids.len()).unwrap();
            let shape = SpanShape {
                sequence: 1,
                state_slot: 0,
                start,
                tokens,
                logits: LogitRows::Last,
                lifted: false,
            };
            frame.begin(1, step);
            frame.push(shape, &[1], &limits).unwrap();
            start += tokens;
            let failed = |error: BandError| error.code().to_owned();
            band.embed(ids).map_err(failed)?;
            band.run(&frame, None, &mut || ()).map_err(failed)?;
            let logits = band.logits(&frame, &mut |_, logits| {
                let Logits::Values(values) = logits else { panic!("there is no ring") };
                last = values[0];
                Ok(())
            });
            logits.map_err(|error| error.code().to_owned())?;
        }
        Ok(last)
    }
}

fn open(options: &str) -> Result<(Rc<Driver>, Device), HipError> {
    let driver = Driver::open(&format!("emulated:{options}").parse().unwrap())?;
    let device = Device::open(&driver, 0)?;
    Ok((driver, device))
}

/// Whichever call of a load runs out of memory: a refusal that says of what and how much, and nothing stays allocated.
#[test]
fn allocation_failure_at_every_call_of_a_load_is_a_clean_refusal() {
    let Some(fixture) = Fixture::new() else { return };
    let allocations = {
        let (_driver, device) = open("").unwrap();
        drop(fixture.load(&device).unwrap());
        assert_eq!((device.ledger().entries().len(), emulated::counters().live), (0, 0));
        emulated::counters().allocations
    };
    assert!(allocations > 50, "weights, states, buffers, streams, events and modules: {allocations}");
    for nth in 1..=allocations {
        let (_driver, device) = open(&format!("fail-allocation={nth}")).unwrap();
        let error = fixture.load(&device).err().unwrap_or_else(|| panic!("call {nth} was ignored"));
        assert_eq!(error.code(), "gpu_out_of_memory", "call {nth}: {error}");
        if let BandError::Hip(HipError::OutOfMemory { label, free, total, .. }) = &error {
            assert!(!label.is_empty() && free <= total && *total == 4 << 30, "call {nth}: {error}");
        }
        let message = error.to_string();
        assert!(message.contains("fewer layers"), "call {nth}: {message}");
        assert!(device.ledger().entries().is_empty(), "call {nth} leaks: {:?}", device.ledger().entries());
        assert_eq!(emulated::counters().live, 0, "call {nth} leaks: {error}");
    }
}

/// A device too small for the last allocations is refused as it would be by a driver that is really full.
#[test]
fn a_device_that_is_full_says_what_it_was_asked_for() {
    let Some(fixture) = Fixture::new() else { return };
    let (_driver, device) = open("memory=256KiB").unwrap();
    let error = fixture.load(&device).unwrap_err();
    assert_eq!(error.code(), "gpu_out_of_memory");
    assert!(error.to_string().contains("of 262144 bytes of the device are free"), "{error}");
    assert_eq!(emulated::counters().live, 0);
}

/// Any kernel of a prompt, of a first decode step, of a captured one or of a replay may fail: the step ends with `gpu_lost`, as do all
/// further ones, and the band can still be dropped.
#[test]
fn a_failed_launch_loses_the_device_wherever_it_comes() {
    let Some(fixture) = Fixture::new() else { return };
    let launches = {
        let (_driver, device) = open("").unwrap();
        let mut band = fixture.load(&device).unwrap();
        fixture.run(&mut band).unwrap();
        emulated::counters().launches
    };
    for nth in (1..=launches).step_by(7).chain([launches]) {
        let (_driver, device) = open(&format!("fail-launch={nth}")).unwrap();
        let mut band = fixture.load(&device).unwrap();
        assert_eq!(fixture.run(&mut band).unwrap_err(), "gpu_lost", "launch {nth} of {launches}");
        assert_eq!(fixture.run(&mut band).unwrap_err(), "gpu_lost", "launch {nth}, the step after");
        drop(band);
        assert_eq!(emulated::counters().live, 0, "launch {nth} leaks");
    }
}

/// The same for a device that is gone from some call on, in a load or in a step.
#[test]
fn a_device_lost_at_any_call_is_told() {
    let Some(fixture) = Fixture::new() else { return };
    let calls = {
        let (_driver, device) = open("").unwrap();
        let mut band = fixture.load(&device).unwrap();
        fixture.run(&mut band).unwrap();
        emulated::counters().calls
    };
    for nth in (5..=calls).step_by(41) {
        let Ok((_driver, device)) = open(&format!("lose-at-call={nth}")) else { continue };
        let ended = match fixture.load(&device) {
            Ok(mut band) => fixture.run(&mut band).unwrap_err(),
            Err(error) => error.code().to_owned(),
        };
        assert_eq!(ended, "gpu_lost", "call {nth} of {calls}");
        assert_eq!(emulated::counters().live, 0, "call {nth} leaks");
    }
}

/// Memory of a neighbour that cannot be used is a reason to go on through the ring, not an error of the band.
#[test]
fn a_neighbours_memory_that_cannot_be_used_is_refused_with_a_reason() {
    let Some(fixture) = Fixture::new() else { return };
    let (_driver, device) = open("").unwrap();
    let mut band = fixture.load_layers(&device, 1..3).unwrap();
    let ring = Ring::create(2, 1 << 12).unwrap();
    let end = RingProducer::attach(ring.dup().unwrap()).unwrap();
    band.use_rings(&Rings { incoming: end.memory(), outgoing: end.memory(), states: None });
    let (share, again) = (band.offer().unwrap(), band.offer().unwrap());
    assert_eq!(share, again, "asked again, the same memory");
    for (share, reason) in [
        (DeviceShare { handle: vec![1, 2, 3], ..share.clone() }, "another size"),
        (DeviceShare { area_bytes: 64, ..share.clone() }, "too small"),
        (DeviceShare { area_bytes: u64::MAX, ..share.clone() }, "too small"),
        (DeviceShare { handle: vec![0; 64], ..share.clone() }, "hipIpcOpenMemHandle"),
        // Of this very process.
        (share, "hipIpcOpenMemHandle"),
    ] {
        let told = band.connect(Some(&share)).unwrap_err();
        assert!(told.contains(reason), "{told}");
    }
    assert_eq!(band.connect(None), Ok(()));
    drop(band);
    assert_eq!((device.ledger().entries().len(), emulated::counters().live), (0, 0));
}

/// A driver that cannot keep a graph loses nothing but speed.
#[test]
fn a_graph_that_cannot_be_had_is_done_without() {
    let Some(fixture) = Fixture::new() else { return };
    let (allocations, expected) = {
        let (_driver, device) = open("").unwrap();
        let mut band = fixture.load(&device).unwrap();
        let before = emulated::counters().allocations;
        let expected = fixture.run(&mut band).unwrap();
        (before..emulated::counters().allocations, expected)
    };
    assert!(!allocations.is_empty(), "a step was captured");
    for nth in allocations.map(|taken| taken + 1) {
        let (_driver, device) = open(&format!("fail-allocation={nth}")).unwrap();
        let mut band = fixture.load(&device).unwrap();
        assert_eq!(fixture.run(&mut band).unwrap().to_bits(), expected.to_bits(), "allocation {nth}");
    }
}
