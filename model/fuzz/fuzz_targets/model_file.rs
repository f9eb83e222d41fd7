//! Whatever the bytes: no panic, no unbounded memory, and what is accepted holds what it promises.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spillway_model::file::ModelFile;
use spillway_model::gguf::{Gguf, Value};

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = Gguf::parse(data.to_vec()) else { return };
    for (key, value) in gguf.metadata().iter() {
        if let Value::Array(array) = value {
            let _ = array.iter().filter(Option::is_some).count();
        }
        assert!(gguf.metadata().get(key).is_some());
    }
    for tensor in gguf.tensors() {
        assert_eq!(gguf.bytes(tensor).len(), tensor.range.len());
    }
    let Ok(file) = ModelFile::from_gguf(gguf) else { return };
    for weight in file.program().weights() {
        let weight = file.weight(weight).expect("an accepted model has all its weights");
        let row = weight.info.ggml_type.row_bytes(weight.cols as u64).expect("rows are whole blocks");
        assert_eq!(weight.bytes.len() as u64, row * weight.rows as u64);
    }
});
