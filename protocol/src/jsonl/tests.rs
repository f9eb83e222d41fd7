//! Every message in both spellings that matter, and every way to get a line wrong.

use super::*;
use serde_json::json;
use std::path::PathBuf;

fn parse(line: serde_json::Value) -> Request {
    parse_line(&line.to_string()).unwrap()
}

/// (id, code, class, message) of a refused line.
fn refusal(line: &str) -> (Option<String>, &'static str, Class, String) {
    let Rejected { id, error } = parse_line(line).unwrap_err();
    (id, error.code(), error.class(), error.to_string())
}

fn generate(line: serde_json::Value) -> Generate {
    match parse(line) {
        Request::Generate(generate) => *generate,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_load_takes_every_placement_name_of_the_command_line() {
    let request = parse(json!({"type": "load", "id": "l", "model": "/m.gguf", "progress": true, "params": {
        "max_seq": 8192, "pp": 2, "pp_layers": "3,5", "cpu_workers": 2, "gpu_layer_budget": "auto",
        "offload_exec": "cpu", "offload_prompts": "gpu", "threads": 4, "devices": "none", "allow_shared_device": true, "assume_pre": "qwen2",
        "allow_mixed_arch": false, "vram_limit": "8GiB", "uniform_vram_tolerance_gb": 2.5, "split": "auto",
        "parallel": 3, "kv_type": "f16", "activations": "int16", "chunk": 64, "peer_copies": "off"}}));
    let text = |s: &str| Some(s.to_owned());
    let params = PlacementParams {
        max_seq: Some(8192),
        pp: Some(2),
        pp_layers: text("3,5"),
        split: text("auto"),
        cpu_workers: Some(2),
        gpu_layer_budget: text("auto"),
        offload_exec: text("cpu"),
        offload_prompts: text("gpu"),
        threads: Some(4),
        devices: text("none"),
        allow_shared_device: Some(true),
        allow_mixed_arch: Some(false),
        vram_limit: text("8GiB"),
        uniform_vram_tolerance_gb: text("2.5"),
        parallel: Some(3),
        kv_type: text("f16"),
        activations: text("int16"),
        chunk: Some(64),
        peer_copies: text("off"),
    };
    let load = Load {
        id: text("l"),
        model: PathBuf::from("/m.gguf"),
        progress: true,
        assume_pre: text("qwen2"),
        plan: None,
        params,
    };
    assert_eq!(request, Request::Load(Box::new(load)));
}

#[test]
fn a_load_takes_a_saved_plan_or_wishes_but_not_both() {
    let load = |params| json!({"type": "load", "id": "l", "model": "m", "params": params});
    let Request::Load(saved) = parse(load(json!({"plan": "p.json", "assume_pre": "qwen2", "pp": null})))
    else {
        panic!()
    };
    assert_eq!((saved.plan, saved.params), (Some(PathBuf::from("p.json")), PlacementParams::default()));
    let Request::Load(shared) = parse(load(json!({"plan": "p.json", "allow_shared_device": true}))) else {
        panic!("a plan says nothing of other processes")
    };
    assert_eq!((shared.plan.is_some(), shared.params.allow_shared_device), (true, Some(true)));
    let (_, code, class, message) = refusal(&load(json!({"plan": "p.json", "pp": 2})).to_string());
    assert_eq!((code, class), ("conflicting_fields", Class::Validation));
    assert!(message.contains("params.plan"), "{message}");
}

#[test]
fn lists_and_numbers_may_be_json_instead_of_text() {
    let Request::Load(load) = parse(json!({"type": "load", "model": "m", "params":
        {"pp_layers": [3, 5], "gpu_layer_budget": 7, "devices": [0, "gfx1100"], "vram_limit": ["8GiB", 1024]}}))
    else {
        panic!()
    };
    assert_eq!(load.params.pp_layers.as_deref(), Some("3,5"));
    assert_eq!(load.params.gpu_layer_budget.as_deref(), Some("7"));
    assert_eq!(load.params.devices.as_deref(), Some("0,gfx1100"));
    assert_eq!(load.params.vram_limit.as_deref(), Some("8GiB,1024"));
}

#[test]
fn a_v1_client_may_send_every_default_it_knows() {
    parse(json!({"type": "load", "model": "m", "params": {"max_seq": 4096, "kv_mode": "", "draft": null,
        "dflash_mode": "auto", "dflash_adaptive_b": true, "cask_sidecar": null, "cask": false, "cask_budget": 512,
        "cask_beta": 128, "cask_core_frac": 0.5, "cask_fold_m": 2, "mmq_screen": false, "mmq_screen_threshold": 0.1,
        "prefill_compression": "off", "prefill_threshold": 32768, "prefill_keep_ratio": 0.05,
        "prefill_drafter": null, "prefill_profile": false, "pp": 1, "tp": 1, "kv_backend": "auto"}}));
    generate(json!({"type": "generate", "id": "0", "prompt": "Hello", "image": null, "temperature": 0.3,
        "top_p": 0.8, "max_tokens": 512, "repeat_penalty": 1.0, "repeat_window": 128, "max_think_tokens": 0,
        "assistant_prefix": "plain", "params": {"prefill_compression": "off", "prefill_threshold": 1}}));
}

#[test]
fn a_generate_takes_every_sampling_field() {
    let request =
        generate(json!({"type": "generate", "id": "r", "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function"}], "enable_thinking": false, "chat_template_kwargs": {"a": 1},
        "max_tokens": 5, "ignore_eos": true, "stop": "END", "temperature": 0, "top_p": 0.5, "top_k": 4,
        "min_p": 0.1, "repetition_penalty": 1.5, "repeat_window": 16, "presence_penalty": 0.25,
        "frequency_penalty": -0.5, "seed": 18446744073709551615u64, "logit_bias": {"13": -1.5}}));
    assert_eq!(request.source, Source::Messages(vec![json!({"role": "user", "content": "x"})]));
    assert_eq!(request.tools, Some(vec![json!({"type": "function"})]));
    assert_eq!((request.enable_thinking, request.template_kwargs.len()), (Some(false), 1));
    assert_eq!((request.max_tokens, request.ignore_eos), (Some(5), true));
    assert_eq!(request.stop, ["END"]);
    assert_eq!((request.temperature, request.top_p, request.top_k), (Some(0.0), Some(0.5), Some(4)));
    assert_eq!(
        (request.min_p, request.repeat_penalty, request.repeat_window),
        (Some(0.1), Some(1.5), Some(16))
    );
    assert_eq!((request.presence_penalty, request.frequency_penalty), (Some(0.25), Some(-0.5)));
    assert_eq!((request.seed, request.logit_bias), (Some(u64::MAX), vec![(13, -1.5)]));
}

