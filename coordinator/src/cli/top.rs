//! `top`: what a daemon is doing, live. Times and shares are those since the frame before.

use super::args::TopArgs;
use super::failure::Failure;
use super::output;
use super::status::{Daemon, layers, shares};
use crate::planner::bytes;
use serde_json::Value;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// Goes to the upper left corner of a terminal, clears the rest of a line, and the rest of the screen: unlike clearing the
/// screen first, this does not flicker.
const HOME: &str = "\x1b[H";
const END_OF_LINE: &str = "\x1b[K\n";
const END_OF_SCREEN: &str = "\x1b[J";

/// Shows frame after frame until interrupted, or as many as were asked for.
pub fn top(args: &TopArgs) -> Result<(), Failure> {
    let mut daemon = Daemon::connect(&args.connect)?;
    let mut before: Option<(Instant, Value)> = None;
    let mut shown = 0;
    loop {
        let (now, state) = (Instant::now(), daemon.diagnosis()?);
        let since = before.as_ref().map(|(at, state)| (now.duration_since(*at), state));
        let frame = frame(&state, since);
        match io::stdout().is_terminal() {
            true => {
                let lines = frame.replace('\n', END_OF_LINE);
                output::text(&format!("{HOME}{lines}{END_OF_SCREEN}"))?;
            }
            false => output::text(&format!("{frame}\n"))?,
        }
        shown += 1;
        if args.frames.is_some_and(|frames| shown >= frames) {
            return Ok(());
        }
        before = Some((now, state));
        // Nobody unparks this thread; it may come back early all the same, which shows the state a little sooner.
        std::thread::park_timeout(args.interval);
    }
}

fn number(of: &Value, key: &str) -> u64 {
    of[key].as_u64().unwrap_or_default()
}

fn text<'a>(of: &'a Value, key: &str) -> &'a str {
    of[key].as_str().unwrap_or_default()
}

/// One frame: the state now, and before so long.
fn frame(state: &Value, before: Option<(Duration, &Value)>) -> String {
    let reason = match text(state, "reason") {
        "" => String::new(),
        reason => format!(" · {reason}"),
    };
    let mut out = format!("spillway {} · {}{reason}\n", text(state, "version"), text(state, "state"));
    if text(state, "model_path").is_empty() {
        return out;
    }
    let rate = before.map_or(0.0, |(time, before)| {
        let tokens = number(state, "tokens_done").saturating_sub(number(before, "tokens_done"));
        tokens as f64 / time.as_secs_f64().max(1e-3)
    });
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{} · {}", text(state, "model_path"), text(state, "model_arch"));
    let _ = writeln!(
        out,
        "requests: {} running, {} queued · {rate:.1} tokens/s, {} in all · {} restarts, epoch {}",
        number(state, "live"),
        number(state, "queued"),
        number(state, "tokens_done"),
        number(state, "restarts"),
        number(state, "epoch"),
    );
    let _ = writeln!(out, "{}", last_recovery(&state["recovery"]));
    let _ = writeln!(
        out,
        "{:>5}  {:6}  {:9}  {:>8}  {:12}  {:>9}  {:>9}  {:>9}  {:>5}  {:>5}  {:>5}  {:>9}",
        "stage",
        "target",
        "layers",
        "process",
        "state",
        "step",
        "last",
        "mean",
        "busy",
        "wait",
        "copy",
        "memory"
    );
    for (index, stage) in state["stages"].as_array().into_iter().flatten().enumerate() {
        // Counters of another process say nothing of this one.
        let before = before.map(|(_, before)| &before["stages"][index]);
        let before = before.filter(|before| before["pid"] == stage["pid"]);
        let _ = writeln!(out, "{}", row(index, stage, before));
    }
    out
}

fn row(index: usize, stage: &Value, before: Option<&Value>) -> String {
    let since = |key: &str| number(stage, key).saturating_sub(before.map_or(0, |before| number(before, key)));
    let [busy, wait, copy] = shares(["busy_ns", "wait_ns", "copy_ns"].map(since));
    format!(
        "{index:>5}  {:6}  {:9}  {:>8}  {:12}  {:>9}  {:>9}  {:>9}  {busy:>5}  {wait:>5}  {copy:>5}  {:>9}",
        text(stage, "target"),
        layers(stage),
        number(stage, "pid"),
        place(stage),
        number(stage, "step"),
        step_time(since("busy_ns"), since("steps")),
        step_time(number(stage, "busy_ns"), number(stage, "steps")),
        bytes(number(stage, "bytes")),
    )
}

