//! What the engine adds to Jinja, and what it does with templates and conversations that mean harm.

use super::*;
use crate::tokenizer::{TokenKind, TokenizerOptions, Vocabulary};
use serde_json::json;
use std::time::{Duration, Instant};

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Some("<s>".to_owned()), None).unwrap()
}

/// Renders `source` with a variable `x`.
fn with_x(source: &str, x: Json) -> Result<String, TemplateError> {
    let messages = json!([]);
    let mut request = ChatRequest::new(&messages);
    request.kwargs.insert("x".to_owned(), x);
    template(source).render(&request)
}

fn tokenizer(second: &str) -> Tokenizer {
    let vocabulary = Vocabulary {
        model: "llama",
        tokens: vec!["<s>", second],
        kinds: vec![TokenKind::Control; 2],
        scores: vec![0.0; 2],
        bos: Some(0),
        ..Vocabulary::default()
    };
    Tokenizer::new(&vocabulary, &TokenizerOptions::default()).unwrap()
}

/// Expressions and what CPython 3.11 with jinja2 3.1.6 renders for them.
#[test]
fn python_semantics() {
    let cases = [
        (
            "{{ x|tojson }}",
            json!({"b": 1.0, "a": [1e22, -0.0, null, true, "é<'\"\u{1}\u{7f}"]}),
            "{\"b\": 1.0, \"a\": [1e+22, -0.0, null, true, \"é<'\\\"\\u0001\u{7f}\"]}",
        ),
        (
            "{{ x|tojson(indent=2) }}",
            json!({"a": [1, {}], "b": []}),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}",
        ),
        (
            "{{ x|tojson(separators=(',', ':'), sort_keys=true) }}",
            json!({"b": 1, "a": 2}),
            r#"{"a":2,"b":1}"#,
        ),
        ("{{ x|tojson(ensure_ascii=true) }}", json!("é🦀"), r#""\u00e9\ud83e\udd80""#),
        (
            "{{ x }}|{{ x|string }}",
            json!([1e-7, 3, "a", null, {"k": true}]),
            "[1e-07, 3, 'a', None, {'k': True}]|[1e-07, 3, 'a', None, {'k': True}]",
        ),
        (
            "{{ x.strip() }}|{{ x.lstrip() }}|{{ x.rstrip() }}|{{ x|trim }}",
            json!("\u{1c} a\u{1f}"),
            "a|a\u{1f}|\u{1c} a|a",
        ),
        ("{{ x }}", json!(["it's\n", "\"'", "\u{a0}"]), r#"["it's\n", '"\'', '\xa0']"#),
        ("{{ x.strip('<>') }}{{ x|trim('<') }}", json!("<a>"), "aa>"),
        ("{{ x.split() }}{{ x.split('b') }}", json!(" a  b\u{1d}c "), "['a', 'b', 'c'][' a  ', '\\x1dc ']"),
        (
            "{{ x.removeprefix('a') }}{{ x.removesuffix('c') }}{{ x.removeprefix('z') }}",
            json!("abc"),
            "bcababc",
        ),
        ("{{ x is iterable }}{{ [] is iterable }}{{ 'a' is iterable }}", json!(null), "FalseTrueTrue"),
        (
            "{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}{{ x.get('none') }}",
            json!({"items": 1, "b": 2}),
            "items=1;b=2;None",
        ),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            json!(0),
            "02",
        ),
        (
            "{{ bos_token }}{{ eos_token }}{{ tools }}{{ documents }}{{ add_generation_prompt }}",
            json!(0),
            "<s>NoneNoneTrue",
        ),
        ("  {% if true %}\n  a\n  {% endif %}\nb\n", json!(0), "  a\nb"),
    ];
    for (source, x, expected) in cases {
        let got = with_x(source, x).unwrap();
        assert_eq!(got, expected, "{source}");
    }
}

/// None has no length, cannot be added to text and contains nothing.
#[test]
fn none_is_not_text() {
    for source in ["{{ 'a' + x }}", "{{ x|length }}", "{{ 'a' in x }}", "{{ x.strip() }}", "{{ x.y.z }}"] {
        let error = with_x(source, json!(null)).unwrap_err();
        assert!(matches!(error, TemplateError::Render { line: 1, .. }), "{source}: {error:?}");
    }
}

/// The message of `raise_exception` arrives word for word, also from inside a macro.
#[test]
fn refusals_carry_the_templates_words() {
    let source = "{% macro m(t) %}{{ raise_exception('No ' ~ t ~ '!') }}{% endmacro %}{{ m(x) }}";
    let error = with_x(source, json!("cats")).unwrap_err();
    assert_eq!(error, TemplateError::Refused { message: "No cats!".to_owned() });
    assert_eq!(error.code(), "chat_template_refused");
}

/// The clock is the caller's, so a prompt can be reproduced; a bad format is an error of the template.
#[test]
fn the_clock_is_formatted() {
    let messages = json!([]);
    let mut request = ChatRequest::new(&messages);
    request.now = Some("2026-01-02T12:34:56".parse().unwrap());
    let source = "{{ strftime_now('%d %b %Y|%Y-%m-%d %H:%M:%S|%A %B %-d') }}";
    assert_eq!(
        template(source).render(&request).unwrap(),
        "02 Jan 2026|2026-01-02 12:34:56|Friday January 2"
    );
    let error = template("{{ strftime_now('%!') }}").render(&request).unwrap_err();
    assert_eq!(error.code(), "chat_template_failed");
}

