//! Workers that die or stop in the middle of something: they are replaced, and every answer is what it would have been.
//!
//! The tests of this file count the processes and descriptors of the test program, so they take turns.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/engine.rs"]
mod fixture;

use fixture::{
    NOBODY, PATIENCE, Running, answer, children, descriptors, greedy, logits, open, options, pids, placement,
    prompt, signal_worker, start, submit, take_turn, tiny, try_start,
};
use nix::sys::signal::Signal;
use spillway::engine::{Engine, EngineOptions, GenerateEvent, GenerateRequest, ScoreRequest};
use spillway::planner::PlacementRequest;
use spillway::sampler::SamplingParams;
use spillway::workers::Lifecycle;
use spillway_model::testing::TinyModel;
use spillway_protocol::frame::{LogitsFrame, write_logits};
use spillway_protocol::ring::{RingConsumer, RingProducer, Wait};
use spillway_worker::args::WorkerArgs;
use std::fs::{File, OpenOptions};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// Six requests, greedy and drawn with a seed.
fn requests() -> Vec<GenerateRequest> {
    let drawn = |seed| SamplingParams { temperature: 1.0, seed, ..Default::default() };
    let mut all: Vec<GenerateRequest> = (0..6).map(|seed| greedy(&prompt(seed, 20 + seed * 7), 60)).collect();
    for (seed, request) in all.iter_mut().enumerate().skip(3) {
        request.sampling = drawn(seed as u64);
    }
    all
}

fn tokens(running: &[Running]) -> Vec<Vec<u32>> {
    running.iter().map(|request| request.done().token_ids).collect()
}

/// Every stage in turn, with an attending and a recurrent model.
#[test]
fn answers_do_not_show_that_a_worker_was_killed() {
    let _turn = take_turn();
    for architecture in ["qwen3", "qwen35"] {
        let file = tiny(&TinyModel::new(architecture));
        let before = descriptors();
        let engine = start(&file.path, &placement(3));
        let undisturbed: Vec<_> =
            requests().into_iter().map(|request| answer(&engine, request).token_ids).collect();
        for stage in 0..3 {
            let workers = pids(&engine);
            let running: Vec<_> = requests().into_iter().map(|request| submit(&engine, request)).collect();
            running[0].tokens(5);
            signal_worker(&engine, stage, Signal::SIGKILL);
            assert_eq!(tokens(&running), undisturbed, "{architecture}, stage {stage}");
            let now = pids(&engine);
            for other in 0..3 {
                assert_eq!(now[other] != workers[other], other == stage, "only the dead one is replaced");
            }
            let status = engine.status();
            assert_eq!((status.ready, status.restarts, status.failure), (true, stage as u64 + 1, None));
            assert!(status.stages.iter().all(|stage| stage.lifecycle == Lifecycle::Ready));
            let recovery = status.recovery.unwrap();
            assert_eq!((recovery.epoch, recovery.code), (status.epoch, "worker_died"));
            assert_eq!((recovery.stages, recovery.attempts), (vec![stage], 1));
            assert!(recovery.detect_ms < 1000.0 && recovery.respawn_ms > 0.0 && recovery.load_ms > 0.0);
            assert!(recovery.replay_ms > 0.0, "sequences were computed again");
        }
        drop(engine);
        assert_eq!(children(), NOBODY);
        assert_eq!(descriptors(), before);
    }
}

#[test]
fn a_stopped_worker_is_found_and_replaced() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen35"));
    let engine = start(&file.path, &placement(2));
    let undisturbed: Vec<_> =
        requests().into_iter().map(|request| answer(&engine, request).token_ids).collect();
    for stage in 0..2 {
        let running: Vec<_> = requests().into_iter().map(|request| submit(&engine, request)).collect();
        running[0].tokens(3);
        signal_worker(&engine, stage, Signal::SIGSTOP);
        assert_eq!(tokens(&running), undisturbed, "stage {stage}");
        assert_eq!(engine.status().restarts, stage as u64 + 1);
        let detected = engine.status().recovery.unwrap().detect_ms;
        assert!(detected >= 1000.0, "a pause of less than a second is no failure: {detected} ms");
    }
    drop(engine);
    assert_eq!(children(), NOBODY);
}