#[test]
fn what_to_answer_comes_in_four_kinds() {
    let source = |fields: serde_json::Value| {
        let mut line = json!({"type": "generate", "id": "r"});
        line.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        generate(line).source
    };
    let turn = Source::Turn { prompt: "p".into(), system: Some("s".into()) };
    assert_eq!(source(json!({"prompt": "p", "system": "s"})), turn);
    assert_eq!(source(json!({"prompt": "p", "raw": true})), Source::Raw("p".into()));
    assert_eq!(source(json!({"prompt_ids": [1, 2]})), Source::Ids(vec![1, 2]));
    assert_eq!(source(json!({"messages": []})), Source::Messages(vec![]));
}

#[test]
fn messages_without_fields_take_an_optional_id() {
    assert_eq!(parse(json!({"type": "ping"})), Request::Ping { id: None });
    assert_eq!(parse(json!({"type": "diag", "id": "d"})), Request::Diag { id: Some("d".into()) });
    assert_eq!(parse(json!({"type": "reset"})), Request::Reset { id: None });
    assert_eq!(parse(json!({"type": "unload"})), Request::Unload { id: None });
    assert_eq!(parse(json!({"type": "reload"})), Request::Reload { id: None, progress: false });
    let reload = json!({"type": "reload", "id": "r", "progress": true});
    assert_eq!(parse(reload), Request::Reload { id: Some("r".into()), progress: true });
    assert_eq!(parse(json!({"type": "abort", "id": "r"})), Request::Abort { id: "r".into() });
}