/// Further variables win over the ones we set.
#[test]
fn arguments_win() {
    let messages = json!([]);
    let mut request = ChatRequest::new(&messages);
    request.kwargs.insert("bos_token".to_owned(), json!("<b>"));
    request.enable_thinking = Some(false);
    let source = "{{ bos_token }}{{ enable_thinking }}";
    assert_eq!(template(source).render(&request).unwrap(), "<b>False");
}

/// Work, memory and recursion are bounded whatever a template does; on a thread with as little stack as tokio's.
#[test]
fn hostile_templates_end() {
    let hostile = [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(1000000000) %}a{% endfor %}",
        "{{ 'aaaaaaaa' * 1000000000 }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(21) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(21) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|tojson }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(21) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|string }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(21) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|join }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{{ ('a' * 1000).replace('', 'aaaaaaaaaaaaaaaa' * 1000000) }}",
        "{{ '%999999999d' % 1 }}",
        "{% include 'chat template' %}",
        "{% extends 'chat template' %}",
        "{% import '/etc/passwd' as p %}",
    ];
    let run = move || {
        for source in hostile {
            let started = Instant::now();
            let error = with_x(source, json!(0)).unwrap_err();
            assert!(!matches!(error, TemplateError::Syntax { .. }), "{source}: {error}");
            assert!(started.elapsed() < Duration::from_secs(5), "{source}: {:?}", started.elapsed());
        }
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(run).unwrap().join().unwrap();
}

/// Deep nesting, of values or of operators in the source, is refused or borne, also on a small stack.
#[test]
fn deep_nesting_is_refused() {
    let run = || {
        let mut x = json!(1);
        for _ in 0..100 {
            x = json!([x]);
        }
        let rendered = with_x("{{ x }}{{ x|tojson }}{{ x == x }}", x.clone()).unwrap();
        assert!(rendered.starts_with(&"[".repeat(100)));
        for _ in 0..100 {
            x = json!({ "a": x });
        }
        assert_eq!(with_x("{{ x }}", x).unwrap_err().code(), "messages_too_deep");
        for operator in ["(", "[", "not ", "-", "1+", "x if x else "] {
            let source = format!("{{{{ {}1 }}}}", operator.repeat(60_000 / operator.len()));
            let compiled = ChatTemplate::new(&source, None, None);
            assert!(compiled.is_ok() || compiled.unwrap_err().code() == "chat_template_syntax", "{operator}");
        }
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(run).unwrap().join().unwrap();
}

/// A refusal at load says where the template is wrong, or that it is too large.
#[test]
fn broken_templates_are_refused() {
    let error = ChatTemplate::new("a\n{% if %}", None, None).unwrap_err();
    assert!(matches!(error, TemplateError::Syntax { line: 2, .. }), "{error:?}");
    let error = ChatTemplate::new(&"a".repeat(2 << 20), None, None).unwrap_err();
    assert_eq!(error.code(), "chat_template_too_large");
}

/// A model without a template gets ChatML if its vocabulary has the delimiters, else an explanation.
#[test]
fn models_without_a_template() {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chatml = ChatTemplate::for_model(None, &tokenizer("<|im_start|>")).unwrap();
    let prompt = chatml.render(&ChatRequest::new(&messages)).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let error = ChatTemplate::for_model(None, &tokenizer("a")).unwrap_err();
    assert!(error.to_string().contains("--raw"), "{error}");
    let own = ChatTemplate::for_model(Some("{{ bos_token }}!"), &tokenizer("a")).unwrap();
    assert_eq!(own.render(&ChatRequest::new(&messages)).unwrap(), "<s>!");
}

/// Leaving the last message open needs a list whose last message has text that the template shows.
#[test]
fn continuing_needs_text() {
    let open = |source: &str, messages: Json| {
        let mut request = ChatRequest::new(&messages);
        (request.add_generation_prompt, request.continue_final_message) = (false, true);
        template(source).render(&request)
    };
    let show = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
    assert_eq!(
        open(show, json!([{"content": "CONTINUE_FINAL_MESSAGE "}])).unwrap(),
        "[CONTINUE_FINAL_MESSAGE "
    );
    assert_eq!(open("{{ messages[0].content|trim }}]", json!([{"content": "a "}])).unwrap(), "a");
    for messages in
        [json!([]), json!([{}]), json!([{"content": null}]), json!([{"content": [{"image": "x"}]}])]
    {
        assert_eq!(open(show, messages).unwrap_err().code(), "nothing_to_continue");
    }
    assert_eq!(open("hidden", json!([{"content": "a"}])).unwrap_err().code(), "nothing_to_continue");
    assert_eq!(open(show, json!({"role": "user"})).unwrap_err().code(), "messages_not_a_list");
}

#[test]
fn a_template_tells_which_variables_it_reads() {
    let reads = |source: &str| template(source).reads("tools").unwrap();
    assert!(reads("{% if tools %}{{ tools|tojson }}{% endif %}"));
    assert!(reads("{% macro m() %}{{ tools[0].name }}{% endmacro %}{{ m() }}"));
    assert!(!reads("{{ messages[0].tools }}{# tools #}tools{% set tools = 1 %}{{ tools }}"));
    // Deeper than an ordinary stack: no overflow.
    assert!(reads(&format!("{{{{ tools{} }}}}", " + 1".repeat(8_000))));
}
