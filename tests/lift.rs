//! Layers that spilled to the CPU and that the GPU runs for prompts, in the real program on the emulated device: prompts have the bits
//! that a GPU with everything gives them, answers are those of the CPU, and nothing that happens to a worker changes a text.
//!
//! The kernels need a C++ compiler; without one the tests print a note and pass, unless `SPILLWAY_REQUIRE_COMPILERS=1`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/engine.rs"]
mod fixture;
#[path = "support/gpu.rs"]
mod gpu;
mod support;

use fixture::{answer, greedy, logits, open, prompt, signal_worker, submit};
use gpu::{can_compile, command, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use spillway::engine::{Engine, EngineOptions};
use spillway_model::testing::{TinyModel, oracles};
use spillway_protocol::plan::Plan;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::{Models, spillway};

/// Ids of a prompt, separated by commas.
fn ids(count: u32) -> String {
    let ids: Vec<String> = (0..count).map(|position| (position * 37 % 200 + 3).to_string()).collect();
    ids.join(",")
}

/// Standard output of `logits` for a prompt on GPUs, and what the CPU said it computed.
fn scored(model: &Path, count: u32, devices: &str, more: &[&str]) -> (String, Vec<String>) {
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
            |who, devices, more: &[&str]| scored(&model, 70, devices, &[&SPILLED[..], &[who], more].concat());
        let resident = scored(&model, 70, one, &[]).0;
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
        let (_, by_cpu) = scored(&model, count, "emulated", &[&SPILLED[..], &["auto"]].concat());
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

/// Starts engines: three layers of a model are on a GPU, the others on CPU workers. Prompts take many steps, two of which are under
/// way at a time.
struct Rig {
    models: Models,
    model: PathBuf,
}

impl Rig {
    fn new() -> Self {
        let models = Models::new();
        let model = models.write("talk.gguf", &TinyModel::new("qwen35").layers(7).q8_0());
        // Workers get the environment of this process, which has no cache of kernels.
        let worker = format!(
            "#!/bin/sh\nSPILLWAY_KERNEL_CACHE='{}' exec '{}' \"$@\"\n",
            gpu::cache().display(),
            spillway(["-"]).get_program().display()
        );
        fs::write(models.path("worker"), worker).unwrap();
        fs::set_permissions(models.path("worker"), fs::Permissions::from_mode(0o700)).unwrap();
        Rig { models, model }
    }

    fn start(&self) -> Engine {
        self.start_with("gpu", "2")
    }

    fn start_with(&self, prompts: &str, workers: &str) -> Engine {
        let sizes = ["--chunk", "4", "--cpu-workers", workers, "--threads", "1", "--max-seq", "384"];
        let args = ["plan", "--json", "--devices", "emulated", "-m", self.model.to_str().unwrap()];
        let plan = run(&[&args[..], &SPILLED, &[prompts], &sizes].concat()).json();
        let plan: Plan = serde_json::from_value(plan).unwrap();
        let worker_exe = Some(self.models.path("worker"));
        let options = EngineOptions { worker_exe, steps_in_flight: Some(2), ..EngineOptions::default() };
        Engine::start(open(&self.model), plan, options, |_| {}).unwrap()
    }
}

/// When a worker is killed in the second turn of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Prompt,
    Answer,
}

/// Two turns of a conversation, the second one on top of what the first one left, and the worker of a stage killed in it: what was
/// answered.
fn talk(engine: &Engine, killed: Option<(usize, When)>) -> [Vec<u32>; 2] {
    let mut ids = prompt(1, 60);
    let first = answer(engine, greedy(&ids, 20));
    ids.extend(&first.token_ids);
    ids.extend(prompt(2, 60));
    let running = submit(engine, greedy(&ids, 20));
    if let Some((stage, when)) = killed {
        match when {
            When::Prompt => std::thread::park_timeout(Duration::from_millis(20)),
            When::Answer => running.tokens(5),
        }
        signal_worker(engine, stage, Signal::SIGKILL);
    }
    let second = running.done();
    assert_eq!(second.timings.cached_tokens, 60 + 19, "the last token of the first answer was never run");
    [first.token_ids, second.token_ids]
}

/// Whichever worker ends in whatever part of an answer: sequences are run again as they were run, prompts by the GPU, answers by the CPU.
#[test]
fn a_killed_worker_changes_no_token() {
    if !can_compile() {
        return;
    }
    let rig = Rig::new();
    let expected = talk(&rig.start(), None);
    for stage in 0..3 {
        for when in [When::Prompt, When::Answer] {
            let engine = rig.start();
            assert_eq!(talk(&engine, Some((stage, when))), expected, "stage {stage}, {when:?}");
            assert_eq!(engine.status().restarts, 1, "stage {stage}, {when:?}");
        }
    }
}

/// Prompts and answers of several requests share steps, some lifted and some not; each answer is that of the request alone, and every
/// bit of a prompt's logits is the same in chunks of any size.
#[test]
fn what_shares_a_step_changes_no_token() {
    if !can_compile() {
        return;
    }
    let engine = Rig::new().start();
    let request = |seed: u32| greedy(&prompt(seed, 10 + 25 * seed), 20);
    let alone: Vec<Vec<u32>> = (0..4).map(|seed| answer(&engine, request(seed)).token_ids).collect();
    let together: Vec<_> = (0..4).map(|seed| submit(&engine, request(seed))).collect();
    for (running, alone) in together.iter().zip(&alone) {
        assert_eq!(running.done().token_ids, *alone);
    }
    let ids = prompt(7, 70);
    let whole = logits(&engine, &ids, 4);
    for chunk in [1, 3] {
        assert!(logits(&engine, &ids, chunk) == whole, "chunks of {chunk}");
    }
}

/// Unquantised files: after a prompt that was lifted, and after one that was not, the CPU goes on with the tokens that transformers goes on
/// with.
#[test]
fn answers_agree_with_transformers_whoever_ran_the_prompt() {
    let Some(folder) = oracles() else { return };
    if !can_compile() {
        return;
    }
    for name in ["qwen3", "qwen35"] {
        let golden = fs::read(folder.join(name).join("compact.json")).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        let model = folder.join(name).join(format!("{name}-bf16.gguf"));
        let rig = Rig { model, ..Rig::new() };
        for prompts in ["gpu", "cpu"] {
            let engine = rig.start_with(prompts, "1");
            for (length, sequence) in golden["seqs"].as_object().unwrap() {
                let ids = |field: &str| -> Vec<u32> {
                    let ids = sequence[field].as_array().unwrap().iter();
                    ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
                };
                let (prompt, expected) = (ids("ids"), ids("greedy"));
                if prompt.len() + expected.len() <= 384 {
                    let found = answer(&engine, greedy(&prompt, expected.len())).token_ids;
                    assert_eq!(found, expected, "{name}, {length} tokens, prompts by the {prompts}");
                }
            }
        }
    }
}