/// Line, code, class, what the message must name.
const REFUSED: &[(&str, &str, Class, &str)] = &[
    ("", "invalid_json", Class::Malformed, "line 1"),
    ("{\"type\":", "invalid_json", Class::Malformed, "EOF"),
    ("[1]", "not_an_object", Class::Malformed, "an array"),
    ("{}", "missing_field", Class::Validation, "\"type\""),
    (r#"{"type":1}"#, "wrong_type", Class::Validation, "\"type\""),
    (r#"{"type":"warp"}"#, "unknown_type", Class::Validation, "warp"),
    (r#"{"type":"bench_prefill"}"#, "unsupported_type", Class::Unsupported, "bench_prefill"),
    (r#"{"type":"load"}"#, "missing_field", Class::Validation, "\"model\""),
    (r#"{"type":"load","model":3}"#, "wrong_type", Class::Validation, "\"model\""),
    (r#"{"type":"load","model":"m","modle":1}"#, "unknown_field", Class::Validation, "\"modle\""),
    (
        r#"{"type":"load","model":"m","params":{"max_sq":1}}"#,
        "unknown_field",
        Class::Validation,
        "params.max_sq",
    ),
    (
        r#"{"type":"load","model":"m","params":{"max_seq":-1}}"#,
        "wrong_type",
        Class::Validation,
        "params.max_seq",
    ),
    (
        r#"{"type":"load","model":"m","params":{"max_seq":1.5}}"#,
        "wrong_type",
        Class::Validation,
        "params.max_seq",
    ),
    (
        r#"{"type":"load","model":"m","params":{"draft":"d"}}"#,
        "draft_unsupported",
        Class::Unsupported,
        "draft",
    ),
    (r#"{"type":"load","model":"m","params":{"tp":2}}"#, "tp_unsupported", Class::Unsupported, "params.tp"),
    (r#"{"type":"load","model":"m","params":{"cask":true}}"#, "cask_unsupported", Class::Unsupported, "cask"),
    (
        r#"{"type":"load","model":"m","params":{"ngram_n":3}}"#,
        "draft_unsupported",
        Class::Unsupported,
        "ngram_n",
    ),
    (r#"{"type":"generate","prompt":"x"}"#, "missing_field", Class::Validation, "\"id\""),
    (r#"{"type":"generate","id":7,"prompt":"x"}"#, "wrong_type", Class::Validation, "\"id\""),
    (r#"{"type":"generate","id":"","prompt":"x"}"#, "bad_id", Class::Validation, "\"id\""),
    (r#"{"type":"generate","id":"r"}"#, "missing_field", Class::Validation, "\"prompt\""),
    (r#"{"type":"generate","id":"r","prompt":["x"]}"#, "wrong_type", Class::Validation, "\"prompt\""),
    (r#"{"type":"generate","id":"r","messages":["x"]}"#, "wrong_type", Class::Validation, "\"messages\""),
    (r#"{"type":"generate","id":"r","prompt_ids":[-1]}"#, "wrong_type", Class::Validation, "\"prompt_ids\""),
    (
        r#"{"type":"generate","id":"r","prompt":"x","image":"a.png"}"#,
        "vision_unsupported",
        Class::Unsupported,
        "image",
    ),
    (
        r#"{"type":"generate","id":"r","prompt":"x","attempt_id":1}"#,
        "unsupported_field",
        Class::Unsupported,
        "attempt",
    ),
    (
        r#"{"type":"generate","id":"r","prompt":"x","max_token":1}"#,
        "unknown_field",
        Class::Validation,
        "max_token",
    ),
    (r#"{"type":"generate","id":"r","prompt":"x","seed":-1}"#, "wrong_type", Class::Validation, "\"seed\""),
    (r#"{"type":"generate","id":"r","prompt":"x","stop":[1]}"#, "wrong_type", Class::Validation, "\"stop\""),
    (
        r#"{"type":"generate","id":"r","prompt":"x","logit_bias":{"a":1}}"#,
        "wrong_type",
        Class::Validation,
        "logit_bias",
    ),
    (
        r#"{"type":"generate","id":"r","prompt":"x","messages":[]}"#,
        "conflicting_fields",
        Class::Validation,
        "messages",
    ),
    (
        r#"{"type":"generate","id":"r","prompt_ids":[],"tools":[]}"#,
        "conflicting_fields",
        Class::Validation,
        "tools",
    ),
    (
        r#"{"type":"generate","id":"r","prompt":"x","repeat_penalty":1,"repetition_penalty":1}"#,
        "conflicting_fields",
        Class::Validation,
        "repetition_penalty",
    ),
    (r#"{"type":"abort"}"#, "missing_field", Class::Validation, "\"id\""),
    (r#"{"type":"ping","x":1}"#, "unknown_field", Class::Validation, "\"x\""),
];

#[test]
fn every_mistake_has_its_code_and_names_the_field() {
    for (line, code, class, named) in REFUSED {
        let (_, found_code, found_class, message) = refusal(line);
        assert_eq!((found_code, found_class), (*code, *class), "{line}: {message}");
        assert!(message.contains(named), "{line}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn a_refused_line_is_reported_under_its_id() {
    assert_eq!(refusal(r#"{"id":"r1","type":"generate"}"#).0.as_deref(), Some("r1"));
    assert_eq!(refusal(r#"{"id":"r1","type":"warp"}"#).0.as_deref(), Some("r1"));
    assert_eq!(refusal(r#"{"id":5,"type":"ping"}"#).0, None);
}

#[test]
fn huge_values_are_quoted_in_part() {
    let line = json!({"type": "x".repeat(100_000)}).to_string();
    assert!(refusal(&line).3.len() < 300);
    let line = json!({"type": "ping", "id": "x".repeat(MAX_ID_BYTES + 1)}).to_string();
    assert!(refusal(&line).3.len() < 300);
    let line = json!({"type": "load", "model": "m", "params": {"max_seq": "9".repeat(100_000)}}).to_string();
    assert!(refusal(&line).3.len() < 300);
}

#[test]
fn deep_nesting_is_an_error_and_not_an_overflow() {
    let line = "[".repeat(1_000_000);
    assert_eq!(refusal(&line).1, "invalid_json");
}

#[test]
fn events_are_one_line_with_the_v1_names() {
    let token = Event::Token { id: "r".into(), text: "a\nb".into() };
    assert_eq!(token.to_line(), "{\"type\":\"token\",\"id\":\"r\",\"text\":\"a\\nb\"}\n");
    let reset = Event::Reset { id: None, seq_pos: 0 };
    assert_eq!(reset.to_line(), "{\"type\":\"reset\",\"seq_pos\":0}\n");
    let error = Event::Error(ErrorEvent::new(None, "no_model", Class::Transient, "m".into()));
    let expected = r#"{"type":"error","code":"no_model","class":"transient","retryable":true,"message":"m"}"#;
    assert_eq!(error.to_line().trim_end(), expected);
    let done = Event::Done(Done {
        id: "r".into(),
        tokens: 1,
        tok_s: 60.1,
        prefill_tokens: 14,
        cached_tokens: 0,
        prefill_ms: 22.0,
        prefill_tok_s: 636.4,
        decode_tok_s: 61.0,
        ttft_ms: 22.4,
        finish_reason: "stop",
    });
    let expected = r#"{"type":"done","id":"r","tokens":1,"tok_s":60.1,"prefill_tokens":14,"cached_tokens":0,"prefill_ms":22.0,"prefill_tok_s":636.4,"decode_tok_s":61.0,"ttft_ms":22.4,"finish_reason":"stop"}"#;
    assert_eq!(done.to_line().trim_end(), expected);
}

#[test]
fn rows_of_tables_refuse_what_asks_for_something_and_pass_what_does_not() {
    const NONE: Feature = feature("nothing_here", "something");
    let table = [
        row("true", NONE, Off::True),
        row("empty", NONE, Off::Empty),
        row("only", NONE, Off::Only("text")),
        row("type", NONE, Off::Type("text")),
    ];
    let refusal = |name: &str, value: serde_json::Value| {
        let fields = Fields::new("m", "", [(name.to_owned(), value)].into_iter().collect());
        fields
            .refuse(&table)
            .err()
            .map(|error| (error.code(), error.field() == Some(name), error.to_string()))
    };
    for (name, off, on, remedy) in [
        ("true", json!(true), json!(false), "or send true"),
        ("empty", json!([]), json!([1]), "remove it"),
        ("empty", json!({}), json!({"a": 1}), "remove it"),
        ("only", json!(["text"]), json!(["text", "audio"]), "[\"text\"]"),
        ("type", json!({"type": "text"}), json!({"type": "json_object"}), "{\"type\":\"text\"}"),
    ] {
        assert_eq!(refusal(name, off), None, "{name}");
        assert_eq!(refusal(name, json!(null)), None, "{name}");
        let (code, named, message) = refusal(name, on).unwrap();
        assert!(code == "nothing_here" && named && message.ends_with(remedy), "{message}");
    }
    assert_eq!(refusal("nobody_knows", json!(1)), None);
}
