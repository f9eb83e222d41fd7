//! Random faults in any state, for as long as one likes, against the real program: every request has exactly one end, with
//! the answer of an undisturbed run, and nothing is left behind or grows.
//!
//! `SPILLWAY_CHAOS_FAULTS` (default 25) and `SPILLWAY_CHAOS_SEED` choose the run. Each line of the report begins with `chaos:`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "numbers of a test are small"
)]

mod clients;
mod dice;
mod faults;
mod figures;
#[path = "../support/gpu.rs"]
mod gpu;
#[path = "../support/mod.rs"]
mod support;

use clients::{REQUESTS, Seen};
use dice::{Dice, setting};
use faults::disturb;
use figures::Figures;
use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{Conversation, Daemon, Models, eventually, holds_within, workers_of};

const CLIENTS: usize = 8;
/// Longest time in which some client must get an answer, whatever happens.
const STALL: Duration = Duration::from_secs(30);
/// Restarts are not limited: there are more faults than any machine would have in a minute.
const NO_LIMIT: (&str, &str) = ("SPILLWAY_RESTART_LIMIT", "1000000");
/// By how much the daemon may grow between a tenth of the faults and all of them.
const GROWTH_KIB: u64 = 8 << 10;

#[test]
fn no_request_is_lost_or_changed_whatever_happens_to_workers_on_cpus() {
    let params = json!({"cpu_workers": 3, "threads": 1, "parallel": 5, "max_seq": 512});
    chaos("CPU", 3, &params, setting("SPILLWAY_CHAOS_FAULTS", 25));
}

#[test]
fn no_request_is_lost_or_changed_whatever_happens_to_workers_on_gpus() {
    if !gpu::can_compile() {
        return;
    }
    let params = json!({"devices": "emulated:devices=2", "gpu_layer_budget": 3, "offload_exec": "cpu", "threads": 1,
        "parallel": 5, "max_seq": 512});
    chaos("CPU and emulated GPUs", 3, &params, setting("SPILLWAY_CHAOS_FAULTS", 25).div_ceil(2));
}

fn chaos(what: &str, stages: usize, params: &Value, faults: u64) {
    let models = Models::new();
    let model = models.write("chaos.gguf", &TinyModel::new("qwen35"));
    let socket = models.path("socket");
    let mut daemon = Daemon::start_with_env(&["--listen", socket.to_str().unwrap()], &[NO_LIMIT]);
    daemon.main.load(&model, params.clone());
    let expected: Vec<String> = (0..REQUESTS).map(|kind| clients::answer(&mut daemon.main, kind).0).collect();
    assert!(expected.iter().all(|text| !text.is_empty()));
    let descriptors = descriptors(daemon.pid());
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut figures = Figures::default();
    let seen: Vec<Seen> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|index| {
                let (socket, expected, stop, done) = (&socket, &expected, &stop, &done);
                scope.spawn(move || clients::run(socket, index * 5, expected, stop, done))
            })
            .collect();
        {
            // Set also when this thread fails, or the clients would never end.
            let _stop = SetAtEnd(&stop);
            inject(&mut daemon, faults, &done, &mut figures);
        }
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    eventually("all is calm", || {
        let diag = diag(&mut daemon);
        (&diag["state"], &diag["live"], &diag["queued"]) == (&json!("ready"), &json!(0), &json!(0))
    });
    figures.report(what, &seen, &diag(&mut daemon));
    let crashes = figures.crashes();
    assert!(seen.iter().map(|client| client.condemned).sum::<usize>() <= crashes / 2, "{crashes} crashes");
    assert!(seen.iter().map(|client| client.latencies.len()).sum::<usize>() > 0);
    assert_eq!(clients::answer(&mut daemon.main, 0).0, expected[0]);
    assert_eq!(workers_of(daemon.pid()).len(), stages, "a worker too many, or a zombie");
    eventually("descriptors are those of before", || self::descriptors(daemon.pid()) == descriptors);
    let workers = daemon.workers();
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
    assert!(workers.iter().all(|&pid| !support::is_running(pid)));
}

struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn inject(daemon: &mut Daemon, faults: u64, done: &AtomicUsize, figures: &mut Figures) {
    let mut dice = Dice::new(setting("SPILLWAY_CHAOS_SEED", 1));
    for number in 0..faults {
        std::thread::park_timeout(Duration::from_millis(dice.below(150)));
        if number == faults / 10 {
            figures.kib_early = resident_kib(daemon.pid());
        }
        let answers = done.load(Ordering::Relaxed);
        let fault = disturb(&mut dice, daemon.pid());
        figures.count(fault);
        let began = Instant::now();
        // Some faults come in quick succession, also while others are being repaired.
        if dice.below(3) > 0 {
            while done.load(Ordering::Relaxed) == answers {
                let what = fault.map(|fault| fault.name);
                assert!(began.elapsed() < STALL, "fault {number} ({what:?}): nobody got an answer");
                std::thread::park_timeout(Duration::from_millis(5));
            }
        }
        figures.note_recovery(&diag(daemon));
    }
    figures.kib_late = resident_kib(daemon.pid());
    let grown = figures.kib_late.saturating_sub(figures.kib_early);
    assert!(grown < GROWTH_KIB, "the daemon has grown by {grown} KiB");
}

