//! The daemon under supervision: models that are loaded again, ends within a time, workers that cannot be replaced at once, and
//! what there is to see of it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use nix::sys::signal::Signal;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{
    Daemon, Models, ask, daemon_with_long_model, endless, eventually, is_running, signal, until_running,
};

fn diag(daemon: &mut Daemon) -> Value {
    daemon.main.ask(json!({"type": "diag"}), "diag")
}

/// Puts another file in the place of one, as tools do that update a model.
fn replace(path: &Path, by: &Path) {
    let new = path.with_extension("new");
    std::fs::copy(by, &new).unwrap();
    std::fs::rename(new, path).unwrap();
}

/// A file that is no model.
fn broken(models: &Models) -> std::path::PathBuf {
    let path = models.path("broken.gguf");
    std::fs::write(&path, "not a model").unwrap();
    path
}

/// Tools that write a file in place cut it first. Whoever reads it then refuses it, and goes on.
#[test]
fn a_file_that_is_rewritten_in_place_ends_no_daemon() {
    let models = Models::new();
    let model = models.write("rewritten.gguf", &TinyModel::new("qwen3").layers(40));
    let whole = std::fs::read(&model).unwrap();
    let mut daemon = Daemon::start(&[]);
    daemon.main.load(&model, json!({"threads": 1}));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let mut file = std::fs::OpenOptions::new().write(true).truncate(true).open(&model).unwrap();
                whole.chunks(1 << 14).for_each(|part| file.write_all(part).unwrap());
            }
        });
        for _ in 0..40 {
            daemon.main.send(json!({"type": "reload", "id": "r"}));
            let end = daemon.main.until(|event| event["id"] == "r").pop().unwrap();
            assert!(matches!(end["type"].as_str(), Some("loaded" | "error")), "{end}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    daemon.main.load(&model, json!({"threads": 1}));
    daemon.main.send(ask("r", 3));
    assert_eq!(daemon.main.answer("r").1["type"], "done");
    daemon.finish();
}

/// A worker that is to be replaced when its file has become something else is not tried again and again.
#[test]
fn a_file_that_was_replaced_by_another_or_is_gone_ends_requests_at_once() {
    let models = Models::new();
    for put in [Some(broken(&models)), None] {
        let model = models.write("served.gguf", &TinyModel::new("qwen3"));
        let mut daemon = Daemon::start(&[]);
        daemon.main.load(&model, json!({"threads": 1}));
        match &put {
            Some(other) => replace(&model, other),
            None => std::fs::remove_file(&model).unwrap(),
        }
        signal(daemon.workers()[0], Signal::SIGKILL);
        eventually("it is noticed", || diag(&mut daemon)["state"] == "failed");
        let diag = diag(&mut daemon);
        assert_eq!(diag["restarts"], 0, "{diag}");
        assert!(diag["reason"].as_str().unwrap().contains("not the one that was loaded"), "{diag}");
        daemon.finish();
    }
}

/// What `status` says of a daemon that was reached and does not answer.
#[test]
fn a_daemon_that_is_stopped_is_told_from_one_that_is_not_there() {
    let models = Models::new();
    let socket = models.path("socket");
    let daemon = Daemon::start(&["--listen", socket.to_str().unwrap()]);
    eventually("it listens", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    daemon.signal(Signal::SIGSTOP);
    let status = || support::run(&["status", "--connect", socket.to_str().unwrap()]);
    let shown = status();
    daemon.signal(Signal::SIGCONT);
    assert!(shown.code == Some(1) && shown.stderr.contains("does not answer"), "{shown:?}");
    drop(daemon);
    let shown = status();
    assert!(shown.code == Some(1) && shown.stderr.contains("no daemon listens"), "{shown:?}");
}

#[test]
fn a_reload_takes_the_file_as_it_is_now_and_refuses_a_broken_one() {
    let models = Models::new();
    let (model, other) = (models.tiny(), models.other());
    let mut daemon = Daemon::start(&[]);
    let refused = daemon.main.ask(json!({"type": "reload", "id": "none"}), "error");
    assert_eq!((&refused["id"], &refused["code"]), (&json!("none"), &json!("no_model_loaded")));
    daemon.main.load(&model, json!({"cpu_workers": 2, "max_seq": 64}));
    replace(&model, &other);
    daemon.main.send(json!({"type": "reload", "id": "r", "progress": true}));
    let events = daemon.main.until(|event| event["type"] == "loaded");
    let loaded = events.last().unwrap();
    assert!(events.len() > 1 && events[0]["type"] == "loading", "{events:?}");
    assert_eq!((&loaded["id"], &loaded["arch"]), (&json!("r"), &json!("llama")), "another file");
    assert_eq!((&loaded["max_seq"], loaded["stages"].as_array().unwrap().len()), (&json!(64), 2));
    replace(&model, &broken(&models));
    let workers = daemon.workers();
    let refused = daemon.main.ask(json!({"type": "reload"}), "error");
    assert_eq!(refused["class"], "validation", "{refused}");
    assert_eq!(daemon.workers(), workers, "the old model serves on");
    daemon.main.send(ask("r", 3));
    assert_eq!(daemon.main.answer("r").1["type"], "done");
    daemon.main.ask(json!({"type": "unload"}), "unloaded");
    assert_eq!(daemon.main.ask(json!({"type": "reload"}), "error")["code"], "no_model_loaded");
    daemon.finish();
}

/// A file that is overwritten where it stands ends the workers that read it; the daemon says so and goes on.
#[test]
fn a_file_that_is_truncated_while_it_is_served_does_not_end_the_daemon() {
    let models = Models::new();
    let model = models.tiny();
    let mut daemon = Daemon::start(&[]);
    daemon.main.load(&model, json!({}));
    std::fs::File::create(&model).unwrap();
    daemon.main.send(ask("r", 3));
    let end = daemon.main.answer("r").1;
    assert_eq!((&end["type"], &end["code"]), (&json!("error"), &json!("worker_failed")), "{end}");
    daemon.main.load(&models.other(), json!({}));
    daemon.main.send(ask("r", 3));
    assert_eq!(daemon.main.answer("r").1["type"], "done");
    daemon.finish();
}

#[test]
fn a_hangup_signal_reloads_after_what_runs_and_changes_nothing_when_the_file_is_refused() {
    let models = Models::new();
    let (model, other, log) = (models.tiny(), models.other(), models.path("log"));
    let mut command = support::spillway(["daemon"]);
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut daemon = Daemon::spawn(command);
    daemon.main.load(&model, json!({}));
    let before = daemon.workers();
    daemon.main.send(ask("running", 300));
    until_running(&mut daemon.main, "running");
    replace(&model, &other);
    daemon.signal(Signal::SIGHUP);
    assert_eq!(daemon.main.answer("running").1["tokens"], 300);
    eventually("the new file serves", || diag(&mut daemon)["model_arch"] == "llama");
    assert!(before.iter().all(|&pid| !is_running(pid)));
    replace(&model, &broken(&models));
    let workers = daemon.workers();
    daemon.signal(Signal::SIGHUP);
    eventually("the refusal is in the log", || {
        std::fs::read_to_string(&log).unwrap().contains("the model was not loaded again")
    });
    daemon.main.send(ask("later", 50));
    assert_eq!(daemon.main.answer("later").1["type"], "done");
    assert_eq!(daemon.workers(), workers);
    assert_eq!(diag(&mut daemon)["ready"], true);
    daemon.finish();
}

#[test]
fn a_reload_starts_afresh_after_too_many_failures() {
    let models = Models::new();
    let mut daemon = Daemon::start_with_env(&[], &[("SPILLWAY_RESTART_LIMIT", "0")]);
    daemon.main.load(&models.tiny(), json!({"cpu_workers": 2}));
    signal(daemon.workers()[0], Signal::SIGKILL);
    eventually("the model is given up", || diag(&mut daemon)["state"] == "failed");
    let failed = diag(&mut daemon);
    assert_eq!(failed["ready"], false);
    assert!(failed["reason"].as_str().unwrap().contains("signal 9"), "{failed}");
    let stages = failed["stages"].as_array().unwrap();
    assert!(
        stages.iter().all(|stage| stage["lifecycle"] == "failed" && stage["state"] == "ended"),
        "{failed}"
    );
    daemon.main.ask(json!({"type": "reload"}), "loaded");
    assert_eq!(diag(&mut daemon)["ready"], true);
    daemon.main.send(ask("r", 3));
    assert_eq!(daemon.main.answer("r").1["type"], "done");
    daemon.finish();
}

#[test]
fn requests_that_run_on_for_too_long_after_a_termination_signal_are_aborted() {
    let models = Models::new();
    let mut daemon = Daemon::start(&["--drain-limit", "0.5"]);
    daemon.main.load(&support::long_model(&models), json!({}));
    daemon.main.send(endless("r"));
    until_running(&mut daemon.main, "r");
    let asked = Instant::now();
    daemon.signal(Signal::SIGTERM);
    let aborted = daemon.main.answer("r").1;
    assert_eq!((&aborted["type"], &aborted["reason"]), (&json!("aborted"), &json!("shutdown")));
    assert!(asked.elapsed() >= Duration::from_millis(500));
    assert_eq!(daemon.wait(), Some(0));
}

/// Sets how much of something a process may have, and gives back how much it might have before.
fn limit(pid: u32, of: Resource, limit: Option<u64>) -> Option<u64> {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    let now = rustix::process::getrlimit(of);
    prlimit(Some(pid), of, Rlimit { current: limit, maximum: now.maximum }).unwrap().current
}

/// A worker dies while the coordinator can have no more descriptors (`EMFILE`).
#[test]
fn a_worker_that_cannot_be_started_for_want_of_descriptors_is_tried_again() {
    starts_again_after_want_of(Resource::Nofile, |_| 8);
}

/// A worker dies while the coordinator can map no more memory (`ENOMEM`).
#[test]
fn a_worker_that_cannot_be_started_for_want_of_memory_is_tried_again() {
    starts_again_after_want_of(Resource::As, |pid| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmSize:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    });
}

/// While there is no more of something than `held`, the starts of a worker fail; later ones do not, and the answer is whole.
fn starts_again_after_want_of(what: Resource, held: fn(u32) -> u64) {
    let models = Models::new();
    let mut daemon = daemon_with_long_model(&models, json!({"cpu_workers": 2}));
    daemon.main.send(ask("whole", 400));
    let whole = daemon.main.answer("whole").0;
    daemon.main.send(ask("again", 400));
    until_running(&mut daemon.main, "again");
    let before = limit(daemon.pid(), what, Some(held(daemon.pid())));
    signal(daemon.workers()[1], Signal::SIGKILL);
    let mut first = String::new();
    let events = daemon.main.until(|event| event["code"] == "worker_setup_failed");
    for event in events.iter().filter(|event| event["type"] == "token") {
        first.push_str(event["text"].as_str().unwrap());
    }
    limit(daemon.pid(), what, before);
    let (rest, end) = daemon.main.answer("again");
    assert_eq!(end["type"], "done", "{end}");
    assert!(whole.ends_with(&(first + &rest)), "no token is missing and none comes twice");
    let recovery = &diag(&mut daemon)["recovery"];
    assert_eq!((&recovery["code"], &recovery["stages"]), (&json!("worker_died"), &json!([1])), "{recovery}");
    assert!(
        recovery["attempts"].as_u64() >= Some(2) && recovery["backoff_ms"].as_f64() >= Some(100.0),
        "{recovery}"
    );
    daemon.finish();
}

#[test]
fn top_shows_frames_without_escapes_where_there_is_no_terminal() {
    let models = Models::new();
    let path = models.path("socket");
    let mut daemon = Daemon::start(&["--listen", path.to_str().unwrap()]);
    daemon.main.load(&support::long_model(&models), json!({"cpu_workers": 2}));
    daemon.main.send(endless("r"));
    until_running(&mut daemon.main, "r");
    let connect = ["top", "--connect", path.to_str().unwrap()];
    let ran = support::run(&[&connect[..], &["--interval", "0.2", "--frames", "2"]].concat());
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert!(!ran.stdout.contains('\x1b'), "{}", ran.stdout);
    let frames: Vec<&str> = ran.stdout.split("\n\nspillway ").collect();
    assert_eq!(frames.len(), 2, "{}", ran.stdout);
    for frame in frames {
        let worker = daemon.workers()[1].to_string();
        let row = frame.lines().find(|line| line.contains(&worker)).unwrap();
        assert!(row.contains("cpu") && row.contains(" ms"), "{frame}");
        assert!(frame.contains("1 running, 0 queued") && frame.contains("no recovery so far"), "{frame}");
    }
    daemon.main.close();
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.wait(), Some(130));
    assert_eq!(support::run(&connect).code, Some(1), "nobody is there any more");
}

