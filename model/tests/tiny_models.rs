//! The tiny models that other tests run are whole models of every architecture.

#![allow(clippy::unwrap_used, reason = "a test that fails should say where")]

use spillway_model::arch::ARCHITECTURES;
use spillway_model::file::ModelFile;
use spillway_model::gguf::{GgmlType, Gguf};
use spillway_model::testing::{TINY_VOCAB, TinyModel};

fn open(model: &TinyModel) -> ModelFile {
    ModelFile::from_gguf(Gguf::parse(model.to_bytes().unwrap()).unwrap()).unwrap()
}

#[test]
fn every_architecture_has_a_tiny_model_with_no_tensor_to_spare() {
    for architecture in ARCHITECTURES {
        for model in
            [TinyModel::new(architecture.name), TinyModel::new(architecture.name).untied().q8_0().layers(5)]
        {
            let file = open(&model);
            assert_eq!(file.config().vocab, TINY_VOCAB);
            assert_eq!(file.notes().collect::<Vec<_>>(), [""; 0]);
        }
    }
}

#[test]
fn a_seed_is_a_model() {
    let model = TinyModel::new("qwen35");
    assert_eq!(model.to_bytes().unwrap(), model.to_bytes().unwrap());
    assert_ne!(model.to_bytes().unwrap(), model.clone().seed(2).to_bytes().unwrap());
}

#[test]
fn options_reach_the_file() {
    let file = open(&TinyModel::new("llama").layers(3).q8_0().untied().context_length(77));
    assert_eq!(file.program().layers.len(), 3);
    assert_eq!(file.config().context_length, 77);
    assert!(!file.program().is_tied());
    assert_eq!(file.weight(&file.program().head.output).unwrap().info.ggml_type, GgmlType::Q8_0);
    assert_eq!(file.weight(&file.program().head.norm).unwrap().info.ggml_type, GgmlType::F32);
}

#[test]
fn a_hybrid_has_both_kinds_of_layers() {
    let file = open(&TinyModel::new("qwen35"));
    let recurrent: Vec<bool> = file.program().layers.iter().map(|layer| layer.recurrent.is_some()).collect();
    assert_eq!(recurrent, [true, true, true, false]);
}
