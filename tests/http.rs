//! Completions over HTTP: the answers of `run`, in OpenAI's shapes, and what is refused.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/http.rs"]
mod http;
mod support;

use http::{CHAT, Http, Sent, Server, TEXT, piece, text_of};
use serde_json::{Value, json};
use spillway_model::testing::TinyModel;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};
use support::{Models, run};

const PROMPT: &str = "the word";

/// A greedy chat request with some fields more.
fn chat(more: Value) -> Value {
    with(
        json!({"model": "any", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 24}),
        more,
    )
}

/// A greedy text completion with some fields more.
fn text(more: Value) -> Value {
    with(json!({"prompt": PROMPT, "temperature": 0, "max_tokens": 24}), more)
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// What the command line answers: text, prompt ids and the number of tokens.
fn expected(model: &Path, more: &[&str]) -> (String, Vec<u64>, u64) {
    let args =
        ["run", "-m", model.to_str().unwrap(), "-p", PROMPT, "--temp", "0", "-n", "24", "--json", "-q"];
    let done = run(&[&args[..], more].concat()).json_lines().pop().unwrap();
    let ids = done["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    let tokens = done["timings"]["generated_tokens"].as_u64().unwrap();
    (done["text"].as_str().unwrap().to_owned(), ids, tokens)
}

/// A setting that the user made counts for HTTP, too; without one, OpenAI's defaults do.
#[test]
fn settings_say_what_a_request_leaves_out() {
    let models = Models::new();
    let model = models.tiny();
    let env = [("SPILLWAY_TEMPERATURE", "0"), ("SPILLWAY_MAX_TOKENS", "24")];
    let server = Server::with_model_and_env(&model, &[], &env);
    let bare = json!({"messages": [{"role": "user", "content": PROMPT}]});
    let answer = server.http.post(CHAT, &bare).ok();
    assert_eq!(answer["choices"][0]["message"]["content"], expected(&model, &[]).0.as_str());
    assert_eq!(answer["usage"]["completion_tokens"], expected(&model, &[]).2);
}

#[test]
fn chat_and_text_answer_as_the_command_line_does_whole_and_in_pieces() {
    let models = Models::new();
    let model = models.tiny();
    let server = Server::with_model(&model, &["--cpu-workers", "2"]);
    let cases = [
        (CHAT, chat(json!({})), expected(&model, &[]), "chat.completion", "chat.completion.chunk"),
        (TEXT, text(json!({})), expected(&model, &["--raw"]), "text_completion", "text_completion"),
    ];
    for (path, body, (answer, prompt, tokens), object, chunk_object) in cases {
        let whole = server.http.post(path, &body).ok();
        let choice = &whole["choices"][0];
        let found = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap();
        assert_eq!((found, &choice["finish_reason"]), (answer.as_str(), &json!("length")), "{whole}");
        assert_eq!((&whole["object"], &whole["model"]), (&json!(object), &json!("tiny")));
        let (prompt, usage) = (prompt.len() as u64, &whole["usage"]);
        let counted = ["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| usage[name].as_u64());
        assert_eq!(counted, [Some(prompt), Some(tokens), Some(prompt + tokens)]);

        let sent = server.http.stream(path, &body).rest();
        assert_eq!(text_of(&sent), answer);
        check_stream(&sent, chunk_object);
        assert!(chunks(&sent).iter().all(|chunk| chunk.get("usage").is_none()));

        let wanted = with(body.clone(), json!({"stream_options": {"include_usage": true}}));
        let sent = server.http.stream(path, &wanted).rest();
        check_stream(&sent, chunk_object);
        let (last, before) =
            chunks(&sent).split_last().map(|(last, before)| (*last, before.to_vec())).unwrap();
        assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &usage["total_tokens"]));
        assert!(before.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)), "{before:?}");
    }
}

fn chunks(sent: &[Sent]) -> Vec<&Value> {
    sent.iter().filter_map(data).collect()
}

fn data(sent: &Sent) -> Option<&Value> {
    match sent {
        Sent::Data(data) => Some(data),
        _ => None,
    }
}

