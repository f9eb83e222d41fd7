//! What an opened file is good for: sharing between threads, real vocabularies in no time, advice to the kernel.

#![allow(clippy::unwrap_used, reason = "a test that fails should say where")]

use spillway_model::file::ModelFile;
use spillway_model::gguf::{Advice, Gguf};
use spillway_model::testing::{GgufWriter, TinyModel};
use std::time::{Duration, Instant};

#[test]
fn handles_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Gguf>();
    shared::<ModelFile>();
}

/// Hardening once made a reader check elements one by one and load for minutes: the bound is generous for a loaded
/// machine (it takes milliseconds), and far below what per-element work with an allocation would take.
#[test]
fn a_vocabulary_of_250_000_tokens_opens_at_once() {
    let words = |prefix: &str| (0..250_000).map(|i| format!("{prefix}{i}")).collect::<Vec<_>>();
    let mut file = GgufWriter::new();
    file.key("tokenizer.ggml.tokens", words("token"))
        .key("tokenizer.ggml.merges", words("merge "))
        .key("tokenizer.ggml.scores", vec![0.5f32; 250_000]);
    let bytes = file.to_bytes();
    let start = Instant::now();
    let gguf = Gguf::parse(bytes).unwrap();
    let tokens = gguf.metadata().str_array("tokenizer.ggml.tokens").unwrap().unwrap();
    let took = start.elapsed();
    assert_eq!((tokens.len(), tokens[249_999]), (250_000, "token249999"));
    assert!(took < Duration::from_secs(1), "{took:?}");
    eprintln!("opened in {took:?}");
}

#[test]
fn dropped_pages_come_back_from_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    TinyModel::new("llama").write(&path).unwrap();
    let file = ModelFile::open(&path).unwrap();
    let embedding = file.weight(&file.program().embed).unwrap();
    let before = embedding.bytes.to_vec();
    for advice in [Advice::Sequential, Advice::WillNeed, Advice::DontNeed] {
        file.gguf().advise(embedding.info, advice);
        assert_eq!(embedding.bytes, before, "{advice:?}");
    }
}
