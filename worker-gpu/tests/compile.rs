//! The kernel compiler: all sources for all targets, what their objects take, and the cache.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

mod common;

use common::{PRELUDE_CHECK, compiler, nvrtc_child_command, settings, skip};
use spillway_kernels::hip::{DeviceSource, SOURCES};
use spillway_worker_gpu::compile::{Arch, CompileError, KernelCompiler, KernelReport, Settings, inspect};
use std::path::PathBuf;

/// What the compiler serves: AMD from Vega 20 to RDNA 4, with and without dot products and matrix units.
const AMD: [&str; 12] = [
    "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1010", "gfx1030", "gfx1032", "gfx1100", "gfx1103", "gfx1151",
    "gfx1200", "gfx1201",
];
const NVIDIA: [&str; 4] = ["sm_80", "sm_89", "sm_90", "sm_120"];

/// Shared memory of a block that every target has, without asking for more.
const AMD_SHARED_LIMIT: u64 = 64 << 10;
const NVIDIA_SHARED_LIMIT: u64 = 48 << 10;
/// Registers that a kernel may spill.
const SPILL_LIMIT: u64 = 8;

fn sources() -> Vec<DeviceSource<'static>> {
    SOURCES.iter().copied().chain([PRELUDE_CHECK]).collect()
}

/// A source's name, what its object holds, and the object.
type Compiled = (String, Vec<KernelReport>, Vec<u8>);

/// Compiles everything for one target without a word from the compiler; `None` when there is no compiler.
fn compile_everything(compiler: &KernelCompiler, arch: &Arch) -> Option<Vec<Compiled>> {
    let sources = sources();
    let mut compiled = Vec::new();
    for (source, result) in sources.iter().zip(compiler.compile_all(&sources, arch)) {
        match result {
            Ok(artifact) => {
                assert_eq!(artifact.warnings, "", "{} for {arch}", source.name);
                let reports = inspect(&artifact.image).unwrap();
                compiled.push((source.name.to_owned(), reports, artifact.image));
            }
            Err(error) if skip(&error) => return None,
            Err(error) => panic!("{error}"),
        }
    }
    Some(compiled)
}

#[test]
fn every_source_compiles_for_every_amd_target_within_limits() {
    for arch in AMD {
        let Some(compiled) = compile_everything(compiler(), &arch.parse().unwrap()) else { return };
        for (source, reports, _) in compiled {
            for report in reports {
                println!("{arch} {source}: {report:?}");
                assert!(report.shared_bytes <= AMD_SHARED_LIMIT, "{arch} {}: {report:?}", report.name);
                assert!(report.spills.unwrap() <= SPILL_LIMIT, "{arch} {}: {report:?}", report.name);
            }
        }
    }
}

/// With clang, which makes assembly text; a GPU newer than clang gets that of the newest it knows.
#[test]
fn every_source_compiles_for_every_nvidia_target() {
    for arch in NVIDIA {
        let Some(compiled) = compile_everything(compiler(), &arch.parse().unwrap()) else { return };
        for (source, reports, image) in compiled {
            println!("{arch} {source}: {reports:?}");
            assert!(
                reports.iter().all(|report| report.shared_bytes <= NVIDIA_SHARED_LIMIT),
                "{arch} {source}"
            );
            let text = String::from_utf8(image).unwrap();
            let target = text.lines().find_map(|line| line.strip_prefix(".target ")).unwrap();
            assert!(target == arch || arch == "sm_120", "{arch}: {target}");
        }
    }
}

#[test]
fn nvrtc_child() {
    common::nvrtc_child();
}

/// With NVIDIA's own compiler, where it is: machine code for a GPU that it knows, text for one that it does not.
#[test]
fn every_source_compiles_with_nvrtc() {
    let cache = tempfile::tempdir().unwrap();
    let no_clang = Some(PathBuf::from("no-clang"));
    let nvrtc_child = Some(nvrtc_child_command());
    let settings = Settings { cache: cache.path().to_owned(), nvrtc_child, clang: no_clang, ..settings() };
    let compiler = KernelCompiler::new(settings);
    let known: Arch = "sm_90".parse().unwrap();
    if let Err(error) = compiler.describe(&known) {
        println!("skipped: {error}");
        return;
    }
    println!("{}", compiler.describe(&known).unwrap());
    for (arch, is_elf) in [("sm_90", true), ("sm_999", false)] {
        for (source, _, image) in compile_everything(&compiler, &arch.parse().unwrap()).unwrap() {
            assert_eq!(image.starts_with(b"\x7fELF"), is_elf, "{arch} {source}");
        }
    }
    let broken = DeviceSource { name: "broken", text: "KERNEL(x) {", entries: &[] };
    let message = compiler.compile(&broken, &known).unwrap_err().to_string();
    assert!(message.contains("broken.hip") && message.contains("error"), "{message}");
}

