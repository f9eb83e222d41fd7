//! The real program on the emulated device: the same numbers as the CPU worker and as transformers, the same bits however
//! layers are cut, CPU and GPU in one pipeline, and failures that are told.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/gpu.rs"]
mod gpu;
mod support;

use gpu::{can_compile, command, run};
use serde_json::{Value, json};
use spillway_model::testing::{TinyModel, oracles};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use support::{Daemon, Models, eventually, is_running, spillway};

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

/// Weights in host memory that prompts take through the device's memory: the bits are those of resident weights, for any chunks,
/// steps that are streamed and steps that are not among them.
#[test]
fn prompts_that_stream_weights_compute_what_resident_weights_compute() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let ids: Vec<String> = (0..70).map(|position| (position * 37 % 200 + 3).to_string()).collect();
    for architecture in ["qwen3", "qwen35"] {
        for (name, model) in
            [("f32", TinyModel::new(architecture)), ("q8", TinyModel::new(architecture).q8_0())]
        {
            let model = models.write(&format!("{architecture}-{name}"), &model.layers(7));
            let on =
                |more: &[&str]| logits(&model, &ids.join(","), &[&["--devices", "emulated"], more].concat());
            let resident = on(&[]);
            for (budget, chunk) in [("3", "512"), ("2", "33"), ("0", "18")] {
                let streamed = on(&["--gpu-layer-budget", budget, "--chunk", chunk]);
                assert_eq!(streamed, resident, "{architecture} {name}, budget {budget}, chunks of {chunk}");
            }
        }
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
    assert!(!cpu.contains("for prompts"), "three tokens are too few: {cpu}");
    let lifted = told(&["--gpu-layer-budget", "4", "--offload-exec", "cpu", "--offload-prompts", "gpu"]);
    assert!(lifted.contains("on device 0 runs Q8_0, and what spilled for prompts"), "{lifted}");
    let streamed = told(&["--gpu-layer-budget", "1"]);
    assert!(streamed.contains("partial offload: 1 resident / 5 spilled, first GPU layer = 5"), "{streamed}");
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
    // A saved plan shares where the flag, the parameter or the setting says so.
    let plan = models.path("plan.json");
    let plan = plan.to_str().unwrap();
    let args = ["plan", "-m", model.to_str().unwrap(), "--devices", "emulated:ids=9", "--save", plan];
    assert_eq!(spillway(args).envs(environment).output().unwrap().status.code(), Some(0));
    let replay = |more: &[&str], allowed: &str| {
        let args = ["logits", "-q", "--ids", "1,2", "-m", model.to_str().unwrap(), "--plan", plan];
        let mut command = spillway(args.iter().chain(more));
        command.envs(environment).env("SPILLWAY_ALLOW_SHARED_DEVICE", allowed).output().unwrap().status.code()
    };
    assert_eq!(replay(&[], ""), Some(3));
    assert_eq!(replay(&["--allow-shared-device"], ""), Some(0));
    assert_eq!(replay(&[], "1"), Some(0));
    daemon.main.load(&model, json!({"plan": plan, "allow_shared_device": true}));
    assert_eq!(replay(&["--allow-shared-device"], ""), Some(0));
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

/// File and llama.cpp's noise on files of its kind (README of the oracles).
const QUANTISED: [(&str, &str, f64); 4] = [
    ("llama", "llama-Q4_K_M", 0.12),
    ("llama", "llama-Q8_0", 0.085),
    ("qwen35", "qwen35-Q4_K_M", 0.37),
    ("qwen35", "qwen35-IQ4_NL", 0.24),
];

/// Quantised files: what exact arithmetic on their weights gives, but for the noise that 8-bit inputs make anywhere.
#[test]
fn quantised_files_stay_within_the_noise_floor() {
    let Some(folder) = oracles() else { return };
    if !can_compile() {
        return;
    }
    for (family, name, floor) in QUANTISED {
        let path = folder.join(family).join(format!("{name}.gguf"));
        let read = |file: &str| -> Value {
            serde_json::from_slice(&std::fs::read(folder.join(family).join(file)).unwrap()).unwrap()
        };
        let ids = read("compact.json")["seqs"]["37"]["ids"].clone();
        let ids: Vec<String> = ids.as_array().unwrap().iter().map(Value::to_string).collect();
        let exact = read("quant.json")[name]["37"].clone();
        let rows = tops(&logits(&path, &ids.join(","), &["--top", "1152", "--devices", "emulated"]));
        let numbers = |field: &str| exact[field].as_array().unwrap().iter().map(|n| n.as_f64().unwrap());
        for (position, (best, margin)) in
            numbers("exact_argmax_all").zip(numbers("exact_margin_all")).enumerate()
        {
            let found = rows[position][0].0 as f64;
            assert!(
                margin < 5.0 * floor || found == best,
                "{name} at {position}: {found} for {best}, by {margin}"
            );
        }
        let pairs = exact["exact_last_top20"].as_array().unwrap();
        let square = |pair: &Value| {
            let found = rows[rows.len() - 1].iter().find(|(id, _)| Some(*id) == pair[0].as_u64()).unwrap().1;
            (found - pair[1].as_f64().unwrap()).powi(2)
        };
        let rms = (pairs.iter().map(square).sum::<f64>() / pairs.len() as f64).sqrt();
        println!("{name}: rms {rms:.3} of the last position's largest logits, llama.cpp's noise {floor}");
        assert!(rms < 2.0 * floor, "{name}: {rms}");
    }
}

/// The devices' report after a test of links.
fn tested(devices: &str, cache: &Path) -> Value {
    let args = ["devices", "--json", "--test-links", "--provider", devices];
    let output = command(&args).env("SPILLWAY_KERNEL_CACHE", cache).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Links are tested between two processes, every byte compared; what came out is kept for plain `devices` and for loads.
#[test]
fn links_are_tested_and_the_results_kept() {
    let cache = tempfile::tempdir().unwrap();
    let listed = |devices: &str| {
        let args = ["devices", "--provider", devices];
        let output = command(&args).env("SPILLWAY_KERNEL_CACHE", cache.path()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let good = "emulated:devices=2";
    assert!(listed(good).contains("link 0 - 1: staged, not tested yet"), "{}", listed(good));
    let report = tested(good, cache.path());
    let links = report["links"].as_array().unwrap();
    assert_eq!(links.len(), 3, "each with itself, and the two: {report}");
    for link in links {
        assert_eq!(link["found"]["verdict"], "works", "{report}");
        for direction in ["there", "back"] {
            let speed = &link["found"][direction];
            assert!(speed["gb_per_s"].as_f64().unwrap() > 0.0, "{speed}");
            let hops = speed["hops"].as_array().unwrap();
            let kinds: Vec<_> =
                hops.iter().map(|hop| (hop["way"].as_str().unwrap(), hop["bytes"].as_u64())).collect();
            let (row, chunk) = (Some(20 << 10), Some(10 << 20));
            assert_eq!(kinds, [("peer", row), ("staged", row), ("peer", chunk), ("staged", chunk)]);
            for hop in hops {
                let (p50, p99) = (hop["p50_us"].as_f64().unwrap(), hop["p99_us"].as_f64().unwrap());
                assert!(p50 > 0.0 && p99 >= p50, "{hop}");
            }
        }
    }
    assert!(listed(good).contains("link 0 - 1: peer ok\n   there "), "{}", listed(good));
    for (devices, reason) in [
        ("emulated:devices=2,garble-peer=true", "byte 2048 arrived wrong"),
        ("emulated:devices=2,refuse-peer=true", "hipIpcOpenMemHandle"),
        ("emulated:devices=2,hang-launch=1", ""),
    ] {
        let found = &tested(devices, cache.path())["links"][1]["found"];
        let told = found["reason"].as_str().unwrap_or_default();
        assert!(told.contains(reason), "{devices}: {found}");
        assert_eq!(found["verdict"] == "refused", !reason.is_empty(), "{devices}: {found}");
        assert_eq!(listed(devices).contains("link 0 - 1: staged, refused"), !reason.is_empty(), "{devices}");
    }
    // A device that cannot hold the test says nothing about its links: nothing is kept.
    let small = "emulated:devices=2,memory=8MiB";
    let report = tested(small, cache.path());
    assert_eq!(report["links"][0]["found"], Value::Null, "{report}");
    assert!(report["looked_for"][0].as_str().unwrap().contains("could not be allocated"), "{report}");
}

/// How stages of a load are linked, as told during the load, and the logits.
fn linked(model: &Path, more: &[&str]) -> (Vec<Value>, String) {
    let args = ["logits", "--json", "--progress", "json", "--ids", "5,9,2,2,7,1,3", "--top", "1000000", "-m"];
    let ran = run(&[&args[..], &[model.to_str().unwrap()], more].concat());
    assert_eq!(ran.code, Some(0), "{more:?}: {ran:?}");
    let events = ran.stderr.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    (events.filter(|event| event["type"] == "link").collect(), ran.stdout)
}

/// Whichever way rows take between stages, they are the same to the bit: written into the next stage's memory, through a ring
/// that the driver copies from and to, or copied once more where it refuses.
#[test]
fn rows_arrive_whole_on_every_way() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    for architecture in ["qwen3", "qwen35"] {
        let model = models.write(architecture, &TinyModel::new(architecture));
        let (links, one) = linked(&model, &["--devices", "emulated"]);
        assert_eq!(links, [0; 0]);
        for (ways, path, reason) in [
            (&["emulated:devices=3"][..], "peer", None),
            (&["emulated:devices=3", "--chunk", "2"], "peer", None),
            (&["emulated:devices=3", "--peer-copies", "off"], "staged", Some("switched off")),
            (&["emulated:devices=3,garble-peer=true"], "staged", Some("arrived wrong")),
            (
                &["emulated:devices=3,refuse-peer=true,refuse-register=true"],
                "staged",
                Some("hipIpcOpenMemHandle"),
            ),
        ] {
            let (links, rows) = linked(&model, &[&["--devices"], ways].concat());
            assert_eq!(rows, one, "{architecture} {ways:?}");
            assert_eq!(links.len(), 2, "{links:?}");
            for (from, link) in (0..).zip(&links) {
                assert_eq!((&link["from"], &link["path"]), (&json!(from), &json!(path)), "{ways:?}: {link}");
                let told = link["reason"].as_str();
                assert!(reason.is_none_or(|reason| told.unwrap().contains(reason)), "{ways:?}: {link}");
            }
        }
        let mixed = ["--devices", "emulated:devices=2", "--gpu-layer-budget", "2", "--offload-exec", "cpu"];
        let (links, _) = linked(&model, &mixed);
        assert_eq!((links.len(), &links[0]["from"], &links[0]["path"]), (1, &json!(1), &json!("peer")));
    }
}

/// The daemon tells in its answers how stages are linked and what does not work as well as it might.
#[test]
fn a_load_tells_how_stages_are_linked() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let mut daemon = Daemon::spawn(command(&["daemon"]));
    let mut stages = |params: Value| daemon.main.load(&models.tiny(), params)["stages"].clone();
    let peer = stages(json!({"devices": "emulated:devices=2"}));
    assert_eq!((&peer[0]["link"], &peer[1]["link"]), (&json!("peer"), &Value::Null), "{peer}");
    let staged = stages(json!({"devices": "emulated:devices=2,refuse-register=true", "peer_copies": "off"}));
    assert_eq!(staged[0]["link"], "staged", "{staged}");
    assert!(staged[0]["link_reason"].as_str().unwrap().contains("switched off"), "{staged}");
    // The first stage gets token ids, which the host turns into rows; the last one sends logits.
    let rings: [&[&str]; 2] = [&["the outgoing ring"], &["the incoming ring", "the outgoing ring"]];
    for (stage, rings) in rings.into_iter().enumerate() {
        let notes = staged[stage]["notes"].as_array().unwrap();
        assert_eq!(notes.len(), rings.len(), "{staged}");
        assert!(
            notes.iter().zip(rings).all(|(note, ring)| note.as_str().unwrap().contains(ring)),
            "{staged}"
        );
    }
    let error = daemon
        .main
        .ask(json!({"type": "load", "model": models.tiny(), "params": {"peer_copies": "maybe"}}), "error");
    assert_eq!(error["code"], "peer_copies_unknown");
    daemon.finish();
}

/// The environment decides where a request does not.
#[test]
fn the_environment_switches_peer_copies_off() {
    let models = Models::new();
    let model = models.tiny();
    let plan = |more: &[&str]| {
        let args = ["plan", "--json", "-m", model.to_str().unwrap(), "--devices", "emulated:devices=2"];
        let output = command(&[&args[..], more].concat()).env("SPILLWAY_PEER", "off").output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["peer_copies"].clone()
    };
    assert_eq!((plan(&[]), plan(&["--peer-copies", "auto"])), (json!(false), json!(true)));
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
        // Its replacement fails in the same step.
        ("emulated:fail-launch=3", 4, "poison_request", "worker of stage 0"),
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

/// Whoever kills the program is not left with compilers at work.
#[test]
fn a_compiler_ends_with_the_program_that_started_it() {
    let folder = tempfile::tempdir().unwrap();
    let (compiler, started) = (folder.path().join("c++"), folder.path().join("started"));
    let script =
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 1 && exit\necho $$ >> \"$STARTED\"\nexec sleep 600\n";
    std::fs::write(&compiler, script).unwrap();
    std::fs::set_permissions(&compiler, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut program = command(&["kernels", "build", "--arch", "emulated_wave32"]);
    program.env("SPILLWAY_CXX", &compiler).env("STARTED", &started);
    program.env("SPILLWAY_KERNEL_CACHE", folder.path().join("cache"));
    let mut program = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let compilers = || -> Vec<u32> {
        let text = std::fs::read_to_string(&started).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    };
    eventually("a compiler runs", || compilers().iter().any(|pid| is_running(*pid)));
    program.kill().unwrap();
    program.wait().unwrap();
    eventually("no compiler runs", || compilers().iter().all(|pid| !is_running(*pid)));
}

#[test]
fn a_compiler_that_cannot_be_started_is_named() {
    let parent = std::process::id().to_string();
    let ran = run(&["kernel-compiler", &parent, "/no/such/compiler"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("/no/such/compiler"), "{ran:?}");
    let by_hand = run(&["kernel-compiler", "1", "true"]);
    assert_eq!(by_hand.code, Some(1));
    assert!(by_hand.stderr.contains("started by the program itself"), "{by_hand:?}");
}
