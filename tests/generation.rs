//! `run`, `chat`, `logits` and `bench` through the real program and its worker processes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use std::path::Path;
use support::{Models, Ran, run, run_with_input};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Sampling that makes a tiny model say something varied, reproducibly.
const VARIED: [&str; 7] = ["--temp", "1.5", "--top-p", "1", "--seed", "11", "--ignore-eos"];

/// Runs `run --json` with further arguments; the lines.
fn sampled(model: &Path, more: &[&str]) -> Vec<Value> {
    let base = [&["run", "-m", text(model), "-p", "the word", "--json"], &VARIED[..]].concat();
    let ran = run(&[&base[..], more].concat());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    ran.json_lines()
}

fn done(lines: &[Value]) -> &Value {
    let last = lines.last().unwrap();
    assert_eq!(last["type"], "done", "{last}");
    last
}

#[test]
fn the_last_line_of_run_has_the_whole_answer() {
    let models = Models::new();
    let tiny = models.tiny();
    let lines = sampled(&tiny, &["-n", "8"]);
    let last = done(&lines);
    assert_eq!(last["token_ids"].as_array().unwrap().len(), 8);
    assert_eq!(last["finish_reason"], "length");
    assert!(!last["prompt_ids"].as_array().unwrap().is_empty());
    assert_eq!(last["timings"]["generated_tokens"], 8);
    let streamed: String =
        lines[..lines.len() - 1].iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert_eq!(last["text"].as_str().unwrap(), streamed);
}

#[test]
fn the_prompt_may_be_an_option_an_argument_or_standard_input() {
    let models = Models::new();
    let tiny = models.tiny();
    let base = ["run", "-m", text(&tiny), "--temp", "0", "-n", "6", "--json"];
    let ids = |ran: Ran| done(&ran.json_lines())["prompt_ids"].clone();
    let as_option = ids(run(&[&base[..], &["-p", "the word"]].concat()));
    assert_eq!(as_option, ids(run(&[&base[..], &["the word"]].concat())));
    for input in [&b"the word"[..], b"the word\n", b"the word\r\n"] {
        assert_eq!(as_option, ids(run_with_input(&base, input)), "{input:?}");
    }
    assert_ne!(as_option, ids(run_with_input(&base, b"the word\n\n")), "only the last line end");
}

#[test]
fn the_chat_template_is_used_unless_the_prompt_is_raw() {
    let models = Models::new();
    let tiny = models.tiny();
    let ids = |more: &[&str]| done(&sampled(&tiny, &[&["-n", "0"], more].concat()))["prompt_ids"].clone();
    let tokenized = |input: &str| {
        run_with_input(&["tokenize", "-m", text(&tiny), "--parse-special", "--no-bos"], input.as_bytes())
            .json()
    };
    assert_eq!(ids(&["--raw"]), tokenized("the word"));
    assert_eq!(ids(&[]), tokenized("<|im_start|>user\nthe word<|im_end|>\n<|im_start|>assistant\n"));
    let with_system =
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nthe word<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(ids(&["--system", "be"]), tokenized(with_system));
}

#[test]
fn no_tokens_asked_for_is_an_answer_without_text() {
    let models = Models::new();
    let lines = sampled(&models.tiny(), &["-n", "0"]);
    assert_eq!(lines.len(), 1);
    assert_eq!((&done(&lines)["text"], &done(&lines)["finish_reason"]), (&json!(""), &json!("length")));
}

#[test]
fn the_number_of_workers_does_not_change_the_answer() {
    let models = Models::new();
    let tiny = models.tiny();
    let answer = |workers| {
        let lines = sampled(&tiny, &["-n", "12", "--cpu-workers", workers]);
        done(&lines)["token_ids"].clone()
    };
    let one = answer("1");
    for workers in ["2", "3", "4"] {
        assert_eq!(answer(workers), one, "{workers} workers");
    }
}