/// One id, one reason to end, and `[DONE]` exactly once, at the end.
fn check_stream(sent: &[Sent], object: &str) {
    assert_eq!(sent[sent.len() - 2..], [Sent::Done, Sent::End], "{sent:?}");
    assert_eq!(sent.iter().filter(|sent| **sent == Sent::Done).count(), 1);
    let chunks = chunks(sent);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == object));
    let reasons: Vec<_> = chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    assert_eq!(reasons.iter().filter(|reason| reason.is_string()).collect::<Vec<_>>(), [&&json!("length")]);
    if object == "chat.completion.chunk" {
        assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    }
}

#[test]
fn prompts_may_be_ids_and_contents_may_be_parts() {
    let models = Models::new();
    let model = models.tiny();
    let server = Server::with_model(&model, &[]);
    let text_answer = |body| server.http.post(TEXT, &body).ok()["choices"][0]["text"].clone();
    let (answer, ids, _) = expected(&model, &["--raw"]);
    for prompt in [json!(PROMPT), json!([PROMPT]), json!(ids), json!([ids])] {
        assert_eq!(text_answer(text(json!({"prompt": prompt}))), json!(answer), "{prompt}");
    }
    let chat_answer = |body| server.http.post(CHAT, &body).ok()["choices"][0]["message"]["content"].clone();
    let messages = |role: &str, content: Value| {
        chat(
            json!({"messages": [{"role": role, "content": "be\nbrief"}, {"role": "user", "content": content}]}),
        )
    };
    let plain = chat_answer(messages("system", json!("a\nb")));
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(chat_answer(messages("developer", parts)), plain);
    assert_ne!(chat_answer(messages("user", json!("a b"))), plain);
}

#[test]
fn what_a_request_says_about_sampling_is_obeyed() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &[]);
    let answer = |more| server.http.post(TEXT, &text(more)).ok()["choices"][0].clone();
    let greedy = answer(json!({}))["text"].as_str().unwrap().to_owned();
    let end: String = greedy.chars().skip(3).take(2).collect();
    let stopped = answer(json!({"stop": end}));
    let before = &greedy[..greedy.find(&end).unwrap()];
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!(before), &json!("stop")));
    assert_eq!(answer(json!({"max_tokens": 0}))["text"], "");
    let drawn = |more| answer(with(json!({"temperature": 50, "max_tokens": 40, "ignore_eos": true}), more));
    assert_eq!(drawn(json!({"seed": 5})), drawn(json!({"seed": 5})));
    assert_eq!(drawn(json!({"seed": -5})), drawn(json!({"seed": -5})));
    assert_ne!(drawn(json!({"seed": 5})), drawn(json!({"seed": -5})));
    assert_ne!(drawn(json!({})), drawn(json!({})), "without a seed one is drawn");
    assert_eq!(
        drawn(json!({"top_k": 1}))["text"],
        answer(json!({"max_tokens": 40, "ignore_eos": true}))["text"]
    );
    for changed in
        [json!({"repeat_penalty": 3}), json!({"presence_penalty": 9}), json!({"frequency_penalty": 9})]
    {
        assert_ne!(answer(changed.clone())["text"], json!(greedy), "{changed}");
    }
    let ids = run_tokens(&models.tiny(), &greedy);
    let banned = answer(json!({"logit_bias": {(ids[0].to_string()): -100}}));
    assert_ne!(banned["text"].as_str().unwrap().chars().next(), greedy.chars().next());
    let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 3, "ignore_eos": true});
    assert_eq!(server.http.post(CHAT, &body).ok()["usage"]["completion_tokens"], 3);
    let endless = json!({"messages": [{"role": "user", "content": PROMPT}], "ignore_eos": true});
    let usage = server.http.post(CHAT, &endless).ok()["usage"].clone();
    assert_eq!(usage["total_tokens"], 512, "without a limit a chat goes on to the end of the context");
}

fn run_tokens(model: &Path, text: &str) -> Vec<u64> {
    let args = ["tokenize", "--no-bos", "-m", model.to_str().unwrap()];
    serde_json::from_value(support::run_with_input(&args, text.as_bytes()).json()).unwrap()
}

