//! A plan needs a file's header, not its weights: a model of 27 thousand million weights is planned in a moment and in little memory.
//!
//! The only test of its file: what it looks at is the largest process that it has started.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use spillway_model::testing::TinyModel;
use support::{Models, run};

#[test]
fn a_large_file_is_planned_without_its_weights() {
    let models = Models::new();
    let path = models.path("large.gguf");
    TinyModel::large().write_outline(&path).unwrap();
    let bytes = std::fs::metadata(&path).unwrap().len();
    assert!((14 << 30..16 << 30).contains(&bytes), "a header and the length of its weights: {bytes}");
    let devices = "emulated:devices=2,memory=12GiB";
    let args = ["plan", "-m", path.to_str().unwrap(), "--devices", devices, "--parallel", "1", "--json"];
    let ran = run(&args);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let plan = ran.json();
    assert_eq!(plan["model"]["layers"], 64);
    // 32 layers of 12,175,278,080 elements in all, in blocks of 256 that take 148 bytes on a device, and vectors.
    let weights = plan["stages"][0]["bytes"]["weights"].as_u64().unwrap();
    assert!((7_038_832_640..7_060_000_000).contains(&weights), "{weights}");
    let used = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
    // In KiB. A vocabulary of a quarter of a million tokens takes some.
    assert!(used.max_rss() < 512 << 10, "{} MiB", used.max_rss() >> 10);
    let time = used.user_time() + used.system_time();
    assert!(time.num_milliseconds() < 4000, "two processes, the second looks for devices: {time}");
}
