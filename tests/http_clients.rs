//! The HTTP server and clients that go away, are slow or strangers; workers that die; and the server's own beginning and end.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/http.rs"]
mod http;
mod support;

use http::{CHAT, Events, Http, Reply, Sent, Server, TEXT, text_of, until_closed};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};
use support::{Daemon, Models, eventually, finish, long_model, run, signal, spillway};

/// A varied and reproducible answer.
fn body(max_tokens: u32) -> Value {
    json!({"prompt": "the word", "temperature": 1.5, "seed": 11, "ignore_eos": true, "max_tokens": max_tokens})
}

/// A request that runs until it is ended.
fn endless() -> Value {
    body(1 << 20)
}

fn text_answer(http: &Http, max_tokens: u32) -> String {
    http.post(TEXT, &body(max_tokens)).ok()["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn is_ready(http: &Http) -> (u16, String) {
    let reply = http.get("/ready");
    (reply.status, reply.json()["state"].as_str().unwrap().to_owned())
}

fn is_healthy(http: &Http) -> bool {
    let reply = http.get("/health");
    reply.status == 200 && reply.json()["version"].is_string()
}

/// A request on a connection of its own, whose answer is not read yet.
fn ask(http: &Http, body: &Value) -> TcpStream {
    let mut stream = http.connect();
    stream.write_all(http.request(TEXT, &body.to_string(), "").as_bytes()).unwrap();
    stream
}

#[test]
fn the_requests_of_clients_that_go_away_are_aborted() {
    let models = Models::new();
    let server = Server::with_model(&long_model(&models), &["--parallel", "1", "--max-seq", "32768"]);
    let http = &server.http;
    let mut streaming = http.stream(TEXT, &endless());
    streaming.until_text();
    let queued = http.stream(TEXT, &endless());
    let whole = ask(http, &endless());
    eventually("all are in flight", || http.metric("spillway_requests_queued") == 2.0);
    drop(streaming);
    eventually("the next one runs", || http.metric("spillway_requests_in_flight") == 2.0);
    drop(queued);
    drop(whole);
    http.until_idle();
    eventually("the slot is free", || http.metric("spillway_requests_generating") == 0.0);
    assert!(!text_answer(http, 5).is_empty());
}

/// What has been sent behind the request is not read before that is answered, and hides that the client is gone.
#[test]
fn clients_that_sent_more_than_a_request_and_go_away_are_noticed() {
    let models = Models::new();
    let server = Server::with_model(&long_model(&models), &["--max-seq", "32768"]);
    let http = &server.http;
    for more in ["\r\n", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
        for body in [endless(), with_stream(endless())] {
            let mut client = ask(http, &body);
            client.write_all(more.as_bytes()).unwrap();
            eventually("it runs", || http.metric("spillway_requests_generating") == 1.0);
            drop(client);
            http.until_idle();
        }
    }
}

/// Slow in every way at once, since each takes its time.
#[test]
fn clients_that_are_slow_hold_up_nobody_and_are_dropped() {
    let models = Models::new();
    let server = Server::with_model(&long_model(&models), &["--parallel", "2", "--max-seq", "65536"]);
    let http = &server.http;
    let silent = http.connect();
    let mut half = http.connect();
    half.write_all(b"GET /health HTTP/1.1\r\n").unwrap();
    let blind = ask(http, &with_stream(endless()));
    nix::sys::socket::setsockopt(&blind, nix::sys::socket::sockopt::RcvBuf, &4096).unwrap();
    eventually("it runs", || http.metric("spillway_requests_generating") == 1.0);
    // Another one is answered meanwhile, in full.
    assert!(!text_answer(http, 50).is_empty());
    let other = ask(http, &endless());
    eventually("both slots are taken", || http.metric("spillway_requests_generating") == 2.0);
    let mut queued = http.stream(TEXT, &endless());
    assert_eq!(queued.next(), Sent::Comment("waiting".to_owned()), "a silent stream shows that it is alive");
    drop((queued, other));
    http.until_idle();
    // What had been sent is still there, but the answer broke off.
    let rest = Events::of(blind).rest();
    assert_eq!(rest.last(), Some(&Sent::Broken));
    until_closed(silent);
    until_closed(half);
}

#[test]
fn a_server_with_too_much_to_do_says_so_and_bounds_its_connections() {
    let models = Models::new();
    let server = Server::with_model(&long_model(&models), &["--parallel", "1", "--max-seq", "65536"]);
    let http = &server.http;
    let waiting: Vec<_> = (0..257).map(|_| ask(http, &endless())).collect();
    eventually("the queue is full", || http.metric("spillway_requests_queued") == 256.0);
    for body in [body(3), with_stream(body(3))] {
        let reply = http.post(TEXT, &body);
        assert_eq!((reply.status, reply.error().as_str()), (429, "queue_full"), "{body}");
        assert_eq!(reply.header("x-should-retry"), Some("true"));
    }
    drop(waiting);
    http.until_idle();
    // A connection beyond the limit is answered once another one has ended.
    let mut idle: Vec<_> = (0..512).map(|_| http.connect()).collect();
    let last = ask(http, &body(3));
    last.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(last.peek(&mut [0]).is_err(), "nobody answers yet");
    idle.pop();
    last.set_read_timeout(Some(support::PATIENCE)).unwrap();
    Reply::of(last).ok();
}

fn with_stream(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body
}

#[test]
fn a_killed_worker_is_a_comment_in_the_stream_and_no_change_of_the_text() {
    /// So long that the worker is killed before the end, however slow this test is.
    const LENGTH: u32 = 7000;
    let models = Models::new();
    let server = Server::with_model(&long_model(&models), &["--cpu-workers", "2", "--max-seq", "8192"]);
    let http = &server.http;
    let undisturbed = text_answer(http, LENGTH);
    let worker = server.workers()[1];
    let mut events = http.stream(TEXT, &body(LENGTH));
    let whole = std::thread::spawn({
        let http = http.clone();
        move || text_answer(&http, LENGTH)
    });
    let begin = events.until_text();
    signal(worker, Signal::SIGKILL);
    let rest = events.rest();
    assert_eq!(begin + &text_of(&rest), undisturbed);
    let recovering =
        |sent: &Sent| matches!(sent, Sent::Comment(text) if text.starts_with("recovering worker_died: "));
    assert!(rest.iter().any(recovering), "{rest:?}");
    assert_eq!(rest[rest.len() - 2..], [Sent::Done, Sent::End]);
    assert_eq!(whole.join().unwrap(), undisturbed);
    assert_eq!(is_ready(http), (200, "ready".to_owned()));
    assert!(http.metric("spillway_worker_restarts_total") >= 1.0);
}

#[test]
fn a_worker_that_is_not_replaced_ends_streams_with_an_error_and_without_done() {
    let models = Models::new();
    let env = [("SPILLWAY_RESTART_LIMIT", "0")];
    let server = Server::with_model_and_env(&long_model(&models), &["--cpu-workers", "2"], &env);
    let http = &server.http;
    let mut events =
        http.stream(CHAT, &json!({"messages": [{"role": "user", "content": "x"}], "ignore_eos": true}));
    events.until_text();
    signal(server.workers()[0], Signal::SIGKILL);
    let rest = events.rest();
    assert!(!rest.contains(&Sent::Done));
    let errors: Vec<_> =
        rest.iter().filter(|sent| matches!(sent, Sent::Data(data) if data["error"].is_object())).collect();
    let [Sent::Data(error)] = errors.as_slice() else { panic!("{errors:?}") };
    assert_eq!(error["error"]["code"], "worker_died");
    assert_eq!((rest.last(), is_ready(http)), (Some(&Sent::End), (503, "failed".to_owned())));
    assert!(is_healthy(http));
    let reply = http.post(TEXT, &body(3));
    assert_eq!(
        (reply.status, reply.error().as_str(), reply.header("x-should-retry")),
        (503, "worker_died", Some("true"))
    );
}

#[test]
fn a_daemon_serves_http_beside_json_lines_and_is_ready_once_a_model_is_loaded() {
    let models = Models::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut daemon = Daemon::start(&["--http", &port.to_string()]);
    let http = Http { address: format!("127.0.0.1:{port}") };
    eventually("it listens", || TcpStream::connect(&http.address).is_ok());
    assert!(is_healthy(&http));
    assert_eq!(is_ready(&http), (503, "none".to_owned()));
    assert_eq!(http.get("/v1/models").ok()["data"], json!([]));
    let reply = http.post(TEXT, &body(3));
    assert_eq!(
        (reply.status, reply.error().as_str(), reply.header("x-should-retry")),
        (503, "no_model_loaded", Some("true"))
    );
    daemon.main.load(&models.tiny(), json!({}));
    assert_eq!(is_ready(&http), (200, "ready".to_owned()));
    let expected = text_answer(&http, 20);
    let mut generate = json!({"type": "generate", "id": "r", "prompt": "the word", "raw": true});
    generate.as_object_mut().unwrap().extend(body(20).as_object().unwrap().clone());
    generate["top_p"] = json!(1);
    daemon.main.send(generate);
    assert_eq!(daemon.main.answer("r").0, expected);
    // The end of standard input is not the end of HTTP.
    daemon.main.close();
    assert_eq!(text_answer(&http, 20), expected);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn a_termination_signal_lets_answers_end_and_a_second_one_does_not() {
    let models = Models::new();
    let args = ["--max-seq", "65536", "--drain-limit", "60"];
    let mut server = Server::with_model(&long_model(&models), &args);
    let http = server.http.clone();
    let undisturbed = text_answer(&http, 1500);
    let mut long = http.stream(TEXT, &endless());
    let whole = ask(&http, &endless());
    eventually("both run", || http.metric("spillway_requests_generating") == 2.0);
    let mut short = http.stream(TEXT, &body(1500));
    let (begin, _) = (short.until_text(), long.until_text());
    server.signal(Signal::SIGTERM);
    assert_eq!(begin + &text_of(&short.rest()), undisturbed);
    assert!(TcpStream::connect(&http.address).is_err(), "nobody new is let in");
    server.signal(Signal::SIGTERM);
    let rest = long.rest();
    let [.., Sent::Data(error), Sent::End] = rest.as_slice() else { panic!("{:?}", rest.last()) };
    assert_eq!(error["error"]["code"], "shutting_down");
    let reply = Reply::of(whole);
    assert_eq!((reply.status, reply.error().as_str()), (503, "shutting_down"));
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_key_is_asked_of_everyone_but_of_probes() {
    let models = Models::new();
    let env = [("SPILLWAY_API_KEY", "secret")];
    let server = Server::with_model_and_env(&models.tiny(), &[], &env);
    let http = &server.http;
    assert!(is_healthy(http));
    assert_eq!(is_ready(http).0, 200);
    // Not even with a wrong method is there anything to be learned.
    for path in ["/v1/models", "/metrics", "/nothing", CHAT] {
        let reply = http.get(path);
        assert_eq!((reply.status, reply.error().as_str()), (401, "missing_api_key"), "{path}");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    let sent = |key: &str| {
        http.send(&http.request(TEXT, &body(3).to_string(), &format!("authorization: Bearer {key}\r\n")))
    };
    let wrong = sent("guess");
    assert_eq!((wrong.status, wrong.error().as_str()), (401, "invalid_api_key"));
    sent("secret").ok();
}

/// An empty variable is what scripts leave behind that have no key to give.
#[test]
fn a_key_that_cannot_be_used_is_not_shown_and_an_empty_variable_is_none() {
    let models = Models::new();
    let model = models.tiny();
    let args = ["serve", "-q", "--http", "0", "-m", model.to_str().unwrap()];
    let mut command = spillway(args);
    command.env("SPILLWAY_API_KEY", "two words");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = finish(command.spawn().unwrap(), b"");
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("SPILLWAY_API_KEY cannot be used: a key must be"), "{ran:?}");
    assert!(!ran.stderr.contains("two words"), "{ran:?}");
    let ran = run(&[&args[..], &["--api-key", "two words"]].concat());
    assert!(ran.code == Some(2) && !ran.stderr.contains("two words"), "{ran:?}");
    let server = Server::with_model_and_env(&model, &[], &[("SPILLWAY_API_KEY", "")]);
    assert!(!text_answer(&server.http, 3).is_empty());
}

#[test]
fn a_page_that_pretends_to_be_this_machine_is_refused() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &[]);
    let http = &server.http;
    let from =
        |host: &str| http.send(&http.request(TEXT, &body(3).to_string(), "").replace(&http.address, host));
    let reply = from("pages.example:8080");
    assert_eq!((reply.status, reply.error().as_str()), (403, "host_not_allowed"));
    let wrong_method =
        http.send(&format!("GET {CHAT} HTTP/1.1\r\nhost: pages.example\r\nconnection: close\r\n\r\n"));
    assert_eq!((wrong_method.status, wrong_method.error().as_str()), (403, "host_not_allowed"));
    from("localhost:8080").ok();
}

#[test]
fn a_server_that_cannot_begin_says_why_and_nothing_is_left() {
    let models = Models::new();
    let model = models.tiny();
    let model = model.to_str().unwrap();
    let refused = |args: &[&str], code: i32, words: &str| {
        let ran = run(&[&["serve", "-q", "--http"], args].concat());
        assert_eq!(ran.code, Some(code), "{ran:?}");
        assert!(ran.stderr.lines().last().unwrap().contains(words), "{ran:?}");
    };
    refused(&["0.0.0.0:0", "-m", model], 2, "needs a key");
    refused(&["here", "-m", model], 2, "127.0.0.1:8080");
    refused(&["0", "-m", model, "--api-key", "two words"], 2, "--api-key cannot be used: a key must be");
    refused(&["0", "-m", model, "--api-key", ""], 2, "--api-key cannot be used: a key must be");
    refused(&["0", "-m", "nothing.gguf"], 3, "nothing.gguf");
    refused(&["0", "-m", model, "--cpu-workers", "99"], 3, "99");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    refused(&[&taken.local_addr().unwrap().to_string(), "-m", model], 1, "is taken by another program");
}

/// A first request, sent as soon as the server listens, waits for the model; and there is no moment without one in a reload.
#[test]
fn requests_wait_for_the_first_model_and_for_the_next_one() {
    let models = Models::new();
    let model = models.tiny();
    let server = Server::start(&["-m", model.to_str().unwrap()], &[]);
    let http = &server.http;
    assert!(["loading", "ready"].contains(&is_ready(http).1.as_str()));
    let answer = text_answer(http, 5);
    assert_eq!(is_ready(http), (200, "ready".to_owned()));
    let loaded_before = server.workers();
    server.signal(Signal::SIGHUP);
    eventually("the model is loaded again", || {
        let (_, state) = is_ready(http);
        assert!(["loading", "ready"].contains(&state.as_str()), "{state}");
        state == "ready" && !server.workers().iter().any(|worker| loaded_before.contains(worker))
    });
    assert_eq!(text_answer(http, 5), answer);
}

#[test]
fn while_a_model_loads_the_server_is_healthy_and_not_ready_and_can_be_ended() {
    let models = Models::new();
    let large = models.write("large.gguf", &spillway_model::testing::TinyModel::new("qwen3").layers(100));
    let mut server = Server::start(&["-m", large.to_str().unwrap()], &[]);
    let http = server.http.clone();
    // A worker that stands still holds up the load.
    let is_worker = |pid: u32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.windows(10).any(|word| word == b"worker-cpu"))
    };
    eventually("the worker is there", || server.workers().into_iter().any(is_worker));
    server.workers().into_iter().for_each(|worker| signal(worker, Signal::SIGSTOP));
    assert_eq!(is_ready(&http), (503, "loading".to_owned()));
    assert!(is_healthy(&http));
    let streams: Vec<_> = (0..4).map(|_| ask(&http, &with_stream(body(3)))).collect();
    let waiting = ask(&http, &body(3));
    eventually("they wait", || http.metric("spillway_requests_in_flight") == 5.0);
    // They hold up nobody who can be answered without a model.
    let wrong = http.post(TEXT, &json!({"prompt": 7}));
    assert_eq!((wrong.status, wrong.error().as_str()), (400, "wrong_type"));
    let ended = Instant::now();
    server.signal(Signal::SIGINT);
    for waiting in streams.into_iter().chain([waiting]) {
        assert_eq!(Reply::of(waiting).error(), "shutting_down");
    }
    assert_eq!(server.wait(), Some(130));
    assert!(ended.elapsed() < Duration::from_secs(10), "{:?}", ended.elapsed());
}
