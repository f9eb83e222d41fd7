//! The real program against numbers that other implementations made: transformers on unquantised files, exact arithmetic on
//! quantised ones, and the real SmolLM2 model. The tolerances are those of the oracle folder's README.
//!
//! Oracles are looked for in `$SPILLWAY_ORACLES`, then in `../shared/oracles` beside the checkout. Without them the tests print a
//! note and pass, unless `SPILLWAY_REQUIRE_ORACLES=1`.
//!
//! On a machine with a GPU: `SPILLWAY_TEST_PLACEMENT="--devices 0"` puts the tested model there. `SPILLWAY_TEST_BINARY` names the
//! program where it is not where Cargo built it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One position of `spillway logits --json`.
struct Row {
    argmax: u64,
    top: HashMap<u64, f64>,
    mean: f64,
    std: f64,
}

impl Row {
    /// The `n` largest logits that were shown, with their ids.
    fn largest(&self, n: usize) -> impl Iterator<Item = (u64, f64)> {
        let mut all: Vec<(u64, f64)> = self.top.iter().map(|(&id, &logit)| (id, logit)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.into_iter().take(n)
    }
}

/// A root mean square in the making.
#[derive(Default)]
struct Rms {
    squares: f64,
    count: f64,
}

impl Rms {
    fn add(&mut self, difference: f64) {
        self.squares += difference * difference;
        self.count += 1.0;
    }

    fn value(&self) -> f64 {
        (self.squares / self.count).sqrt()
    }
}

fn oracles() -> Option<PathBuf> {
    let folder = std::env::var_os("SPILLWAY_ORACLES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/oracles"), PathBuf::from);
    if folder.is_dir() {
        return Some(folder);
    }
    assert_ne!(
        std::env::var("SPILLWAY_REQUIRE_ORACLES").as_deref(),
        Ok("1"),
        "no oracles at {}",
        folder.display()
    );
    eprintln!("skipped: no oracles at {}", folder.display());
    None
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .unwrap()
}

fn join(ids: &[u64]) -> String {
    ids.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// Where the tested model lives: on CPU workers unless the environment says otherwise.
fn placement() -> Vec<String> {
    let arguments = std::env::var("SPILLWAY_TEST_PLACEMENT").unwrap_or_default();
    arguments.split_whitespace().map(str::to_owned).collect()
}

/// Whether the tested model lives on CPU workers.
fn on_cpu() -> bool {
    placement().is_empty()
}

/// Standard output of `spillway logits` for `ids` with the tested placement and further arguments.
fn placed_logits_output(model: &Path, ids: &[u64], more: &[&str]) -> String {
    let placement = placement();
    logits_output(
        model,
        ids,
        &placement.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>(),
    )
}

/// Standard output of `spillway logits` for `ids`, with further arguments.
fn logits_output(model: &Path, ids: &[u64], more: &[&str]) -> String {
    let binary = std::env::var_os("SPILLWAY_TEST_BINARY").unwrap_or(env!("CARGO_BIN_EXE_spillway").into());
    let output = Command::new(binary)
        .args(["logits", "--json", "--ids", &join(ids), "-m"])
        .arg(model)
        .args(more)
        .env("SPILLWAY_CONFIG", "/dev/null")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}: {}", model.display(), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn placed_logits(model: &Path, ids: &[u64], more: &[&str]) -> Vec<Row> {
    rows(&placed_logits_output(model, ids, more), ids.len())
}

fn logits(model: &Path, ids: &[u64], more: &[&str]) -> Vec<Row> {
    rows(&logits_output(model, ids, more), ids.len())
}

fn rows(output: &str, positions: usize) -> Vec<Row> {
    let rows: Vec<Row> = output
        .lines()
        .map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            let pair = |p: &Value| (p[0].as_u64().unwrap(), p[1].as_f64().unwrap());
            Row {
                argmax: row["argmax"].as_u64().unwrap(),
                top: row["top"].as_array().unwrap().iter().map(pair).collect(),
                mean: row["mean"].as_f64().unwrap(),
                std: row["std"].as_f64().unwrap(),
            }
        })
        .collect();
    assert_eq!(rows.len(), positions, "one row per position");
    rows
}

/// Files of the oracle folders that hold exactly the weights the transformers goldens were made with.
const UNQUANTISED: [&str; 6] = [
    "llama/llama-bf16.gguf",
    "qwen2/qwen2-bf16.gguf",
    "qwen3/qwen3-bf16.gguf",
    "qwen35/qwen35-bf16.gguf",
    "qwen35/qwen35-f16.gguf",
    "qwen35_r1mtp/qwen35_r1mtp-bf16.gguf",
];

