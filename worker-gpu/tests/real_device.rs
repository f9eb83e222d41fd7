//! The same kernel cases, and what only hardware can show, on a real GPU. All tests are ignored: they need a device.
//!
//! On a machine with a GPU and a compiler:
//!     cargo test -p spillway-worker-gpu --test real_device -- --ignored --test-threads=1
//! On a machine without a compiler, fill a kernel cache elsewhere and take it along with this test's executable:
//!     SPILLWAY_KERNEL_CACHE=<folder> SPILLWAY_TEST_ARCH=sm_90 \
//!         cargo test -p spillway-worker-gpu --test real_device -- --ignored fill_the_cache
//!     SPILLWAY_KERNEL_CACHE=<folder> <executable> --ignored --test-threads=1 --nocapture --skip fill_the_cache
//! `SPILLWAY_TEST_PROVIDER` names the provider; the default is the first that has a device. `SPILLWAY_NVRTC` names a
//! library of NVIDIA's compiler to compile with instead.

#![allow(clippy::cast_possible_truncation, reason = "patterns of bytes are cut on purpose")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

mod common;

use common::{Bench, PRELUDE_CHECK, cases, nvrtc_child_command, speed};
use nix::sys::memfd::{MFdFlags, memfd_create};
use spillway_kernels::device_layout::DeviceLayout;
use spillway_kernels::formats::Format;
use spillway_kernels::hip::SOURCES;
use spillway_worker_gpu::compile::{KernelCompiler, Settings};
use spillway_worker_gpu::hip::{
    Device, DeviceBuffer, Driver, Event, HipError, IpcHandle, Launch, Module, PeerBuffer, Provider, Stream,
    search,
};
use spillway_worker_gpu::launch::{
    Attention, AttentionBuffers, GatedBuffers, HeadSteps, Heads, Inputs, Int8Rows, Kernels, KvCache,
    KvElement, LaunchError, Matrix, Output, PARTITION, Pairing, Rope, RowMeta, SpanMeta, StepSize,
};
use std::fs::File;
use std::process::Command;
use std::ptr::NonNull;
use std::rc::Rc;

fn compiler() -> KernelCompiler {
    KernelCompiler::new(Settings { nvrtc_child: Some(nvrtc_child_command()), ..Settings::from_env() })
}

fn provider() -> String {
    std::env::var("SPILLWAY_TEST_PROVIDER").unwrap_or_else(|_| {
        let found = search();
        let driver = found.drivers.first().unwrap_or_else(|| panic!("no device: {:?}", found.absent));
        driver.provider().to_string()
    })
}

fn open() -> (Rc<Driver>, Device) {
    let driver = Driver::open(&provider().parse::<Provider>().unwrap()).unwrap();
    let device = Device::open(&driver, 0).unwrap();
    (driver, device)
}

#[test]
#[ignore = "writes the cache that SPILLWAY_KERNEL_CACHE names"]
fn fill_the_cache() {
    let arch = std::env::var("SPILLWAY_TEST_ARCH").unwrap().parse().unwrap();
    let sources: Vec<_> = SOURCES.iter().copied().chain([PRELUDE_CHECK]).collect();
    for (source, result) in sources.iter().zip(compiler().compile_all(&sources, &arch)) {
        println!("{} for {arch}: {} bytes", source.name, result.unwrap().image.len());
    }
}

/// Not a test by itself: the process that NVRTC runs in.
#[test]
#[ignore = "started by other tests"]
fn nvrtc_child() {
    common::nvrtc_child();
}

#[test]
#[ignore = "needs a GPU"]
fn a_device_describes_itself() {
    let (driver, device) = open();
    println!("{} version {}: {:?}", driver.provider(), driver.version(), device.info());
    println!("memory {:?}", device.memory().unwrap());
    let info = device.info();
    assert!(!info.name.is_empty() && info.compute_units > 0 && info.total_bytes > 1 << 30);
    assert!(matches!(info.wave, 32 | 64) && info.shared_bytes >= 48 << 10);
}