#[test]
fn the_same_seed_gives_the_same_text_and_another_one_another() {
    let models = Models::new();
    let tiny = models.tiny();
    let base = [
        "run",
        "-m",
        text(&tiny),
        "-p",
        "x",
        "--temp",
        "2",
        "--top-p",
        "1",
        "-n",
        "16",
        "--ignore-eos",
        "--json",
    ];
    let answer = |more: &[&str]| done(&run(&[&base[..], more].concat()).json_lines()).clone();
    let first = answer(&["--seed", "5"]);
    assert_eq!(first["seed"], 5);
    assert_eq!(first["token_ids"], answer(&["--seed", "5"])["token_ids"]);
    assert_ne!(first["token_ids"], answer(&["--seed", "6"])["token_ids"]);
    // A seed that was drawn is told, so that the answer can be had again.
    let drawn = answer(&[]);
    let again = answer(&["--seed", &drawn["seed"].to_string()]);
    assert_eq!(drawn["token_ids"], again["token_ids"]);
}

#[test]
fn greedy_takes_the_arg_max_and_a_banned_token_is_not_generated() {
    let models = Models::new();
    let tiny = models.tiny();
    let base =
        ["run", "-m", text(&tiny), "-p", "the word", "--temp", "0", "-n", "1", "--ignore-eos", "--json"];
    let answer = |more: &[&str]| done(&run(&[&base[..], more].concat()).json_lines()).clone();
    let greedy = answer(&[]);
    let favourite = &greedy["token_ids"][0];
    let ids: Vec<String> = greedy["prompt_ids"].as_array().unwrap().iter().map(Value::to_string).collect();
    let rows = run(&["logits", "-m", text(&tiny), "--ids", &ids.join(","), "--json"]).json_lines();
    assert_eq!(favourite, &rows.last().unwrap()["argmax"]);
    let second = &rows.last().unwrap()["top"][1][0];
    assert_eq!(&answer(&["--logit-bias", &format!("{favourite}=-inf")])["token_ids"][0], second);
}

#[test]
fn a_stop_string_ends_the_answer_and_does_not_show() {
    let models = Models::new();
    let tiny = models.tiny();
    let whole = done(&sampled(&tiny, &["-n", "40"]))["text"].as_str().unwrap().to_owned();
    let characters: Vec<char> = whole.chars().collect();
    // A stop string in the middle, of several characters, so that it is likely to span tokens.
    let stop: String = characters[characters.len() / 2..][..3.min(characters.len() / 2)].iter().collect();
    let lines = sampled(&tiny, &["-n", "40", "--stop", &stop]);
    let before = &whole[..whole.find(&stop).unwrap()];
    assert_eq!(done(&lines)["text"], before);
    assert_eq!(done(&lines)["finish_reason"], "stop");
    let streamed: String =
        lines[..lines.len() - 1].iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert_eq!(streamed, before);
}

#[test]
fn without_json_the_answer_is_plain_text() {
    let models = Models::new();
    let tiny = models.tiny();
    let wanted = done(&sampled(&tiny, &["-n", "8"]))["text"].as_str().unwrap().to_owned();
    let ran = run(&[&["run", "-m", text(&tiny), "the word", "-n", "8"], &VARIED[..]].concat());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert_eq!(ran.stdout, if wanted.ends_with('\n') { wanted } else { wanted + "\n" });
}

#[test]
fn progress_is_told_as_json_when_asked() {
    let models = Models::new();
    let tiny = models.tiny();
    let ran = run(&["run", "-m", text(&tiny), "x", "-n", "0", "--progress", "json", "--cpu-workers", "2"]);
    let events: Vec<Value> = ran.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for stage in 0..2 {
        let last = events.iter().rfind(|event| event["stage"] == stage).unwrap();
        assert_eq!((&last["type"], &last["stages"]), (&json!("loading"), &json!(2)));
        assert_eq!(last["done"], last["total"]);
    }
}

