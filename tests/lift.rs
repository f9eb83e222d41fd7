//! Layers that spilled to the CPU and that the GPU runs for prompts, in the real program on the emulated device: prompts have the bits
//! that a GPU with everything gives them, answers are those of the CPU, and nothing that happens to a worker changes a text.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/gpu.rs"]
mod gpu;
mod support;

use gpu::{can_compile, command, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::path::Path;
use std::time::Duration;
use support::{Daemon, Models, is_terminal, signal};

/// Ids of a prompt, separated by commas.
fn ids(count: u32) -> String {
    let ids: Vec<String> = (0..count).map(|position| (position * 37 % 200 + 3).to_string()).collect();
    ids.join(",")
}

/// Standard output of `logits` for a prompt on GPUs, and what the CPU said it computed.
fn logits(model: &Path, count: u32, devices: &str, more: &[&str]) -> (String, Vec<String>) {
    let ids = ids(count);
    let args = ["logits", "--json", "--quiet", "--ids", &ids, "--devices", devices, "-m"];
    on_gpus(&[&args[..], &[model.to_str().unwrap()], more].concat())
}

/// Standard output of a command, and what the CPU said it computed.
fn on_gpus(args: &[&str]) -> (String, Vec<String>) {
    let output = command(args).env("SPILLWAY_CPU_EXEC_TRACE", "1").output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {told}");
    let by_cpu = told.lines().filter(|line| line.starts_with("cpu exec")).map(str::to_owned).collect();
    (String::from_utf8(output.stdout).unwrap(), by_cpu)
}

/// Four of seven layers on the CPU, and who runs prompts there.
const SPILLED: [&str; 5] = ["--gpu-layer-budget", "3", "--offload-exec", "cpu", "--offload-prompts"];

/// The logits of a lifted prompt are those of a GPU that holds everything, to the bit, in chunks of any size, past one CPU worker or
/// three, before one GPU or two; and the CPU computes nothing of it.
#[test]
fn a_lifted_prompt_has_the_bits_of_a_gpu_with_everything() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    for (name, model) in [
        ("llama", TinyModel::new("llama")),
        ("qwen2", TinyModel::new("qwen2")),
        ("qwen3", TinyModel::new("qwen3")),
        ("qwen35", TinyModel::new("qwen35")),
        ("q8", TinyModel::new("qwen35").q8_0()),
    ] {
        let model = models.write(name, &model.layers(7));
        let one = "emulated";
        let with =
            |who, devices, more: &[&str]| logits(&model, 70, devices, &[&SPILLED[..], &[who], more].concat());
        let resident = logits(&model, 70, one, &[]).0;
        for (devices, more) in [
            (one, &["--chunk", "64"][..]),
            (one, &["--chunk", "7", "--cpu-workers", "3"]),
            (one, &["--chunk", "1"]),
            ("emulated:devices=2", &[]),
        ] {
            let (lifted, by_cpu) = with("gpu", devices, more);
            assert!(lifted == resident, "{name}, {devices}, {more:?}");
            assert_eq!(by_cpu, [""; 0], "{name}, {more:?}");
        }
        let (on_cpu, by_cpu) = with("cpu", one, &[]);
        assert!(on_cpu != resident && by_cpu.len() == 1, "{name}: the CPU rounds otherwise, and says so");
    }
}

/// Unless it is said otherwise, short prompts stay on the CPU.
#[test]
fn a_prompt_is_lifted_from_the_planned_length_on() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let model = models.write("seven", &TinyModel::new("qwen35").layers(7));
    for (count, told) in [(31, 1), (32, 0)] {
        let (_, by_cpu) = logits(&model, count, "emulated", &[&SPILLED[..], &["auto"]].concat());
        assert_eq!(by_cpu.len(), told, "{count}: {by_cpu:?}");
    }
    let args = ["plan", "--json", "--devices", "emulated", "-m", model.to_str().unwrap()];
    let plan = run(&[&args[..], &SPILLED, &["auto"]].concat()).json();
    let lift = &plan["lift"];
    assert_eq!((&lift["from"], &lift["stage"]), (&json!(32), &json!(1)), "{plan}");
    assert_eq!(lift["layers"], json!({"start": 0, "end": 4}), "{plan}");
}

/// The CPU decodes from what the GPU left: one token a step, and the tokens are those of a CPU that runs everything.
#[test]
fn answers_go_on_from_lifted_prompts() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    for architecture in ["qwen3", "qwen35"] {
        let model = models.write(architecture, &TinyModel::new(architecture).layers(7));
        let prompt = "the word of the other word ".repeat(4);
        let answer = |more: &[&str]| {
            let args =
                ["run", "--raw", "-p", &prompt, "-n", "12", "--temp", "0", "--ignore-eos", "--json", "-q"];
            let (lines, by_cpu) = on_gpus(&[&args[..], &["-m", model.to_str().unwrap()], more].concat());
            let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
            (last["token_ids"].clone(), by_cpu)
        };
        let (expected, _) = answer(&[]);
        assert_eq!(expected.as_array().unwrap().len(), 12);
        let spilled = ["--devices", "emulated", "--chunk", "16"];
        let (ids, by_cpu) = answer(&[&spilled[..], &SPILLED, &["gpu"]].concat());
        assert_eq!(ids, expected, "{architecture}");
        assert!(by_cpu.len() == 1 && by_cpu[0].contains("layers 0-3, tokens 1,"), "{by_cpu:?}");
    }
}

