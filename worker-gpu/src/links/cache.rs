//! What link tests found, on disk: a file per pair of devices and driver version.

use super::{End, Verdict};
use crate::compile::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::PathBuf;

/// A file's contents.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    from: End,
    to: End,
    found: Verdict,
}

/// The folder of results. Files appear whole, so several processes may share it; what cannot be read counts as absent.
#[derive(Debug)]
pub struct LinkCache {
    folder: PathBuf,
}

impl LinkCache {
    /// The cache in a folder that need not exist yet.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// What the last test of a pair found, seen from `from`.
    pub fn find(&self, from: &End, to: &End) -> Option<Verdict> {
        let text = std::fs::read(self.path(from, to)).ok()?;
        let entry: Entry = serde_json::from_slice(&text).ok()?;
        let (first, second) = (entry.from.identity(), entry.to.identity());
        if (first, second) == (from.identity(), to.identity()) {
            Some(entry.found)
        } else if (first, second) == (to.identity(), from.identity()) {
            Some(entry.found.reversed())
        } else {
            None
        }
    }

    /// Keeps what a test found.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn store(&self, from: &End, to: &End, found: &Verdict) -> std::io::Result<()> {
        let entry = Entry { from: from.clone(), to: to.clone(), found: found.clone() };
        std::fs::create_dir_all(&self.folder)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(&serde_json::to_vec_pretty(&entry)?)?;
        file.persist(self.path(from, to)).map_err(|failed| failed.error)?;
        Ok(())
    }

    /// The same file for both directions.
    fn path(&self, from: &End, to: &End) -> PathBuf {
        let mut names = [from, to].map(|end| format!("{:?}", end.identity()));
        names.sort_unstable();
        let mut hash = Sha256::new();
        names.iter().for_each(|name| hash.update(name));
        self.folder.join(format!("{}.json", hex(&hash.finalize()[..16])))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Speed;
    use super::*;

    fn end(ordinal: u32, uuid: Option<&str>, driver: i32) -> End {
        End { provider: "amd".into(), ordinal, uuid: uuid.map(str::to_owned), driver }
    }

    /// A result belongs to a pair and a driver version, whichever direction is asked for, and however devices are numbered
    /// that have ids.
    #[test]
    fn a_result_is_found_for_its_pair_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let cache = LinkCache::new(folder.path().join("links"));
        let (fast, slow) =
            (Speed { gb_per_s: 50.0, small_us: 9.0 }, Speed { gb_per_s: 20.0, small_us: 11.0 });
        let (a, b) = (end(0, Some("a"), 7), end(1, Some("b"), 7));
        assert_eq!(cache.find(&a, &b), None);
        cache.store(&a, &b, &Verdict::Works { there: fast, back: slow }).unwrap();
        assert_eq!(cache.find(&a, &b), Some(Verdict::Works { there: fast, back: slow }));
        let (a, b) = (end(1, Some("a"), 7), end(0, Some("b"), 7));
        assert_eq!(cache.find(&b, &a), Some(Verdict::Works { there: slow, back: fast }));
        for (from, to) in [
            (end(0, Some("a"), 8), end(1, Some("b"), 8)),
            (end(0, Some("a"), 7), end(1, Some("c"), 7)),
            (end(0, None, 7), end(1, None, 7)),
            (end(0, Some("a"), 7), end(0, Some("a"), 7)),
        ] {
            assert_eq!(cache.find(&from, &to), None);
        }
        cache.store(&a, &b, &Verdict::Refused { reason: "no".into() }).unwrap();
        assert_eq!(cache.find(&b, &a), Some(Verdict::Refused { reason: "no".into() }));
    }
}
