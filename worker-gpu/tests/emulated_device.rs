//! The safe types above the table, on the emulated device, in good and in bad conditions.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

mod common;

use common::{Bench, compiler, skip};
use spillway_worker_gpu::compile::Arch;
use spillway_worker_gpu::hip::{
    Arena, Device, Driver, Event, HipError, Launch, Module, PeerBuffer, Provider, Stream, emulated, search,
    status,
};
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

fn open(options: &str) -> (Rc<Driver>, Device) {
    let driver = Driver::open(&format!("emulated:{options}").parse().unwrap()).unwrap();
    let device = Device::open(&driver, 0).unwrap();
    (driver, device)
}

/// The compiled residual_add; `None` without a C++ compiler.
fn image() -> Option<Vec<u8>> {
    let source = spillway_kernels::hip::source("residual_add").unwrap();
    match compiler().compile(source, &Arch::Emulated { wave: 32 }) {
        Ok(artifact) => Some(artifact.image),
        Err(error) if skip(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

/// One of everything, used: what a worker does with a device.
fn everything(driver: &Rc<Driver>, image: &[u8], ring: &mut [u8]) -> Result<f32, HipError> {
    let device = Device::open(driver, 0)?;
    let (copies, compute) = (Stream::new(&device)?, Stream::new(&device)?);
    let uploaded = Event::new(&device)?;
    let mut arena = Arena::new(&device);
    let (residual, update) = (arena.allocate("residual", 256)?, arena.allocate("update", 256)?);
    let pinned = device.allocate_pinned("staging", 256)?;
    // SAFETY: the ring outlives the registration, which ends with this function.
    let ring = unsafe { device.register_pinned("ring", NonNull::from(&mut *ring).cast(), ring.len()) }?;
    let kernel = Module::load(&device, "residual_add", image)?.function("residual_add")?;
    let ones = [1.0f32; 64];
    pinned.write(0, bytemuck::bytes_of(&ones))?;
    ring.write(0, bytemuck::bytes_of(&ones))?;
    copies.upload(residual, &pinned, 0)?;
    copies.upload(update, &ring, 0)?;
    copies.record(&uploaded)?;
    compute.wait_for(&uploaded)?;
    let args = [residual.into(), update.into(), 64u32.into()];
    // SAFETY: the arguments are the kernel's.
    let graph = compute.capture(|| unsafe { compute.launch(&kernel, Launch::linear(1, 64), &args) })?;
    // SAFETY: the buffers are alive.
    unsafe { graph.launch(&compute) }?;
    compute.download(&pinned, 0, residual)?;
    compute.synchronize()?;
    let mut result = [0.0f32; 64];
    pinned.read(0, bytemuck::bytes_of_mut(&mut result))?;
    Ok(result[63])
}

/// Whichever call runs out of memory: a clean refusal, and nothing stays behind.
#[test]
fn allocation_failure_at_every_call_is_clean() {
    let Some(image) = image() else { return };
    let mut ring = [0u8; 256];
    let allocations = {
        let (driver, device) = open("");
        drop(device);
        assert_eq!(everything(&driver, &image, &mut ring).unwrap(), 2.0);
        assert_eq!(emulated::counters().live, 0);
        emulated::counters().allocations
    };
    assert!(allocations >= 10, "every kind of resource is taken: {allocations}");
    for nth in 1..=allocations {
        let (driver, device) = open(&format!("fail-allocation={nth}"));
        drop(device);
        let error = everything(&driver, &image, &mut ring).unwrap_err();
        assert_eq!(error.status(), Some(status::OUT_OF_MEMORY), "call {nth}: {error}");
        assert_eq!(emulated::counters().live, 0, "call {nth} leaks: {error}");
    }
}

/// Whenever the device goes: an error that says so, and everything is still released.
#[test]
fn device_loss_at_every_call_is_clean() {
    let Some(image) = image() else { return };
    let mut ring = [0u8; 256];
    let calls = {
        let (driver, device) = open("");
        drop(device);
        everything(&driver, &image, &mut ring).unwrap();
        emulated::counters().calls
    };
    for nth in 10..calls {
        let Ok(driver) = Driver::open(&format!("emulated:lose-at-call={nth}").parse().unwrap()) else {
            continue;
        };
        if let Err(error) = everything(&driver, &image, &mut ring) {
            assert_eq!(error.code(), "gpu_lost", "call {nth}: {error}");
        }
        assert_eq!(emulated::counters().live, 0, "call {nth} leaks");
    }
}

#[test]
fn a_failed_kernel_is_noticed_and_everything_is_released() {
    let Some(image) = image() else { return };
    let (driver, device) = open("fail-launch=1");
    drop(device);
    let error = everything(&driver, &image, &mut [0u8; 256]).unwrap_err();
    assert_eq!(error.code(), "gpu_lost");
    assert!(error.to_string().contains("restart the worker"), "{error}");
    assert_eq!(emulated::counters().live, 0);
}

/// Polling sees that a kernel does not end; waiting does not return, which is what the watchdog is for.
#[test]
fn a_hung_kernel_never_finishes() {
    if image().is_none() {
        return;
    }
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let bench = Bench::open("emulated:hang-launch=1", compiler()).unwrap();
        let buffer = bench.upload(&[0.0f32; 64]);
        let (event, other) = (Event::new(&bench.device).unwrap(), Stream::new(&bench.device).unwrap());
        bench.launch(&bench.kernel("residual_add"), Launch::linear(1, 64), args![&buffer, &buffer, 64u32]);
        bench.stream.record(&event).unwrap();
        bench.stream.fill(buffer.slice(), 1).unwrap();
        assert!(!bench.stream.is_done().unwrap() && !event.is_done().unwrap());
        other.synchronize().unwrap();
        other.wait_for(&event).unwrap();
        assert!(!other.is_done().unwrap(), "who waits for it hangs too");
        let mut bytes = [1u8; 256];
        bench.device.read(&mut bytes, buffer.slice()).unwrap();
        assert_eq!(bytes, [0; 256], "work behind it does not run");
        done.send("polled").unwrap();
        bench.stream.synchronize().unwrap();
        done.send("synchronised").unwrap();
    });
    assert_eq!(finished.recv_timeout(Duration::from_secs(60)), Ok("polled"));
    assert!(finished.recv_timeout(Duration::from_millis(200)).is_err());
}

/// A refusal says what the memory was for and how much there is; what is freed can be had again.
#[test]
fn running_out_of_memory_names_the_buffer() {
    let (_driver, device) = open("memory=1MiB");
    let weights = device.allocate("weights", 700 << 10).unwrap();
    let error = device.allocate("kv cache", 400 << 10).unwrap_err();
    assert_eq!(error.code(), "gpu_out_of_memory");
    for part in ["kv cache", "409600", "331776 of 1048576"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    drop(weights);
    device.allocate("kv cache", 400 << 10).unwrap();
}

#[test]
fn the_ledger_knows_what_is_allocated() {
    let (_driver, device) = open("");
    let mut arena = Arena::new(&device);
    arena.allocate("weights", 1000).unwrap();
    arena.allocate("scratch", 24).unwrap();
    let pinned = device.allocate_pinned("staging", 512).unwrap();
    let ledger = device.ledger();
    assert_eq!((ledger.device_bytes(), ledger.pinned_bytes(), arena.bytes()), (1024, 512, 1024));
    let labels: Vec<String> = ledger.entries().into_iter().map(|entry| entry.label).collect();
    assert_eq!(labels, ["weights", "scratch", "staging"]);
    drop((arena, pinned));
    assert_eq!((ledger.device_bytes(), ledger.pinned_bytes(), ledger.peak_device_bytes()), (0, 0, 1024));
}

/// Drivers hand out whole pages.
#[test]
fn what_is_reserved_together_loses_one_end_of_a_page() {
    let (_driver, device) = open("memory=8MiB,page=1MiB");
    let free = || device.memory().unwrap().free >> 20;
    let mut arena = Arena::new(&device);
    arena.reserve("a layer", 3 * 1024).unwrap();
    let parts = [1000, 24, 1024].map(|bytes| arena.allocate("a matrix", bytes).unwrap());
    assert_eq!((free(), parts.map(|part| part.len())), (7, [1000, 24, 1024]));
    assert!(parts.iter().all(|part| part.address().is_multiple_of(256)));
    assert!(
        parts[0].address() + 1024 <= parts[1].address() && parts[1].address() + 256 <= parts[2].address()
    );
    // What does not fit any more is allocated by itself.
    arena.allocate("another one", 1024).unwrap();
    assert_eq!(free(), 6);
    assert_eq!(device.allocate("weights", (6 << 20) + 1).unwrap_err().code(), "gpu_out_of_memory");
}

/// Memory that goes together goes in reverse order of allocation.
#[test]
fn an_arena_frees_the_last_allocation_first() {
    let (_driver, device) = open("");
    let mut arena = Arena::new(&device);
    for bytes in [100, 200, 300] {
        arena.allocate("a", bytes).unwrap();
    }
    drop(arena);
    assert_eq!(emulated::counters().out_of_order_frees, 0);
    drop([device.allocate("first", 1).unwrap(), device.allocate("second", 1).unwrap()]);
    assert_eq!(emulated::counters().out_of_order_frees, 1, "the counter counts");
}

/// Nothing is copied outside its buffer, and a range that is gone is refused by the device.
#[test]
fn copies_stay_inside_their_buffers() {
    let (_driver, device) = open("");
    let stream = Stream::new(&device).unwrap();
    let (buffer, pinned) = (device.allocate("a", 100).unwrap(), device.allocate_pinned("b", 50).unwrap());
    let whole = buffer.slice();
    let range_errors = [
        whole.part(90, 11).unwrap_err(),
        whole.part(usize::MAX, 2).unwrap_err(),
        stream.upload(whole, &pinned, 0).unwrap_err(),
        stream.download(&pinned, 40, whole.part(0, 20).unwrap()).unwrap_err(),
        stream.copy_within(whole.part(0, 10).unwrap(), whole.part(20, 11).unwrap()).unwrap_err(),
        device.write(whole, &[0; 99]).unwrap_err(),
        pinned.write(48, &[0; 3]).unwrap_err(),
    ];
    for error in range_errors {
        assert_eq!(error.code(), "gpu_out_of_range", "{error}");
    }
    drop(buffer);
    assert_eq!(device.write(whole, &[0; 100]).unwrap_err().status(), Some(status::INVALID_VALUE));
}

#[test]
fn copies_and_fills_deliver_their_bytes() {
    let (_driver, device) = open("");
    let stream = Stream::new(&device).unwrap();
    let buffer = device.allocate("a", 300).unwrap();
    let pinned = device.allocate_pinned("b", 100).unwrap();
    pinned.write(0, &[7; 100]).unwrap();
    let part = |offset| buffer.slice().part(offset, 100).unwrap();
    stream.upload(part(0), &pinned, 0).unwrap();
    stream.copy_within(part(100), part(0)).unwrap();
    stream.fill(part(200), 9).unwrap();
    stream.download(&pinned, 0, part(100)).unwrap();
    stream.synchronize().unwrap();
    let (mut bytes, mut staged) = ([0; 300], [0; 100]);
    device.read(&mut bytes, buffer.slice()).unwrap();
    pinned.read(0, &mut staged).unwrap();
    assert_eq!((&bytes[..200], &bytes[200..], staged), (&[7; 200][..], &[9; 100][..], [7; 100]));
    // The device's own view of pinned memory.
    stream.copy_within(part(200), pinned.on_device()).unwrap();
    device.read(&mut bytes, buffer.slice()).unwrap();
    assert_eq!(bytes, [7; 300]);
}

/// Events time work in the order it was queued; a mark that was never made cannot be timed.
#[test]
fn events_measure_time() {
    let (_driver, device) = open("");
    let stream = Stream::new(&device).unwrap();
    let [start, stop, never] = std::array::from_fn(|_| Event::timed(&device).unwrap());
    stream.record(&start).unwrap();
    stream.fill(device.allocate("a", 1 << 20).unwrap().slice(), 0).unwrap();
    stream.record(&stop).unwrap();
    stop.synchronize().unwrap();
    assert!(stop.is_done().unwrap() && stop.milliseconds_since(&start).unwrap() >= 0.0);
    assert!(stop.milliseconds_since(&never).is_err());
}

/// A failed capture leaves the stream usable; what drivers cannot capture is refused.
#[test]
fn captures_fail_cleanly() {
    let (_driver, device) = open("");
    let stream = Stream::new(&device).unwrap();
    let (buffer, pinned) = (device.allocate("a", 64).unwrap(), device.allocate_pinned("b", 64).unwrap());
    let live = emulated::counters().live;
    let error = stream.capture(|| stream.synchronize()).unwrap_err();
    assert_eq!(error.status(), Some(status::CAPTURE_UNSUPPORTED));
    assert_eq!(emulated::counters().live, live);
    let graph = stream.capture(|| stream.upload(buffer.slice(), &pinned, 0)).unwrap();
    pinned.write(0, &[5; 64]).unwrap();
    // SAFETY: the buffers are alive.
    unsafe { graph.launch(&stream) }.unwrap();
    let mut bytes = [0; 64];
    device.read(&mut bytes, buffer.slice()).unwrap();
    assert_eq!(bytes, [5; 64], "a replay reads pinned memory as it is then");
}

#[test]
fn impossible_launches_are_refused() {
    let Some(image) = image() else { return };
    let (_driver, device) = open("");
    let stream = Stream::new(&device).unwrap();
    let module = Module::load(&device, "residual_add", &image).unwrap();
    let kernel = module.function("residual_add").unwrap();
    assert_eq!(kernel.max_threads(), 256);
    for launch in [Launch::linear(0, 64), Launch::linear(1, 0), Launch::linear(1, 33), Launch::linear(1, 512)]
    {
        // SAFETY: refused before anything runs.
        let error = unsafe { stream.launch(&kernel, launch, &[]) }.unwrap_err();
        assert_eq!(error.code(), "gpu_bad_launch", "{launch:?}");
    }
    // SAFETY: as above.
    let error = unsafe { stream.launch(&kernel, Launch::linear(1, 64), &[0u32.into(); 33]) }.unwrap_err();
    assert!(error.to_string().contains("33 arguments"), "{error}");
    assert_eq!(module.function("no_such_kernel").unwrap_err().status(), Some(status::NOT_FOUND));
    assert_eq!(Module::load(&device, "text", b"text").unwrap_err().status(), Some(status::INVALID_IMAGE));
}

/// An object for waves of 64 is not run with waves of 32.
#[test]
fn an_object_for_another_device_is_refused() {
    let Some(image) = image() else { return };
    let (_driver, device) = open("wave=64");
    let error = Module::load(&device, "residual_add", &image).unwrap().function("residual_add").unwrap_err();
    assert_eq!(error.status(), Some(status::NO_BINARY_FOR_GPU));
}

/// Copies between devices work, and a driver that lies about them is caught by looking at the bytes.
#[test]
fn peer_copies_deliver_or_are_caught() {
    for (options, delivers) in [("devices=2", true), ("devices=2,garble-peer=true", false)] {
        let (driver, first) = open(options);
        let second = Device::open(&driver, 1).unwrap();
        assert!(driver.can_access_peer(1, 0).unwrap() && !driver.can_access_peer(1, 1).unwrap());
        second.enable_peer(&first).unwrap();
        let (from, to) = (first.allocate("from", 4096).unwrap(), second.allocate("to", 4096).unwrap());
        first.write(from.slice(), &[3; 4096]).unwrap();
        let stream = Stream::new(&second).unwrap();
        stream.copy_from_peer(to.slice(), from.slice(), 0).unwrap();
        stream.synchronize().unwrap();
        let mut bytes = vec![0; 4096];
        second.read(&mut bytes, to.slice()).unwrap();
        assert_eq!(bytes == [3; 4096], delivers);
        assert_eq!(first.ledger().device_bytes(), 4096, "each device has its own account");
        second.disable_peer(&first).unwrap();
        assert!(
            PeerBuffer::open(&second, from.share().unwrap()).is_err(),
            "a process cannot open its own memory"
        );
        let mut kept = vec![0; 4096];
        first.read(&mut kept, from.slice()).unwrap();
        assert_eq!(kept, [3; 4096], "sharing changes nothing");
    }
}

/// A driver may refuse to page-lock memory; that is an error to fall back from, not the end of the device.
#[test]
fn refused_registration_leaves_the_device_usable() {
    let (_driver, device) = open("refuse-register=true");
    let mut ring = [0u8; 64];
    // SAFETY: the ring outlives the attempt.
    let refused = unsafe { device.register_pinned("ring", NonNull::from(&mut ring).cast(), 64) };
    assert_eq!(refused.unwrap_err().status(), Some(status::NOT_SUPPORTED));
    assert_eq!(device.ledger().pinned_bytes(), 0);
    device.allocate_pinned("own buffer", 64).unwrap();
}

/// The emulated device is found by name only, and real ones are absent with a reason that says what to install.
#[test]
fn real_devices_are_searched_for_and_the_emulated_one_never() {
    let found = search();
    assert!(found.drivers.iter().all(|driver| driver.provider().name() != "emulated"));
    for reason in &found.absent {
        assert!(["gpu_library_missing", "gpu_not_found"].contains(&reason.code()), "{reason}");
        assert!(reason.to_string().contains("install") || reason.to_string().contains("check"), "{reason}");
    }
    assert_eq!(found.drivers.len() + found.absent.len(), 2);
}

#[test]
fn providers_and_devices_that_do_not_exist_are_named() {
    let unknown = |name: &str| name.parse::<Provider>().unwrap_err();
    for name in ["", "nvidia", "amd:0", "emulated:speed=9"] {
        assert_eq!(unknown(name).code(), "gpu_unknown_provider", "{name}");
    }
    assert!(unknown("emulated:speed=9").to_string().contains("speed"));
    let none = Driver::open(&"emulated:devices=0".parse().unwrap()).unwrap_err();
    assert_eq!(none.code(), "gpu_not_found");
    let (driver, _device) = open("devices=2");
    assert_eq!(driver.device_count(), 2);
    assert_eq!(Device::open(&driver, 2).unwrap_err().code(), "gpu_no_such_device");
    assert_eq!(Driver::open(&"emulated".parse().unwrap()).unwrap_err().code(), "gpu_emulated_busy");
}

#[test]
fn a_device_describes_itself() {
    let (driver, _device) = open("wave=64,devices=2,memory=3GiB");
    let info = driver.describe(1).unwrap();
    assert_eq!((info.arch.as_str(), info.wave, info.total_bytes), ("emulated_wave64", 64, 3 << 30));
    assert_eq!((info.pci.to_string().as_str(), info.integrated, info.uuid), ("ffff:01:00.0", false, None));
    assert_eq!(driver.provider().to_string(), "emulated:wave=64,order=forward,devices=2,memory=3GiB");
}