/// Steps that a stopped worker has not taken fill its ring, and who is before it cannot send, whoever that is.
#[test]
fn a_stopped_worker_is_found_when_the_one_before_it_has_been_replaced() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    let options = EngineOptions { steps_in_flight: Some(3), queue: Some(6), ..options() };
    let request = PlacementRequest { parallel: Some(6), ..placement(3) };
    let engine = try_start(&open(&file.path), &request, options).unwrap();
    let undisturbed: Vec<_> =
        requests().into_iter().map(|request| answer(&engine, request).token_ids).collect();
    let running: Vec<_> = requests().into_iter().map(|request| submit(&engine, request)).collect();
    running[0].tokens(3);
    signal_worker(&engine, 1, Signal::SIGSTOP);
    // Until all steps have come up to it.
    std::thread::park_timeout(Duration::from_millis(200));
    signal_worker(&engine, 0, Signal::SIGKILL);
    assert_eq!(tokens(&running), undisturbed);
    assert_eq!(engine.status().restarts, 2, "one was killed, one was stopped");
    drop(engine);
    assert_eq!(children(), NOBODY);
}

/// A pause that is shorter than the watchdog's patience is no failure.
#[test]
fn a_worker_that_goes_on_in_time_is_left_alone() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(2));
    let running = submit(&engine, greedy(&prompt(1, 20), 200));
    running.tokens(3);
    signal_worker(&engine, 1, Signal::SIGSTOP);
    std::thread::park_timeout(Duration::from_millis(300));
    signal_worker(&engine, 1, Signal::SIGCONT);
    assert_eq!(running.done().token_ids.len(), 200);
    assert_eq!(engine.status().restarts, 0);
}

#[test]
fn clients_hear_of_a_recovery_and_requests_made_meanwhile_wait() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    let request = PlacementRequest { parallel: Some(1), ..placement(2) };
    let engine = start(&file.path, &request);
    let running = submit(&engine, greedy(&prompt(1, 20), 100));
    running.tokens(3);
    signal_worker(&engine, 0, Signal::SIGKILL);
    let waiting = submit(&engine, greedy(&prompt(2, 20), 5));
    let told = running.events.iter().find(|event| !matches!(event, GenerateEvent::Token { .. })).unwrap();
    let GenerateEvent::Recovering { code, message } = told else { panic!("{told:?}") };
    assert!(
        code == "worker_died" && message.contains("stage 0") && message.contains("signal 9"),
        "{code}: {message}"
    );
    assert_eq!(running.done().token_ids.len(), 100);
    assert_eq!(waiting.done().token_ids.len(), 5);
}

#[test]
fn an_idle_worker_that_dies_is_replaced_before_anyone_asks() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(2));
    let before = answer(&engine, greedy(&prompt(1, 20), 20)).token_ids;
    signal_worker(&engine, 1, Signal::SIGKILL);
    eventually("the worker is replaced", || engine.status().restarts == 1);
    assert_eq!(answer(&engine, greedy(&prompt(1, 20), 20)).token_ids, before);
}

/// Nobody waits for an idle worker, so that nothing replaces it: whoever asks is told.
#[test]
fn an_engine_with_a_stopped_worker_is_not_ready() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(2));
    assert!(engine.readiness().ready);
    signal_worker(&engine, 1, Signal::SIGSTOP);
    eventually("it is stopped", || engine.readiness().state == "stalled");
    let readiness = engine.readiness();
    assert!(!readiness.ready && readiness.reason.unwrap().contains("stage 1"));
    signal_worker(&engine, 1, Signal::SIGCONT);
    eventually("it goes on", || engine.readiness().ready);
    assert_eq!(engine.status().restarts, 0);
}

#[test]
fn scores_are_handed_over_once_although_they_are_computed_again() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen35"));
    let engine = start(&file.path, &placement(2));
    let ids = prompt(3, 200);
    let undisturbed = logits(&engine, &ids, 16);
    let mut rows: Vec<Vec<u32>> = Vec::new();
    let request = ScoreRequest { ids, chunk: Some(16) };
    let result = engine.score(&request, &mut |position, row| {
        assert_eq!(position, rows.len());
        rows.push(row.iter().map(|value| value.to_bits()).collect());
        if position == 50 {
            signal_worker(&engine, 1, Signal::SIGKILL);
        }
        ControlFlow::Continue(())
    });
    result.unwrap();
    assert!(rows == undisturbed, "a row differs");
    assert_eq!(engine.status().restarts, 1);
}

#[test]
fn an_answer_can_be_aborted_and_the_engine_ended_while_a_worker_is_replaced() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3").layers(60));
    let engine = start(&file.path, &placement(2));
    let running = submit(&engine, greedy(&prompt(1, 20), 200));
    running.tokens(2);
    signal_worker(&engine, 0, Signal::SIGKILL);
    engine.abort(running.id);
    assert!(matches!(running.end(), GenerateEvent::Aborted(_)));
    let second = submit(&engine, greedy(&prompt(1, 20), 200));
    second.tokens(2);
    signal_worker(&engine, 1, Signal::SIGKILL);
    let asked = Instant::now();
    engine.shutdown();
    assert!(matches!(second.end(), GenerateEvent::Aborted(_)));
    assert!(asked.elapsed() < Duration::from_secs(4), "{:?}", asked.elapsed());
    assert_eq!(children(), NOBODY);
}