/// Path, fields that make the request wrong, status, code, param.
type Refusal = (&'static str, Value, u16, &'static str, Option<&'static str>);

fn refusals() -> Vec<Refusal> {
    let message = |message: Value| json!({"messages": [message]});
    let image = json!([{"type": "image_url", "image_url": {"url": "data:"}}]);
    vec![
        (CHAT, json!({"messages": null}), 400, "missing_field", Some("messages")),
        (CHAT, json!({"messages": "hello"}), 400, "wrong_type", Some("messages")),
        (CHAT, json!({"messages": ["hello"]}), 400, "wrong_type", Some("messages")),
        (CHAT, json!({"messages": []}), 400, "empty_messages", Some("messages")),
        (CHAT, message(json!({"content": "x"})), 400, "missing_field", Some("messages[0].role")),
        (
            CHAT,
            message(json!({"role": "king", "content": "x"})),
            400,
            "unknown_role",
            Some("messages[0].role"),
        ),
        (CHAT, message(json!({"role": "user"})), 400, "missing_field", Some("messages[0].content")),
        (
            CHAT,
            message(json!({"role": "user", "content": 7})),
            400,
            "wrong_type",
            Some("messages[0].content"),
        ),
        (
            CHAT,
            message(json!({"role": "user", "content": image})),
            400,
            "content_unsupported",
            Some("messages[0].content[0]"),
        ),
        (CHAT, json!({"model": 7}), 400, "wrong_type", Some("model")),
        (CHAT, json!({"temperature": "hot"}), 400, "wrong_type", Some("temperature")),
        (CHAT, json!({"temperature": -1}), 400, "invalid_sampling_parameter", Some("temperature")),
        (CHAT, json!({"top_p": 0}), 400, "invalid_sampling_parameter", Some("top_p")),
        (CHAT, json!({"min_p": 2}), 400, "invalid_sampling_parameter", Some("min_p")),
        (CHAT, json!({"presence_penalty": 101}), 400, "invalid_sampling_parameter", Some("presence_penalty")),
        (CHAT, json!({"repeat_penalty": 0}), 400, "invalid_sampling_parameter", Some("repeat_penalty")),
        (
            CHAT,
            json!({"repetition_penalty": 0}),
            400,
            "invalid_sampling_parameter",
            Some("repetition_penalty"),
        ),
        (CHAT, json!({"logit_bias": {"99999": 1}}), 400, "invalid_sampling_parameter", Some("logit_bias")),
        (
            CHAT,
            message(json!({"role": "user", "content": "x".repeat(600)})),
            400,
            "context_length_exceeded",
            Some("messages"),
        ),
        (CHAT, json!({"max_tokens": -1}), 400, "wrong_type", Some("max_tokens")),
        (CHAT, json!({"max_completion_tokens": 3}), 400, "conflicting_fields", Some("max_tokens")),
        (CHAT, json!({"stop": ""}), 400, "invalid_stop", Some("stop")),
        (CHAT, json!({"logit_bias": {"x": 1}}), 400, "wrong_type", Some("logit_bias")),
        (
            CHAT,
            json!({"stream_options": {"include_usage": true}}),
            400,
            "conflicting_fields",
            Some("stream_options"),
        ),
        (CHAT, json!({"n": 2}), 400, "n_unsupported", Some("n")),
        (CHAT, json!({"logprobs": true}), 400, "logprobs_unsupported", Some("logprobs")),
        (
            CHAT,
            json!({"response_format": {"type": "json_object"}}),
            400,
            "response_format_unsupported",
            Some("response_format"),
        ),
        (CHAT, json!({"stop_token_ids": [2]}), 400, "stop_token_ids_unsupported", Some("stop_token_ids")),
        (CHAT, json!({"guided_regex": "a*"}), 400, "response_format_unsupported", Some("guided_regex")),
        (CHAT, json!({"tools": [{"type": "function"}]}), 400, "tools_unsupported", Some("tools")),
        (CHAT, json!({"tools": ["x"]}), 400, "wrong_type", Some("tools")),
        (CHAT, json!({"tool_choice": "required"}), 400, "tool_choice_unsupported", Some("tool_choice")),
        (CHAT, json!({"functions": [{}]}), 400, "functions_unsupported", Some("functions")),
        (CHAT, json!({"modalities": ["text", "audio"]}), 400, "audio_unsupported", Some("modalities")),
        (
            CHAT,
            json!({"chat_template_kwargs": {"messages": []}}),
            400,
            "template_argument_reserved",
            Some("chat_template_kwargs"),
        ),
        (
            CHAT,
            json!({"add_generation_prompt": false}),
            400,
            "continue_unsupported",
            Some("add_generation_prompt"),
        ),
        (
            CHAT,
            json!({"chat_template_kwargs": {"add_generation_prompt": false}}),
            400,
            "continue_unsupported",
            Some("chat_template_kwargs.add_generation_prompt"),
        ),
        (TEXT, json!({"prompt": null}), 400, "missing_field", Some("prompt")),
        (TEXT, json!({"prompt": {}}), 400, "wrong_type", Some("prompt")),
        (TEXT, json!({"prompt": ["a", "b"]}), 400, "n_unsupported", Some("prompt")),
        (TEXT, json!({"prompt": [1 << 20]}), 400, "token_out_of_range", Some("prompt")),
        (TEXT, json!({"prompt": "x".repeat(600)}), 400, "context_length_exceeded", Some("prompt")),
        (TEXT, json!({"logprobs": 1}), 400, "logprobs_unsupported", Some("logprobs")),
        (TEXT, json!({"echo": true}), 400, "echo_unsupported", Some("echo")),
        (TEXT, json!({"suffix": "end"}), 400, "suffix_unsupported", Some("suffix")),
        (TEXT, json!({"best_of": 3}), 400, "n_unsupported", Some("best_of")),
        (TEXT, json!({"mirostat": 2}), 400, "sampler_unsupported", Some("mirostat")),
    ]
}

#[test]
fn requests_that_cannot_be_obeyed_are_refused_by_name_whole_and_as_streams() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &[]);
    for (path, wrong, status, code, param) in refusals() {
        let base = if path == CHAT { chat(json!({})) } else { text(json!({})) };
        let body = with(base, wrong.clone());
        let streams = if wrong.get("stream_options").is_some() { &[false][..] } else { &[false, true] };
        for &stream in streams {
            let reply = server.http.post(path, &with(body.clone(), json!({"stream": stream})));
            assert_eq!((reply.status, reply.error().as_str()), (status, code), "{wrong}: {reply:?}");
            assert_eq!(reply.json()["error"]["param"].as_str(), param, "{wrong}: {reply:?}");
            assert_eq!(reply.header("x-should-retry"), Some("false"));
        }
    }
    let harmless = json!({"n": 1, "logprobs": false, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto",
        "modalities": ["text"], "user": "me", "store": false, "metadata": {}, "stop": null, "seed": null});
    server.http.post(CHAT, &chat(harmless)).ok();
}