#[test]
fn logits_are_one_line_per_position_and_the_same_bytes_for_any_placement() {
    let models = Models::new();
    for (name, model) in [
        ("qwen35", spillway_model::testing::TinyModel::new("qwen35")),
        ("qwen3", spillway_model::testing::TinyModel::new("qwen3").q8_0()),
    ] {
        let path = models.write(name, &model);
        let ids: Vec<String> = (0..40).map(|i| ((i * 37) % 250).to_string()).collect();
        let base = ["logits", "-m", text(&path), "--ids", &ids.join(","), "--top", "5", "--json"];
        let reference = run(&base);
        assert_eq!((reference.code, reference.stderr.as_str()), (Some(0), ""));
        let rows = reference.json_lines();
        assert_eq!(rows.len(), 40);
        for (pos, row) in rows.iter().enumerate() {
            assert_eq!((&row["pos"], row["token"].to_string()), (&json!(pos), ids[pos].clone()));
            assert_eq!(row["top"].as_array().unwrap().len(), 5);
            assert_eq!(row["top"][0][0], row["argmax"]);
            assert!(row["mean"].is_f64() && row["std"].as_f64().unwrap() > 0.0);
        }
        for more in [
            &["--cpu-workers", "2"][..],
            &["--cpu-workers", "3", "--chunk", "7"],
            &["--pp", "4", "--chunk", "1"],
            &["--pp-layers", "1,3", "--chunk", "64", "--threads", "1"],
        ] {
            assert_eq!(run(&[&base[..], more].concat()).stdout, reference.stdout, "{name} {more:?}");
        }
    }
}

#[test]
fn bench_reports_speed_bytes_and_the_host() {
    let models = Models::new();
    let tiny = models.tiny();
    let base = ["bench", "-m", text(&tiny), "-p", "16,32", "-n", "4", "-d", "0,8", "-r", "2"];
    let ran = run(&[&base[..], &["--json", "--cpu-workers", "2"]].concat());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    let report = ran.json();
    assert_eq!((&report["type"], report["kernels"].as_array().unwrap().len()), (&json!("bench"), 2));
    assert!(report["read_bandwidth"]["best"].as_f64().unwrap() > 1e8, "{}", report["read_bandwidth"]);
    let tests = report["results"].as_array().unwrap();
    assert_eq!(tests.len(), 6);
    for test in tests {
        let speed = |of: &str| test["tok_s"][of].as_f64().unwrap();
        assert!(
            0.0 < speed("min") && speed("min") <= speed("median") && speed("median") <= speed("max"),
            "{test}"
        );
        assert_eq!(test["repetitions"], 2);
        assert_eq!(test["bytes_per_token"].is_u64(), test["test"] == "decode");
    }
    let table = run(&base).stdout;
    assert!(
        table.contains("prefill") && table.contains("decode") && table.contains("load of the host"),
        "{table}"
    );
}

#[test]
fn chat_answers_a_turn_per_line_and_can_start_anew() {
    let models = Models::new();
    let tiny = models.tiny();
    let base = [&["chat", "-m", text(&tiny), "-n", "24"], &VARIED[..]].concat();
    let ran = run_with_input(&base, b"hello\n/reset\nhello\n/nonsense\n/help\n/quit\nnever said\n");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stderr.contains("/nonsense"), "{ran:?}");
    let (answers, help) = ran.stdout.split_once("/reset forgets").unwrap();
    assert_eq!(help.lines().count(), 1);
    let half = answers.len() / 2;
    assert_eq!(answers[..half], answers[half..], "the same turn in an empty conversation");
    // Without the reset the second turn sees the first.
    let ran = run_with_input(&base, b"hello\nhello\n");
    assert_eq!(ran.code, Some(0));
    assert!(ran.stdout.starts_with(&answers[..half]), "{ran:?} {answers:?}");
    assert_ne!(ran.stdout, answers);
}

#[test]
fn a_turn_that_does_not_fit_is_told_and_the_chat_goes_on() {
    let models = Models::new();
    let tiny = models.tiny();
    let long = "word ".repeat(600);
    let input = format!("{long}\nhello\n");
    let ran = run_with_input(&["chat", "-m", text(&tiny), "-n", "4"], input.as_bytes());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stderr.contains("512") && ran.stderr.contains("/reset"), "{ran:?}");
    assert!(!ran.stdout.is_empty());
}
