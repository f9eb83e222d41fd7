//! Several clients of one daemon, those that misbehave, and every way a daemon ends.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::time::{Duration, Instant};
use support::{
    Conversation, Daemon, Models, ask, daemon_with_long_model, endless, eventually, holds_within, is_running,
    is_terminal, long_model, signal, until_running,
};

#[test]
fn several_clients_share_the_model_and_not_their_conversations() {
    let models = Models::new();
    let path = models.path("socket");
    let mut daemon = Daemon::start(&["--listen", path.to_str().unwrap()]);
    let mut first = Conversation::connect(&path);
    let mut second = Conversation::connect(&path);
    first.load(&models.tiny(), json!({}));
    // The same id on two connections is two requests.
    for client in [&mut first, &mut second] {
        client.send(ask("r", 60));
    }
    assert_eq!(first.answer("r").0, second.answer("r").0);
    assert_eq!(second.expect_error(b"{\"type\":\"abort\",\"id\":\"r\"}\n", "unknown_request")["id"], "r");
    // A client that has said everything still hears the answer.
    first.send(ask("last", 4));
    first.close();
    daemon.main.close();
    drop(first);
    let shown = support::run(&["status", "--connect", path.to_str().unwrap()]);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    assert!(shown.stdout.contains("ready") && shown.stdout.contains("tiny.gguf"), "{shown:?}");
    // The end of standard input does not end a daemon that listens.
    second.send(ask("s", 4));
    assert_eq!(second.answer("s").1["type"], "done");
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
    assert!(!path.exists(), "the socket file is removed");
}

