//! What happens to commands and workers when something is killed, interrupted or not listened to.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};
use std::time::Duration;
use support::{Models, eventually, holds_within, is_running, long_model, signal, spillway, wait, workers_of};

/// A `run --json` that does not end by itself, after its first token.
struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Running {
    fn start(model: &Path) -> Self {
        Self::start_with_env(model, &[])
    }

    fn start_with_env(model: &Path, env: &[(&str, &str)]) -> Self {
        let base = ["run", "-m", model.to_str().unwrap(), "-p", "x", "-n", "60000", "--ignore-eos", "--json"];
        let base = base.iter().chain(&["--max-seq", "32768", "--cpu-workers", "2"]);
        let mut child = spillway(base)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut running = Running { stdout: BufReader::new(child.stdout.take().unwrap()), child };
        assert_eq!(running.event()["type"], "token");
        running
    }

    fn event(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn workers(&self) -> Vec<u32> {
        workers_of(self.child.id())
    }

    /// Exit code, last line, standard error.
    fn end(mut self) -> (Option<i32>, Value, String) {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        let status = wait(&mut self.child);
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (status.code(), serde_json::from_str(rest.lines().last().unwrap()).unwrap(), stderr)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails when it has ended, which is what is wanted.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn without_restarts_a_killed_worker_ends_the_command_with_its_exit_code_and_one_error() {
    let models = Models::new();
    for victim in [0, 1] {
        let running = Running::start_with_env(&long_model(&models), &[("SPILLWAY_RESTART_LIMIT", "0")]);
        let workers = running.workers();
        assert_eq!(workers.len(), 2);
        signal(workers[victim], Signal::SIGKILL);
        let (code, last, stderr) = running.end();
        assert_eq!(
            (code, &last["type"], &last["code"]),
            (Some(4), &json!("error"), &json!("worker_died")),
            "{stderr}"
        );
        assert!(stderr.lines().any(|line| line.starts_with("error: ")), "{stderr}");
        assert!(workers.iter().all(|&pid| !is_running(pid)));
    }
}

#[test]
fn a_killed_coordinator_leaves_no_worker_behind() {
    let models = Models::new();
    let mut running = Running::start(&long_model(&models));
    let workers = running.workers();
    running.child.kill().unwrap();
    let gone = holds_within(Duration::from_secs(1), || workers.iter().all(|&pid| !is_running(pid)));
    assert!(gone, "workers survive their coordinator: {workers:?}");
    running.child.wait().unwrap();
}

#[test]
fn an_interrupt_ends_the_answer_with_exit_code_130_and_what_there_was() {
    let models = Models::new();
    let running = Running::start(&long_model(&models));
    let workers = running.workers();
    signal(running.child.id(), Signal::SIGINT);
    let (code, last, stderr) = running.end();
    assert_eq!(
        (code, &last["type"], &last["code"]),
        (Some(130), &json!("error"), &json!("interrupted")),
        "{stderr}"
    );
    assert!(workers.iter().all(|&pid| !is_running(pid)));
}

#[test]
fn a_reader_that_goes_away_is_success() {
    let models = Models::new();
    let mut running = Running::start(&long_model(&models));
    let workers = running.workers();
    let stdout = std::mem::replace(&mut running.stdout, BufReader::new(spare_stdout()));
    drop(stdout);
    assert_eq!(wait(&mut running.child).code(), Some(0));
    assert!(workers.iter().all(|&pid| !is_running(pid)));
}

/// The output of a command that has ended, to stand in for one that is closed.
fn spare_stdout() -> ChildStdout {
    let mut child = spillway(["--version"]).stdout(Stdio::piped()).spawn().unwrap();
    child.wait().unwrap();
    child.stdout.take().unwrap()
}

/// A `bench` that takes for ever, with its output.
fn endless_bench(models: &Models) -> Child {
    let model = long_model(models);
    spillway(["bench", "-m", model.to_str().unwrap(), "-p", "0", "-n", "60000", "-r", "1000"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn assert_interrupt_ends(mut child: Child) {
    let workers = workers_of(child.id());
    signal(child.id(), Signal::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130));
    assert!(holds_within(Duration::from_secs(1), || workers.iter().all(|&pid| !is_running(pid))));
}

#[test]
fn an_interrupt_while_loading_ends_the_command() {
    let models = Models::new();
    let child = endless_bench(&models);
    eventually("the worker is there", || !workers_of(child.id()).is_empty());
    assert_interrupt_ends(child);
}

#[test]
fn an_interrupt_while_measuring_ends_the_command() {
    let models = Models::new();
    let mut child = endless_bench(&models);
    // The first line comes when everything is loaded.
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("stages"), "{line}");
    assert_interrupt_ends(child);
}

#[test]
fn an_interrupt_cancels_the_answer_of_a_chat_and_not_the_chat() {
    use std::io::Write;
    let models = Models::new();
    let model = long_model(&models);
    let mut child = spillway([
        "chat",
        "-m",
        model.to_str().unwrap(),
        "-n",
        "60000",
        "--ignore-eos",
        "--max-seq",
        "32768",
    ])
    .stdin(Stdio::piped())
    .stdout(Stdio::piped())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdin.write_all(b"first\n").unwrap();
    let mut byte = [0];
    stdout.read_exact(&mut byte).unwrap();
    signal(child.id(), Signal::SIGINT);
    // The next turn is answered: the program is still there.
    stdin.write_all(b"/help\n").unwrap();
    let mut help = BufReader::new(stdout);
    let mut line = Vec::new();
    while !line.ends_with(b"twice ends\n") {
        line.clear();
        assert_ne!(help.read_until(b'\n', &mut line).unwrap(), 0, "the chat ended");
    }
    // Twice with nothing in between ends it.
    signal(child.id(), Signal::SIGINT);
    std::thread::park_timeout(Duration::from_millis(200));
    signal(child.id(), Signal::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(130));
}
