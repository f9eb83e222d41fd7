//! `status`: what a daemon is doing, asked over its local socket; with `--watch`, again and again.

use super::args::StatusArgs;
use super::failure::Failure;
use super::output;
use crate::planner::bytes;
use serde_json::Value;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest wait for a daemon's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Clears a terminal and goes to its upper left corner.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Prints the state once or until interrupted.
pub fn status(args: &StatusArgs) -> Result<(), Failure> {
    let mut daemon = Daemon::connect(&args.connect)?;
    loop {
        let answer = daemon.diagnosis()?;
        match (args.json, args.watch) {
            (true, _) => output::json(&answer)?,
            (false, Some(_)) if io::stdout().is_terminal() => {
                output::text(&format!("{CLEAR}{}", table(&answer)))?
            }
            (false, _) => output::text(&table(&answer))?,
        }
        let Some(seconds) = args.watch else { return Ok(()) };
        // Nobody unparks this thread; it may come back early all the same, which shows the state a little sooner.
        std::thread::park_timeout(seconds);
    }
}

/// A connection to a daemon.
pub(super) struct Daemon {
    name: String,
    stream: BufReader<UnixStream>,
}

impl Daemon {
    pub(super) fn connect(path: &Path) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let connected = UnixStream::connect(path).and_then(|stream| {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => Ok(Self { name, stream: BufReader::new(stream) }),
            Err(source) => Err(Failure::NoDaemon { path: name, source }),
        }
    }

    pub(super) fn diagnosis(&mut self) -> Result<Value, Failure> {
        self.ask().map_err(|source| Failure::SilentDaemon { path: self.name.clone(), source })
    }

    fn ask(&mut self) -> io::Result<Value> {
        self.stream.get_mut().write_all(b"{\"type\":\"diag\"}\n")?;
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// The state for people.
fn table(state: &Value) -> String {
    let text = |key: &str| state[key].as_str().unwrap_or_default();
    let number = |key: &str| state[key].as_u64().unwrap_or_default();
    let mut out = format!("spillway {} · {}", text("version"), text("state"));
    // Writing to a String cannot fail.
    if !text("reason").is_empty() {
        let _ = write!(out, " · {}", text("reason"));
    }
    let _ = writeln!(out);
    if text("model_path").is_empty() {
        return out;
    }
    let _ = writeln!(out, "{} · {}", text("model_path"), text("model_arch"));
    let _ = writeln!(
        out,
        "requests: {} running, {} queued · {} tokens done · {} restarts, epoch {}\n",
        number("live"),
        number("queued"),
        number("tokens_done"),
        number("restarts"),
        number("epoch"),
    );
    let _ = writeln!(
        out,
        "{:>5}  {:6}  {:9}  {:>8}  {:9}  {:>9}  {:>9}  {:>5}  {:>5}  {:>5}",
        "stage", "target", "layers", "process", "state", "step", "memory", "busy", "wait", "copy"
    );
    for (index, stage) in state["stages"].as_array().into_iter().flatten().enumerate() {
        let _ = writeln!(out, "{}", row(index, stage));
    }
    out
}

fn row(index: usize, stage: &Value) -> String {
    let number = |key: &str| stage[key].as_u64().unwrap_or_default();
    let text = |key: &str| stage[key].as_str().unwrap_or_default();
    let [busy, wait, copy] = shares(["busy_ns", "wait_ns", "copy_ns"].map(number));
    format!(
        "{index:>5}  {:6}  {:9}  {:>8}  {:9}  {:>9}  {:>9}  {busy:>5}  {wait:>5}  {copy:>5}",
        text("target"),
        layers(stage),
        number("pid"),
        text("state"),
        number("step"),
        bytes(number("bytes")),
    )
}

/// The band of a stage.
pub(super) fn layers(stage: &Value) -> String {
    let number = |key: &str| stage[key].as_u64().unwrap_or_default();
    let first = number("first_layer");
    format!("{first}-{}", (first + number("layers")).saturating_sub(1))
}

/// Each time's share of all of them.
pub(super) fn shares(times: [u64; 3]) -> [String; 3] {
    let all = times.iter().sum::<u64>().max(1);
    times.map(|time| format!("{:.0}%", time as f64 * 100.0 / all as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_table_has_a_row_per_stage_with_shares_of_time() {
        let state = json!({"version": "1", "state": "recovering", "reason": "stage 1 died", "model_path": "/m.gguf",
            "model_arch": "llama", "restarts": 3, "epoch": 9, "stages": [
                {"first_layer": 0, "layers": 4, "target": "cpu", "pid": 77, "bytes": 2048, "state": "stepping",
                 "step": 12, "busy_ns": 75, "wait_ns": 20, "copy_ns": 5}]});
        let text = table(&state);
        assert!(text.contains("recovering · stage 1 died") && text.contains("3 restarts, epoch 9"), "{text}");
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["0", "cpu", "0-3", "77", "stepping", "12", "2.0", "KiB", "75%", "20%", "5%"]);
        assert!(table(&json!({"version": "1", "state": "none"})).lines().count() == 1);
    }
}