#[test]
fn the_socket_of_a_killed_daemon_is_taken_over_and_that_of_a_living_one_is_not() {
    let models = Models::new();
    let path = models.path("socket");
    let listen = ["--listen", path.to_str().unwrap()];
    let mut killed = Daemon::start(&listen);
    Conversation::connect(&path);
    killed.signal(Signal::SIGKILL);
    killed.wait();
    assert!(path.exists());
    let _living = Daemon::start(&listen);
    eventually("the new daemon answers", || std::os::unix::net::UnixStream::connect(&path).is_ok());
    Conversation::connect(&path).ask(json!({"type": "ping"}), "pong");
    let refused = support::run(&["daemon", "--listen", path.to_str().unwrap()]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("already serves"), "{refused:?}");
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_others_do_not_wait_for_it() {
    use std::io::Write;
    let models = Models::new();
    let path = models.path("socket");
    let mut daemon = Daemon::start(&["--listen", path.to_str().unwrap()]);
    daemon.main.load(&long_model(&models), json!({}));
    let mut deaf = std::os::unix::net::UnixStream::connect(&path).unwrap();
    writeln!(deaf, "{}", endless("deaf")).unwrap();
    // Answers to pings fill its buffer much faster than tokens; the daemon may stop reading at any point.
    let ping = format!("{{\"type\":\"ping\",\"id\":\"{}\"}}\n", "x".repeat(250));
    let flood = std::thread::spawn(move || while deaf.write_all(ping.as_bytes()).is_ok() {});
    for number in 0..20 {
        let id = format!("r{number}");
        daemon.main.send(ask(&id, 8));
        assert_eq!(daemon.main.answer(&id).1["type"], "done");
    }
    flood.join().unwrap();
    eventually("the request of the dropped client has ended", || {
        daemon.main.ask(json!({"type": "diag"}), "diag")["requests"] == 0
    });
    daemon.main.close();
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn the_requests_of_a_client_that_has_gone_away_are_aborted() {
    let models = Models::new();
    let path = models.path("socket");
    let mut daemon = Daemon::start(&["--listen", path.to_str().unwrap()]);
    daemon.main.load(&long_model(&models), json!({"parallel": 1, "max_seq": 32768}));
    let mut gone = Conversation::connect(&path);
    gone.send(endless("running"));
    until_running(&mut gone, "running");
    gone.send(endless("waiting"));
    let running = |daemon: &mut Daemon| daemon.main.ask(json!({"type": "diag"}), "diag")["requests"].clone();
    eventually("both are accepted", || running(&mut daemon) == 2);
    gone.hang_up();
    eventually("both are aborted", || running(&mut daemon) == 0);
    daemon.main.send(ask("next", 2));
    assert_eq!(daemon.main.answer("next").1["type"], "done");
    daemon.main.close();
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn a_reader_of_standard_output_that_goes_away_ends_the_daemon_in_order() {
    let models = Models::new();
    let mut daemon = daemon_with_long_model(&models, json!({}));
    daemon.main.send(endless("r"));
    until_running(&mut daemon.main, "r");
    let workers = daemon.workers();
    daemon.main.hang_up();
    assert_eq!(daemon.wait(), Some(0));
    assert!(workers.iter().all(|&pid| !is_running(pid)));
}

#[test]
fn a_termination_signal_lets_requests_end_and_a_second_one_does_not() {
    let models = Models::new();
    let mut daemon = daemon_with_long_model(&models, json!({}));
    daemon.main.send(ask("short", 500));
    daemon.main.send(endless("long"));
    until_running(&mut daemon.main, "short");
    // Service managers and terminals signal every process of a group.
    daemon.workers().into_iter().for_each(|worker| support::signal(worker, Signal::SIGTERM));
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.main.answer("short").1["type"], "done");
    daemon.signal(Signal::SIGTERM);
    let aborted = daemon.main.answer("long").1;
    assert_eq!((&aborted["type"], &aborted["reason"]), (&json!("aborted"), &json!("shutdown")));
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn an_interrupt_ends_the_daemon_at_once_with_its_own_code() {
    let models = Models::new();
    let mut daemon = daemon_with_long_model(&models, json!({}));
    daemon.main.send(endless("r"));
    until_running(&mut daemon.main, "r");
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.main.answer("r").1["type"], "aborted");
    assert_eq!(daemon.wait(), Some(130));
}

#[test]
fn without_restarts_a_killed_worker_ends_its_requests_once_and_the_daemon_goes_on() {
    let models = Models::new();
    let mut daemon = Daemon::start_with_env(&[], &[("SPILLWAY_RESTART_LIMIT", "0")]);
    daemon.main.load(&long_model(&models), json!({"cpu_workers": 2}));
    daemon.main.send(endless("a"));
    daemon.main.send(endless("b"));
    until_running(&mut daemon.main, "b");
    let workers = daemon.workers();
    signal(workers[1], Signal::SIGKILL);
    let mut open = 2;
    let events = daemon.main.until(|event| {
        open -= i32::from(is_terminal(event));
        open == 0
    });
    for event in events.iter().filter(|event| is_terminal(event)) {
        assert_eq!(
            (&event["type"], &event["code"], &event["class"]),
            (&json!("error"), &json!("worker_died"), &json!("transient"))
        );
    }
    // No zombie, no survivor: both ended, and were waited for.
    assert!(holds_within(Duration::from_secs(5), || daemon.workers().is_empty()), "{:?}", daemon.workers());
    let diag = daemon.main.ask(json!({"type": "diag"}), "diag");
    assert_eq!((&diag["state"], &diag["model_loaded"]), (&json!("failed"), &json!(false)));
    daemon.main.send(ask("r", 2));
    assert_eq!(daemon.main.answer("r").1["type"], "error");
    daemon.main.load(&models.tiny(), json!({}));
    daemon.main.send(ask("r", 2));
    assert_eq!(daemon.main.answer("r").1["type"], "done");
    daemon.finish();
}

#[test]
fn an_interrupt_ends_the_daemon_although_a_load_does_not_come_to_an_end() {
    let models = Models::new();
    let mut daemon = Daemon::start(&[]);
    let large = models.write("large.gguf", &TinyModel::new("qwen3").layers(100));
    daemon.main.send(json!({"type": "load", "model": large}));
    // A worker that stands still holds up the load (or, if it was quicker than this test, the end).
    let is_worker = |pid: u32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.windows(10).any(|word| word == b"worker-cpu"))
    };
    eventually("the worker is there", || daemon.workers().into_iter().any(is_worker));
    for worker in daemon.workers() {
        signal(worker, Signal::SIGSTOP);
    }
    let interrupted = Instant::now();
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.wait(), Some(130));
    assert!(interrupted.elapsed() < Duration::from_secs(10), "{:?}", interrupted.elapsed());
}

