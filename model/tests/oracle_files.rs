//! Every oracle file (made by llama.cpp's converter and quantiser) opens, and means what its makers say.

use spillway_model::gguf::Gguf;
use spillway_model::testing::{oracle_files, oracles};
use std::collections::{BTreeMap, BTreeSet};

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
