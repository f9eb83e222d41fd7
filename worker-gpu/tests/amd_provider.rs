//! What the `amd` provider says about a library that is not what it should be.

#![allow(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use spillway_worker_gpu::hip::{Driver, Provider};
use std::path::Path;
use std::process::Command;

/// Set in the process that sees the stand-in library, to what is expected of it.
const CHILD: &str = "SPILLWAY_TEST_FAKE_HIP";

/// Runs [`amd_child`] where the loader finds a library of this C source under ROCm 7's name.
fn run_with(name: &str, source: &str, expected: &str) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("hip.c");
    std::fs::write(&file, source).unwrap();
    let library = folder.join("libamdhip64.so.7");
    match Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(library).arg(file).status() {
        Ok(status) => assert!(status.success()),
        Err(error) => return println!("skipped: no C compiler: {error}"),
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["amd_child", "--exact", "--nocapture"])
        .env(CHILD, expected)
        .env("LD_LIBRARY_PATH", folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Not a test by itself: see above.
#[test]
fn amd_child() {
    if let Ok(expected) = std::env::var(CHILD) {
        let error = Driver::open(&Provider::Amd).unwrap_err();
        assert_eq!(format!("{}: {error}", error.code()), expected);
    }
}

/// A library without a function is named with the function, before anything is called.
#[test]
fn a_library_without_a_function_is_named() {
    run_with(
        "hip_without_functions",
        "int hipInit(unsigned flags) { return (int)flags; }",
        "gpu_library_too_old: libamdhip64.so.7 has no function hipDriverGetVersion, so it is too old; install AMD's \
         ROCm runtime (package hip-runtime-amd, or libamdhip64 of your distribution) and check that /dev/kfd and /dev/dri \
         are readable by this user (groups render and video)",
    );
}