/// Two requests go on after a worker is killed; the client is told, and both answers are those of an undisturbed daemon.
#[test]
fn a_killed_worker_is_replaced_and_answers_go_on() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({"cpu_workers": 2}));
    let answers = |daemon: &mut Daemon, kill: bool| -> Vec<String> {
        let workers = daemon.workers();
        ["a", "b"].into_iter().for_each(|id| daemon.main.send(ask(id, 300)));
        let mut texts = vec![String::new(); 2];
        let (mut open, mut recovering, mut killed) = (2, 0, false);
        daemon.main.until(|event| {
            let which = usize::from(event["id"] == "b");
            match event["type"].as_str() {
                Some("token") => texts[which].push_str(event["text"].as_str().unwrap()),
                Some("recovering") => {
                    assert_eq!(event["code"], "worker_died", "{event}");
                    recovering += 1;
                }
                Some("done") => open -= 1,
                other => panic!("{other:?}: {event}"),
            }
            if kill && !killed && texts.iter().all(|text| !text.is_empty()) {
                killed = true;
                signal(workers[1], Signal::SIGKILL);
            }
            open == 0
        });
        assert_eq!(recovering > 0, kill);
        texts
    };
    let undisturbed = answers(&mut daemon, false);
    assert_eq!(answers(&mut daemon, true), undisturbed);
    let diag = daemon.main.ask(json!({"type": "diag"}), "diag");
    assert_eq!((&diag["state"], &diag["reason"]), (&json!("ready"), &json!(null)));
    assert!(diag["restarts"].as_u64() >= Some(1), "{diag}");
    daemon.finish();
}

/// The request whose token makes its worker crash gets an error of its own; the one beside it does not notice.
#[test]
fn a_request_that_crashes_its_worker_twice_ends_alone() {
    let models = Models::new();
    let mut daemon = Daemon::start_with_env(&[], &[("SPILLWAY_FAULT", "abort-on-token:77")]);
    daemon.main.load(&models.tiny(), json!({"cpu_workers": 2}));
    daemon.main.send(json!({"type": "generate", "id": "good", "prompt_ids": [1, 2, 3], "max_tokens": 200}));
    until_running(&mut daemon.main, "good");
    // However often: failures that are put down to a request do not end the model for the others.
    let poison = |id: &str| json!({"type": "generate", "id": id, "prompt_ids": [5, 77, 6], "max_tokens": 5});
    let mut ends = Vec::new();
    for id in ["p1", "p2", "p3", "p4"] {
        daemon.main.send(poison(id));
        daemon.main.until(|event| {
            if is_terminal(event) {
                ends.push((event["id"].clone(), event["type"].clone(), event["code"].clone()));
            }
            is_terminal(event) && event["id"] == id
        });
    }
    if !ends.iter().any(|(id, ..)| id == "good") {
        let end = daemon.main.answer("good").1;
        ends.push((end["id"].clone(), end["type"].clone(), end["code"].clone()));
    }
    for (id, end, code) in ends {
        let expected = if id == "good" { ("done", Value::Null) } else { ("error", json!("poison_request")) };
        assert_eq!((end.as_str().unwrap(), code), expected, "{id}");
    }
    daemon.main.send(ask("later", 2));
    assert_eq!(daemon.main.answer("later").1["type"], "done");
    daemon.finish();
}

#[test]
fn a_restart_limit_that_is_no_number_refuses_to_start() {
    let mut daemon = Daemon::start_with_env(&[], &[("SPILLWAY_RESTART_LIMIT", "many")]);
    assert_eq!(daemon.wait(), Some(3));
}
