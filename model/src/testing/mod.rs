//! Helpers for tests of this crate and of those above it (feature `testing`): files made by others, files we craft.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "small numbers that tests choose"
)]

mod tiny;
mod writer;

pub use tiny::{TINY_VOCAB, TinyModel};
pub use writer::{GgufWriter, MetaValue, TensorData};

use std::path::{Path, PathBuf};

/// The folder of oracle files: `SPILLWAY_ORACLES`, else `shared/oracles` beside the repository.
///
/// `None`, with a note on stderr, when the folder is absent, so that a test can return; with
/// `SPILLWAY_REQUIRE_ORACLES=1` an absent folder fails the test instead.
///
/// # Panics
/// When the folder is absent and required.
pub fn oracles() -> Option<PathBuf> {
    let beside = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/oracles"));
    let dir = std::env::var_os("SPILLWAY_ORACLES").map_or_else(|| beside.to_owned(), PathBuf::from);
    if dir.is_dir() {
        return Some(dir);
    }
    let absent = format!("oracle folder {} is absent", dir.display());
    assert_ne!(std::env::var("SPILLWAY_REQUIRE_ORACLES").as_deref(), Ok("1"), "{absent}");
    eprintln!("skipped: {absent}");
    None
}

/// Every GGUF file below the oracle folder, sorted.
pub fn oracle_files(dir: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let files = folders.flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten().flatten());
    let mut found: Vec<PathBuf> =
        files.map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    found.sort();
    found
}
