//! The `cuda` provider's translation of HIP's calls, against a library that checks what it is given.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

use spillway_worker_gpu::hip::{
    Device, Driver, Event, Launch, Module, PeerBuffer, Provider, Stream, search, status,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;

/// Builds the stand-in library; `None` without a C compiler.
fn fake_library() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_libcuda");
    std::fs::create_dir_all(&folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_libcuda.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-o"]);
    match compiler.arg(folder.join("libcuda.so.1")).arg(source).status() {
        Ok(status) => assert!(status.success()),
        Err(error) => {
            println!("skipped: no C compiler: {error}");
            return None;
        }
    }
    Some(folder)
}

/// Set in the process that sees the stand-in library.
const CHILD: &str = "SPILLWAY_TEST_FAKE_CUDA";

/// Runs [`every_call_child`] where the loader finds the stand-in.
#[test]
fn every_call_reaches_libcuda_as_it_should() {
    let Some(folder) = fake_library() else { return };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["every_call_child", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Not a test by itself: see above.
#[test]
fn every_call_child() {
    if std::env::var_os(CHILD).is_some() {
        let driver = Driver::open(&Provider::Cuda).unwrap();
        assert_eq!((driver.device_count(), driver.version()), (2, 12040));
        let device = Device::open(&driver, 0).unwrap();
        describes(&device);
        copies(&device);
        runs_kernels(&device);
        reaches_peers(&device);
        assert_eq!(device.ledger().entries(), []);
        assert!(search().drivers.iter().any(|driver| *driver.provider() == Provider::Cuda));
    }
}

fn describes(device: &Device) {
    let info = device.info();
    assert_eq!((info.name.as_str(), info.arch.as_str(), info.uuid), ("Fake 0", "sm_90", Some([0x70; 16])));
    assert_eq!(
        (info.wave, info.compute_units, info.shared_bytes, info.integrated),
        (32, 132, 232_448, false)
    );
    assert_eq!(info.pci.to_string(), "0002:c0:01.0");
    assert_eq!((info.total_bytes, device.memory().unwrap().free), (1 << 20, 1 << 19));
    let error = device.allocate("weights", (1 << 20) + 1).unwrap_err();
    assert_eq!(error.code(), "gpu_out_of_memory");
}

fn copies(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, b) = (device.allocate("a", 64).unwrap(), device.allocate("b", 64).unwrap());
    let pinned = device.allocate_pinned("pinned", 64).unwrap();
    let mut ring = [3u8; 64];
    // SAFETY: the ring outlives the registration.
    let ring = unsafe { device.register_pinned("ring", NonNull::from(&mut ring).cast(), 64) }.unwrap();
    stream.upload(a.slice(), &ring, 0).unwrap();
    stream.copy_within(b.slice(), a.slice()).unwrap();
    stream.fill(b.slice().part(60, 4).unwrap(), 9).unwrap();
    stream.download(&pinned, 0, b.slice()).unwrap();
    stream.synchronize().unwrap();
    let (mut staged, mut read) = ([0u8; 64], [0u8; 64]);
    pinned.read(0, &mut staged).unwrap();
    device.read(&mut read, b.slice()).unwrap();
    assert_eq!((staged[59], staged[60], staged), (3, 9, read));
    device.write(a.slice(), &[5; 64]).unwrap();
    device.read(&mut read, a.slice()).unwrap();
    assert_eq!(read, [5; 64]);
}

fn runs_kernels(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let error = Module::load(device, "bad", b"bad image").unwrap_err();
    assert_eq!(error.status(), Some(status::INVALID_KERNEL_FILE));
    let module = Module::load(device, "good", b"good image").unwrap();
    assert_eq!(module.function("subtract").unwrap_err().status(), Some(status::NOT_FOUND));
    let add = module.function("add").unwrap();
    let resources = add.resources().unwrap();
    assert_eq!((resources.registers, resources.shared_bytes, resources.max_threads), (40, 1024, 256));
    let buffer = device.allocate("x", 400).unwrap();
    device.write(buffer.slice(), bytemuck::cast_slice(&[1.5f32; 100])).unwrap();
    let args = [buffer.slice().into(), buffer.slice().into(), 100u32.into()];
    // All the dynamic shared memory that the device has beside the kernel's own.
    let launch = Launch { grid: [2, 1, 1], block: 64, shared_bytes: 232_448 - 1024 };
    // SAFETY: the stand-in's kernel has these parameters.
    unsafe { stream.launch(&add, launch, &args) }.unwrap();
    let mut sums = [0.0f32; 100];
    device.read(bytemuck::cast_slice_mut(&mut sums), buffer.slice()).unwrap();
    assert_eq!(sums, [3.0; 100]);
    let odd = [buffer.slice().part(1, 4).unwrap().into(), buffer.slice().into(), 0u32.into()];
    // SAFETY: refused by the stand-in.
    let error = unsafe { stream.launch(&add, Launch::linear(1, 32), &odd) }.unwrap_err();
    assert_eq!((error.status(), error.code()), (Some(status::LAUNCH_FAILURE), "gpu_lost"));

    // SAFETY: as above; the stand-in's graphs do nothing.
    let graph = stream.capture(|| unsafe { stream.launch(&add, Launch::linear(1, 32), &args) }).unwrap();
    // SAFETY: as above.
    unsafe { graph.launch(&stream) }.unwrap();
    let (event, timed) = (Event::new(device).unwrap(), Event::timed(device).unwrap());
    stream.record(&event).unwrap();
    stream.wait_for(&event).unwrap();
    assert!(event.is_done().unwrap() && !stream.is_done().unwrap());
    assert_eq!(event.milliseconds_since(&timed).unwrap().to_bits(), 2.5f32.to_bits());
    device.synchronize().unwrap();
}

fn reaches_peers(device: &Device) {
    let driver = device.driver();
    assert!(driver.can_access_peer(0, 1).unwrap() && !driver.can_access_peer(1, 0).unwrap());
    let second = Device::open(driver, 1).unwrap();
    second.enable_peer(device).unwrap();
    second.enable_peer(device).unwrap();
    let (from, to) = (device.allocate("from", 8).unwrap(), second.allocate("to", 8).unwrap());
    device.write(from.slice(), &[7; 8]).unwrap();
    let stream = Stream::new(&second).unwrap();
    stream.copy_from_peer(to.slice(), from.slice(), 0).unwrap();
    second.disable_peer(device).unwrap();
    let shared = PeerBuffer::open(&second, to.share().unwrap()).unwrap();
    let mut bytes = [0; 8];
    second.read(&mut bytes, shared.slice()).unwrap();
    assert_eq!(bytes, [7; 8]);
}