/// When a worker is killed in the second turn of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Prompt,
    Answer,
}

/// A daemon with a model of seven layers, four of them spilled; prompts take many steps.
fn daemon(models: &Models) -> Daemon {
    let mut daemon = Daemon::spawn(command(&["daemon"]));
    let model = models.write("talk.gguf", &TinyModel::new("qwen35").layers(7).q8_0());
    let params = json!({"devices": "emulated", "gpu_layer_budget": 3, "offload_exec": "cpu", "offload_prompts": "gpu",
        "chunk": 4});
    daemon.main.load(&model, params);
    daemon
}

fn raw(id: &str, prompt: &str, seed: u32) -> Value {
    json!({"type": "generate", "id": id, "prompt": prompt, "raw": true, "temperature": 1.5, "top_p": 1, "seed": seed,
        "max_tokens": 20, "ignore_eos": true})
}

/// The text of an answer and its last event; the worker of a stage is killed in it.
fn answer(daemon: &mut Daemon, request: Value, killed: Option<(usize, When)>) -> (String, Value) {
    let (id, workers) = (request["id"].clone(), daemon.workers());
    let kill = |now| {
        if let Some((stage, when)) = killed.filter(|(_, when)| *when == now) {
            // Into the prompt, which takes longer.
            std::thread::park_timeout(Duration::from_millis(if when == When::Prompt { 30 } else { 0 }));
            signal(workers[stage], Signal::SIGKILL);
        }
    };
    daemon.main.send(request);
    kill(When::Prompt);
    let mut text = String::new();
    loop {
        let event = daemon.main.next();
        if event["id"] != id {
            continue;
        }
        if is_terminal(&event) {
            assert_eq!(event["type"], "done", "{event}");
            return (text, event);
        }
        if event["type"] == "token" {
            if text.is_empty() {
                kill(When::Answer);
            }
            text.push_str(event["text"].as_str().unwrap());
        }
    }
}

/// Two turns of a conversation, the second one on top of what the first one left, and a worker killed in it: the answers, and the
/// last event.
fn talk(daemon: &mut Daemon, killed: Option<(usize, When)>) -> ([String; 2], Value) {
    let mut prompt = "the word of the other word ".repeat(3);
    let (first, _) = answer(daemon, raw("first", &prompt, 5), None);
    prompt.push_str(&first);
    prompt.push_str(&" and one more word".repeat(6));
    let (second, end) = answer(daemon, raw("second", &prompt, 6), killed);
    ([first, second], end)
}

/// Whichever worker ends in whatever part of an answer: sequences are run again as they were run, prompts by the GPU, answers by the CPU.
#[test]
fn a_killed_worker_changes_no_text() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let mut undisturbed = daemon(&models);
    let (expected, end) = talk(&mut undisturbed, None);
    assert!(end["cached_tokens"].as_u64().unwrap() > 20, "the second turn goes on from the first: {end}");
    undisturbed.finish();
    for stage in 0..2 {
        for when in [When::Prompt, When::Answer] {
            let mut daemon = daemon(&models);
            assert_eq!(talk(&mut daemon, Some((stage, when))).0, expected, "stage {stage}, {when:?}");
            let diag = daemon.main.ask(json!({"type": "diag"}), "diag");
            assert_eq!(diag["restarts"], 1, "{diag}");
            daemon.finish();
        }
    }
}

/// Prompts and answers of several requests share steps, some lifted and some not; each text is that of the request alone.
#[test]
fn what_runs_beside_it_changes_no_text() {
    if !can_compile() {
        return;
    }
    let models = Models::new();
    let request = |index: u32| {
        let words = "the word of the other word ".repeat(1 + index as usize);
        raw(&format!("r{index}"), &format!("{index} {words}"), index)
    };
    let mut daemon = daemon(&models);
    let alone: Vec<String> = (0..4).map(|index| answer(&mut daemon, request(index), None).0).collect();
    daemon.finish();
    let mut daemon = self::daemon(&models);
    (0..4).for_each(|index| daemon.main.send(request(index)));
    let mut together = vec![String::new(); 4];
    let mut open = 4;
    while open > 0 {
        let event = daemon.main.next();
        let index = event["id"].as_str().and_then(|id| id.strip_prefix('r')?.parse::<usize>().ok());
        if let Some(text) = index.filter(|_| event["type"] == "token").map(|index| &mut together[index]) {
            text.push_str(event["text"].as_str().unwrap());
        }
        open -= usize::from(is_terminal(&event));
    }
    assert_eq!(together, alone);
    daemon.finish();
}