/// What the log says of the workers of one stage: where they came from, where they went, and why.
fn changes<'a>(log: &'a str, stage: &str) -> Vec<(&'a str, &'a str)> {
    let of_stage = log.lines().filter(|line| line.contains("spillway::worker: ") && line.contains(stage));
    let field = |line: &'a str, name: &str| {
        let (_, rest) = line.split_once(name)?;
        Some(rest.trim_start_matches('"').split(['"', ' ']).next().unwrap())
    };
    of_stage.map(|line| (field(line, "from=").unwrap_or("none"), field(line, "to=").unwrap())).collect()
}

/// Every change of a worker is in the log, with its process, its code and its cause.
#[test]
fn the_log_tells_where_every_worker_is() {
    use std::process::Stdio;
    let models = Models::new();
    let mut child = support::spillway(["daemon"])
        .env("SPILLWAY_LOG", "spillway::worker=info")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let say = |child: &mut std::process::Child, message: Value| {
        use std::io::Write;
        writeln!(child.stdin.as_mut().unwrap(), "{message}").unwrap();
    };
    say(&mut child, json!({"type": "load", "model": models.tiny(), "params": {"cpu_workers": 2}}));
    let is_worker = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.windows(10).any(|word| word == b"worker-cpu"))
    };
    let workers =
        |parent: u32| support::workers_of(parent).into_iter().filter(is_worker).collect::<Vec<u32>>();
    eventually("both workers are there", || workers(child.id()).len() == 2);
    say(&mut child, ask("r", 20));
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    lines.find(|line| line.as_ref().unwrap().contains("\"done\"")).unwrap().unwrap();
    let victim = workers(child.id())[1];
    signal(victim, Signal::SIGKILL);
    eventually("it is replaced", || {
        let now = workers(child.id());
        now.len() == 2 && !now.contains(&victim)
    });
    say(&mut child, ask("r", 2));
    lines.find(|line| line.as_ref().unwrap().contains("\"done\"")).unwrap().unwrap();
    drop(child.stdin.take());
    let mut log = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut log).unwrap();
    assert_eq!(support::wait(&mut child).code(), Some(0));
    let whole = [("none", "spawning"), ("spawning", "loading"), ("loading", "loaded"), ("loaded", "ready")];
    let end = [("ready", "draining"), ("draining", "dead")];
    assert_eq!(changes(&log, "stage=0"), [&whole[..], &end].concat(), "{log}");
    let again = [("ready", "dead"), ("dead", "spawning")];
    assert_eq!(changes(&log, "stage=1"), [&whole[..], &again, &whole[1..], &end].concat(), "{log}");
    let death = log.lines().find(|line| line.contains("to=\"dead\"")).unwrap();
    for part in [&format!("pid={victim}"), "epoch=", "code=\"worker_died\"", "was killed by signal 9"] {
        assert!(death.contains(part), "{part}: {death}");
    }
}