#[test]
fn a_worker_that_keeps_dying_is_given_up() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let options = EngineOptions { restart_limit: Some(2), ..options() };
    let engine = try_start(&open(&file.path), &placement(2), options).unwrap();
    let running = submit(&engine, greedy(&prompt(1, 20), 230));
    for restarts in 0..2 {
        signal_worker(&engine, 0, Signal::SIGKILL);
        eventually("the worker is replaced", || engine.status().restarts == restarts + 1);
    }
    signal_worker(&engine, 0, Signal::SIGKILL);
    let end = running.end();
    // The answer may have been complete before the last signal.
    if let GenerateEvent::Failed(error) = &end {
        assert!(error.message.contains("failure 3 within 60 s"), "{error}");
    }
    eventually("the engine gives up", || engine.status().failure.is_some());
    let status = engine.status();
    assert!(!status.ready && status.recovering.is_none());
    assert!(status.stages.iter().all(|stage| stage.lifecycle == Lifecycle::Failed));
    let readiness = engine.readiness();
    assert!(!readiness.ready && readiness.state == "failed" && readiness.reason == status.failure);
    assert_eq!(engine.submit(greedy(&[1], 1), Box::new(|_| {})).unwrap_err().code, "worker_died");
    drop(engine);
    assert_eq!(children(), NOBODY);
}

/// A file that has taken the place of the model's while it was served is not mixed into the pipeline, though it fits.
#[test]
fn a_worker_is_not_replaced_from_another_file() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    let engine = start(&file.path, &placement(2));
    let other = file.path.with_extension("new");
    std::fs::copy(&file.path, &other).unwrap();
    std::fs::rename(&other, &file.path).unwrap();
    let running = submit(&engine, greedy(&prompt(1, 20), 230));
    running.tokens(1);
    signal_worker(&engine, 0, Signal::SIGKILL);
    let GenerateEvent::Failed(error) = running.end() else { panic!("the answer goes on") };
    assert!(
        error.code == "worker_failed" && error.message.contains("not the one that was loaded"),
        "{error}"
    );
    let status = engine.status();
    assert!(!status.ready && status.stages.iter().all(|stage| stage.state == "ended"), "{status:?}");
    drop(engine);
    assert_eq!(children(), NOBODY);
}

/// A ring between the engine and a worker that is stopped and cannot mend it.
struct Nonsense {
    stage: usize,
    /// Puts the worker's end of its ring into that state.
    act: fn(&Engine, File),
    /// What the engine says of it.
    words: &'static str,
}

fn answer_another_step(engine: &Engine, ring: File) {
    let mut logits = RingProducer::attach(ring.into()).unwrap();
    let Wait::Ready(mut slot) = logits.try_next().unwrap() else { panic!("no room") };
    let about = LogitsFrame { epoch: engine.status().epoch, step: 99_999, first_row: 0, rows: 1, last: true };
    let vocab = engine.plan().model.vocab;
    write_logits(&mut slot, &about, vocab, &vec![0.0; vocab]).unwrap();
    slot.publish();
}

/// The first page has the counters.
fn overwrite(_: &Engine, ring: File) {
    ring.write_all_at(&[0x5a; 4096], 0).unwrap();
}

fn close_producer(_: &Engine, ring: File) {
    drop(RingProducer::attach(ring.into()).unwrap());
}

fn close_consumer(_: &Engine, ring: File) {
    drop(RingConsumer::attach(ring.into()).unwrap());
}

/// What a worker that has gone wild leaves in a ring: it is named and replaced, the ring is another one, and the answer is whole.
#[test]
fn a_worker_whose_ring_makes_no_sense_is_replaced() {
    const LAST: usize = 1;
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    let engine = start(&file.path, &placement(LAST + 1));
    let request = || greedy(&prompt(1, 20), 40);
    let undisturbed = answer(&engine, request()).token_ids;
    let table = [
        Nonsense { stage: LAST, act: answer_another_step, words: "another step" },
        Nonsense { stage: LAST, act: overwrite, words: "beyond the slots" },
        Nonsense { stage: LAST, act: close_producer, words: "closed its ring" },
        Nonsense { stage: 0, act: overwrite, words: "beyond the slots" },
        Nonsense { stage: 0, act: close_consumer, words: "closed its ring" },
    ];
    let fds = WorkerArgs::standard(0, false);
    for (nth, Nonsense { stage, act, words }) in table.into_iter().enumerate() {
        let worker = pids(&engine)[stage];
        let fd = if stage == LAST { fds.ring_out_fd } else { fds.ring_in_fd };
        let ring = OpenOptions::new().read(true).write(true).open(format!("/proc/{worker}/fd/{fd}")).unwrap();
        signal_worker(&engine, stage, Signal::SIGSTOP);
        eventually("it is stopped", || engine.readiness().state == "stalled");
        act(&engine, ring);
        let running = submit(&engine, request());
        let (code, message) = running
            .events
            .iter()
            .find_map(|event| match event {
                GenerateEvent::Recovering { code, message } => Some((code, message)),
                _ => None,
            })
            .unwrap();
        let named = message.contains(&format!("stage {stage}")) && message.contains(words);
        assert!(code == "worker_protocol" && named, "{nth}: {code}: {message}");
        assert_eq!(running.done().token_ids, undisturbed, "{nth}");
        let status = engine.status();
        assert_eq!(
            (status.restarts, status.recovery.unwrap().stages),
            (nth as u64 + 1, vec![stage]),
            "{nth}"
        );
    }
    drop(engine);
    assert_eq!(children(), NOBODY);
}

