//! Every load that is refused: condition, code, words of the sentence. Each goes through the daemon beside a model that
//! serves, which answers the same bytes afterwards.
//!
//! Devices are emulated ones that are only looked at, so no kernel is compiled.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use spillway_model::gguf::GgmlType;
use spillway_model::testing::TinyModel;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use support::{Daemon, Models, ask};

/// Two cards of one architecture and one of another, of different sizes, with ids, as real ones have.
const DEVICES: &str = "emulated:devices=3,memory=4GiB/4GiB/1GiB,wave=32/64/32,ids=5";

/// A refused load: parameters, code, words of the sentence.
type Row = (Value, &'static str, &'static [&'static str]);

/// A daemon with a model on the CPU, and what it answers.
struct Served {
    daemon: Daemon,
    models: Models,
    before: String,
    asked: usize,
}

impl Served {
    fn new(devices: &str) -> Self {
        let models = Models::new();
        let locks = models.path("locks");
        let environment = [("SPILLWAY_PROVIDER", devices), ("SPILLWAY_LOCK_DIR", locks.to_str().unwrap())];
        let mut daemon = Daemon::start_with_env(&[], &environment);
        daemon.main.load(&models.tiny(), json!({}));
        daemon.main.send(ask("before", 16));
        let before = daemon.main.answer("before").0;
        assert!(!before.is_empty());
        Served { daemon, models, before, asked: 0 }
    }

    /// Loads `model` and expects a refusal that disturbs nothing.
    fn refuses(&mut self, model: &PathBuf, params: &Value, code: &str, words: &[&str]) {
        let client = &mut self.daemon.main;
        let load = json!({"type": "load", "id": "l", "model": model, "params": params});
        let error = client.ask(load, "error");
        assert_eq!((&error["id"], &error["code"]), (&json!("l"), &json!(code)), "{params}: {error}");
        let sentence = error["message"].as_str().unwrap();
        for word in words {
            assert!(sentence.contains(word), "{params}: {sentence:?} lacks {word:?}");
        }
        self.asked += 1;
        let id = format!("after{}", self.asked);
        client.send(ask(&id, 16));
        assert_eq!(client.answer(&id).0, self.before, "after {params}");
    }

    fn refuses_all(mut self, rows: &[Row]) {
        let model = self.models.other();
        for (params, code, words) in rows {
            self.refuses(&model, params, code, words);
        }
        self.daemon.finish();
    }
}

#[test]
fn bands_that_cannot_be() {
    Served::new(DEVICES).refuses_all(&[
        (json!({"pp": 9}), "too_few_layers", &["9 stages", "4 layers"]),
        (
            json!({"devices": "0,0,0,0,0", "allow_shared_device": true}),
            "too_few_layers",
            &["5 stages", "4 layers"],
        ),
        (
            json!({"devices": 0, "gpu_layer_budget": 3, "offload_exec": "cpu", "cpu_workers": 2}),
            "too_few_layers",
            &["1 layers", "2"],
        ),
        (json!({"pp": 2, "cpu_workers": 3}), "stages_disagree", &["pp is 2", "cpu_workers is 3"]),
        (json!({"devices": "0,2", "pp": 3}), "pp_beyond_devices", &["pp is 3", "2 devices"]),
        (json!({"pp_layers": "2,x"}), "pp_layers_parse", &["`x`"]),
        (json!({"pp": 3, "pp_layers": "2,2"}), "pp_layers_count", &["2 entries", "3 stages"]),
        (json!({"pp_layers": [2, 1]}), "pp_layers_sum", &["3 layers", "has 4"]),
        (json!({"pp_layers": [4, 0]}), "pp_layers_empty_stage", &["stage 1"]),
        (
            json!({"devices": "0,2", "pp_layers": "2,2", "split": "auto"}),
            "split_with_pp_layers",
            &["pp_layers", "split"],
        ),
        (
            json!({"devices": "0,2", "pp_layers": "2,2", "gpu_layer_budget": 2}),
            "gpu_layer_budget_with_pp_layers",
            &["pp_layers", "gpu_layer_budget"],
        ),
        (json!({"devices": "0,2", "split": "evenly"}), "split_unknown", &["`evenly`", "`uniform`"]),
        (json!({"split": "auto"}), "needs_gpu", &["split"]),
        (json!({"offload_prompts": "gpu"}), "needs_gpu", &["offload_prompts"]),
        (json!({"devices": 0, "offload_prompts": "both"}), "offload_prompts_unknown", &["`both`", "`auto`"]),
        (json!({"devices": "0,2", "split": "bytes:1GiB,1,1"}), "size_count", &["3 sizes", "2 devices"]),
        (json!({"max_seq": 0}), "placement_out_of_range", &["max_seq is 0", "between 1 and 512"]),
        (json!({"max_seq": 513}), "max_seq_beyond_model", &["513", "512"]),
    ]);
}

#[test]
fn devices_that_do_not_serve() {
    Served::new(DEVICES).refuses_all(&[
        (json!({"devices": "7"}), "unknown_device", &["`7`", "0 = Spillway emulated device", "ffff:02:00.0"]),
        (json!({"devices": ["gfx1100"]}), "unknown_device", &["`gfx1100`", "emulated_wave64"]),
        (json!({"devices": "0,,1"}), "devices_unreadable", &["`0,,1`"]),
        (json!({"devices": [1, 1]}), "device_twice", &["device 1", "allow_shared_device", "2 = Spillway"]),
        (json!({"devices": "emulated_wave32"}), "device_ambiguous", &["2 devices", "ffff:00:00.0"]),
        (
            json!({"devices": [0, 1]}),
            "arch_mismatch",
            &["emulated_wave32", "emulated_wave64", "allow_mixed_arch"],
        ),
        (json!({"devices": [0, 2]}), "vram_difference", &["4.0 GiB", "1.0 GiB", "split `auto`"]),
        (
            json!({"devices": [0, 2], "uniform_vram_tolerance_gb": 3.2}),
            "vram_difference",
            &["device 2", "more than 3.0 GiB apart"],
        ),
        (
            json!({"devices": [0, 2], "uniform_vram_tolerance_gb": "much"}),
            "uniform_vram_tolerance_unreadable",
            &["`much`"],
        ),
        (json!({"devices": 0, "vram_limit": "64KiB"}), "out_of_memory", &["of device 0", "63.0 KiB"]),
        (json!({"devices": 0, "vram_limit": "8 bits"}), "size_unreadable", &["vram_limit", "`8 bits`"]),
    ]);
    Served::new("emulated:devices=0").refuses_all(&[(json!({"devices": "all"}), "no_gpu", &["no device"])]);
}

#[test]
fn spills_that_cannot_be() {
    Served::new(DEVICES).refuses_all(&[
        (json!({"devices": 0, "gpu_layer_budget": 5}), "gpu_layer_budget_beyond_layers", &["5", "4 layers"]),
        (json!({"devices": 0, "gpu_layer_budget": "most"}), "gpu_layer_budget_unreadable", &["`most`"]),
        (json!({"gpu_layer_budget": 2}), "gpu_layer_budget_without_gpu", &["devices: none"]),
        (json!({"offload_exec": "pcie"}), "offload_exec_without_gpu", &["devices: none"]),
    ]);
    Served::new("emulated:integrated=true").refuses_all(&[(
        json!({"devices": 0, "gpu_layer_budget": 2}),
        "gpu_layer_budget_on_unified_memory",
        &["device 0", "shares the host's memory"],
    )]);
}

#[test]
fn features_that_are_not_there() {
    Served::new(DEVICES).refuses_all(&[
        (json!({"tp": 2, "pp": 2}), "tp_unsupported", &["params.tp", "tensor parallelism"]),
        (json!({"tp": 2}), "tp_unsupported", &["send 1"]),
        (json!({"pp": 2, "draft": "d.mq4"}), "draft_unsupported", &["params.draft", "speculative"]),
        (json!({"pp": 2, "mtp_mode": "on"}), "draft_unsupported", &["params.mtp_mode"]),
        (json!({"pp": 2, "cask_sidecar": "s.bin"}), "cask_unsupported", &["params.cask_sidecar"]),
        (
            json!({"pp": 2, "prefill_drafter": "p"}),
            "prefill_compression_unsupported",
            &["params.prefill_drafter"],
        ),
        (json!({"pp": 2, "vision": "on"}), "vision_unsupported", &["params.vision", "image"]),
        (json!({"replay": true, "offload_exec": "cpu"}), "replay_unsupported", &["params.replay"]),
        (json!({"kv_mode": "fp8"}), "kv_mode_unsupported", &["params.kv_mode"]),
        (json!({"kv_type": "fp8"}), "kv_type_unknown", &["`fp8`", "`f16`"]),
        (json!({"activations": "int4"}), "activations_unknown", &["`int4`", "`int16`"]),
        (json!({"devices": 0, "activations": "int16"}), "activations_on_gpu", &["`int16`", "8-bit"]),
        (json!({"peer_copies": "always"}), "peer_copies_unknown", &["`always`", "`off`"]),
    ]);
}

#[test]
fn files_that_cannot_be_run() {
    let mut served = Served::new(DEVICES);
    let tiny = TinyModel::new("qwen3").writer().unwrap();
    let write = |name: &str, file: &spillway_model::testing::GgufWriter| {
        let path = served.models.path(name);
        std::fs::write(&path, file.to_bytes()).unwrap();
        path
    };
    let experts = write("experts.gguf", tiny.clone().set("general.architecture", "qwen3moe"));
    let mut odd = tiny.clone();
    odd.remove_tensor("blk.0.ffn_down.weight").tensor(
        "blk.0.ffn_down.weight",
        &[128, 64],
        GgmlType::I8,
        vec![0; 8192],
    );
    let odd = write("odd.gguf", &odd);
    let params = json!({"devices": 0, "gpu_layer_budget": 2});
    served.refuses(&experts, &params, "unknown_architecture", &["\"qwen3moe\"", "qwen35"]);
    served.refuses(&odd, &params, "tensor_unusable_format", &["blk.0.ffn_down.weight", "I8"]);
    served.daemon.finish();
}

/// A card that another process has locked is not touched; the refusal says who has it.
#[test]
fn a_card_that_another_process_uses() {
    let mut served = Served::new(DEVICES);
    let folder = served.models.path("locks");
    std::fs::create_dir_all(&folder).unwrap();
    let mut lock = File::create(folder.join("gpu-05050505-0505-0505-0505-050500000002.lock")).unwrap();
    lock.lock().unwrap();
    writeln!(lock, "4242").unwrap();
    let model = served.models.other();
    let words: &[&str] = &["device 2", "process 4242", "allow_shared_device"];
    served.refuses(&model, &json!({"devices": 2}), "device_busy", words);
    served.refuses(&model, &json!({"devices": 2, "allow_shared_device": true}), "device_busy", words);
    served.daemon.finish();
}

/// Without locks nobody knows who uses a card.
#[test]
fn locks_that_cannot_be_kept() {
    let mut served = Served::new(DEVICES);
    let (folder, model) = (served.models.path("locks"), served.models.other());
    std::fs::write(&folder, "a file").unwrap();
    served.refuses(&model, &json!({"devices": 2}), "device_lock_failed", &[folder.to_str().unwrap()]);
    served.daemon.finish();
}
