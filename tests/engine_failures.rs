//! Ends that nobody wished for: workers that are not replaced, aborted requests, engines that do not start. Every request has one last
//! event, and no process, segment or descriptor stays behind.
//!
//! The tests of this file count the processes and descriptors of the test program, so they take turns.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/engine.rs"]
mod fixture;

use fixture::{
    NOBODY, answer, children, descriptors, exists, greedy, open, options, pids, placement, prompt,
    signal_worker, start, submit, take_turn, tiny, try_start,
};
use nix::sys::signal::Signal;
use spillway::engine::{Engine, EngineOptions, ErrorClass, GenerateEvent};
use spillway::planner::{Machine, PlacementRequest, plan};
use spillway_model::testing::TinyModel;
use std::fs::{OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

#[test]
fn without_restarts_a_killed_worker_ends_every_request_once_and_the_engine_says_why() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    for stage in 0..3 {
        let before = descriptors();
        let options = EngineOptions { restart_limit: Some(0), ..options() };
        let engine = try_start(&open(&file.path), &placement(3), options).unwrap();
        let workers = pids(&engine);
        let running: Vec<_> = (0..6).map(|seed| submit(&engine, greedy(&prompt(seed, 30), 200))).collect();
        running[0].tokens(3);
        signal_worker(&engine, stage, Signal::SIGKILL);
        let killed = Instant::now();
        for request in &running {
            let GenerateEvent::Failed(error) = request.end() else { panic!("{:?}", request.id) };
            assert_eq!(
                (error.code, error.class, error.retryable),
                ("worker_died", ErrorClass::Transient, true)
            );
            let named = format!("stage {stage}");
            assert!(error.message.contains(&named) && error.message.contains("signal 9"), "{error}");
        }
        assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
        let status = engine.status();
        assert!(!status.ready && status.failure.is_some() && status.live + status.queued == 0);
        let refused = engine.submit(greedy(&[1], 1), Box::new(|event| panic!("{event:?}"))).unwrap_err();
        assert_eq!(refused.code, "worker_died");
        assert!(!workers.into_iter().any(exists), "the other workers ended too");
        drop(engine);
        assert_eq!(children(), NOBODY);
        assert_eq!(descriptors(), before);
    }
}

#[test]
fn a_request_can_be_aborted_queued_and_running() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen35"));
    let engine = start(&file.path, &PlacementRequest { parallel: Some(1), ..placement(2) });
    let running = submit(&engine, greedy(&prompt(1, 20), 230));
    let queued = submit(&engine, greedy(&prompt(2, 20), 20));
    running.tokens(2);
    engine.abort(queued.id);
    assert!(matches!(queued.end(), GenerateEvent::Aborted(completion) if completion.token_ids.is_empty()));
    engine.abort(running.id);
    let GenerateEvent::Aborted(completion) = running.end() else { panic!("not aborted") };
    assert!(completion.token_ids.len() >= 2);
    // In the middle of a prompt that takes many steps.
    let reading = submit(&engine, greedy(&prompt(3, 250), 4));
    engine.abort(reading.id);
    assert!(matches!(reading.end(), GenerateEvent::Aborted(_)));
    assert_eq!(answer(&engine, greedy(&prompt(4, 9), 5)).token_ids.len(), 5, "and the engine goes on");
    assert_eq!(engine.status().kv_blocks_used, 0);
}

#[test]
fn the_queue_is_bounded() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &PlacementRequest { parallel: Some(1), ..placement(1) });
    let running = submit(&engine, greedy(&prompt(1, 20), 230));
    running.tokens(1);
    let waiting: Vec<_> = (0..5).map(|seed| submit(&engine, greedy(&prompt(seed, 20), 2))).collect();
    let GenerateEvent::Failed(error) = waiting[4].end() else { panic!("the queue holds four") };
    assert_eq!((error.code, error.retryable), ("queue_full", true));
    for request in &waiting[..4] {
        assert_eq!(request.done().token_ids.len(), 2);
    }
}

#[test]
fn shutting_down_aborts_what_is_live_and_leaves_nothing() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("qwen3"));
    let before = descriptors();
    let engine = start(&file.path, &placement(2));
    let running = submit(&engine, greedy(&prompt(1, 20), 230));
    running.tokens(1);
    engine.shutdown();
    assert!(matches!(running.end(), GenerateEvent::Aborted(_)));
    assert_eq!(children(), NOBODY);
    let late = engine.submit(greedy(&[1], 1), Box::new(|event| panic!("{event:?}"))).unwrap_err();
    assert_eq!(late.code, "engine_stopped");
    engine.shutdown();
    drop(engine);
    assert_eq!(descriptors(), before);
}

