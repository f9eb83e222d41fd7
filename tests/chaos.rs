//! Random faults in any state, for as long as one likes: every request has exactly one end, with the answer of an
//! undisturbed run, and nothing is left behind or grows.
//!
//! `SPILLWAY_CHAOS_FAULTS` (default 25) and `SPILLWAY_CHAOS_SEED` choose the run.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::cast_possible_truncation, reason = "numbers of a test are small")]

#[path = "support/engine.rs"]
mod fixture;

use fixture::{
    NOBODY, answer, children, descriptors, greedy, open, options, placement, prompt, submit, tiny, try_start,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use spillway::engine::{Engine, EngineOptions, GenerateEvent, GenerateRequest};
use spillway::planner::PlacementRequest;
use spillway::sampler::SamplingParams;
use spillway_model::testing::TinyModel;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const CLIENTS: usize = 8;
const STAGES: usize = 3;
/// Longest time in which some client must get an answer, whatever happens.
const STALL: Duration = Duration::from_secs(30);

/// A linear congruential generator: the same faults for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Requests of a client, greedy and drawn, short and with prompts of several steps.
fn request(client: usize, turn: usize) -> GenerateRequest {
    let kind = (client * 5 + turn) % 12;
    let mut request = greedy(&prompt(kind as u32, 10 + kind as u32 * 13), 20 + kind * 3);
    if kind % 2 == 1 {
        request.sampling = SamplingParams { temperature: 1.0, seed: kind as u64, ..Default::default() };
    }
    request
}

/// Does something bad to a worker, or to one that is being started; what it was.
fn disturb(dice: &mut Dice) -> &'static str {
    let workers = children();
    if workers.is_empty() {
        return "nothing: no worker was there";
    }
    let victim = Pid::from_raw(workers[dice.below(workers.len() as u64) as usize]);
    // A process that has ended meanwhile is as good as a victim.
    let send = |signal| {
        let _ = kill(victim, signal);
    };
    match dice.below(6) {
        0 => {
            send(Signal::SIGSTOP);
            "stop"
        }
        1 => {
            send(Signal::SIGSTOP);
            std::thread::park_timeout(Duration::from_millis(dice.below(300)));
            send(Signal::SIGCONT);
            "pause"
        }
        2 => {
            for worker in workers {
                let _ = kill(Pid::from_raw(worker), Signal::SIGKILL);
            }
            "kill all"
        }
        3 => {
            send(Signal::SIGTERM);
            "terminate, which a worker ignores"
        }
        _ => {
            send(Signal::SIGKILL);
            "kill"
        }
    }
}

/// Runs requests one after the other until told to stop; counts them.
fn client(engine: &Engine, client: usize, expected: &[Vec<Vec<u32>>], stop: &AtomicBool, done: &AtomicUsize) {
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let turn = turn % expected[client].len();
        match submit(engine, request(client, turn)).end() {
            GenerateEvent::Done(completion) => {
                assert_eq!(completion.token_ids, expected[client][turn], "client {client}, turn {turn}");
            }
            other => panic!("client {client}: {other:?}"),
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn no_request_is_lost_or_changed_whatever_happens_to_workers() {
    let mut dice = Dice(setting("SPILLWAY_CHAOS_SEED", 1));
    let faults = setting("SPILLWAY_CHAOS_FAULTS", 25);
    let file = tiny(&TinyModel::new("qwen35"));
    let before = descriptors();
    let options = EngineOptions { restart_limit: Some(usize::MAX), queue: Some(CLIENTS), ..options() };
    let placement = PlacementRequest { parallel: Some(5), ..placement(STAGES) };
    let engine = try_start(&open(&file.path), &placement, options).unwrap();
    let expected: Vec<Vec<Vec<u32>>> = (0..CLIENTS)
        .map(|client| (0..4).map(|turn| answer(&engine, request(client, turn)).token_ids).collect())
        .collect();
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let within = descriptors().len();
    std::thread::scope(|scope| {
        for index in 0..CLIENTS {
            let (engine, expected, stop, done) = (&engine, &expected, &stop, &done);
            scope.spawn(move || client(engine, index, expected, stop, done));
        }
        // Set also when this thread fails, or the clients would never end.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _stop = Stop(&stop);
        for fault in 0..faults {
            std::thread::park_timeout(Duration::from_millis(dice.below(150)));
            let answers = done.load(Ordering::Relaxed);
            let what = disturb(&mut dice);
            let began = Instant::now();
            // Some faults come in quick succession, also while others are being repaired.
            if dice.below(3) > 0 {
                while done.load(Ordering::Relaxed) == answers {
                    assert!(began.elapsed() < STALL, "fault {fault} ({what}): nobody got an answer");
                    std::thread::park_timeout(Duration::from_millis(5));
                }
            }
        }
    });
    let status = engine.status();
    eprintln!(
        "{faults} faults, {} workers replaced, {} answers, none lost or changed",
        status.restarts,
        done.load(Ordering::Relaxed)
    );
    assert!(status.restarts > 0 && done.load(Ordering::Relaxed) > 0);
    assert_eq!((status.live, status.queued, status.kv_blocks_used), (0, 0, 0));
    // The last worker may still be starting; then its descriptors are the same ones.
    assert_eq!(answer(&engine, request(0, 0)).token_ids, expected[0][0]);
    assert_eq!(descriptors().len(), within, "descriptors grow");
    assert_eq!(children().len(), STAGES);
    drop(engine);
    assert_eq!(children(), NOBODY);
    assert_eq!(descriptors(), before);
}
