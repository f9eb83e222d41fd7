//! Every oracle file (made by llama.cpp's converter and quantiser) opens, and means what its makers say.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a test that fails should say where"
)]

use spillway_model::file::ModelFile;
use spillway_model::gguf::Gguf;
use spillway_model::testing::{oracle_files, oracles};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// `blk.7.attn_q.weight` -> `blk.N.attn_q.weight`.
fn anonymous(name: &str) -> String {
    match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((_, rest)) => format!("blk.N.{rest}"),
        None => name.to_owned(),
    }
}

#[test]
fn tensor_types_are_those_the_quantiser_reported() {
    let Some(dir) = oracles() else { return };
    let listed: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("tensor_types.json")).unwrap()).unwrap();
    let mut compared = 0;
    for path in oracle_files(&dir) {
        let Some(listed) = listed.get(path.file_name().unwrap().to_str().unwrap()) else { continue };
        let gguf = Gguf::open(&path).unwrap();
        assert_eq!(gguf.file_len() as u64, listed["size"].as_u64().unwrap());
        let mut types: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for tensor in gguf.tensors() {
            types.entry(anonymous(&tensor.name)).or_default().insert(tensor.ggml_type.to_string());
        }
        let expected: BTreeMap<String, BTreeSet<String>> =
            serde_json::from_value(listed["by_tensor"].clone()).unwrap();
        assert_eq!(types, expected, "{}", path.display());
        compared += 1;
    }
    assert!(compared >= 20, "only {compared} files were found");
}

#[test]
fn the_last_tensor_ends_where_the_file_does() {
    let Some(dir) = oracles() else { return };
    for path in oracle_files(&dir) {
        let gguf = Gguf::open(&path).unwrap();
        let Some(end) = gguf.tensors().iter().map(|t| t.range.end).max() else { continue };
        assert_eq!(end.next_multiple_of(gguf.alignment() as usize), gguf.file_len(), "{}", path.display());
        assert!(gguf.notes().is_empty(), "{:?}", gguf.notes());
    }
}

/// Oracle files that hold weights (the others are vocabularies).
fn models(dir: &Path) -> Vec<PathBuf> {
    oracle_files(dir)
        .into_iter()
        .filter(|p| p.parent().is_none_or(|folder| !folder.ends_with("tokenizers")))
        .collect()
}

#[test]
fn every_model_opens_and_its_program_matches_the_transformers_configuration() {
    let Some(dir) = oracles() else { return };
    let mut opened = 0;
    for path in models(&dir) {
        let file = ModelFile::open(&path).unwrap();
        let config = path.with_file_name("config.json");
        let hf: serde_json::Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
        let number = |key: &str| hf[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize;
        let (ours, program) = (file.config(), file.program());
        assert_eq!(program.layers.len(), number("num_hidden_layers"), "{}", path.display());
        assert_eq!((program.d_model, program.vocab), (number("hidden_size"), number("vocab_size")));
        assert_eq!(
            (ours.heads, ours.kv_heads),
            (number("num_attention_heads"), number("num_key_value_heads"))
        );
        assert_eq!(ours.ffn, number("intermediate_size"));
        assert_eq!(ours.context_length, number("max_position_embeddings"));
        assert_eq!(program.is_tied(), hf["tie_word_embeddings"].as_bool().unwrap());
        assert_eq!(ours.rope.base, hf["rope_parameters"]["rope_theta"].as_f64().unwrap() as f32);
        if let Some(types) = hf["layer_types"].as_array() {
            let recurrent: Vec<bool> = program.layers.iter().map(|layer| layer.recurrent.is_some()).collect();
            let expected: Vec<bool> = types.iter().map(|t| t == "linear_attention").collect();
            assert_eq!(recurrent, expected, "{}", path.display());
        }
        opened += 1;
    }
    assert!(opened >= 20, "only {opened} files were found");
}

#[test]
fn a_vocabulary_alone_is_refused_by_the_tensor_it_lacks() {
    let Some(dir) = oracles() else { return };
    let error = ModelFile::open(&dir.join("tokenizers/smollm-vocab.gguf")).unwrap_err();
    assert_eq!(error.code(), "tensor_missing");
    assert!(error.to_string().contains("token_embd.weight"), "{error}");
}

#[test]
fn the_prediction_block_of_a_file_is_skipped_and_noted() {
    let Some(dir) = oracles() else { return };
    let with = ModelFile::open(&dir.join("qwen35_r1mtp/qwen35_r1mtp-withmtp-Q4_K_M.gguf")).unwrap();
    let without = ModelFile::open(&dir.join("qwen35_r1mtp/qwen35_r1mtp-bf16.gguf")).unwrap();
    assert_eq!(with.program(), without.program());
    assert_eq!(with.config().nextn_layers, 1);
    assert!(with.notes().any(|note| note.contains("multi-token prediction")));
}

#[test]
fn every_tensor_of_a_plain_model_is_used() {
    let Some(dir) = oracles() else { return };
    for path in models(&dir) {
        let file = ModelFile::open(&path).unwrap();
        if file.config().nextn_layers == 0 {
            assert_eq!(file.notes().collect::<Vec<_>>(), [""; 0], "{}", path.display());
        }
    }
}