fn diag(daemon: &mut Daemon) -> Value {
    daemon.main.ask(json!({"type": "diag"}), "diag")
}

/// Open descriptors of a process.
fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Memory of a process that is its own (`RssAnon`): what is mapped from the model file comes and goes with the page cache.
fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A load that is disturbed ends in exactly one way, and the daemon answers as before after the next one.
#[test]
fn faults_during_a_load_end_it_or_do_not_show() {
    let models = Models::new();
    let model = models.write("chaos.gguf", &TinyModel::new("qwen35"));
    let mut dice = Dice::new(setting("SPILLWAY_CHAOS_SEED", 1));
    let mut daemon = Daemon::start_with_env(&[], &[NO_LIMIT]);
    let load = json!({"type": "load", "id": "l", "model": model, "params": {"cpu_workers": 3, "threads": 1}});
    daemon.main.load(&model, json!({"threads": 1}));
    let expected = clients::answer(&mut daemon.main, 3).0;
    let (mut ends, mut missed) = ([0, 0], 0);
    for _ in 0..setting("SPILLWAY_CHAOS_FAULTS", 25) {
        daemon.main.send(load.clone());
        std::thread::park_timeout(Duration::from_millis(dice.below(60)));
        let fault = disturb(&mut dice, daemon.pid());
        missed += usize::from(fault.is_none());
        let end = daemon.main.until(|event| event["id"] == "l" && event["type"] != "loading").pop().unwrap();
        ends[usize::from(end["type"] == "loaded")] += 1;
        if end["type"] != "loaded" {
            assert_eq!((&end["type"], &end["class"]), (&json!("error"), &json!("transient")), "{end}");
        }
        let (text, end, _) = clients::answer(&mut daemon.main, 3);
        if end["code"] == "no_model_loaded" {
            daemon.main.load(&model, json!({"threads": 1}));
            assert_eq!(clients::answer(&mut daemon.main, 3).0, expected);
        } else {
            assert_eq!(
                (text, &end["type"]),
                (expected.clone(), &json!("done")),
                "{end} after {:?}",
                fault.map(|f| f.name)
            );
        }
    }
    println!(
        "chaos: loads under faults: {} loaded, {} ended with an error; {missed} faults found no worker",
        ends[1], ends[0]
    );
    daemon.finish();
}

/// A coordinator that is killed at any moment takes its workers with it and leaves nothing that hinders the next one.
#[test]
fn a_coordinator_killed_at_any_moment_leaves_nothing() {
    let models = Models::new();
    let model = models.write("chaos.gguf", &TinyModel::new("qwen35"));
    let socket = models.path("socket");
    let mut dice = Dice::new(setting("SPILLWAY_CHAOS_SEED", 1));
    let (devices, folder) = if gpu::can_compile() {
        ("emulated:devices=2,ids=7", models.path("locks"))
    } else {
        ("none", models.path("locks"))
    };
    let mark = format!("SPILLWAY_CHAOS_MARK={}", std::process::id());
    let (name, value) = mark.split_once('=').unwrap();
    let lock = folder.to_str().unwrap();
    for _ in 0..setting("SPILLWAY_CHAOS_FAULTS", 25).div_ceil(4) {
        let mut daemon = Daemon::start_with_env(
            &["--listen", socket.to_str().unwrap()],
            &[(name, value), ("SPILLWAY_LOCK_DIR", lock)],
        );
        daemon
            .main
            .send(json!({"type": "load", "model": model, "params": {"devices": devices, "threads": 1}}));
        if dice.below(2) == 0 {
            // Half of them in mid-answer, the others somewhere in start and load.
            let mut client = Conversation::connect(&socket);
            assert_eq!(daemon.main.next()["type"], "loaded");
            client.send(clients::request(11));
        }
        std::thread::park_timeout(Duration::from_millis(dice.below(120)));
        daemon.signal(nix::sys::signal::Signal::SIGKILL);
        daemon.wait();
        let gone = holds_within(Duration::from_secs(1), || marked(&mark).is_empty());
        assert!(gone, "left behind: {:?}", marked(&mark));
    }
    let mut daemon =
        Daemon::start_with_env(&["--listen", socket.to_str().unwrap()], &[("SPILLWAY_LOCK_DIR", lock)]);
    daemon.main.load(&model, json!({"devices": devices, "threads": 1}));
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

/// Living processes with a variable in their environment.
fn marked(variable: &str) -> Vec<u32> {
    let has = |path: &Path| {
        std::fs::read(path.join("environ"))
            .is_ok_and(|all| all.split(|&byte| byte == 0).any(|one| one == variable.as_bytes()))
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            (has(&entry.path()) && support::is_running(pid)).then_some(pid)
        })
        .collect()
}
