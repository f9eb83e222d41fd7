//! The fuzzer starts from these files (`model/fuzz/seeds`); they must stay valid models of every architecture.
//!
//! After a change of the tiny models, `SPILLWAY_WRITE_SEEDS=1 cargo test -p spillway-model --test fuzz_seeds` rewrites
//! them.

#![allow(clippy::unwrap_used, reason = "a test that fails should say where")]

use spillway_model::arch::ARCHITECTURES;
use spillway_model::file::ModelFile;
use spillway_model::testing::TinyModel;
use std::path::Path;

#[test]
fn there_is_a_current_seed_for_every_architecture() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/model_file");
    for architecture in ARCHITECTURES {
        let seed = folder.join(format!("{}.gguf", architecture.name));
        let model = TinyModel::seedling(architecture.name);
        if std::env::var_os("SPILLWAY_WRITE_SEEDS").is_some() {
            model.write(&seed).unwrap();
        }
        assert_eq!(std::fs::read(&seed).unwrap(), model.to_bytes().unwrap(), "{} is stale", seed.display());
        ModelFile::open(&seed).unwrap();
    }
}
