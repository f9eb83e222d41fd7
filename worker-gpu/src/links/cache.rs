//! What link tests found, on disk: a result per pair of devices and driver version.

use super::{End, Verdict};
use crate::measurements::Measurements;
use std::path::PathBuf;

/// Results of link tests, kept as other measurements are.
#[derive(Debug)]
pub struct LinkCache {
    results: Measurements,
}

impl LinkCache {
    /// The cache in a folder that need not exist yet.
    pub fn new(folder: PathBuf) -> Self {
        Self { results: Measurements::new(folder) }
    }

    /// What the last test of a pair found, seen from `from`.
    pub fn find(&self, from: &End, to: &End) -> Option<Verdict> {
        let pair = Pair::new(from, to);
        Some(pair.turned(self.results.find(&pair.subject)?))
    }

    /// Keeps what a test found.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn store(&self, from: &End, to: &End, found: &Verdict) -> std::io::Result<()> {
        let pair = Pair::new(from, to);
        self.results.store(&pair.subject, &pair.turned(found.clone()))
    }
}

/// Two ends, whose result is kept once for both directions.
struct Pair {
    subject: String,
    /// The result is kept as seen from the other end.
    backwards: bool,
}

impl Pair {
    fn new(from: &End, to: &End) -> Self {
        let [from, to] = [from, to].map(|end| format!("{:?}", end.identity()));
        let backwards = from > to;
        let (first, second) = if backwards { (to, from) } else { (from, to) };
        Self { subject: format!("{first} - {second}"), backwards }
    }

    /// From the direction that was asked for to the one that is kept, or back.
    fn turned(&self, verdict: Verdict) -> Verdict {
        if self.backwards { verdict.reversed() } else { verdict }
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
        let (fast, slow) = (Speed { gb_per_s: 50.0, hops: vec![] }, Speed { gb_per_s: 20.0, hops: vec![] });
        let (a, b) = (end(0, Some("a"), 7), end(1, Some("b"), 7));
        assert_eq!(cache.find(&a, &b), None);
        cache.store(&a, &b, &Verdict::Works { there: fast.clone(), back: slow.clone() }).unwrap();
        assert_eq!(cache.find(&a, &b), Some(Verdict::Works { there: fast.clone(), back: slow.clone() }));
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