/// Bytes of a thread's registers that a compiler may keep in memory, as `compile.rs` allows: those that are seldom used, of a full set.
const SPILL_LIMIT: u32 = 32;

#[test]
#[ignore = "needs a GPU"]
fn kernels_match_their_references() {
    let compiler = compiler();
    let bench = Bench::open(&provider(), &compiler).unwrap();
    println!("compiler: {:?}", compiler.describe(&bench.arch));
    for (name, case) in cases::ALL {
        println!("{name}");
        case(&bench);
    }
    for source in SOURCES {
        for entry in source.entries {
            let resources = bench.function(source, entry).resources().unwrap();
            println!("{entry}: {resources:?}");
            assert!(resources.local_bytes <= SPILL_LIMIT, "{entry} spills");
        }
    }
}

/// Memory of another origin, page-locked: copies through it arrive, at the speed of the link.
#[test]
#[ignore = "needs a GPU"]
fn copies_through_pinned_and_registered_memory_arrive() {
    const BYTES: usize = 64 << 20;
    let (_driver, device) = open();
    let stream = Stream::new(&device).unwrap();
    let buffer = device.allocate("device", BYTES).unwrap();
    // As rings are: shared memory without a name.
    let file = File::from(memfd_create(c"spillway-test", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(BYTES as u64).unwrap();
    // SAFETY: no other process has the file.
    let mut shared = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    // SAFETY: the mapping is dropped after the registration.
    let registered =
        unsafe { device.register_pinned("mapping", NonNull::new(shared.as_mut_ptr()).unwrap(), BYTES) }
            .unwrap();
    let allocated = device.allocate_pinned("pinned", BYTES).unwrap();
    let pattern: Vec<u8> = (0..BYTES).map(|i| ((i * 31) >> 8) as u8).collect();
    for (name, pinned) in [("registered", &registered), ("allocated", &allocated)] {
        pinned.write(0, &pattern).unwrap();
        let [start, uploaded, downloaded] = std::array::from_fn(|_| Event::timed(&device).unwrap());
        stream.record(&start).unwrap();
        stream.upload(buffer.slice(), pinned, 0).unwrap();
        stream.record(&uploaded).unwrap();
        stream.synchronize().unwrap();
        pinned.write(0, &vec![0; BYTES]).unwrap();
        stream.download(pinned, 0, buffer.slice()).unwrap();
        stream.record(&downloaded).unwrap();
        downloaded.synchronize().unwrap();
        let mut got = vec![0; BYTES];
        pinned.read(0, &mut got).unwrap();
        assert!(got == pattern, "{name}");
        println!(
            "{name}: upload {:.1} GB/s",
            BYTES as f32 / uploaded.milliseconds_since(&start).unwrap() / 1e6
        );
    }
}

/// A refusal, after which the device still works.
#[test]
#[ignore = "needs a GPU"]
fn too_much_memory_is_refused() {
    let (_driver, device) = open();
    let total = device.memory().unwrap().total;
    assert_eq!(device.allocate("everything and more", total + 1).unwrap_err().code(), "gpu_out_of_memory");
    device.allocate("a little", 1 << 20).unwrap();
    assert_eq!(device.ledger().device_bytes(), 0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_bad_image_is_refused() {
    let (_driver, device) = open();
    let error = Module::load(&device, "nonsense", b".version 8.0\n.target sm_50\nnonsense").unwrap_err();
    println!("{error}");
    assert_eq!(error.code(), "gpu_call_failed");
    device.synchronize().unwrap();
}

/// Many small kernels, queued one by one and as a graph: what a decode step is made of.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_replays_faster_than_launches() {
    const LAUNCHES: usize = 1000;
    let compiler = compiler();
    let bench = Bench::open(&provider(), &compiler).unwrap();
    let kernel = bench.kernel("residual_add");
    let buffer = bench.upload(&[1.0f32; 256]);
    let queue = || {
        (0..LAUNCHES)
            .for_each(|_| bench.launch(&kernel, Launch::linear(1, 256), args![&buffer, &buffer, 0u32]))
    };
    let graph = bench
        .stream
        .capture(|| {
            queue();
            Ok::<(), HipError>(())
        })
        .unwrap();
    let time = |run: &dyn Fn()| {
        run();
        bench.stream.synchronize().unwrap();
        let start = std::time::Instant::now();
        run();
        bench.stream.synchronize().unwrap();
        start.elapsed().as_secs_f64() * 1e6 / LAUNCHES as f64
    };
    let launched = time(&queue);
    // SAFETY: the buffer is alive.
    let replayed = time(&|| unsafe { graph.launch(&bench.stream) }.unwrap());
    println!("a kernel: {launched:.2} us launched, {replayed:.2} us in a graph");
    assert!(replayed < launched);
}

/// Microseconds of one call of `queue`, which is called with 0, 1, 2, ... and must not find its data in a cache.
fn microseconds(bench: &Bench<'_>, calls: usize, mut queue: impl FnMut(usize)) -> f32 {
    queue(0);
    let [start, end] = std::array::from_fn(|_| Event::timed(&bench.device).unwrap());
    bench.stream.record(&start).unwrap();
    (0..calls).for_each(&mut queue);
    bench.stream.record(&end).unwrap();
    end.synchronize().unwrap();
    end.milliseconds_since(&start).unwrap() * 1e3 / calls as f32
}

/// How fast every format is multiplied, on the shapes of a 27B model (5120 wide, 17408 in the MLP): share of memory bandwidth
/// for few tokens, operations for many. Figures are printed, not judged: they belong to a device.
#[test]
#[ignore = "needs a GPU"]
fn speed_of_products() {
    const COPIES: usize = 8; // more than caches hold
    const MANY: [usize; 3] = [128, 512, 2048];
    const MOST: usize = MANY[MANY.len() - 1];
    let compiler = compiler();
    let bench = Bench::open(&provider(), &compiler).unwrap();
    let kernels = bench.kernels();
    for (rows, cols) in [(17408, 5120), (5120, 17408), (1024, 5120)] {
        let values = bench.upload(&vec![0.5f32; MOST * cols]);
        let int8_memory = bench.empty::<u8>(Int8Rows::bytes_for(MOST, cols));
        let int8 = Int8Rows::new(int8_memory.slice(), MOST, cols).unwrap();
        kernels.quantize_rows(&bench.stream, values.slice(), &int8).unwrap();
        let out = bench.empty::<f32>(MOST * rows);
        for format in Format::ALL {
            let layout = DeviceLayout::new(format, cols).unwrap();
            let memory = bench.empty::<u8>(COPIES * layout.matrix_bytes(rows).unwrap());
            bench.stream.fill(memory.slice(), 0x11).unwrap();
            let bytes = memory.len() / COPIES;
            let matrices: Vec<Matrix> = (0..COPIES)
                .map(|i| Matrix::new(layout, rows, memory.slice().part(i * bytes, bytes).unwrap()).unwrap())
                .collect();
            let inputs = match format.is_quantised() {
                true => Inputs::Int8(int8),
                false => Inputs::F32(values.slice()),
            };
            let time = |tokens: usize, calls: usize| {
                microseconds(&bench, calls, |call| {
                    let (weight, output) = (&matrices[call % COPIES], Output::store(out.slice()));
                    kernels.matmul(&bench.stream, weight, inputs, tokens, output).unwrap();
                })
            };
            let few: Vec<String> = [1, 2, 4, 8, 16, 32, 64]
                .iter()
                .map(|tokens| (tokens, time(*tokens, 100)))
                .map(|(tokens, us)| format!("x{tokens} {us:.1} us {:.0} GB/s", bytes as f32 / us / 1e3))
                .collect();
            let many: Vec<String> = MANY
                .iter()
                .map(|tokens| (tokens, time(*tokens, 3)))
                .map(|(tokens, us)| {
                    format!("x{tokens} {us:.0} us {:.1} T/s", 2.0 * (rows * cols * tokens) as f32 / us / 1e6)
                })
                .collect();
            println!("{rows} x {cols} {}: {}, {}", format.name(), few.join(", "), many.join(", "));
        }
    }
}

/// How fast norms, quantisation, activations and DeltaNet layers are.
#[test]
#[ignore = "needs a GPU"]
fn speed_of_operations() {
    let compiler = compiler();
    let bench = Bench::open(&provider(), &compiler).unwrap();
    speed::rows(&bench);
    speed::delta_net(&bench);
}

/// Copies of matrices of one format on the device, all of them more than caches hold.
struct Copies {
    sets: Vec<Vec<Matrix>>,
    /// Of one set.
    bytes: usize,
    _memory: DeviceBuffer,
}

impl Copies {
    const SETS: usize = 4;

    fn new(bench: &Bench<'_>, format: Format, rows: &[usize], cols: usize) -> Self {
        let layout = DeviceLayout::new(format, cols).unwrap();
        let bytes = rows.iter().map(|rows| layout.matrix_bytes(*rows).unwrap()).sum();
        let memory = bench.empty::<u8>(Self::SETS * bytes);
        bench.stream.fill(memory.slice(), 0x11).unwrap();
        let mut at = 0;
        let mut next = |rows: usize| {
            let len = layout.matrix_bytes(rows).unwrap();
            let data = memory.slice().part(at, len).unwrap();
            at += len;
            Matrix::new(layout, rows, data).unwrap()
        };
        let sets = (0..Self::SETS).map(|_| rows.iter().map(|rows| next(*rows)).collect()).collect();
        Self { sets, bytes, _memory: memory }
    }
}

/// How fast the launches are that do several things at once: the matrices of a DeltaNet layer of a 27B model that read one
/// input, the gated half of its MLP, and what stands between its halves for a prompt.
#[test]
#[ignore = "needs a GPU"]
fn speed_of_fused_products() {
    const CALLS: usize = 100;
    const GROUP: [usize; 4] = [10240, 6144, 48, 48];
    const HIDDEN: usize = 17408;
    const COLS: usize = 5120;
    const MANY: usize = 512;
    let compiler = compiler();
    let bench = Bench::open(&provider(), &compiler).unwrap();
    let (kernels, stream) = (bench.kernels(), &bench.stream);
    let x = bench.upload(&vec![0.5f32; 16 * COLS]);
    let inputs_memory = bench.empty::<u8>(Int8Rows::bytes_for(16, COLS));
    let inputs = Int8Rows::new(inputs_memory.slice(), 16, COLS).unwrap();
    kernels.quantize_rows(stream, x.slice(), &inputs).unwrap();
    let [left, right] = [0, 1].map(|_| bench.empty::<f32>(MANY * HIDDEN));
    let int8 = bench.empty::<u8>(Int8Rows::bytes_for(MANY, HIDDEN));
    let buffers = GatedBuffers { products: [left.slice(), right.slice()], int8: int8.slice() };
    for format in [Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q8_0] {
        let inputs = Inputs::Int8(inputs);
        let group = Copies::new(&bench, format, &GROUP, COLS);
        let mlp = Copies::new(&bench, format, &[HIDDEN, HIDDEN], COLS);
        for tokens in [1, 2, 4, 8, 16] {
            let at_once = microseconds(&bench, CALLS, |call| {
                let set = &group.sets[call % Copies::SETS];
                let products: Vec<(Matrix, Output)> =
                    set.iter().map(|matrix| (*matrix, Output::store(left.slice()))).collect();
                kernels.matmuls(stream, &products, inputs, tokens).unwrap();
            });
            let gated = microseconds(&bench, CALLS, |call| {
                let [gate, up] = &mlp.sets[call % Copies::SETS][..] else { unreachable!() };
                kernels.gated(stream, [(gate, inputs), (up, inputs)], tokens, &buffers, true).unwrap();
            });
            let speed = |bytes: usize, us: f32| bytes as f32 / us / 1e6;
            println!(
                "{} x{tokens}: {GROUP:?} x {COLS} {at_once:.1} us {:.2} TB/s, gated MLP {HIDDEN} x {COLS} {gated:.1} us \
                 {:.2} TB/s",
                format.name(),
                speed(group.bytes, at_once),
                speed(mlp.bytes, gated)
            );
        }
    }
    let out = Int8Rows::new(int8.slice(), MANY, HIDDEN).unwrap();
    let at_once = microseconds(&bench, CALLS, |_| {
        kernels.silu_quantize(stream, left.slice(), right.slice(), &out).unwrap();
    });
    let apart = microseconds(&bench, CALLS, |_| {
        kernels.silu_mul(stream, left.slice(), right.slice(), MANY * HIDDEN).unwrap();
        kernels.quantize_rows(stream, left.slice(), &out).unwrap();
    });
    println!("silu_quantize {MANY} x {HIDDEN}: {at_once:.1} us, silu_mul and quantize_rows {apart:.1} us");
}

/// How fast attention is at head shapes of Qwen3.5 27B (24:4 heads of 256) and Llama 8B (32:8 of 128), norm, rotation and
/// cache included: share of memory bandwidth for single tokens, operations for chunks of a prompt. Figures are printed, not
/// judged.
#[test]
#[ignore = "needs a GPU"]
fn speed_of_attention() {
    let compiler = compiler();
    let bench = Bench::open(&provider(), &compiler).unwrap();
    let kernels = Kernels::load(&bench.device, &compiler, &[]).unwrap();
    for (heads, kv_heads, dim) in [(24, 4, 256), (32, 8, 128)] {
        for (rows, contexts) in [
            (1, &[128, 1024, 8192, 32768][..]),
            (4, &[128, 8192, 32768]),
            (512, &[512, 1024, 1536, 2048, 16384]),
        ] {
            for &context in contexts {
                let us = attention_microseconds(&bench, &kernels, (heads, kv_heads, dim), rows, context);
                let floor = (rows.min(4) * context * kv_heads * dim * 4) as f32 / 4.5e6;
                let pairs = if rows > 4 { rows * (2 * context - rows) / 2 } else { rows * context };
                let rate = 4.0 * (pairs * heads * dim) as f32 / us / 1e6;
                println!(
                    "{heads}:{kv_heads} x {dim}, {rows} rows at {context}: {us:.1} us, floor {floor:.1} us, {rate:.1} T/s"
                );
            }
        }
    }
}

/// Microseconds of a layer of f16 keys and values; up to four rows are sequences of their own.
fn attention_microseconds(
    bench: &Bench<'_>,
    kernels: &Kernels,
    (heads, kv_heads, dim): (usize, usize, usize),
    rows: usize,
    context: usize,
) -> f32 {
    const LAYERS: usize = 8; // more than caches hold
    const PAIRS: usize = 32;
    let spans = if rows <= 4 { rows } else { 1 };
    let blocks = context.div_ceil(32);
    let tables: Vec<u32> = (0..spans * blocks).map(|i| (i * 7 % (spans * blocks)) as u32).collect();
    let first = context - rows / spans;
    let row_meta: Vec<RowMeta> = (0..rows)
        .map(|row| match spans {
            1 => RowMeta { position: (first + row) as u32, table: 0, span: 0 },
            _ => RowMeta { position: first as u32, table: (row * blocks) as u32, span: row as u32 },
        })
        .collect();
    let span_meta: Vec<SpanMeta> = (0..spans)
        .map(|span| SpanMeta { first_row: span as u32, tokens: (rows / spans) as u32, slot: 0, reset: 0 })
        .collect();
    let values = |count: usize| bench.upload(&vec![0.5f32; count]);
    let (joined, k, v) =
        (values(2 * rows * heads * dim), values(rows * kv_heads * dim), values(rows * kv_heads * dim));
    let (weight, angles) = (values(dim), values(rows * PAIRS));
    let [prepared, out] = [0; 2].map(|_| bench.empty::<f32>(rows * heads * dim));
    let (row_meta, span_meta, tables) =
        (bench.upload(&row_meta), bench.upload(&span_meta), bench.upload(&tables));
    let scratch = bench.empty::<u8>(Attention::scratch_bytes(heads, dim, 4, context.div_ceil(PARTITION)));
    let cache_bytes = KvCache::bytes_for(KvElement::F16, kv_heads, dim, dim, spans * blocks);
    let memory = bench.empty::<u8>(LAYERS * cache_bytes);
    bench.stream.fill(memory.slice(), 0x11).unwrap();
    let stride = 2 * dim;
    let buffers = AttentionBuffers {
        q: Heads { memory: joined.slice(), stride },
        prepared: prepared.slice(),
        k: k.slice(),
        v: v.slice(),
        gate: Some(Heads { memory: joined.slice().part(dim * 4, joined.len() - dim * 4).unwrap(), stride }),
        out: out.slice(),
        row_meta: row_meta.slice(),
        span_meta: span_meta.slice(),
        tables: tables.slice(),
        scratch: scratch.slice(),
    };
    let rope =
        Some(Rope { pairing: Pairing::Halves, pairs: PAIRS, cos: angles.slice(), sin: angles.slice() });
    let steps = HeadSteps { norm: Some((weight.slice(), 1e-6)), rope };
    let layer = Attention { heads, scale: 0.0625 };
    let size = StepSize { rows, spans, context };
    let queue = || -> Result<(), LaunchError> {
        (0..LAYERS).try_for_each(|at| {
            let part = memory.slice().part(at * cache_bytes, cache_bytes)?;
            let cache = KvCache::new(KvElement::F16, kv_heads, dim, dim, part)?;
            kernels.attention(&bench.stream, &layer, &cache, &buffers, [&steps, &steps], size)
        })
    };
    let graph = bench.stream.capture(queue).unwrap();
    microseconds(bench, if rows > 4 { 3 } else { 20 }, |_| {
        // SAFETY: the graph's memory is alive.
        unsafe { graph.launch(&bench.stream) }.unwrap();
    }) / LAYERS as f32
}

/// Environment variable with which [`ipc_child`] gets a handle: hexadecimal bytes, then the length.
const HANDLE: &str = "SPILLWAY_TEST_IPC_HANDLE";

/// Not a test by itself: opens memory that its parent shares, checks and answers in it.
#[test]
#[ignore = "started by another test"]
fn ipc_child() {
    let Ok(text) = std::env::var(HANDLE) else { return };
    let (hex, len) = text.split_once(' ').unwrap();
    let bytes: [u8; 64] = std::array::from_fn(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap());
    let (_driver, device) = open();
    let shared = PeerBuffer::open(&device, IpcHandle::from_parts(bytes, len.parse().unwrap())).unwrap();
    let mut got = vec![0; shared.slice().len()];
    device.read(&mut got, shared.slice()).unwrap();
    assert!(got.iter().enumerate().all(|(i, byte)| *byte == i as u8));
    device.write(shared.slice(), &vec![0xa5; got.len()]).unwrap();
}

/// Another process reads and writes memory of this one through a handle.
#[test]
#[ignore = "needs a GPU"]
fn memory_is_shared_between_processes() {
    let (driver, device) = open();
    let buffer = device.allocate("shared", 1 << 20).unwrap();
    let pattern: Vec<u8> = (0..1 << 20).map(|i| i as u8).collect();
    device.write(buffer.slice(), &pattern).unwrap();
    let (bytes, len) = buffer.share().unwrap().to_parts();
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["ipc_child", "--exact", "--ignored", "--nocapture"])
        .env(HANDLE, format!("{hex} {len}"))
        .env("SPILLWAY_TEST_PROVIDER", driver.provider().to_string())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    let mut got = vec![0; 1 << 20];
    device.read(&mut got, buffer.slice()).unwrap();
    assert!(got.iter().all(|byte| *byte == 0xa5));
}