/// Where a worker is: what it is doing while it serves, else how far it is.
fn place(stage: &Value) -> String {
    match (text(stage, "lifecycle"), number(stage, "stored_of")) {
        ("ready", _) => text(stage, "state").to_owned(),
        ("loading", of) if of > 0 => {
            format!("loading {:.0}%", number(stage, "stored_bytes") as f64 * 100.0 / of as f64)
        }
        (lifecycle, _) => lifecycle.replace('_', " "),
    }
}

/// Mean time of steps; a dash when there were none.
fn step_time(busy_ns: u64, steps: u64) -> String {
    match steps {
        0 => "-".to_owned(),
        steps => format!("{:.2} ms", busy_ns as f64 / steps as f64 / 1e6),
    }
}

fn last_recovery(recovery: &Value) -> String {
    if recovery.is_null() {
        return "no recovery so far\n".to_owned();
    }
    let parts = [
        ("detected", "detect_ms"),
        ("backed off", "backoff_ms"),
        ("replanned", "replan_ms"),
        ("respawned", "respawn_ms"),
        ("loaded", "load_ms"),
        ("replayed", "replay_ms"),
    ];
    let parts = parts.map(|(what, key)| (what, recovery[key].as_f64()));
    let told = parts
        .iter()
        .filter_map(|(what, ms)| ms.filter(|ms| *ms > 0.0).map(|ms| format!("{what} {ms:.1} ms")));
    let told: Vec<String> = told.collect();
    format!("last recovery: {} · {}\n", text(recovery, "code"), told.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn state(step: u64, busy_ns: u64, pid: u64) -> Value {
        json!({"version": "1", "state": "ready", "reason": null, "model_path": "/m.gguf", "model_arch": "llama",
            "live": 2, "queued": 5, "tokens_done": step * 4, "restarts": 1, "epoch": 3,
            "recovery": {"code": "worker_died", "detect_ms": 12.5, "backoff_ms": 0.0, "load_ms": 30.0, "replay_ms": 0.0},
            "stages": [{"first_layer": 0, "layers": 4, "target": "cpu", "pid": pid, "bytes": 2048, "lifecycle": "ready",
                "state": "stepping", "step": step, "steps": step, "busy_ns": busy_ns, "wait_ns": 0, "copy_ns": 0}]})
    }

    fn last_words(frame: &str) -> Vec<&str> {
        frame.lines().last().unwrap().split_whitespace().collect()
    }

    #[test]
    fn times_and_shares_are_those_since_the_frame_before() {
        let (first, second) = (state(10, 10_000_000, 7), state(20, 40_000_000, 7));
        let later = frame(&second, Some((Duration::from_secs(2), &first)));
        assert!(
            later.contains("2 running, 5 queued · 20.0 tokens/s, 80 in all · 1 restarts, epoch 3"),
            "{later}"
        );
        assert!(later.contains("worker_died · detected 12.5 ms, loaded 30.0 ms\n"), "{later}");
        let row = [
            "0", "cpu", "0-3", "7", "stepping", "20", "3.00", "ms", "2.00", "ms", "100%", "0%", "0%", "2.0",
            "KiB",
        ];
        assert_eq!(last_words(&later), row);
        let replaced = frame(&state(5, 5_000_000, 8), Some((Duration::from_secs(1), &second)));
        assert_eq!(
            last_words(&replaced)[5..10],
            ["5", "1.00", "ms", "1.00", "ms"],
            "another process counts anew"
        );
    }

    #[test]
    fn a_worker_that_does_not_serve_shows_how_far_it_is() {
        let shown = |stage: Value| place(&stage);
        assert_eq!(
            shown(json!({"lifecycle": "loading", "stored_bytes": 30, "stored_of": 40})),
            "loading 75%"
        );
        assert_eq!(shown(json!({"lifecycle": "loading"})), "loading");
        assert_eq!(shown(json!({"lifecycle": "backing_off", "state": "ended"})), "backing off");
        assert_eq!(
            frame(&json!({"version": "1", "state": "none", "reason": "no model"}), None).lines().count(),
            1
        );
    }
}