/// What is wrong is told, not only the type around it.
#[test]
fn refusals_do_not_contradict_themselves() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &[]);
    for (path, wrong, words) in [
        (TEXT, json!({"logit_bias": {"x": 1}}), "not an object with the number 1 for the string \"x\""),
        (TEXT, json!({"stop": [1]}), "not an array with the number 1"),
        (TEXT, json!({"prompt": [1, -1]}), "not an array with the number -1"),
        (TEXT, json!({"prompt": null}), "needs the field \"prompt\" (a string or an array of token ids)"),
        (CHAT, json!({"messages": ["x"]}), "not an array with the string \"x\""),
        (TEXT, json!({"repetition_penalty": 0}), "repetition_penalty is 0, but must be between"),
    ] {
        let base = if path == CHAT { chat(json!({})) } else { text(json!({})) };
        let reply = server.http.post(path, &with(base, wrong));
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn a_prompt_that_is_too_long_is_refused_with_both_numbers() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &[]);
    let prompt = vec![1; 700];
    let reply = server.http.post(TEXT, &text(json!({"prompt": prompt})));
    assert_eq!((reply.status, reply.error().as_str()), (400, "context_length_exceeded"));
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("700") && message.contains("512"), "{message}");
    // So much text cannot fit, which is said without making tokens of it.
    let megabytes = "x".repeat(7 << 20);
    let asked = Instant::now();
    for (path, body) in [
        (TEXT, text(json!({"prompt": megabytes}))),
        (CHAT, chat(json!({"messages": [{"role": "user", "content": megabytes}]}))),
    ] {
        let reply = server.http.post(path, &body);
        assert_eq!((reply.status, reply.error().as_str()), (400, "context_length_exceeded"));
        assert!(reply.body.contains("bytes, which are at least "), "{reply:?}");
    }
    assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
}