/// The same between two workers: both are replaced, for either may have written there.
#[test]
fn workers_whose_ring_makes_no_sense_are_replaced() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    let engine = start(&file.path, &placement(3));
    let request = || greedy(&prompt(1, 20), 40);
    let undisturbed = answer(&engine, request()).token_ids;
    let worker = pids(&engine)[2];
    let fd = WorkerArgs::standard(0, false).ring_in_fd;
    overwrite(&engine, OpenOptions::new().write(true).open(format!("/proc/{worker}/fd/{fd}")).unwrap());
    assert_eq!(answer(&engine, request()).token_ids, undisturbed);
    let status = engine.status();
    let recovery = status.recovery.unwrap();
    assert_eq!((recovery.code, recovery.attempts), ("worker_failed", 1));
    // Stage 1 may have found it, too, and is then no more to be trusted with its other ring.
    assert!(matches!(recovery.stages[..], [1, 2] | [0, 1, 2]), "{recovery:?}");
    drop(engine);
    assert_eq!(children(), NOBODY);
}

/// Both workers die; one of the next two has loaded when the other one dies, too. Everything that was replaced is told of.
#[test]
fn a_recovery_tells_what_all_of_its_attempts_replaced() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    let folder = tempfile::tempdir().unwrap();
    let [program, armed, go] = ["worker", "armed", "go"].map(|name| folder.path().join(name));
    // Of the workers that start when it is armed, all but the first one wait.
    let script = format!(
        "#!/bin/sh\nif [ -e '{armed}' ] && ! mkdir '{armed}/first' 2>/dev/null; then\n\
         while [ ! -e '{go}' ]; do sleep 0.02; done; fi\nexec '{worker}' \"$@\"\n",
        armed = armed.display(),
        go = go.display(),
        worker = options().worker_exe.unwrap().display(),
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
    let options = EngineOptions { worker_exe: Some(program), ..options() };
    let engine = try_start(&open(&file.path), &placement(2), options).unwrap();
    let undisturbed = answer(&engine, greedy(&prompt(1, 20), 40)).token_ids;
    std::fs::create_dir(&armed).unwrap();
    let mut victims = pids(&engine);
    let (sender, events) = channel();
    // On the engine's thread, so that it finds both dead at once.
    let sink = Box::new(move |event| {
        for victim in victims.drain(..) {
            let pid = i32::try_from(victim).unwrap();
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
            eventually("it is dead", || {
                std::fs::read_to_string(format!("/proc/{victim}/stat")).unwrap().contains(") Z ")
            });
        }
        drop(sender.send(event));
    });
    engine.submit(greedy(&prompt(1, 20), 40), sink).unwrap();
    let loaded = |engine: &Engine| {
        let status = engine.status();
        let at = |state| status.stages.iter().position(|stage| stage.lifecycle == state);
        at(Lifecycle::Loaded).zip(at(Lifecycle::Spawning))
    };
    eventually("one has loaded", || loaded(&engine).is_some());
    let (_, waiting) = loaded(&engine).unwrap();
    signal_worker(&engine, waiting, Signal::SIGKILL);
    std::fs::write(&go, "").unwrap();
    let end = events.iter().find_map(|event| match event {
        GenerateEvent::Done(completion) => Some(completion.token_ids),
        GenerateEvent::Failed(error) => panic!("{error}"),
        _ => None,
    });
    assert_eq!(end.unwrap(), undisturbed);
    let status = engine.status();
    let recovery = status.recovery.unwrap();
    assert_eq!((recovery.stages, recovery.attempts, status.restarts), (vec![0, 1], 2, 3));
    drop(engine);
    assert_eq!(children(), NOBODY);
}
