//! Refusals, special tokens and hostile text, on vocabularies small enough to see through.

use super::*;
use std::time::{Duration, Instant};

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

/// Bytes `a b c _` (`Ġ` is the space), the merges `ab`, `abc` and ` a`, and specials of every kind.
fn bpe() -> Vocabulary<'static> {
    use TokenKind::{Control, Normal, Unused, UserDefined};
    Vocabulary {
        model: "gpt2",
        pre: Some("gpt-2"),
        tokens: vec![
            "a",
            "b",
            "c",
            "Ġ",
            "ab",
            "abc",
            "Ġa",
            "<|im_end|>",
            "<x>",
            "</s>",
            "[PAD]",
            "<x><x>",
            "<",
            "x",
            ">",
        ],
        kinds: [[Normal; 7].as_slice(), &[Control, UserDefined, Normal, Unused, UserDefined], &[Normal; 3]]
            .concat(),
        merges: vec!["a b", "ab c", "Ġ a"],
        eos: Some(0),
        ..Vocabulary::default()
    }
}

/// The SentencePiece way of the same: scores instead of merges, bytes for what is missing.
fn spm() -> Vocabulary<'static> {
    use TokenKind::{Byte, Control, Normal, Unknown};
    Vocabulary {
        model: "llama",
        tokens: vec!["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "ab", "▁a", "▁ab"],
        kinds: [&[Unknown, Control, Control, Byte, Byte], [Normal; 6].as_slice()].concat(),
        scores: vec![0.0, 0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -2.0, -3.0, -1.0],
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..Vocabulary::default()
    }
}

fn build(vocabulary: &Vocabulary<'_>) -> Tokenizer {
    Tokenizer::new(vocabulary, &TokenizerOptions::default()).unwrap()
}