#[test]
fn what_is_no_request_is_answered_and_the_server_goes_on() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &[]);
    let http = &server.http;
    let raw = |body: &str| http.send(&http.request(CHAT, body, ""));
    for (body, code) in
        [("{", "invalid_json"), ("", "invalid_json"), ("[]", "not_an_object"), ("7", "not_an_object")]
    {
        let reply = raw(body);
        assert_eq!((reply.status, reply.error().as_str()), (400, code), "{body}");
    }
    let deep = raw(&format!("{{\"messages\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000)));
    assert_eq!((deep.status, deep.error().as_str()), (400, "invalid_json"));
    let as_text = http.request(CHAT, "{}", "").replace("application/json", "text/plain");
    let reply = http.send(&as_text);
    assert_eq!((reply.status, reply.error().as_str()), (415, "unsupported_media_type"));
    let unknown = http.get("/v1/embeddings");
    assert_eq!((unknown.status, unknown.error().as_str()), (404, "unknown_route"));
    for (reply, allow) in [(http.get(CHAT), "POST"), (http.post("/ready", &json!({})), "GET,HEAD")] {
        assert_eq!((reply.status, reply.error().as_str()), (405, "method_not_allowed"));
        assert_eq!(reply.header("allow"), Some(allow));
    }
    let long = http.get(&format!("/{}", "a".repeat(10_000)));
    assert!(long.status == 404 && long.body.len() < 400, "{long:?}");
    // Too large by what it says, and by what it sends.
    let declared = http.request(CHAT, "", "").replace("content-length: 0", "content-length: 9000000");
    let reply = http.send(&declared);
    assert_eq!((reply.status, reply.error().as_str()), (413, "body_too_large"));
    let chunk = format!("900000\r\n{}\r\n0\r\n\r\n", " ".repeat(0x90_0000));
    let sent = http.request(CHAT, "", "").replace("content-length: 0\r\n", "transfer-encoding: chunked\r\n");
    let reply = http.send(&format!("{sent}{chunk}"));
    assert_eq!((reply.status, reply.error().as_str()), (413, "body_too_large"));
    assert_eq!(http.send("hello\r\n\r\n").status, 400);
    http.post(CHAT, &chat(json!({}))).ok();
}

#[test]
fn the_model_is_listed_under_the_name_of_its_file() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &[]);
    let list = server.http.get("/v1/models").ok();
    assert_eq!((&list["object"], list["data"].as_array().unwrap().len()), (&json!("list"), 1));
    let model = &list["data"][0];
    assert_eq!(
        (&model["id"], &model["object"], &model["max_model_len"]),
        (&json!("tiny"), &json!("model"), &json!(512))
    );
    assert_eq!(&server.http.get("/v1/models/tiny").ok(), model);
    let other = server.http.get("/v1/models/gpt");
    assert_eq!((other.status, other.error().as_str()), (404, "model_not_found"));
}

/// A tiny model with another chat template.
fn with_template(models: &Models, name: &str, template: &str) -> Server {
    let mut writer = TinyModel::new("qwen3").writer().unwrap();
    writer.set("tokenizer.chat_template", template);
    let path = models.path(name);
    std::fs::write(&path, writer.to_bytes()).unwrap();
    Server::with_model(&path, &[])
}

fn prompt_tokens(http: &Http, body: &Value) -> u64 {
    http.post(CHAT, body).ok()["usage"]["prompt_tokens"].as_u64().unwrap()
}

