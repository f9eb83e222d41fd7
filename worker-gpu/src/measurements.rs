//! What was measured, on disk: a file for each subject and version of this program.

use crate::compile::hex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::PathBuf;

/// A file's contents.
#[derive(Debug, Serialize, Deserialize)]
struct Entry<T> {
    subject: String,
    version: String,
    found: T,
}

/// The folder of results. Files appear whole, so several processes may share it; what cannot be read counts as absent, and so
/// does what another version of this program has measured.
#[derive(Debug)]
pub struct Measurements {
    folder: PathBuf,
}

impl Measurements {
    /// Results in a folder that need not exist yet.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// What was measured last of a subject.
    pub fn find<T: DeserializeOwned>(&self, subject: &str) -> Option<T> {
        let text = std::fs::read(self.path(subject)).ok()?;
        let entry: Entry<T> = serde_json::from_slice(&text).ok()?;
        (entry.subject == subject && entry.version == env!("CARGO_PKG_VERSION")).then_some(entry.found)
    }

    /// Keeps what was measured.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn store<T: Serialize>(&self, subject: &str, found: &T) -> std::io::Result<()> {
        let (subject, version) = (subject.to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        let path = self.path(&subject);
        std::fs::create_dir_all(&self.folder)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(&serde_json::to_vec_pretty(&Entry { subject, version, found })?)?;
        file.persist(path).map_err(|failed| failed.error)?;
        Ok(())
    }

    fn path(&self, subject: &str) -> PathBuf {
        self.folder.join(format!("{}.json", hex(&Sha256::digest(subject)[..16])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A result belongs to its subject and to this version; garbage is no result.
    #[test]
    fn a_result_is_found_for_its_subject_and_version_only() {
        let folder = tempfile::tempdir().unwrap();
        let results = Measurements::new(folder.path().join("speeds"));
        assert_eq!(results.find::<u64>("one"), None);
        results.store("one", &7u64).unwrap();
        results.store("one", &8u64).unwrap();
        assert_eq!((results.find("one"), results.find::<u64>("other")), (Some(8u64), None));
        let path = results.path("one");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace(env!("CARGO_PKG_VERSION"), "0.0.0")).unwrap();
        assert_eq!(results.find::<u64>("one"), None);
        std::fs::write(&path, "garbage").unwrap();
        assert_eq!(results.find::<u64>("one"), None);
    }
}
