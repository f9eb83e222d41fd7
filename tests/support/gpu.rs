//! Commands that use the emulated device, with kernels from a cache that tests share.

#![allow(dead_code, reason = "every test file uses a part of the fixture")]

use crate::support::{Ran, spillway};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Where compiled kernels and results of link tests are kept.
pub fn cache() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("kernels")
}

/// The program with arguments, not yet started.
pub fn command(args: &[&str]) -> Command {
    let mut command = spillway(args);
    command.env("SPILLWAY_KERNEL_CACHE", cache()).stdin(Stdio::null());
    command
}

/// Runs the program to its end. No limit on the time: the first test compiles every kernel, on a machine that may be busy.
pub fn run(args: &[&str]) -> Ran {
    let output = command(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Whether kernels for the emulated device can be had.
pub fn can_compile() -> bool {
    let ran = run(&["kernels", "build", "--arch", "emulated_wave32", "--json"]);
    if ran.code == Some(0) {
        return true;
    }
    let missing = ran.stdout.contains("kernel_no_compiler");
    assert!(missing && std::env::var_os("SPILLWAY_REQUIRE_COMPILERS").is_none(), "{ran:?}");
    eprintln!("skipped: {}", ran.stderr);
    false
}