#[test]
fn templates_see_tools_calls_and_further_variables_and_may_decline() {
    let models = Models::new();
    let template = "{% if tools %}{{ tools|length * 'tttt' }}{% endif %}{% if loud %}llllllll{% endif %}\
        {% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ m.content }}\
        {% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}";
    let server = with_template(&models, "tools.gguf", template);
    let http = &server.http;
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let plain = prompt_tokens(http, &chat(json!({})));
    assert!(prompt_tokens(http, &chat(json!({"tools": [tool, tool]}))) > plain);
    assert_eq!(prompt_tokens(http, &chat(json!({"tools": [tool], "tool_choice": "none"}))), plain);
    assert!(prompt_tokens(http, &chat(json!({"chat_template_kwargs": {"loud": true}}))) > plain);
    let called = |calls: Value| {
        chat(
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "b"}]}),
        )
    };
    let with_text = called(
        json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"city\":\"Rome\"}"}}]),
    );
    let with_object = called(
        json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}]),
    );
    assert_eq!(prompt_tokens(http, &with_text), prompt_tokens(http, &with_object));
    let empty = chat(json!({"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}));
    assert!(prompt_tokens(http, &empty) < prompt_tokens(http, &with_text));
    let declined = http.post(CHAT, &chat(json!({"messages": [{"role": "system", "content": "x"}]})));
    assert_eq!((declined.status, declined.error().as_str()), (400, "chat_template_refused"));
    assert!(declined.body.contains("no system here"));
}

/// Otherwise clients that ask and go away could have any number of prompts made at once.
#[test]
fn the_work_on_a_prompt_counts_until_it_ends_though_its_client_has_gone_away() {
    let models = Models::new();
    let slow = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}x";
    let http = &with_template(&models, "slow.gguf", slow).http;
    // Long conversations are given more time.
    let body = chat(json!({"messages": [{"role": "user", "content": "x".repeat(7 << 20)}], "max_tokens": 1}));
    let asked = Instant::now();
    http.post(CHAT, &body).ok();
    let alone = asked.elapsed();
    let asked = Instant::now();
    let mut client = http.connect();
    client.write_all(http.request(CHAT, &body.to_string(), "").as_bytes()).unwrap();
    client.set_read_timeout(Some(alone / 8)).unwrap();
    assert!(client.read(&mut [0]).is_err(), "it is being worked on");
    drop(client);
    http.until_idle();
    assert!(asked.elapsed() > alone / 3, "{:?} of {alone:?}", asked.elapsed());
}

#[test]
fn eight_at_once_get_the_answers_that_they_get_alone() {
    let models = Models::new();
    let server = Server::with_model(&models.tiny(), &["--parallel", "3"]);
    let body =
        |client: u64| text(json!({"temperature": 1.5, "seed": client, "ignore_eos": true, "max_tokens": 60}));
    let alone: Vec<Value> = (0..8)
        .map(|client| server.http.post(TEXT, &body(client)).ok()["choices"][0]["text"].clone())
        .collect();
    std::thread::scope(|scope| {
        for (client, expected) in alone.iter().enumerate() {
            let http = &server.http;
            scope.spawn(move || {
                let body = body(client as u64);
                let answer = match client % 2 {
                    0 => http.post(TEXT, &body).ok()["choices"][0]["text"].clone(),
                    _ => Value::from(text_of(&http.stream(TEXT, &body).rest())),
                };
                assert_eq!(&answer, expected, "client {client}");
            });
        }
    });
    server.http.until_idle();
}

#[test]
fn a_stream_is_unbuffered_and_says_text_as_it_comes() {
    let models = Models::new();
    let server = Server::with_model(&support::long_model(&models), &["--max-seq", "32768"]);
    let body = text(json!({"temperature": 1.5, "seed": 3, "ignore_eos": true, "max_tokens": 30_000}));
    let mut events = server.http.stream(TEXT, &body);
    assert!(!events.until_text().is_empty());
    assert_eq!(server.http.metric("spillway_requests_generating"), 1.0, "text came before the end");
    let Sent::Data(next) = events.next() else { panic!("no data") };
    assert!(piece(&next).len() < 100);
}
