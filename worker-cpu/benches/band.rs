//! A band on a real file, in one process: load time and memory, prefill, decode, and what cutting it in two costs.
//!
//! `SPILLWAY_BENCH_MODEL=FILE cargo bench -p spillway-worker-cpu` prints one JSON object. Floors: peak RSS at most 1.3 times
//! the file; decoding through two bands at least 95 % as fast as through one (both measured in turns in the same run).

#![allow(clippy::unwrap_used, clippy::panic, reason = "a bench stops at the first surprise")]
#![allow(clippy::cast_precision_loss, reason = "sizes and times to print")]

#[path = "../tests/support/mod.rs"]
mod support;

use spillway_kernels::topology::available_threads;
use spillway_protocol::frame::LogitRows;
use std::path::PathBuf;
use std::time::Instant;
use support::{Piece, Pipeline, Rounding, open};

/// Tokens of the prompt and of the answer.
const PROMPT: u32 = 128;
const ANSWER: u32 = 32;

fn main() {
    let Some(path) = std::env::var_os("SPILLWAY_BENCH_MODEL").map(PathBuf::from) else {
        eprintln!("skipped: SPILLWAY_BENCH_MODEL names no model file");
        return;
    };
    let (model, threads) = (open(&path), available_threads());
    let layers = model.program().layers.len();
    let start = Instant::now();
    let mut one = Pipeline::new(&model, &[layers], threads, Rounding::COARSE);
    let load_s = start.elapsed().as_secs_f64();
    let peak_rss = peak_rss_bytes();
    let file = model.gguf().file_len();
    let mut two = Pipeline::new(&model, &[layers - layers / 2, layers / 2], threads, Rounding::COARSE);

    let ids: Vec<u32> = (0..PROMPT).map(|i| i * 37 % 1000).collect();
    let start = Instant::now();
    let prompt = Piece { slot: 0, start: 0, ids: &ids, logits: LogitRows::Last };
    one.step(&[prompt], &mut ());
    let prefill_s = start.elapsed().as_secs_f64();
    let (mut alone, mut cut) = (Vec::new(), Vec::new());
    for position in 0..ANSWER {
        alone.push(decode(&mut one, position));
        cut.push(decode(&mut two, position));
    }
    let (alone, cut) = (median(alone), median(cut));
    let report = serde_json::json!({
        "threads": threads,
        "load_s": load_s,
        "load_gb_s": file as f64 / load_s / 1e9,
        "peak_rss_over_file": peak_rss as f64 / file as f64,
        "prefill_tok_s": f64::from(PROMPT) / prefill_s,
        "decode_tok_s": 1.0 / alone,
        "two_bands_over_one": alone / cut,
    });
    println!("{report}");
}

/// Seconds that one token takes.
fn decode(pipeline: &mut Pipeline, start: u32) -> f64 {
    let clock = Instant::now();
    let ids = [start];
    pipeline.step(&[Piece { slot: 1, start, ids: &ids, logits: LogitRows::Last }], &mut ());
    clock.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The largest resident size this process has had.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}
