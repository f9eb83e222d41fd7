//! The real program on the emulated device: the same numbers as the CPU worker and as transformers, the same bits however
//! layers are cut, CPU and GPU in one pipeline, and failures that are told.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use spillway_model::testing::{TinyModel, oracles};
use std::path::Path;
use std::process::Stdio;
use support::{Daemon, Models, Ran, spillway};

const ARCHITECTURES: [&str; 4] = ["llama", "qwen2", "qwen3", "qwen35"];

/// Runs the program with kernels from a cache that tests share.
fn run(args: &[&str]) -> Ran {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    // No limit on the time: the first test compiles every kernel, on a machine that may be busy.
    let output = spillway(args).env("SPILLWAY_KERNEL_CACHE", cache).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Whether kernels for the emulated device can be had.
fn can_compile() -> bool {
    let ran = run(&["kernels", "build", "--arch", "emulated_wave32", "--json"]);
    if ran.code == Some(0) {
        return true;
    }
    let missing = ran.stdout.contains("kernel_no_compiler");
    assert!(missing && std::env::var_os("SPILLWAY_REQUIRE_COMPILERS").is_none(), "{ran:?}");
    eprintln!("skipped: {}", ran.stderr);
    false
}

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
        let spill = ["--gpu-layer-budget", "2"];
        let on_cpu = on(&[&["--devices", "emulated", "--offload-exec", "cpu"], &spill[..]].concat());
        let mixed = distance(&cpu, &on_cpu);
        assert!(mixed < 1e-3, "{architecture}: {mixed}");
        for devices in ["emulated", "emulated:devices=2"] {
            let mapped = on(&[&["--devices", devices], &spill[..]].concat());
            assert_eq!(mapped, one, "{architecture}: two layers in host memory, {devices}");
        }
        assert_eq!(
            on(&["--devices", "emulated", "--gpu-layer-budget", "0"]),
            one,
            "{architecture}: all layers there"
        );
    }
}

/// What spilled is told from what was loaded, takes no device memory, and workers keep to their plans.
#[test]
fn a_spill_is_what_the_plan_says() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let model = models.write("q8.gguf", &TinyModel::new("qwen35").q8_0().layers(6));
    let model = model.to_str().unwrap();
    let told = |more: &[&str]| {
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
        let args = ["logits", "--json", "--quiet", "--ids", "1,2,3", "-m", model, "--devices", "emulated"];
        let output = spillway(args.iter().chain(more))
            .env("SPILLWAY_KERNEL_CACHE", cache)
            .env("SPILLWAY_LOG", "info")
            .env("SPILLWAY_CPU_EXEC_TRACE", "1")
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && !stderr.contains("from its plan"), "{stderr}");
        stderr
    };
    let pcie = told(&["--gpu-layer-budget", "4"]);
    assert!(pcie.contains("partial offload: 4 resident / 2 spilled, first GPU layer = 2"), "{pcie}");
    assert!(pcie.contains("stage 0 on device 0 runs Q8_0") && !pcie.contains("cpu exec"), "{pcie}");
    let cpu = told(&["--gpu-layer-budget", "4", "--offload-exec", "cpu"]);
    assert!(cpu.contains("partial offload: 4 resident / 2 spilled, first GPU layer = 2"), "{cpu}");
    assert!(cpu.contains("stage 0 on CPU runs Q8_0; stage 1 on device 0 runs Q8_0"), "{cpu}");
    assert!(cpu.contains("cpu exec: layers 0-1, tokens 3, sequences 1, logit rows 3, formats Q8_0"), "{cpu}");
    let typo = told(&["--gpu-layer-budget", "4", "--offload-exec", "cup"]);
    assert!(typo.contains("`cup`") && typo.contains("2 spilled") && !typo.contains("cpu exec"), "{typo}");
    assert!(!told(&[]).contains("partial offload"));
}

/// Layers in host memory take not a byte of the device's: a model runs on a device that its weights do not fit, to the same bits.
#[test]
fn layers_in_host_memory_take_none_of_the_devices() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let model = models.write("large.gguf", &TinyModel::new("qwen3").layers(12));
    let path = model.to_str().unwrap();
    let sizes = ["--max-seq", "64", "--parallel", "1", "--chunk", "8"];
    let needed = |more: &[&str]| {
        let args = ["plan", "-m", path, "--json", "--devices", "emulated"];
        let plan = run(&[&args[..], &sizes, more].concat()).json();
        let bytes = &plan["stages"][0]["bytes"];
        ["weights", "kv", "state", "scratch"].map(|part| bytes[part].as_u64().unwrap()).iter().sum::<u64>()
    };
    let spill: &[&str] = &["--gpu-layer-budget", "2"];
    let (all, least) = (needed(&[]), needed(spill));
    assert!(least < all / 2, "ten of twelve layers are elsewhere: {least} of {all}");
    // What the plan needs and the driver's share, no more.
    let device = format!("emulated:memory={}", least + least / 32);
    let small: &[&str] = &["--devices", &device];
    let ids = "5,9,2,2,7,1,3";
    let here = logits(&model, ids, &[&sizes[..], small, spill].concat());
    assert_eq!(here, logits(&model, ids, &[&sizes[..], &["--devices", "emulated"]].concat()));
    let args = ["logits", "--json", "--quiet", "--ids", ids, "-m", path];
    let refused = run(&[&args[..], &sizes, small].concat());
    assert_eq!(
        (refused.code, refused.json()["code"].as_str()),
        (Some(3), Some("out_of_memory")),
        "{refused:?}"
    );
    assert!(refused.stderr.contains("gpu_layer_budget 2 would fit"), "{refused:?}");
}

/// Cards with ids are locked across processes; one that ends, however it ends, gives its card back.
#[test]
fn a_card_serves_one_process_unless_both_share_it() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let (model, locks) = (models.tiny(), models.path("locks"));
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let environment =
        [("SPILLWAY_LOCK_DIR", locks.to_str().unwrap()), ("SPILLWAY_KERNEL_CACHE", cache.to_str().unwrap())];
    let score = |more: &[&str]| {
        let args =
            ["logits", "--json", "--quiet", "--ids", "1,2", "-m", model.to_str().unwrap(), "--devices"];
        let output =
            spillway(args.iter().chain(&["emulated:ids=9"]).chain(more)).envs(environment).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let serve = |params: Value| {
        let mut daemon = Daemon::start_with_env(&[], &environment);
        daemon.main.load(&model, params);
        daemon
    };
    let daemon = serve(json!({"devices": "emulated:ids=9"}));
    let (code, line) = score(&[]);
    let pid = format!("process {}", daemon.pid());
    assert!(code == Some(3) && line.contains("device_busy") && line.contains(&pid), "{line}");
    assert_eq!(score(&["--allow-shared-device"]).0, Some(3), "both have to allow it");
    daemon.signal(nix::sys::signal::Signal::SIGKILL);
    drop(daemon);
    assert_eq!(score(&[]).0, Some(0));
    let mut daemon = serve(json!({"devices": "emulated:ids=9", "allow_shared_device": true}));
    assert_eq!(score(&["--allow-shared-device"]).0, Some(0));
    assert_eq!(score(&[]).0, Some(3));
    // The same card goes on under a new model.
    daemon.main.load(&model, json!({"devices": "emulated:ids=9", "allow_shared_device": true}));
    daemon.finish();
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
        ("emulated:fail-launch=3", 4, "poison_request", "worker of stage 0"),
        ("emulated:lose-at-call=60", 4, "worker_failed", "lost"),
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