/// A developer or a user with an odd compiler sees at once what failed, for what, and why.
#[test]
fn a_failed_compile_names_kernel_architecture_and_reason() {
    let broken = DeviceSource {
        name: "broken_kernel",
        text: "#include \"prelude.h\"\nKERNEL(broken_kernel, 64, float* out) { out[0] = undeclared; }\n",
        entries: &["broken_kernel"],
    };
    for arch in ["gfx1100", "sm_90", "emulated_wave32"] {
        let error = compiler().compile(&broken, &arch.parse().unwrap()).unwrap_err();
        if !skip(&error) {
            assert_eq!(error.code(), "kernel_compile_failed");
            let message = error.to_string();
            for part in ["broken_kernel", arch, "undeclared"] {
                assert!(message.contains(part), "{message}");
            }
        }
    }
}

#[test]
fn a_missing_entry_point_is_refused() {
    let source = DeviceSource {
        name: "renamed",
        text: "#include \"prelude.h\"\nKERNEL(new_name, 64, float* out) { out[0] = 1.0f; }\n",
        entries: &["old_name"],
    };
    for arch in ["gfx1100", "sm_90", "emulated_wave64"] {
        let error = compiler().compile(&source, &arch.parse().unwrap()).unwrap_err();
        if !skip(&error) {
            assert_eq!(error.code(), "kernel_bad_object");
            assert!(error.to_string().contains("old_name"), "{error}");
        }
    }
}

const FAKE: DeviceSource<'static> = DeviceSource { name: "fake", text: "text", entries: &["one"] };

fn fake_compiler(cache: &std::path::Path, clang: &str) -> KernelCompiler {
    let clang = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(clang);
    KernelCompiler::new(Settings { clang: Some(clang), ..Settings::with_cache(cache.to_owned()) })
}

fn sm_90() -> Arch {
    "sm_90".parse().unwrap()
}

/// An object is made once for its sources and compiler, and again when either changes.
#[test]
fn objects_are_cached_by_what_they_are_made_of() {
    let cache = tempfile::tempdir().unwrap();
    let compiler = fake_compiler(cache.path(), "fake_clang.sh");
    let first = compiler.compile(&FAKE, &sm_90()).unwrap();
    let again = fake_compiler(cache.path(), "fake_clang.sh").compile(&FAKE, &sm_90()).unwrap();
    assert_eq!((first.cached, again.cached), (false, true));
    assert_eq!(first.image, again.image);
    let edited = DeviceSource { text: "other text", ..FAKE };
    assert!(!compiler.compile(&edited, &sm_90()).unwrap().cached, "another text");
    assert!(!compiler.compile(&FAKE, &"sm_80".parse().unwrap()).unwrap().cached, "another architecture");
    assert!(!compiler.compile(&FAKE, &"gfx1100".parse().unwrap()).unwrap().cached, "another vendor");
}

/// A machine without a compiler uses a cache that was filled elsewhere, and says what it lacks when that is not enough.
#[test]
fn a_filled_cache_serves_without_a_compiler() {
    let cache = tempfile::tempdir().unwrap();
    let without = fake_compiler(cache.path(), "no_such_clang");
    let error = without.compile(&FAKE, &sm_90()).unwrap_err();
    assert!(matches!(error, CompileError::NoCompiler { .. }));
    assert!(error.to_string().contains("no_such_clang") && error.to_string().contains("install"), "{error}");
    fake_compiler(cache.path(), "fake_clang.sh").compile(&FAKE, &sm_90()).unwrap();
    assert!(without.compile(&FAKE, &sm_90()).unwrap().cached);
    let edited = DeviceSource { text: "other text", ..FAKE };
    assert!(without.compile(&edited, &sm_90()).is_err(), "an object of other sources must not serve");
}

/// An empty or foreign file in the folder is never an object.
#[test]
fn damaged_objects_are_made_again() {
    let cache = tempfile::tempdir().unwrap();
    let compiler = fake_compiler(cache.path(), "fake_clang.sh");
    compiler.compile(&FAKE, &sm_90()).unwrap();
    let object = &compiler.cached().unwrap()[0];
    std::fs::write(&object.path, "").unwrap();
    assert!(!compiler.compile(&FAKE, &sm_90()).unwrap().cached);
}

/// Cleaning takes objects, those of older versions too, and nothing else.
#[test]
fn cleaning_takes_objects_alone() {
    let cache = tempfile::tempdir().unwrap();
    let compiler = fake_compiler(cache.path(), "fake_clang.sh");
    assert_eq!(compiler.cached().unwrap(), [], "a folder that does not exist yet is empty");
    compiler.compile(&FAKE, &sm_90()).unwrap();
    std::fs::write(cache.path().join("notes.txt"), "mine").unwrap();
    let objects = compiler.cached().unwrap();
    assert_eq!(objects.len(), 1);
    assert_eq!((objects[0].source.as_str(), &objects[0].arch, objects[0].current), ("fake", &sm_90(), false));
    assert_eq!(compiler.clean().unwrap(), objects[0].bytes);
    assert_eq!(compiler.cached().unwrap(), []);
    assert!(cache.path().join("notes.txt").exists());
}

/// Several workers start at once and want the same kernels: all get whole objects.
#[test]
fn concurrent_compiles_share_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| fake_compiler(cache.path(), "fake_clang.sh").compile(&FAKE, &sm_90())))
            .collect();
        for worker in workers {
            assert_eq!(worker.join().unwrap().unwrap().image, b".visible .entry one(\n");
        }
    });
    assert_eq!(fake_compiler(cache.path(), "fake_clang.sh").cached().unwrap().len(), 1);
}
