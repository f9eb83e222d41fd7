//! Conversations with the daemon: what is accepted, what is refused, and that neither disturbs the other.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use serde_json::{Value, json};
use support::{
    Conversation, Daemon, Models, ask, daemon_with_long_model, endless, is_running, is_terminal, long_model,
    until_running,
};

#[test]
fn a_conversation_from_load_to_unload() {
    let models = Models::new();
    let mut daemon = Daemon::start(&[]);
    let client = &mut daemon.main;
    client.ask(json!({"type": "ping", "id": "p"}), "pong");
    let loaded = client.load(&models.tiny(), json!({"max_seq": 256, "cpu_workers": 2}));
    for (field, value) in [
        ("arch", json!("qwen3")),
        ("dim", json!(64)),
        ("layers", json!(4)),
        ("vocab", json!(288)),
        ("vl", json!(false)),
        ("max_seq", json!(256)),
    ] {
        assert_eq!(loaded[field], value, "{loaded}");
    }
    let stages: Vec<_> =
        loaded["stages"].as_array().unwrap().iter().map(|stage| stage["layers"].clone()).collect();
    assert_eq!(stages, [2, 2]);
    client.send(ask("r", 8));
    let (text, done) = client.answer("r");
    assert!(!text.is_empty());
    assert_eq!(
        (&done["type"], &done["tokens"], &done["finish_reason"]),
        (&json!("done"), &json!(8), &json!("length"))
    );
    for figure in
        ["tok_s", "prefill_tokens", "prefill_ms", "prefill_tok_s", "decode_tok_s", "ttft_ms", "cached_tokens"]
    {
        assert!(done[figure].is_number(), "{figure}: {done}");
    }
    assert_eq!(
        client.ask(json!({"type": "reset", "id": "x"}), "reset"),
        json!({"type": "reset", "id": "x", "seq_pos": 0})
    );
    client.ask(json!({"type": "unload"}), "unloaded");
    client.ask(json!({"type": "unload"}), "unloaded");
    client.send(ask("r", 8));
    assert_eq!(client.answer("r").1["code"], "no_model_loaded");
    daemon.finish();
}

#[test]
fn lines_that_are_wrong_get_an_error_and_the_daemon_goes_on() {
    let mut daemon = Daemon::start(&[]);
    let client = &mut daemon.main;
    client.expect_error(b"hello\n", "invalid_json");
    client.expect_error(b"\"\xff\xfe\"\n", "invalid_utf8");
    client.expect_error(b"[1,2]\n", "not_an_object");
    client.expect_error(b"{\"type\":\"warp\"}\n", "unknown_type");
    client.expect_error(b"{\"type\":\"generate\",\"prompt\":\"x\"}\n", "missing_field");
    client.expect_error(b"{\"type\":\"generate\",\"id\":\"r\",\"prompt\":7}\n", "wrong_type");
    client.expect_error(
        b"{\"type\":\"generate\",\"id\":\"r\",\"prompt\":\"x\",\"image\":\"a.png\"}\n",
        "vision_unsupported",
    );
    client.expect_error(b"{\"type\":\"abort\",\"id\":\"nobody\"}\n", "unknown_request");
    let mut long = vec![b'x'; 10_000_000];
    long.push(b'\n');
    client.expect_error(&long, "line_too_long");
    client.ask(json!({"type": "ping"}), "pong");
    // A last line without its line feed counts.
    client.send_bytes(b"{\"type\":\"ping\"}");
    client.close();
    assert_eq!(client.next()["type"], "pong");
    daemon.finish();
}

#[test]
fn a_generate_before_any_load_is_an_error_for_that_request() {
    let mut daemon = Daemon::start(&[]);
    daemon.main.send(ask("r", 8));
    let error = daemon.main.next();
    assert_eq!(
        (&error["id"], &error["code"], &error["class"]),
        (&json!("r"), &json!("no_model_loaded"), &json!("validation"))
    );
    daemon.finish();
}

#[test]
fn lines_that_come_all_at_once_are_answered_in_order_and_the_end_of_input_drains() {
    let models = Models::new();
    let mut daemon = Daemon::start(&[]);
    let load = json!({"type": "load", "model": models.tiny()});
    let unload = json!({"type": "unload"});
    let lines = [load, ask("a", 20), ask("b", 20), unload, ask("c", 20)];
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    daemon.main.send_bytes(text.as_bytes());
    daemon.main.close();
    let events = daemon.main.until(|event| event["id"] == "c");
    let ends: Vec<_> =
        events.iter().filter(|event| event["type"] != "token").map(|event| event["type"].clone()).collect();
    assert_eq!(ends, ["loaded", "done", "done", "unloaded", "error"]);
    assert!(daemon.main.is_closed());
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn requests_run_side_by_side_and_each_ends_once() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({}));
    let client = &mut daemon.main;
    // More than there are slots: some wait.
    let ids: Vec<String> = (0..12).map(|n| format!("r{n}")).collect();
    for id in &ids {
        client.send(ask(id, 24));
    }
    let mut open = ids.len();
    let events = client.until(|event| {
        open -= usize::from(is_terminal(event));
        open == 0
    });
    let text_of = |id: &str| -> String {
        let pieces = events.iter().filter(|event| event["type"] == "token" && event["id"] == id);
        pieces.map(|event| event["text"].as_str().unwrap()).collect()
    };
    for id in &ids {
        assert_eq!(events.iter().filter(|event| is_terminal(event) && event["id"] == *id).count(), 1);
        assert_eq!(text_of(id), text_of("r0"), "an answer does not depend on its neighbours");
    }
    daemon.finish();
}

