//! Kernels on the emulated device: right in every variant of it, and wrong ones are noticed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

mod common;

use common::{Bench, PLANTED_FAULTS, cases, compiler, settings, skip};
use spillway_kernels::hip::SOURCES;
use spillway_worker_gpu::compile::{Arch, KernelCompiler, Settings};
use spillway_worker_gpu::hip::{HipError, Launch};
use std::process::Command;

const ORDERS: [&str; 3] = ["forward", "reverse", "random/7"];

/// True when there is no C++ compiler.
fn no_compiler(compiler: &KernelCompiler) -> bool {
    compiler.describe(&Arch::Emulated { wave: 32 }).is_err_and(|error| skip(&error))
}

fn run_all(compiler: &KernelCompiler) {
    for wave in [32, 64] {
        for order in ORDERS {
            let bench = Bench::open(&format!("emulated:wave={wave},order={order}"), compiler).unwrap();
            for (name, case) in cases::ALL {
                println!("{name} wave={wave} order={order}");
                case(&bench);
            }
        }
    }
}

/// Every kernel and every promise of the prelude, against references computed here, for both wave sizes and three orders of
/// lanes.
#[test]
fn kernels_match_their_references() {
    if !no_compiler(compiler()) {
        run_all(compiler());
    }
}

/// The portable way of switching stacks, which other processors than x86-64 use, runs the same kernels.
#[test]
fn kernels_run_on_portable_fibers() {
    let compiler =
        KernelCompiler::new(Settings { cxx_flags: vec!["-DSPILLWAY_UCONTEXT".to_owned()], ..settings() });
    if !no_compiler(&compiler) {
        let bench = Bench::open("emulated", &compiler).unwrap();
        for (name, case) in
            cases::ALL.iter().filter(|(name, _)| ["rms_norm", "block_operations"].contains(name))
        {
            println!("{name}");
            case(&bench);
        }
    }
}

fn run_planted(entry: &str, block: u32) -> Result<Vec<f32>, HipError> {
    let bench = Bench::open("emulated:order=reverse", compiler()).unwrap();
    let output = bench.empty::<f32>(block as usize);
    let input = bench.upload(&(0..block).map(|i| i as f32).collect::<Vec<_>>());
    let both = [input.slice().into(), output.slice().into()];
    let args = if entry == "missing_barrier" { &both[..] } else { &both[1..] };
    bench.launch(&bench.function(&PLANTED_FAULTS, entry), Launch::linear(1, block), args);
    bench.stream.synchronize()?;
    Ok(bench.download(&output))
}

/// A kernel that needs a barrier and has none gives a wrong result, not a lucky one.
#[test]
fn a_missing_barrier_shows() {
    if no_compiler(compiler()) {
        return;
    }
    let right: Vec<f32> = (0..256).rev().map(|i| i as f32).collect();
    assert_ne!(run_planted("missing_barrier", 256).unwrap(), right);
}

/// What a GPU leaves undefined is a failure of the launch that says what happened.
#[test]
fn undefined_behaviour_is_a_failure_with_a_reason() {
    if no_compiler(compiler()) {
        return;
    }
    for (entry, reason) in [
        ("divergent_barrier", "a barrier after another thread of the block has returned"),
        ("divergent_shuffle", "a shuffle that not all lanes of the wave reach"),
        ("too_much_shared", "the shared memory of the block is over the limit"),
    ] {
        let error = run_planted(entry, 64).unwrap_err();
        assert_eq!(error.code(), "gpu_lost", "{entry}");
        assert!(error.to_string().contains(reason), "{entry}: {error}");
    }
}

/// Environment variable that makes [`sanitized_child`] do what it names.
const CHILD: &str = "SPILLWAY_TEST_SANITIZED";

/// Runs this executable again with the address sanitizer's runtime in front, which kernels compiled with it need.
/// `None` when the compiler has no such runtime.
fn run_sanitized(what: &str) -> Option<(bool, String)> {
    let runtime = Command::new("cc").arg("-print-file-name=libasan.so").output().ok()?;
    let runtime = String::from_utf8(runtime.stdout).ok()?.trim().to_owned();
    if !std::path::Path::new(&runtime).is_absolute() {
        println!("skipped: the compiler has no address sanitizer");
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["sanitized_child", "--exact", "--nocapture"])
        .env(CHILD, what)
        .env("LD_PRELOAD", runtime)
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .output()
        .unwrap();
    Some((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn sanitizing() -> KernelCompiler {
    let flags = ["-fsanitize=address", "-fno-omit-frame-pointer", "-g"].map(str::to_owned).to_vec();
    KernelCompiler::new(Settings { cxx_flags: flags, ..settings() })
}

/// Not a test by itself: see [`run_sanitized`].
#[test]
fn sanitized_child() {
    let compiler = sanitizing();
    match std::env::var(CHILD).as_deref() {
        Err(_) => {}
        Ok("all") => {
            let bench = Bench::open("emulated", &compiler).unwrap();
            cases::ALL.iter().for_each(|(_, case)| case(&bench));
        }
        Ok(entry) => {
            let bench = Bench::open("emulated", &compiler).unwrap();
            let output = bench.empty::<f32>(64);
            bench.launch(
                &bench.function(&PLANTED_FAULTS, entry),
                Launch::linear(2, 64),
                args![&output, 64u32],
            );
        }
    }
}

/// No kernel touches memory it does not own; every kernel of the product is among the cases.
#[test]
fn kernels_are_clean_under_the_address_sanitizer() {
    if no_compiler(compiler()) {
        return;
    }
    for source in SOURCES {
        // One case covers the products of all formats, another both ways through a DeltaNet layer.
        let subject = match source.name {
            "delta_step" => "delta_net",
            name if name.starts_with("matmul_") => "matmul",
            name => name,
        };
        assert!(cases::ALL.iter().any(|(name, _)| *name == subject), "{} has no case", source.name);
    }
    if let Some((success, said)) = run_sanitized("all") {
        assert!(success, "{said}");
    }
}

/// The sanitizer does see what kernels do, in device memory and in shared memory.
#[test]
fn the_address_sanitizer_catches_planted_faults() {
    if no_compiler(compiler()) {
        return;
    }
    for (entry, reason) in
        [("past_the_end", "heap-buffer-overflow"), ("past_the_shared_end", "use-after-poison")]
    {
        if let Some((success, said)) = run_sanitized(entry) {
            assert!(!success && said.contains(reason), "{entry}: {said}");
        }
    }
}
