//! Placement by measured speeds and from saved plans, through the program. Devices are emulated ones, slowed down where a test needs
//! speeds that differ; no kernel is compiled.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use support::{Daemon, Models, Ran, ask, finish, run, spillway};

/// Sizes that keep everything but weights small.
const SMALL: [&str; 6] = ["--max-seq", "64", "--parallel", "1", "--chunk", "8"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Results of measurements of their own, in a folder that goes with the models.
struct Measured {
    models: Models,
    model: PathBuf,
}

impl Measured {
    fn new() -> Self {
        let models = Models::new();
        let model = models.write("ten.gguf", &TinyModel::new("qwen3").layers(10));
        Measured { models, model }
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.run_on("", args)
    }

    /// On a machine that has these devices.
    fn run_on(&self, provider: &str, args: &[&str]) -> Ran {
        let mut command = spillway(args);
        command.env("SPILLWAY_PROVIDER", provider);
        command.env("SPILLWAY_KERNEL_CACHE", self.models.path("cache"));
        command.env("SPILLWAY_LOCK_DIR", self.models.path("locks"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(command.spawn().unwrap(), b"")
    }

    fn plan(&self, more: &[&str]) -> Value {
        let args = ["plan", "-m", text(&self.model), "--json"];
        let ran = self.run(&[&args[..], &SMALL, more].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.json()
    }

    /// Puts other numbers in the place of those that were measured.
    fn pretend(&self, of: &str, numbers: &Value) {
        let mut changed = 0;
        for file in fs::read_dir(self.models.path("cache/speeds")).unwrap().flatten() {
            let mut entry: Value = serde_json::from_slice(&fs::read(file.path()).unwrap()).unwrap();
            if entry["subject"].as_str().unwrap().starts_with(of) {
                for (name, number) in numbers.as_object().unwrap() {
                    entry["found"][name] = number.clone();
                }
                fs::write(file.path(), entry.to_string()).unwrap();
                changed += 1;
            }
        }
        assert!(changed > 0, "nothing was kept of {of}");
    }
}

fn layers(plan: &Value) -> Vec<u64> {
    let of =
        |stage: &Value| stage["layers"]["end"].as_u64().unwrap() - stage["layers"]["start"].as_u64().unwrap();
    plan["stages"].as_array().unwrap().iter().map(of).collect()
}

/// Where the layers' weights live: in the device's memory, mapped for it, with the CPU.
fn homes(plan: &Value) -> [usize; 3] {
    let homes =
        plan["stages"].as_array().unwrap().iter().flat_map(|stage| stage["residency"].as_array().unwrap());
    ["device", "host-mapped", "host"].map(|home| homes.clone().filter(|found| *found == home).count())
}

/// The faster card gets more layers, by what was measured when it was first asked for.
#[test]
fn a_split_follows_speeds_that_are_measured_when_they_are_needed() {
    let measured = Measured::new();
    let devices = "emulated:devices=2,memory=64MiB,bandwidth=1200MiB/300MiB";
    assert_eq!(layers(&measured.plan(&["--devices", devices])), [5, 5]);
    assert!(!measured.models.path("cache/speeds").exists(), "nothing was measured that decides nothing");
    let split = measured.plan(&["--devices", devices, "--split", "auto"]);
    let counts = layers(&split);
    assert!(counts[0] >= 7, "four times as fast: {counts:?}");
    let why = split["stages"][1]["why"].as_str().unwrap();
    assert!(why.contains("the slowest stage is fastest so, at ") && why.contains("MiB/s here"), "{why}");
}

/// Only the devices that a placement uses are measured, and a split of one device is no question of speed.
#[test]
fn devices_that_are_not_used_are_not_measured() {
    let measured = Measured::new();
    let provider = "emulated:devices=3,memory=64MiB,ids=3";
    let known = || {
        let found = measured.run_on(provider, &["devices", "--json"]).json();
        let speed = |number: usize| !found["devices"][number]["speed"].is_null();
        [0, 1, 2].map(speed)
    };
    let plan = |more: &[&str]| {
        let ran =
            measured.run_on(provider, &[&["plan", "-m", text(&measured.model)][..], &SMALL, more].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
    };
    plan(&["--devices", "1", "--split", "auto"]);
    assert_eq!(known(), [false; 3]);
    plan(&["--devices", "1", "--gpu-layer-budget", "auto"]);
    assert_eq!(known(), [false, true, false]);
    plan(&["--devices", "2,1,0", "--pp", "2", "--split", "auto"]);
    assert_eq!(known(), [false, true, true], "the third one is not used");
}

#[test]
fn a_measurement_may_be_of_some_devices_alone() {
    let measured = Measured::new();
    let only = |numbers: &str| {
        let args = ["devices", "--json", "--measure", "--only", numbers];
        measured.run_on("emulated:devices=2,memory=64MiB,ids=3", &args)
    };
    let unknown = only("0,2");
    assert_eq!((unknown.code, unknown.json()["code"].as_str()), (Some(3), Some("bad_input")), "{unknown:?}");
    assert!(!measured.models.path("cache/speeds").exists(), "nothing was measured");
    let found = only("1").json();
    assert!(found["devices"][0]["speed"].is_null() && !found["devices"][1]["speed"].is_null(), "{found}");
    assert!(found["host"].is_null(), "{found}");
}

/// What was kept decides: whoever reads faster runs what spills, and a card that is slower than the CPU runs nothing.
#[test]
fn a_budget_of_auto_follows_what_was_measured() {
    let measured = Measured::new();
    let roomy = "emulated:memory=64MiB";
    measured.plan(&["--devices", roomy, "--gpu-layer-budget", "auto"]);
    let gib = 1u64 << 30;
    let pretend = |cpu: u64, memory: u64, link: u64| {
        // Prompts take no time.
        measured.pretend("memory of a host", &json!({"memory": cpu * gib, "products": u64::MAX}));
        measured.pretend("speed of", &json!({"memory": memory * gib, "link": link * gib, "hop_ns": 1}));
    };
    let auto = |devices: &str, more: &[&str]| {
        let args = ["--devices", devices, "--gpu-layer-budget", "auto"];
        measured.plan(&[&args[..], more].concat())
    };
    pretend(50, 900, 25);
    let all = auto(roomy, &[]);
    assert_eq!(homes(&all), [10, 0, 0], "it fits, and nothing is faster");
    let why = all["stages"][0]["why"].as_str().unwrap();
    for part in ["device 0 reads 900.0 GiB/s", "25.0 GiB/s of the host's", "the CPU 50.0 GiB/s"] {
        assert!(why.contains(part), "{why}");
    }
    pretend(5000, 900, 25);
    assert_eq!(homes(&auto(roomy, &[])), [0, 0, 10], "the CPU is faster than the card");
    // Room for about half of the layers.
    let needed = |budget: &str| {
        let plan =
            measured.plan(&["--devices", roomy, "--gpu-layer-budget", budget, "--offload-exec", "pcie"]);
        let bytes = &plan["stages"][0]["bytes"];
        ["weights", "kv", "state", "scratch"].map(|part| bytes[part].as_u64().unwrap()).iter().sum::<u64>()
    };
    let tight = format!("emulated:memory={}", needed("5") + needed("5") / 32);
    auto(&tight, &[]);
    pretend(50, 900, 25);
    let [on_device, mapped, on_cpu] = homes(&auto(&tight, &[]));
    assert!(on_device >= 5 && mapped == 0 && on_cpu > 0, "{on_device} {mapped} {on_cpu}");
    pretend(15, 900, 25);
    let [on_device, mapped, on_cpu] = homes(&auto(&tight, &[]));
    assert!(on_device >= 5 && mapped > 0 && on_cpu == 0, "{on_device} {mapped} {on_cpu}");
    assert_eq!(homes(&auto(&tight, &["--offload-exec", "cpu"]))[1], 0, "what was asked for stays");
}

/// `devices --measure` measures anew, tells, and keeps; a device in use keeps what is known of it.
#[test]
fn speeds_are_shown_and_measured_anew() {
    let measured = Measured::new();
    let devices = |more: &[&str]| {
        let args = ["devices", "--provider", "emulated:memory=64MiB,bandwidth=500MiB,link=100MiB,ids=9"];
        let ran = measured.run(&[&args[..], more].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran
    };
    let speed = |ran: &Ran| ran.json()["devices"][0]["speed"].clone();
    assert_eq!(speed(&devices(&["--json"])), Value::Null, "nothing is measured unasked");
    let first = devices(&["--json", "--measure"]);
    let memory = speed(&first)["memory"].as_u64().unwrap();
    assert!((250 << 20..500 << 20).contains(&memory), "{first:?}");
    assert!(first.json()["host"]["memory"].as_u64().unwrap() > 0, "{first:?}");
    let later = devices(&["--json"]).json();
    assert_eq!((&later["devices"][0]["speed"], &later["host"]), (&speed(&first), &first.json()["host"]));
    let shown = devices(&[]).stdout;
    assert!(shown.contains("MiB/s of its memory") && shown.contains("host: "), "{shown}");
    measured.pretend("speed of", &json!({"memory": 7}));
    assert_eq!(speed(&devices(&["--json", "--measure=missing"]))["memory"], 7, "it is known");
    // As if another process served from it.
    let folder = measured.models.path("locks");
    let lock = fs::File::create(folder.join("gpu-09090909-0909-0909-0909-090900000000.lock")).unwrap();
    lock.lock().unwrap();
    let busy = devices(&["--json", "--measure"]).json();
    assert_eq!(busy["devices"][0]["speed"]["memory"], 7);
    let reason = busy["speed_notes"][0].as_str().unwrap();
    assert!(reason.contains("device 0 is not measured") && reason.contains("in use"), "{reason}");
    drop(lock);
    assert!(speed(&devices(&["--json", "--measure"]))["memory"].as_u64().unwrap() > 7);
}

/// A saved plan is used as it stands by every command that runs a model, or refused; and nothing else may be asked for beside it.
#[test]
fn commands_replay_a_saved_plan() {
    let models = Models::new();
    let (tiny, plan) = (models.tiny(), models.path("plan.json"));
    let (tiny, plan) = (text(&tiny), text(&plan));
    let placed = ["--pp-layers", "3,1", "--max-seq", "64", "--parallel", "1"];
    assert_eq!(run(&[&["plan", "-m", tiny, "--save", plan][..], &placed].concat()).code, Some(0));
    let progress = ["--progress", "json"];
    let stages = |ran: &Ran| {
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.stderr.lines().filter(|line| line.contains("\"stages\":2")).count()
    };
    let logits = ["logits", "-m", tiny, "--ids", "1,2,3", "--json"];
    let replayed = run(&[&logits[..], &progress, &["--plan", plan]].concat());
    assert!(stages(&replayed) > 0, "two stages: {}", replayed.stderr);
    assert_eq!(replayed.stdout, run(&[&logits[..], &["-q"]].concat()).stdout, "no cut changes a result");
    let answer =
        run(&[&["run", "-m", tiny, "-p", "hi", "-n", "4"][..], &progress, &["--plan", plan]].concat());
    assert!(stages(&answer) > 0, "{answer:?}");
    let bench =
        run(&["bench", "-m", tiny, "-p", "8", "-n", "2", "-r", "1", "--json", "-q", "--plan", plan]).json();
    assert_eq!(layers(&bench["plan"]), [3, 1]);
    let chat = support::run_with_input(&["chat", "-m", tiny, "-q", "-n", "2", "--plan", plan], b"hi\n");
    assert_eq!(chat.code, Some(0), "{chat:?}");

    let refused = |args: &[&str], code: i32, name: &str, words: &str| {
        let ran = run(&[&logits[..], &["-q"], args].concat());
        let error = ran.json();
        assert_eq!((ran.code, error["code"].as_str()), (Some(code), Some(name)), "{ran:?}");
        assert!(error["message"].as_str().unwrap().contains(words), "{ran:?}");
    };
    refused(&["--plan", plan, "--pp", "2"], 2, "usage", "--plan");
    let shared = run(&[&logits[..], &["-q", "--plan", plan, "--allow-shared-device"]].concat());
    assert_eq!((shared.code, shared.stdout), (Some(0), replayed.stdout), "it is about other processes");
    refused(&["--plan", "/nowhere.json"], 3, "plan_file", "/nowhere.json");
    let other = models.other();
    let ran = run(&["logits", "-m", text(&other), "--ids", "1", "--json", "--plan", plan]);
    assert_eq!((ran.code, ran.json()["code"].as_str()), (Some(3), Some("plan_other_model")), "{ran:?}");
}

#[test]
fn a_load_replays_a_saved_plan() {
    let models = Models::new();
    let (tiny, other, plan) = (models.tiny(), models.other(), models.path("plan.json"));
    let saved = run(&["plan", "-m", text(&tiny), "--pp-layers", "3,1", "--save", text(&plan)]);
    assert_eq!(saved.code, Some(0), "{saved:?}");
    let mut daemon = Daemon::start(&[]);
    let client = &mut daemon.main;
    let load =
        |model: &Path, params: Value| json!({"type": "load", "id": "l", "model": model, "params": params});
    let loaded = client.ask(load(&tiny, json!({"plan": plan})), "loaded");
    let counts: Vec<_> = loaded["stages"].as_array().unwrap().iter().map(|stage| &stage["layers"]).collect();
    assert_eq!(counts, [3, 1], "{loaded}");
    for (model, params, code) in [
        (&other, json!({"plan": plan}), "plan_other_model"),
        (&tiny, json!({"plan": "/nowhere.json"}), "plan_file"),
        (&tiny, json!({"plan": plan, "max_seq": 32}), "conflicting_fields"),
    ] {
        let error = client.ask(load(model, params), "error");
        assert_eq!((&error["id"], &error["code"]), (&json!("l"), &json!(code)), "{error}");
    }
    client.send(ask("after", 4));
    assert_eq!(client.answer("after").1["type"], "done");
    daemon.finish();
}

/// Numbers that cannot be are refused in the planner's words, and what cannot be read is named with what can.
#[test]
fn what_is_wrong_is_named() {
    let models = Models::new();
    let tiny = models.tiny();
    let refused = |args: &[&str], code: &str, words: &[&str]| {
        let ran = run(&[&["plan", "-m", text(&tiny), "--json"], args].concat());
        assert_eq!((ran.code, ran.json()["code"].as_str()), (Some(3), Some(code)), "{ran:?}");
        for word in words {
            assert!(ran.json()["message"].as_str().unwrap().contains(word), "{ran:?} lacks {word}");
        }
    };
    refused(&["--pp-layers", "-1,2"], "pp_layers_parse", &["numbers of layers", "`-1` is not one"]);
    refused(&["--devices", "emulated", "--gpu-layer-budget", "-1"], "gpu_layer_budget_unreadable", &["`-1`"]);
    refused(
        &["--devices", "emulated:foo=1"],
        "no_gpu",
        &["option \"foo\" is unknown", "memory", "bandwidth"],
    );
    let two = ["--devices", "emulated:devices=2", "--gpu-layer-budget", "1"];
    refused(&two, "too_few_layers", &["leaves 1 layers for 2 GPUs", "at least 2"]);
}