#[test]
fn unquantised_files_give_the_logits_and_the_greedy_tokens_of_transformers() {
    let Some(folder) = oracles() else { return };
    for file in UNQUANTISED {
        let model = folder.join(file);
        let compact = read_json(&model.with_file_name("compact.json"));
        for (length, seq) in compact["seqs"].as_object().unwrap() {
            let context = format!("{file}, {length} tokens");
            let prompt = ids(&seq["ids"]);
            let greedy = ids(&seq["greedy"]);
            assert_eq!(greedy.len(), 32);
            // Teacher-forced: the greedy continuation is right exactly if every next argmax is.
            let forced: Vec<u64> = prompt.iter().chain(&greedy[..31]).copied().collect();
            let rows = placed_logits(&model, &forced, &["--top", "1152"]);
            for (pos, row) in rows[..prompt.len()].iter().enumerate() {
                assert_eq!(
                    row.argmax,
                    seq["argmax_all"][pos].as_u64().unwrap(),
                    "{context}, argmax at {pos}"
                );
                for pair in seq["top5_all"][pos].as_array().unwrap() {
                    near(
                        row.top[&pair[0].as_u64().unwrap()],
                        pair[1].as_f64().unwrap(),
                        &format!("{context}, logit at {pos}"),
                    );
                }
                near(row.mean, seq["mean_all"][pos].as_f64().unwrap(), &format!("{context}, mean at {pos}"));
                near(row.std, seq["std_all"][pos].as_f64().unwrap(), &format!("{context}, std at {pos}"));
            }
            for (id, expected) in seq["logits_last"].as_array().unwrap().iter().enumerate() {
                let got = rows[prompt.len() - 1].top[&(id as u64)];
                near(got, expected.as_f64().unwrap(), &format!("{context}, last logits, id {id}"));
            }
            let answer: Vec<u64> = rows[prompt.len() - 1..].iter().map(|row| row.argmax).collect();
            assert_eq!(answer, greedy, "{context}, greedy tokens");
        }
    }
}

fn near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() <= 1e-3, "{what}: {got} is not within 1e-3 of {expected}");
}

/// llama.cpp's noise floor against exact arithmetic (rms of the top-20 logits over 300 positions): simple formats, and
/// K-quants with IQ4_XS. From the oracle folder's README.
const NOISE_FLOOR: [(&str, f64, f64); 5] = [
    ("llama", 0.085, 0.12),
    ("qwen2", 0.048, 0.068),
    ("qwen3", 0.13, 0.18),
    ("qwen35", 0.24, 0.37),
    ("qwen35_r1mtp", 0.17, 0.22),
];
const SIMPLE: [&str; 6] = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"];

/// What may be left of the noise with 16-bit activations.
const FINE_SHARE: f64 = 0.1;

#[test]
fn quantised_files_stay_within_the_noise_that_8_bit_activations_make_and_small_models_far_below() {
    let Some(folder) = oracles() else { return };
    let mut files = 0;
    for (name, simple, k_quant) in NOISE_FLOOR {
        let quant = read_json(&folder.join(name).join("quant.json"));
        for (file, seqs) in quant.as_object().unwrap() {
            let model = folder.join(name).join(format!("{file}.gguf"));
            if !model.exists() || file.ends_with("bf16") || file.ends_with("f16") {
                continue;
            }
            let floor = if SIMPLE.iter().any(|format| file.ends_with(format)) { simple } else { k_quant };
            let (mut noise, mut fine_noise) = (Rms::default(), Rms::default());
            let (mut agree, mut positions, mut peer) = (0usize, 0usize, 0.0);
            for seq in seqs.as_object().unwrap() {
                // The tokens of a sequence are the same in every file of a folder.
                let compact = read_json(&folder.join(name).join("compact.json"));
                let prompt = ids(&compact["seqs"][seq.0]["ids"]);
                let int8 = if on_cpu() { &["--activations", "int8"][..] } else { &[] };
                let rows = placed_logits(&model, &prompt, &[&["--top", "1152"], int8].concat());
                let fine = logits(&model, &prompt, &["--top", "1152"]);
                for pair in seq.1["exact_last_top20"].as_array().unwrap() {
                    let (id, exact) = (pair[0].as_u64().unwrap(), pair[1].as_f64().unwrap());
                    fine_noise.add(fine[prompt.len() - 1].top[&id] - exact);
                }
                // The goldens have exact logits of the last position only, too few for a noise of one draw per position.
                // Those with 16-bit activations stand in for them everywhere else: they are that close.
                for (row, fine) in rows.iter().zip(&fine) {
                    fine.largest(20).for_each(|(id, exact)| noise.add(row.top[&id] - exact));
                }
                let exact = ids(&seq.1["exact_argmax_all"]);
                agree += exact.iter().zip(&rows).filter(|(exact, row)| **exact == row.argmax).count();
                positions += exact.len();
                peer += seq.1["llamacpp_vs_exact"]["argmax_agree"].as_f64().unwrap() * exact.len() as f64;
            }
            let (rms, fine) = (noise.value(), fine_noise.value());
            let (agree, peer) = (agree as f64 / positions as f64, peer / positions as f64);
            eprintln!(
                "{file}: rms {rms:.4} (floor {floor}), by default {fine:.4}, argmax agreement {agree:.3} (llama.cpp {peer:.3})"
            );
            assert!(rms <= 1.3 * floor, "{file}: rms {rms} is above 1.3 x {floor}");
            assert!(fine <= FINE_SHARE * floor, "{file}: rms {fine} is above {FINE_SHARE} x {floor}");
            assert!(agree >= peer - 0.03, "{file}: argmax agreement {agree} is below llama.cpp's {peer}");
            files += 1;
        }
    }
    assert!(files >= 18, "only {files} quantised files were found");
}

