//! The command line through the real program: help, answers, refusals and exit codes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::process::{Command, Stdio};
use support::{Models, Ran, finish, run, run_with_input, spillway};

fn text(path: &std::path::Path) -> &str {
    path.to_str().unwrap()
}

/// The command failed with an exit code, one sentence on standard error, and with `--json` the same as an object.
fn assert_refused(args: &[&str], exit: i32, code: &str, named: &str) {
    let ran = run(args);
    assert_eq!(ran.code, Some(exit), "{args:?}: {ran:?}");
    assert_one_error_line(&ran, named);
    assert_eq!(ran.stdout, "", "{args:?}");
    let with_json: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
    let ran = run(&with_json);
    assert_eq!(ran.code, Some(exit), "{with_json:?}: {ran:?}");
    assert_one_error_line(&ran, named);
    let error = ran.json();
    assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!(code)), "{with_json:?}: {error}");
    assert!(error["message"].as_str().unwrap().contains(named), "{error}");
}

fn assert_one_error_line(ran: &Ran, named: &str) {
    assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(named), "{ran:?}");
    assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
}

#[test]
fn help_is_as_reviewed() {
    insta::assert_snapshot!("help", run(&["--help"]).stdout);
    for command in [
        "run",
        "chat",
        "inspect",
        "plan",
        "logits",
        "tokenize",
        "detokenize",
        "bench",
        "serve",
        "daemon",
        "status",
        "top",
        "config",
        "completions",
    ] {
        let ran = run(&[command, "--help"]);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
        insta::assert_snapshot!(format!("help-{command}"), ran.stdout);
    }
}