/// Whoever hears of the end may ask for it, too, also from the engine's own thread while another one waits for that.
#[test]
fn an_event_callback_can_end_the_engine_while_another_thread_does() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(1));
    let (heard, ends) = channel();
    let again = engine.clone();
    let sink = Box::new(move |event| {
        if let GenerateEvent::Aborted(_) = event {
            // By now the other thread waits.
            std::thread::park_timeout(Duration::from_millis(100));
            again.shutdown();
        }
        drop(heard.send(event));
    });
    engine.submit(greedy(&prompt(1, 20), 230), sink).unwrap();
    let ending = std::thread::spawn(move || engine.shutdown());
    let aborted = |event: &GenerateEvent| matches!(event, GenerateEvent::Aborted(_));
    while !aborted(&ends.recv_timeout(Duration::from_secs(10)).expect("the engine ends")) {}
    ending.join().unwrap();
    assert_eq!(children(), NOBODY);
}

#[test]
fn dropping_the_last_handle_ends_the_workers() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(2));
    let second = engine.clone();
    drop(engine);
    assert_eq!(answer(&second, greedy(&prompt(1, 5), 3)).token_ids.len(), 3);
    drop(second);
    assert_eq!(children(), NOBODY);
}

/// A stand-in for the worker: a shell script whose descriptor 3 is the control channel.
fn impostor(folder: &Path, script: &str) -> PathBuf {
    let path = folder.join("worker");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
    path
}

/// What a worker does instead of starting, the code it gives, and what the sentence says.
#[test]
fn workers_that_do_not_start_are_an_error_and_leave_nothing() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let model = open(&file.path);
    let folder = tempfile::tempdir().unwrap();
    let before = descriptors();
    let table = [
        ("exit 7", "worker_died", "exit code 7"),
        ("kill -SEGV $$", "worker_died", "signal 11"),
        // Gone without ending.
        ("exec 3>&-; exec sleep 100", "worker_died", "closed its control channel"),
        // Hello of protocol 99.
        (r"printf '\003\000\000\000\000\143\001' >&3; exec sleep 100", "worker_protocol", "protocol 99"),
        // A frame of no bytes.
        (r"printf '\000\000\000\000' >&3; exec sleep 100", "worker_protocol", "frame of 0 bytes"),
        // Loaded, without having been asked to load.
        (
            r"printf '\012\000\000\000\002\000\000\000\000\000\000\000\000\000' >&3; exec sleep 100",
            "worker_protocol",
            "while spawning",
        ),
    ];
    for (script, code, words) in table {
        let options = EngineOptions { worker_exe: Some(impostor(folder.path(), script)), ..options() };
        let error = try_start(&model, &placement(3), options).unwrap_err();
        assert_eq!(error.code(), code, "{script}: {error}");
        assert!(error.to_string().contains(words), "{script}: {error}");
        assert_eq!(children(), NOBODY);
        assert_eq!(descriptors(), before);
    }
    let options = EngineOptions { worker_exe: Some("/nonexistent/spillway".into()), ..options() };
    let error = try_start(&model, &placement(3), options).unwrap_err();
    assert_eq!(error.code(), "worker_spawn_failed", "{error}");
    assert_eq!(descriptors(), before);
}

#[test]
fn a_worker_that_does_not_end_is_killed() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let engine = start(&file.path, &placement(2));
    signal_worker(&engine, 0, Signal::SIGSTOP);
    let stopped = Instant::now();
    engine.shutdown();
    assert!(stopped.elapsed() >= Duration::from_secs(2), "it had its time");
    assert_eq!(children(), NOBODY);
}

#[test]
fn a_plan_of_another_model_is_refused() {
    let [one, other] = [tiny(&TinyModel::new("llama")), tiny(&TinyModel::new("qwen3"))];
    let plan = plan(open(&one.path).summary(), &Machine::detect(), &placement(1)).unwrap();
    let error = Engine::start(open(&other.path), plan, options(), |_| {}).unwrap_err();
    assert_eq!(error.code(), "plan_mismatch");
}

#[test]
fn a_file_that_changed_after_planning_is_not_loaded() {
    let _turn = take_turn();
    let file = tiny(&TinyModel::new("llama"));
    let model = open(&file.path);
    OpenOptions::new().append(true).open(&file.path).unwrap().write_all(&[0; 64]).unwrap();
    let error = try_start(&model, &placement(2), options()).unwrap_err();
    assert_eq!(error.code(), "worker_failed");
    assert!(error.to_string().contains("not the one that was loaded"), "{error}");
    assert_eq!(children(), NOBODY);
}