#[test]
fn smollm2_agrees_with_exact_arithmetic_on_at_least_99_percent_of_the_next_tokens() {
    let Some(folder) = oracles() else { return };
    let Some(model) = std::env::var_os("SPILLWAY_SMOLLM2").map(PathBuf::from) else {
        eprintln!("skipped: SPILLWAY_SMOLLM2 does not name the real model");
        return;
    };
    let exact = read_json(&folder.join("smollm2/exact.json"));
    let (mut agree, mut total) = (0, 0);
    for item in exact["items"].as_array().unwrap() {
        let prompt = ids(&item["prompt_ids"]);
        let greedy = ids(&item["exact_greedy_ids"]);
        let forced: Vec<u64> = prompt.iter().chain(&greedy[..greedy.len() - 1]).copied().collect();
        let rows = logits(&model, &forced, &["--cpu-workers", "2"]);
        agree += rows[prompt.len() - 1..].iter().zip(&greedy).filter(|(row, id)| row.argmax == **id).count();
        total += greedy.len();
    }
    eprintln!("SmolLM2: {agree} of {total} next tokens agree");
    assert!(total > 100 && agree as f64 >= 0.99 * total as f64, "{agree} of {total} agree");
}

/// A file of every architecture, quantised and not, with its number of layers and the activations to use.
const PLACED: [(&str, usize, &str); 6] = [
    ("llama/llama-Q4_K_M.gguf", 4, "int8"),
    ("llama/llama-IQ4_XS.gguf", 4, "int16"),
    ("qwen2/qwen2-bf16.gguf", 4, "auto"),
    ("qwen3/qwen3-bf16.gguf", 4, "auto"),
    ("qwen35/qwen35-Q5_K_M.gguf", 8, "int8"),
    ("qwen35/qwen35-f16.gguf", 8, "auto"),
];

#[test]
fn placement_chunking_and_threads_cannot_change_a_bit_of_the_logits() {
    let Some(folder) = oracles() else { return };
    for (file, layers, activations) in PLACED {
        let model = folder.join(file);
        let compact = read_json(&model.with_file_name("compact.json"));
        let prompt = ids(&compact["seqs"]["300"]["ids"]);
        let always = ["--top", "1152", "--activations", activations];
        let all = |more: &[&str]| logits_output(&model, &prompt, &[&always, more].concat());
        let reference = all(&["--cpu-workers", "1"]);
        assert_eq!(reference.lines().count(), 300);
        let layers = layers.to_string();
        for more in [
            vec!["--cpu-workers", "2"],
            vec!["--cpu-workers", "3"],
            vec!["--cpu-workers", &layers],
            vec!["--cpu-workers", "2", "--pp-layers", "1,3"].into_iter().filter(|_| layers == "4").collect(),
            vec!["--chunk", "1"],
            vec!["--chunk", "7", "--cpu-workers", "2"],
            vec!["--chunk", "64", "--threads", "1"],
            vec!["--threads", "3"],
        ] {
            assert!(all(&more) == reference, "{file}: {more:?} changes the logits");
        }
    }
}