/// Every way a vocabulary can be wrong has its own refusal.
#[test]
fn refusals() {
    type Damage = fn(&mut Vocabulary<'static>);
    let bpe_cases: [(&str, Damage); 16] = [
        ("tokenizer_unsupported_model", |v| v.model = "t5"),
        ("tokenizer_missing_pre", |v| v.pre = None),
        ("tokenizer_missing_pre", |v| v.pre = Some("default")),
        ("tokenizer_unknown_pre", |v| v.pre = Some("gpt-99")),
        ("tokenizer_missing_key", |v| v.tokens.clear()),
        ("tokenizer_missing_key", |v| v.merges.clear()),
        ("tokenizer_wrong_length", |v| v.kinds.truncate(3)),
        ("tokenizer_duplicate_token", |v| v.tokens[5] = "b"),
        ("tokenizer_bad_merge", |v| v.merges[0] = "ab"),
        ("tokenizer_bad_merge", |v| v.merges[0] = "z b"),
        ("tokenizer_bad_merge", |v| v.merges[0] = "a z"),
        ("tokenizer_bad_merge", |v| v.merges[0] = "b b"),
        ("tokenizer_id_out_of_range", |v| v.eos = Some(15)),
        ("tokenizer_id_out_of_range", |v| v.eot = Some(u32::MAX)),
        ("tokenizer_no_such_special", |v| v.add_bos = Some(true)),
        ("tokenizer_no_such_special", |v| (v.add_eos, v.eos) = (Some(true), None)),
    ];
    let spm_cases: [(&str, Damage); 4] = [
        ("tokenizer_missing_key", |v| v.scores.clear()),
        ("tokenizer_wrong_length", |v| v.scores.truncate(2)),
        ("tokenizer_bad_score", |v| v.scores[2] = f32::NAN),
        ("tokenizer_no_such_special", |v| v.bos = None),
    ];
    let cases = bpe_cases.iter().map(|case| (bpe(), case)).chain(spm_cases.iter().map(|case| (spm(), case)));
    for (mut vocabulary, (code, damage)) in cases {
        damage(&mut vocabulary);
        let error = Tokenizer::new(&vocabulary, &TokenizerOptions::default()).unwrap_err();
        assert_eq!(error.code(), *code, "{error}");
    }
    assert!([0, 7, u32::MAX].into_iter().all(|value| TokenKind::from_gguf(value).is_none()));
}

/// The user's word about the splitting rule wins over the file's, and replaces a missing one.
#[test]
fn the_splitting_rule_can_be_assumed() {
    let options = TokenizerOptions { assume_pre: Some("qwen2".to_owned()) };
    for pre in [None, Some("default"), Some("nobody-knows"), Some("gpt-2")] {
        assert!(Tokenizer::new(&Vocabulary { pre, ..bpe() }, &options).is_ok(), "{pre:?}");
    }
}

/// Merges by rank, bytes without a token dropped, whole pieces only where the rule says so.
#[test]
fn byte_level_bpe() {
    let tokenizer = build(&bpe());
    assert_eq!(tokenizer.encode("abc cab", PLAIN), [5, 3, 2, 4]);
    assert_eq!(tokenizer.encode("a\u{e9}b", PLAIN), [0, 1]);
    let mut reordered = bpe();
    reordered.merges = vec!["Ġ a", "a b"]; // "abc" is a token but no merge makes it
    assert_eq!(build(&reordered).encode("abc", PLAIN), [4, 2]);
    reordered.pre = Some("tekken");
    reordered.add_bos = Some(false);
    assert_eq!(build(&reordered).encode("abc", PLAIN), [5]);
}

/// Control tokens only when asked for, user-defined ones always and longest first, padding and plain tokens never.
#[test]
fn special_tokens() {
    let tokenizer = build(&bpe());
    let special = EncodeOptions { parse_special: true, ..PLAIN };
    assert_eq!(tokenizer.encode("a<|im_end|>b", special), [0, 7, 1]);
    assert_eq!(tokenizer.encode("a<|im_end|>b", PLAIN), [0, 12, 14, 1]);
    assert_eq!(tokenizer.encode("<x><x><x>", PLAIN), [11, 8]);
    assert_eq!(tokenizer.encode("</s>[PAD]", special), [12, 14]);
    assert_eq!(tokenizer.token_id("[PAD]"), Some(10));
    assert_eq!(tokenizer.token_bytes(10), Some(b"".as_slice()));
    assert_eq!(tokenizer.token_bytes(6), Some(b" a".as_slice()));
    assert_eq!(tokenizer.token_bytes(15), None);
}

/// The file's ids and known spellings end an answer; a plain token that is spelled like one does not.
#[test]
fn ends_of_an_answer() {
    let tokenizer = build(&bpe());
    assert_eq!(tokenizer.end_of_generation(), [0, 7]);
    assert!(tokenizer.is_end_of_generation(7) && !tokenizer.is_end_of_generation(9));
    assert!(tokenizer.is_control(7) && !tokenizer.is_control(8) && !tokenizer.is_control(99));
}

/// Merges by score, a space in front of every stretch of text, bytes for the rest, unknown where a byte is missing too.
#[test]
fn sentence_piece() {
    let tokenizer = build(&spm());
    let both = EncodeOptions { add_special: true, parse_special: true };
    assert_eq!(tokenizer.encode("ab a", both), [1, 10, 9]);
    assert_eq!(tokenizer.encode("\u{e9}</s>ab", both), [1, 5, 3, 4, 2, 10]);
    assert_eq!(tokenizer.encode("</s>", PLAIN), [5, 0, 0, 0, 0]);
    assert_eq!(tokenizer.encode("", both), [1]);
    let without =
        Vocabulary { add_space_prefix: Some(false), add_bos: Some(false), add_eos: Some(true), ..spm() };
    assert_eq!(build(&without).encode("ab", both), [8, 2]);
}

/// What a text has at least follows from its length, without the bytes that have no token.
#[test]
fn least_tokens() {
    let special = EncodeOptions { parse_special: true, ..PLAIN };
    for (vocabulary, longest) in [(spm(), "<unk>".len()), (bpe(), "<|im_end|>".len())] {
        let tokenizer = build(&vocabulary);
        for text in
            ["", "a", "ab ab", "</s></s>ab\u{e9}", "<|im_end|><|im_end|>", "<x><x><x> abcabc", "\u{e9}\u{e9}"]
        {
            assert!(tokenizer.least_tokens(text) <= tokenizer.encode(text, special).len(), "{text}");
        }
        assert_eq!(tokenizer.least_tokens(&"a".repeat(10 * longest + 1)), 11);
    }
    assert_eq!(build(&bpe()).least_tokens("\u{e9}\u{e9}"), 0);
    assert_eq!(build(&spm()).least_tokens("\u{e9}\u{e9}"), 1);
}

/// Decoding reverses encoding; control tokens can be hidden; an unknown id is an error.
#[test]
fn decoding() {
    let tokenizer = build(&spm());
    let ids = tokenizer.encode(" ab a\u{e9}", EncodeOptions { add_special: true, parse_special: false });
    assert_eq!(tokenizer.decode(&ids, ControlText::Show).unwrap(), "<s> ab a\u{e9}".as_bytes());
    assert_eq!(tokenizer.decode(&ids, ControlText::Hide).unwrap(), " ab a\u{e9}".as_bytes());
    assert_eq!(tokenizer.decode(&[11], ControlText::Show).unwrap_err().code(), "unknown_token");
}

/// A megabyte made to be slow takes a fraction of a second: the bound is generous because test machines are busy.
#[test]
fn hostile_text_takes_linear_time() {
    let texts = ["a", " ", "\n", "ab", "1", "\u{3000}", "<x", "\u{e9}", "a ", "!"]
        .map(|unit| unit.repeat((1 << 20) / unit.len()));
    let mixed = (" ".repeat(1000) + "a").repeat(1000);
    for vocabulary in [
        bpe(),
        Vocabulary { pre: Some("qwen35"), ..bpe() },
        Vocabulary { pre: Some("deepseek-llm"), ..bpe() },
        spm(),
    ] {
        let tokenizer = build(&vocabulary);
        for text in texts.iter().chain([&mixed]) {
            let started = Instant::now();
            tokenizer.encode(text, EncodeOptions::RENDERED_CHAT);
            let took = started.elapsed();
            assert!(took < Duration::from_secs(10), "{:?} {:?}: {took:?}", vocabulary.pre, &text[..3]);
        }
    }
}