#[test]
fn an_id_in_flight_is_refused_and_free_again_afterwards() {
    let models = Models::new();
    let mut daemon = daemon_with_long_model(&models, json!({}));
    let client = &mut daemon.main;
    client.send(endless("r"));
    until_running(client, "r");
    client.send(ask("r", 1));
    let error = client.until(|event| event["type"] == "error").pop().unwrap();
    assert_eq!((&error["code"], &error["id"]), (&json!("duplicate_id"), &json!("r")));
    client.send(json!({"type": "abort", "id": "r"}));
    assert_eq!(client.answer("r").1["type"], "aborted");
    client.send(ask("r", 1));
    assert_eq!(client.answer("r").1["type"], "done");
    daemon.finish();
}

#[test]
fn a_request_can_be_aborted_while_it_runs_and_while_it_waits() {
    let models = Models::new();
    let mut daemon = daemon_with_long_model(&models, json!({"parallel": 1, "max_seq": 4096}));
    let client = &mut daemon.main;
    client.send(endless("running"));
    until_running(client, "running");
    client.send(endless("waiting"));
    client.send(json!({"type": "abort", "id": "waiting"}));
    assert_eq!(client.answer("waiting").1, json!({"type": "aborted", "id": "waiting", "reason": "client"}));
    client.send(json!({"type": "abort", "id": "running"}));
    assert_eq!(client.answer("running").1["type"], "aborted");
    client.send(ask("next", 2));
    assert_eq!(client.answer("next").1["type"], "done");
    daemon.finish();
}

#[test]
fn a_refused_load_leaves_the_old_model_serving_the_same_answers() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({}));
    let tiny = models.tiny();
    let broken = models.path("broken.gguf");
    std::fs::write(&broken, b"GGUF but not really").unwrap();
    let client = &mut daemon.main;
    client.send(ask("before", 24));
    let before = client.answer("before").0;
    let refused = [
        (json!({"model": models.path("absent.gguf")}), "file"),
        (json!({"model": broken}), "broken.gguf"),
        (json!({"model": tiny, "params": {"max_seq": 0}}), "max_seq"),
        (json!({"model": tiny, "params": {"pp": 9}}), "9"),
        (json!({"model": tiny, "params": {"pp_layers": [1, 1]}}), "4"),
        (json!({"model": tiny, "params": {"devices": [0]}}), "devices"),
        (json!({"model": tiny, "params": {"nonsense": 1}}), "nonsense"),
        (json!({"model": tiny, "params": {"tp": 2}}), "tp"),
    ];
    for (number, (mut load, named)) in refused.into_iter().enumerate() {
        load["type"] = json!("load");
        load["id"] = json!("l");
        let error = client.ask(load, "error");
        assert_eq!(error["id"], "l");
        assert!(error["message"].as_str().unwrap().contains(named), "{error}");
        let id = format!("after{number}");
        client.send(ask(&id, 24));
        assert_eq!(client.answer(&id).0, before);
    }
    daemon.finish();
}

#[test]
fn a_load_replaces_the_model_after_what_runs_and_ends_its_workers() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({"cpu_workers": 2}));
    let old_workers = daemon.workers();
    assert_eq!(old_workers.len(), 2);
    let other = models.other();
    daemon.main.send(ask("old", 200));
    daemon.main.send(json!({"type": "load", "model": other}));
    daemon.main.send(ask("new", 8));
    let events = daemon.main.until(|event| event["id"] == "new" && is_terminal(event));
    let ends: Vec<_> = events.iter().filter(|event| event["type"] != "token").collect();
    assert_eq!(
        ends.iter().map(|event| event["type"].as_str().unwrap()).collect::<Vec<_>>(),
        ["done", "loaded", "done"]
    );
    assert_eq!((&ends[0]["tokens"], &ends[1]["arch"]), (&json!(200), &json!("llama")));
    assert!(old_workers.iter().all(|&pid| !is_running(pid)), "workers of the old model are gone");
    assert_eq!(daemon.workers().len(), 1);
    daemon.finish();
}

