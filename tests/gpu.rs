//! The real program on the emulated device: the same numbers as the CPU worker and as transformers, the same bits however
//! layers are cut, CPU and GPU in one pipeline, and failures that are told.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/gpu.rs"]
mod gpu;
mod support;

use gpu::{can_compile, run};
use serde_json::Value;
use spillway_model::testing::{TinyModel, oracles};
use std::path::Path;
use support::Models;

const ARCHITECTURES: [&str; 4] = ["llama", "qwen2", "qwen3", "qwen35"];

/// Lines of `logits`, with further arguments.
fn logits(model: &Path, ids: &str, more: &[&str]) -> String {
    let args = ["logits", "--json", "--quiet", "--ids", ids, "-m", model.to_str().unwrap()];
    let ran = run(&[&args[..], more].concat());
    assert_eq!(ran.code, Some(0), "{more:?}: {ran:?}");
    ran.stdout
}

/// The ids and values of the largest logits of every line.
fn tops(lines: &str) -> Vec<Vec<(u64, f64)>> {
    let pair = |pair: &Value| (pair[0].as_u64().unwrap(), pair[1].as_f64().unwrap());
    let row = |line| {
        serde_json::from_str::<Value>(line).unwrap()["top"].as_array().unwrap().iter().map(pair).collect()
    };
    lines.lines().map(row).collect()
}

/// The largest distance between logits of one id in both.
fn distance(one: &str, other: &str) -> f64 {
    let (one, other) = (tops(one), tops(other));
    assert_eq!(one.len(), other.len());
    let mut most = 0.0f64;
    for (one, other) in one.iter().zip(&other) {
        for (id, value) in one {
            let same =
                other.iter().find(|(other, _)| other == id).unwrap_or_else(|| panic!("{id} is missing"));
            most = most.max((value - same.1).abs());
        }
    }
    most
}

/// One GPU, two, a GPU after the CPU, other waves and orders: all agree with the CPU, and those on GPUs to the bit.
#[test]
fn the_gpu_computes_what_the_cpu_computes() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let all = "1000000";
    for architecture in ARCHITECTURES {
        let model = models.write(architecture, &TinyModel::new(architecture));
        let on = |more: &[&str]| logits(&model, "5,9,2,2,7,1,3", &[&["--top", all], more].concat());
        let cpu = on(&[]);
        let one = on(&["--devices", "emulated"]);
        let off = distance(&cpu, &one);
        assert!(off < 1e-3, "{architecture}: {off}");
        assert_eq!(on(&["--devices", "emulated:devices=2"]), one, "{architecture}: two devices");
        assert_eq!(on(&["--devices", "emulated", "--chunk", "3"]), one, "{architecture}: chunks");
        let mixed = distance(&cpu, &on(&["--devices", "emulated", "--gpu-layer-budget", "2"]));
        assert!(mixed < 1e-3, "{architecture}: {mixed}");
    }
}

/// Decoding replays captured steps; the tokens are those of the CPU.
#[test]
fn answers_are_those_of_the_cpu() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    for architecture in ["qwen3", "qwen35"] {
        let model = models.write(architecture, &TinyModel::new(architecture));
        let answer = |more: &[&str]| {
            let args =
                ["run", "--raw", "-p", "a", "-n", "8", "--temp", "0", "--ignore-eos", "--json", "--quiet"];
            let ran = run(&[&args[..], &["-m", model.to_str().unwrap()], more].concat());
            assert_eq!(ran.code, Some(0), "{ran:?}");
            ran.json_lines().pop().unwrap()["token_ids"].clone()
        };
        let cpu = answer(&[]);
        assert_eq!(cpu.as_array().unwrap().len(), 8);
        assert_eq!(answer(&["--devices", "emulated"]), cpu, "{architecture}");
    }
}

/// Unquantised files: logits within 1e-3 of transformers'.
#[test]
fn unquantised_files_agree_with_transformers() {
    let Some(folder) = oracles() else { return };
    if !can_compile() {
        return;
    }
    for name in ["llama", "qwen2", "qwen3", "qwen35"] {
        let golden = std::fs::read(folder.join(name).join("compact.json")).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        let golden = &golden["seqs"]["37"];
        let ids: Vec<String> = golden["ids"].as_array().unwrap().iter().map(Value::to_string).collect();
        let file = folder.join(name).join(format!("{name}-bf16.gguf"));
        let rows = tops(&logits(&file, &ids.join(","), &["--top", "1152", "--devices", "emulated"]));
        for (position, pairs) in golden["top5_all"].as_array().unwrap().iter().enumerate() {
            for pair in pairs.as_array().unwrap() {
                let (id, expected) = (pair[0].as_u64().unwrap(), pair[1].as_f64().unwrap());
                let (_, found) = rows[position].iter().find(|(found, _)| *found == id).unwrap();
                assert!((found - expected).abs() < 1e-3, "{name} at {position}: {found} for {expected}");
            }
        }
    }
}

/// What a device cannot do is told by whoever notices: the planner, or the worker.
#[test]
fn failures_of_a_device_are_told() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let model = models.tiny();
    let cases = [
        ("emulated:memory=64KiB", 3, "out_of_memory", "of device 0"),
        ("emulated:devices=0", 3, "no_gpu", "no device"),
        ("emulated:fail-launch=3", 4, "gpu_lost", "worker of stage 0"),
        ("emulated:lose-at-call=60", 4, "gpu_lost", "lost"),
    ];
    for (devices, exit, code, words) in cases {
        let args = ["logits", "--json", "--quiet", "--ids", "1,2", "--devices", devices, "-m"];
        let ran = run(&[&args[..], &[model.to_str().unwrap()]].concat());
        assert_eq!(ran.code, Some(exit), "{devices}: {ran:?}");
        let last = ran.json_lines().pop().unwrap();
        assert_eq!(last["code"], code, "{devices}: {last}");
        assert!(last["message"].as_str().unwrap().contains(words), "{devices}: {last}");
    }
}

#[test]
fn devices_and_kernels_are_listed() {
    let devices = run(&["devices", "--json", "--provider", "emulated:devices=2"]).json();
    assert_eq!(devices["devices"].as_array().unwrap().len(), 2);
    assert_eq!(devices["devices"][1]["index"], 1);
    let nothing = run(&["devices", "--provider", "emulated:nothing=1"]);
    assert!(nothing.stdout.contains("no GPU was found") && nothing.stdout.contains("nothing"), "{nothing:?}");
    if can_compile() {
        let kernels = run(&["kernels", "list", "--json"]).json();
        assert!(kernels.as_array().unwrap().iter().any(|object| object["source"] == "rms_norm"), "{kernels}");
    }
    let unknown = run(&["kernels", "build", "--arch", "gfx", "--json"]);
    assert_eq!((unknown.code, unknown.json()["code"].as_str()), (Some(2), Some("kernel_unknown_arch")));
}
