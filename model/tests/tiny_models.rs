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

/// A file whose header alone is read is the same file, also when its header is longer than what is read first.
#[test]
fn a_header_that_is_read_is_that_of_the_mapped_file() {
    let folder = tempfile::tempdir().unwrap();
    for extra in [0, 40 << 20] {
        let mut writer = TinyModel::new("qwen35").writer().unwrap();
        writer.key("test.filler", "x".repeat(extra).as_str());
        let path = folder.path().join(format!("{extra}.gguf"));
        std::fs::write(&path, writer.to_bytes()).unwrap();
        let (whole, header) = (ModelFile::open(&path).unwrap(), ModelFile::open_header(&path).unwrap());
        assert_eq!(header.program(), whole.program());
        let (whole, header) = (whole.gguf(), header.gguf());
        assert_eq!((header.tensors(), header.file_len()), (whole.tensors(), whole.file_len()));
        assert_eq!((header.stamp(), header.data_offset()), (whole.stamp(), whole.data_offset()));
        for tensor in whole.tensors() {
            assert_eq!(header.read(tensor).unwrap(), whole.bytes(tensor), "{}", tensor.name);
            assert!(header.bytes(tensor).is_empty());
        }
    }
    let cut = folder.path().join("cut.gguf");
    let bytes = TinyModel::new("qwen3").to_bytes().unwrap();
    for length in [1, 3, 30, 300, 3000, bytes.len() - 1] {
        std::fs::write(&cut, &bytes[..length]).unwrap();
        let said = |error: &dyn std::error::Error| error.to_string();
        let (whole, header) = (ModelFile::open(&cut).unwrap_err(), ModelFile::open_header(&cut).unwrap_err());
        assert_eq!((header.code(), said(&header)), (whole.code(), said(&whole)), "{length} bytes");
    }
}
