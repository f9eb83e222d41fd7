//! Dividing work: fixed shares and a shared counter.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Share `index` of `parts` of `0..n`: contiguous, in order, sizes differing by at most one (the first shares are the
/// larger ones). Empty when there is nothing left for it.
pub fn partition(n: usize, parts: usize, index: usize) -> Range<usize> {
    let parts = parts.max(1);
    let (base, extra) = (n / parts, n % parts);
    let start = (index * base + index.min(extra)).min(n);
    let len = base + usize::from(index < extra);
    start..(start + len).min(n)
}

/// Hands out `0..n` in chunks to whoever asks next: for work whose pieces differ in cost, or threads that differ in
/// speed. Which thread gets which chunk is not deterministic, so a chunk's result must not depend on it.
#[derive(Debug)]
pub struct ChunkQueue {
    next: AtomicUsize,
    n: usize,
    chunk: usize,
}

impl ChunkQueue {
    /// A queue over `0..n` in chunks of `chunk` (at least 1).
    pub fn new(n: usize, chunk: usize) -> Self {
        Self { next: AtomicUsize::new(0), n, chunk: chunk.max(1) }
    }

    /// The next chunk, or `None` when all are taken.
    pub fn take(&self) -> Option<Range<usize>> {
        // Relaxed: the counter only divides the work; the pool's fork and join order the data.
        let start = self.next.fetch_add(self.chunk, Ordering::Relaxed);
        (start < self.n).then(|| start..(start + self.chunk).min(self.n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The shares tile `0..n` in order and are balanced.
        #[test]
        fn partition_tiles_the_range(n in 0usize..10_000, parts in 1usize..70) {
            let shares: Vec<_> = (0..parts).map(|i| partition(n, parts, i)).collect();
            let mut end = 0;
            for share in &shares {
                prop_assert_eq!(share.start, end);
                end = share.end;
            }
            prop_assert_eq!(end, n);
            let sizes: Vec<_> = shares.iter().map(ExactSizeIterator::len).collect();
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
        }

        /// Every index is handed out exactly once.
        #[test]
        fn queue_hands_out_everything_once(n in 0usize..1000, chunk in 0usize..40) {
            let queue = ChunkQueue::new(n, chunk);
            let mut seen = Vec::new();
            while let Some(range) = queue.take() {
                seen.extend(range);
            }
            prop_assert_eq!(seen, (0..n).collect::<Vec<_>>());
        }
    }
}