#[test]
fn wrong_usage_is_one_sentence_and_exit_code_2() {
    assert_refused(&["run", "-p", "x"], 2, "usage", "--model");
    assert_refused(&["run", "-m", "f", "-p", "x", "--temp", "hot"], 2, "usage", "--temp");
    assert_refused(&["run", "-m", "f", "-p", "x", "--no-such-flag"], 2, "usage", "--no-such-flag");
    assert_refused(&["run", "-m", "f", "-p", "x", "--logit-bias", "13"], 2, "usage", "ID=VALUE");
    assert_refused(&["run", "-m", "f", "-p", "x", "--raw", "--system", "s"], 2, "usage", "--system");
    assert_refused(&["logits", "-m", "f", "--ids", "1,x"], 2, "usage", "--ids");
    assert_refused(&["bench", "-m", "f", "-p", "0", "-n", "0"], 2, "usage", "nothing to measure");
    assert_refused(&["bench", "-m", "f", "-r", "0"], 2, "usage", "--repetitions");
    assert_eq!(run(&[]).code, Some(2));
    assert_eq!(run(&["--version"]).stdout, format!("spillway {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_worker_that_is_started_by_hand_says_so() {
    let ran = run(&["worker-cpu", "--help-me"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("started by the coordinator"), "{ran:?}");
}

#[test]
fn a_file_that_cannot_be_used_is_refused_alike_by_every_command() {
    let models = Models::new();
    let bytes = TinyModel::new("llama").to_bytes().unwrap();
    let files: &[(&str, &[u8], &str)] = &[
        ("empty.gguf", b"", "is empty"),
        ("other.gguf", b"PK\x03\x04 some archive of another kind", "gguf"),
        ("cut.gguf", &bytes[..bytes.len() - 1000], "cut.gguf"),
    ];
    for (name, bytes, named) in files {
        let path = models.path(name);
        std::fs::write(&path, bytes).unwrap();
        assert_same_refusal(text(&path), named);
    }
    assert_same_refusal(text(&models.path("absent.gguf")), "absent.gguf");
    assert_same_refusal(text(models.path("").as_path()), "directory");
}

fn assert_same_refusal(file: &str, named: &str) {
    let commands: &[&[&str]] = &[
        &["plan", "-m", file],
        &["logits", "-m", file, "--ids", "1"],
        &["bench", "-m", file],
        &["run", "-m", file, "-p", "x"],
    ];
    let inspected = run(&["inspect", file]);
    assert_eq!(inspected.code, Some(3), "{inspected:?}");
    assert_one_error_line(&inspected, named);
    for args in commands {
        let ran = run(args);
        assert_eq!((ran.code, &ran.stderr), (Some(3), &inspected.stderr), "{args:?}");
    }
}

/// Limits of the process are told from faults of the file, and no limit ends it without a word.
#[test]
fn limits_of_the_process_are_named() {
    let models = Models::new();
    let limited = |limit: &str| {
        let program = spillway::<&str>([]).get_program().to_owned();
        let mut shell = Command::new("sh");
        shell
            .args(["-c", "ulimit $0 && exec \"$@\"", limit])
            .arg(program)
            .args(["logits", "--ids", "1", "-m"]);
        shell.arg(models.tiny()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(shell.spawn().unwrap(), b"")
    };
    let no_files = limited("-f 0");
    assert_eq!(no_files.code, Some(4), "{no_files:?}");
    assert_one_error_line(&no_files, "ulimit");
}

#[test]
fn a_placement_that_cannot_be_had_is_refused_with_its_own_code() {
    let models = Models::new();
    let tiny = models.tiny();
    let plan = |option: &'static str, value: &'static str, code, named| {
        assert_refused(&["plan", "-m", text(&tiny), option, value], 3, code, named);
    };
    plan("--pp-layers", "1,x", "pp_layers_parse", "x");
    plan("--pp-layers", "1,2", "pp_layers_sum", "4");
    plan("--max-seq", "0", "placement_out_of_range", "max_seq");
    plan("--max-seq", "513", "max_seq_beyond_model", "512");
    plan("--cpu-workers", "5", "too_few_layers", "4");
    plan("--devices", "emulated:nothing=1", "no_gpu", "nothing");
    plan("--gpu-layer-budget", "auto", "gpu_layer_budget_without_gpu", "auto");
    plan("--offload-exec", "pcie", "offload_exec_without_gpu", "pcie");
    plan("--split", "auto", "needs_gpu", "split");
    plan("--vram-limit", "8GiB", "needs_gpu", "vram_limit");
    plan("--kv-type", "q8", "kv_type_unknown", "q8");
    plan("--activations", "int4", "activations_unknown", "int4");
    assert_refused(
        &["plan", "-m", text(&tiny), "--pp", "3", "--pp-layers", "2,2"],
        3,
        "pp_layers_count",
        "3",
    );
}

#[test]
fn a_request_that_cannot_be_answered_is_refused() {
    let models = Models::new();
    let tiny = models.tiny();
    let long = "word ".repeat(600);
    let with = |more: &[&'static str]| [&["run", "-m", text(&tiny), "-p", "x"], more].concat();
    assert_refused(&with(&["--temp", "-1"]), 3, "invalid_sampling_parameter", "temperature");
    assert_refused(&with(&["--template-arg", "messages=[]"]), 3, "template_argument_reserved", "messages");
    assert_refused(&with(&["--top-p", "7"]), 3, "invalid_sampling_parameter", "top_p");
    assert_refused(&with(&["--logit-bias", "99999=1"]), 3, "invalid_sampling_parameter", "logit_bias");
    assert_refused(&["run", "-m", text(&tiny), "-p", &long], 3, "context_length_exceeded", "512");
    assert_refused(&["logits", "-m", text(&tiny), "--ids", "1,99999"], 3, "token_out_of_range", "99999");
}

#[test]
fn a_daemon_that_is_not_there_is_told() {
    let models = Models::new();
    let path = models.path("no-socket");
    let ran = run(&["status", "--connect", text(&path)]);
    assert_eq!(ran.code, Some(1));
    assert_one_error_line(&ran, "no-socket");
    for interval in ["inf", "nan", "-1", "0", "1e300", "x"] {
        let watch = format!("--watch={interval}");
        assert_refused(&["status", "--connect", "s", &watch], 2, "usage", "0.1 to 86400");
    }
}

#[test]
fn the_plan_covers_every_layer_once_in_both_renderings() {
    let models = Models::new();
    let tiny = models.tiny();
    let ran = run(&["plan", "-m", text(&tiny), "--cpu-workers", "3", "--threads", "1", "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    let plan = ran.json();
    let bands: Vec<_> = plan["stages"].as_array().unwrap().iter().map(|stage| &stage["layers"]).collect();
    assert_eq!(
        bands,
        [&json!({"start": 0, "end": 2}), &json!({"start": 2, "end": 3}), &json!({"start": 3, "end": 4})]
    );
    let table = run(&["plan", "-m", text(&tiny), "--cpu-workers", "3", "--threads", "1"]).stdout;
    for shown in ["0-1 + embedding", "2-2", "3-3 + head", "max_seq 512 of 512"] {
        assert!(table.contains(shown), "{table}");
    }
}

#[test]
fn a_plan_is_kept_checked_and_compared() {
    let models = Models::new();
    let (tiny, first, second) = (models.tiny(), models.path("one.json"), models.path("two.json"));
    let devices = "emulated:devices=2,ids=3";
    let make = |file, more: &[&str]| {
        let args = ["plan", "-m", text(&tiny), "--devices", devices, "--json", "--save", text(file)];
        let ran = run(&[&args[..], more].concat());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.json()
    };
    let plan = make(&first, &[]);
    make(&second, &["--pp-layers", "3,1"]);
    assert_eq!(run(&["plan", "--load", text(&first), "--json"]).json(), plan);
    let differences = run(&["plan", "--diff", text(&first), text(&second)]).stdout;
    assert!(differences.contains("stages[0].layers.end: 2 -> 3\n"), "{differences}");
    let listed = run(&["plan", "--diff", text(&first), text(&second), "--json"]).json();
    assert!(listed.as_array().unwrap().iter().any(|one| one["path"] == "stages[1].layers.start"), "{listed}");
    assert_eq!(run(&["plan", "--diff", text(&first), text(&first)]).stdout, "the plans are the same\n");

    // The same file elsewhere is the same model; another one is not.
    let moved = models.path("moved.gguf");
    std::fs::rename(&tiny, &moved).unwrap();
    let replayed = run(&["plan", "--load", text(&first), "-m", text(&moved), "--json"]).json();
    assert_eq!(replayed["stages"], plan["stages"]);
    let other = models.other();
    assert_refused(
        &["plan", "--load", text(&first), "-m", text(&other)],
        3,
        "plan_other_model",
        "file length",
    );
    let gone = std::fs::read_to_string(&first).unwrap().replace("ids=3", "ids=4");
    std::fs::write(&second, gone).unwrap();
    assert_refused(
        &["plan", "--load", text(&second), "-m", text(&moved)],
        3,
        "plan_other_device",
        "ffff:00:00.0",
    );
    std::fs::write(&second, "{}").unwrap();
    assert_refused(&["plan", "--load", text(&second)], 3, "plan_file", "two.json");
    assert_refused(&["plan", "--load", text(&first), "--pp", "2"], 2, "usage", "--load");
    assert_refused(&["plan"], 2, "usage", "--model");
}

#[test]
fn inspect_lists_what_the_file_holds() {
    let models = Models::new();
    let tiny = models.write("q8.gguf", &TinyModel::new("qwen35").q8_0());
    let report = run(&["inspect", text(&tiny), "--json"]).json();
    assert_eq!((&report["architecture"], &report["d_model"]), (&json!("qwen35"), &json!(64)));
    assert_eq!(report["layers"].as_array().unwrap().len(), 4);
    assert_eq!(report["metadata"]["general.architecture"], "qwen35");
    assert_eq!(report["metadata"]["tokenizer.ggml.tokens"], json!({"array_of": "string", "length": 288}));
    let tensors = report["tensors"].as_array().unwrap();
    assert!(tensors.iter().any(|tensor| tensor["name"] == "token_embd.weight" && tensor["format"] == "Q8_0"));
    let listing = run(&["inspect", text(&tiny)]).stdout;
    for shown in
        ["GGUF v3", "layer 3", "attention", "recurrent", "Q8_0", "token_embd.weight", "head       tied"]
    {
        assert!(listing.contains(shown), "{listing}");
    }
}

#[test]
fn text_becomes_ids_and_ids_become_the_same_text() {
    let models = Models::new();
    let tiny = models.tiny();
    let model = ["-m", text(&tiny)];
    let input = "the word\n\tand <|im_end|> größer 🙂\u{0}";
    for more in [&["--no-bos"][..], &["--no-bos", "--parse-special"]] {
        let ids = run_with_input(&[&["tokenize"], &model[..], more].concat(), input.as_bytes());
        assert_eq!(ids.code, Some(0), "{ids:?}");
        assert!(ids.json().as_array().unwrap().iter().all(Value::is_u64));
        let back = run_with_input(&[&["detokenize"], &model[..]].concat(), ids.stdout.as_bytes());
        assert_eq!((back.code, back.stdout.as_str()), (Some(0), input));
    }
    let plain = run_with_input(&[&["tokenize"], &model[..]].concat(), b"<|im_end|>").json();
    let special =
        run_with_input(&[&["tokenize"], &model[..], &["--parse-special"]].concat(), b"<|im_end|>").json();
    assert!(plain.as_array().unwrap().len() > 1);
    assert_eq!(special.as_array().unwrap().len(), 1);
}

#[test]
fn a_file_that_does_not_say_how_it_splits_text_is_refused_unless_the_user_says_it() {
    let models = Models::new();
    let (named, nameless) = (models.tiny(), models.path("nameless.gguf"));
    let mut file = TinyModel::new("qwen3").writer().unwrap();
    std::fs::write(&nameless, file.remove("tokenizer.ggml.pre").to_bytes()).unwrap();
    let tokenize = |model: &std::path::Path, more: &[&str]| {
        run_with_input(&[&["tokenize", "-m", text(model)], more].concat(), b"the word 123")
    };
    let refused = tokenize(&nameless, &[]);
    assert_eq!(refused.code, Some(3));
    assert_one_error_line(&refused, "tokenizer.ggml.pre");
    assert_eq!(run(&["inspect", text(&nameless)]).code, Some(3));
    assert_eq!(tokenize(&nameless, &["--assume-pre", "qwen2"]).stdout, tokenize(&named, &[]).stdout);
    assert_eq!(run(&["inspect", text(&nameless), "--assume-pre", "qwen2"]).code, Some(0));
}

#[test]
fn input_that_is_not_what_was_expected_is_refused() {
    let models = Models::new();
    let tiny = models.tiny();
    let refused = |command: &str, input: &[u8], named: &str| {
        let ran = run_with_input(&[command, "-m", text(&tiny)], input);
        assert_eq!(ran.code, Some(3), "{ran:?}");
        assert_one_error_line(&ran, named);
    };
    refused("tokenize", b"\xff", "UTF-8");
    refused("run", b"\xff", "UTF-8");
    refused("detokenize", b"{}", "JSON array");
    refused("detokenize", b"[1, 99999]", "99999");
}

#[test]
fn completions_are_a_script_for_each_shell() {
    for (shell, shown) in
        [("bash", "_spillway"), ("zsh", "#compdef spillway"), ("fish", "complete -c spillway")]
    {
        let ran = run(&["completions", shell]);
        assert_eq!(ran.code, Some(0));
        assert!(ran.stdout.contains(shown) && ran.stdout.contains("detokenize"), "{shell}");
        assert!(!ran.stdout.contains("worker-cpu"), "{shell} offers what users do not start");
    }
}

#[test]
fn a_path_that_is_not_text_is_refused_before_anything_starts() {
    use std::os::unix::ffi::OsStrExt;
    let models = Models::new();
    let path = models.path("x").with_file_name(std::ffi::OsStr::from_bytes(b"n\xff.gguf"));
    std::fs::copy(models.tiny(), &path).unwrap();
    for command in [["inspect"].as_slice(), &["plan", "-m"], &["logits", "--ids", "1", "-m"]] {
        let output = support::spillway(command).arg(&path).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{command:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("not valid UTF-8"), "{output:?}");
    }
}

#[test]
fn unknown_kernels_are_refused_before_a_worker_starts() {
    let models = Models::new();
    let tiny = models.tiny();
    let logits = |kernels: &str| {
        let args = ["logits", "--json", "--ids", "1", "-m", text(&tiny)];
        support::spillway(args).env("SPILLWAY_KERNELS", kernels).output().unwrap()
    };
    let output = logits("bogus");
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(error["code"], "config_value_unusable");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("SPILLWAY_KERNELS") && message.contains("`avx512`"), "{message}");
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
    // Set but empty is as good as unset.
    assert_eq!(logits("").status.code(), Some(0));
}

/// Whoever reads standard error may go away: what is told there is lost, and nothing else changes.
#[test]
fn a_standard_error_that_nobody_reads_ends_no_command() {
    let models = Models::new();
    let (model, file) = (models.tiny(), models.path("config.toml"));
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    let load = ["logits", "-m", model, "--ids", "1", "--progress", "json"];
    let table: [(&[&str], i32); 5] = [
        (&["config", "--config", file, "set", "memory.max_seq", "64"], 0),
        (&["config", "--config", file, "unset", "memory.parallel"], 0),
        (&["plan", "-m", "/nowhere.gguf"], 3),
        (&["kernels"], 2),
        (&load, 0),
    ];
    for (args, code) in table {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = spillway(args);
        command.env("SPILLWAY_MAX_SEQ", "32").stdout(Stdio::null()).stderr(writer);
        assert_eq!(command.status().unwrap().code(), Some(code), "{args:?}");
    }
}