#[test]
fn prompts_make_a_conversation_that_reset_forgets_and_messages_do_not_touch() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({}));
    let client = &mut daemon.main;
    let turn = |client: &mut Conversation, prompt: &str| {
        client.send(
            json!({"type": "generate", "id": "t", "prompt": prompt, "system": "be", "temperature": 1.5,
            "max_tokens": 8, "ignore_eos": true}),
        );
        client.answer("t")
    };
    let (first_text, first) = turn(client, "hello");
    let (_, second) = turn(client, "hello");
    let tokens = |event: &Value| event["prefill_tokens"].as_u64().unwrap();
    assert!(tokens(&second) > tokens(&first), "the second turn sees the first");
    client.send(ask("m", 4));
    client.answer("m");
    let (_, third) = turn(client, "hello");
    assert!(tokens(&third) > tokens(&second));
    client.ask(json!({"type": "reset"}), "reset");
    let (again_text, again) = turn(client, "hello");
    assert_eq!((again_text, tokens(&again)), (first_text, tokens(&first)));
    daemon.finish();
}

#[test]
fn a_conversation_that_gets_too_long_starts_anew_and_says_so() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({"max_seq": 128}));
    let client = &mut daemon.main;
    let mut resets = 0;
    for _ in 0..8 {
        client.send(
            json!({"type": "generate", "id": "t", "prompt": "the word", "temperature": 1.5, "max_tokens": 24,
            "ignore_eos": true}),
        );
        let events = client.until(|event| event["id"] == "t" && is_terminal(event));
        assert_eq!(events.last().unwrap()["type"], "done");
        resets += events
            .iter()
            .filter(|event| event["type"] == "info" && event["code"] == "conversation_reset")
            .count();
    }
    assert!(resets > 0);
    daemon.finish();
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_both_numbers() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({"max_seq": 64}));
    let ids = vec![1; 100];
    daemon.main.send(json!({"type": "generate", "id": "r", "prompt_ids": ids}));
    let error = daemon.main.next();
    assert_eq!(
        (&error["code"], &error["class"], &error["retryable"]),
        (&json!("context_length_exceeded"), &json!("context_length"), &json!(false))
    );
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("100") && message.contains("64"), "{message}");
    daemon.finish();
}

#[test]
fn a_stop_string_does_not_leak_in_pieces() {
    let models = Models::new();
    let mut daemon = Daemon::with_model(&models, json!({}));
    let client = &mut daemon.main;
    client.send(ask("whole", 60));
    let whole: Vec<char> = client.answer("whole").0.chars().collect();
    for start in [whole.len() / 4, whole.len() / 2] {
        let stop: String = whole[start..start + 4].iter().collect();
        let mut request = ask("cut", 60);
        request["stop"] = json!([stop]);
        client.send(request);
        let (text, done) = client.answer("cut");
        let text_before: String = whole.iter().collect::<String>().split(&stop).next().unwrap().to_owned();
        assert_eq!((text, &done["finish_reason"]), (text_before, &json!("stop")));
    }
    daemon.finish();
}

#[test]
fn diag_answers_at_any_time() {
    let models = Models::new();
    let mut daemon = Daemon::start(&[]);
    let client = &mut daemon.main;
    let empty = client.ask(json!({"type": "diag"}), "diag");
    assert_eq!(
        (&empty["model_loaded"], &empty["model_arch"], &empty["state"]),
        (&json!(false), &json!("none"), &json!("none"))
    );
    assert_eq!(empty["ready"], false);
    assert!(empty["reason"].as_str().unwrap().contains("load"), "{empty}");
    client.load(&long_model(&models), json!({"cpu_workers": 2}));
    client.send(endless("r"));
    until_running(client, "r");
    client.send(json!({"type": "diag", "id": "d"}));
    let busy = client.until(|event| event["type"] == "diag").pop().unwrap();
    assert_eq!((&busy["id"], &busy["state"], &busy["requests"]), (&json!("d"), &json!("ready"), &json!(1)));
    assert_eq!((&busy["ready"], &busy["reason"]), (&json!(true), &json!(null)));
    assert_eq!(busy["stages"].as_array().unwrap().len(), 2);
    assert!(busy["host_available_mb"].as_u64().unwrap() > 0);
    client.send(json!({"type": "abort", "id": "r"}));
    client.answer("r");
    daemon.finish();
}

#[test]
fn loading_is_told_to_whoever_asks_for_it() {
    let models = Models::new();
    let mut daemon = Daemon::start(&[]);
    daemon.main.send(json!({"type": "load", "model": models.tiny(), "progress": true}));
    let events = daemon.main.until(|event| event["type"] == "loaded");
    let last = &events[events.len() - 2];
    assert_eq!((&last["type"], &last["done"]), (&json!("loading"), &last["total"]));
    daemon.finish();
}
