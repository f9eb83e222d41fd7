//! Measured memory read bandwidth: the yardstick for decoding, which reads every weight once per token.

use crate::pool::{ThreadPool, partition};
use memmap2::{Advice, MmapMut};
use std::hint::black_box;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Default size of the buffer: larger than the caches of any current CPU.
pub const BUFFER_BYTES: usize = 512 << 20;
/// Passes that are timed; the first one after filling the buffer is not.
const PASSES: usize = 7;
/// Independent sums per thread, so that adding never waits for memory latency alone.
const SUMS: usize = 64;

/// Why the bandwidth could not be measured.
#[derive(Debug, Error)]
pub enum BandwidthError {
    /// The system refused the buffer.
    #[error("cannot reserve {bytes} bytes to measure memory bandwidth: {source}; free some memory")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl BandwidthError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            BandwidthError::Memory { .. } => "bandwidth_out_of_memory",
        }
    }
}

/// Read bandwidth of this machine as the pool's threads see it together, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadBandwidth {
    /// The fastest pass: what the hardware can do.
    pub best: f64,
    /// The median pass: what it did while we looked. Far below `best` means a busy machine.
    pub median: f64,
}

/// Reads `bytes` of memory several times with all threads of the pool and reports how fast.
///
/// # Errors
/// [`BandwidthError::Memory`] when the buffer cannot be had.
pub fn read_bandwidth(pool: &ThreadPool, bytes: usize) -> Result<ReadBandwidth, BandwidthError> {
    let words = bytes.div_ceil(size_of::<u64>()).max(1);
    let bytes = words * size_of::<u64>();
    let mut map = MmapMut::map_anon(bytes).map_err(|source| BandwidthError::Memory { bytes, source })?;
    // Advice only: without huge pages the result is what ordinary memory gives.
    let _ = map.advise(Advice::HugePage);
    fill(pool, bytemuck::cast_slice_mut(&mut map));
    let buffer: &[u64] = bytemuck::cast_slice(&map);
    let mut passes: Vec<Duration> = (0..=PASSES).map(|_| time_pass(pool, buffer)).skip(1).collect();
    passes.sort_unstable();
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE);
    Ok(ReadBandwidth { best: rate(passes[0]), median: rate(passes[PASSES / 2]) })
}

/// Writes every page, each by the thread that will read it (on a NUMA machine its memory is then near it). Memory that
/// was never written would be one shared page of zeros, and reading it would measure a cache.
fn fill(pool: &ThreadPool, buffer: &mut [u64]) {
    let len = buffer.len();
    let parts = crate::disjoint::Disjoint::new(buffer);
    pool.run(&|thread| {
        let range = partition(len, pool.threads(), thread);
        // SAFETY: threads have disjoint ranges.
        unsafe { parts.part(range.start, range.len()) }.fill(thread as u64 + 1);
    });
}

/// Time to read the whole buffer once.
fn time_pass(pool: &ThreadPool, buffer: &[u64]) -> Duration {
    let start = Instant::now();
    pool.run(&|thread| {
        let range = partition(buffer.len(), pool.threads(), thread);
        black_box(sum(&buffer[range]));
    });
    start.elapsed()
}

/// Adds all words; the compiler vectorises the independent sums.
fn sum(words: &[u64]) -> u64 {
    let (lines, rest) = words.as_chunks::<SUMS>();
    let mut sums = [0u64; SUMS];
    for line in lines {
        for (sum, word) in sums.iter_mut().zip(line) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |sum, word| sum.wrapping_add(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every word is read, and the numbers are those of a memory.
    #[test]
    fn measures_a_plausible_rate() {
        assert_eq!(sum(&(0..1000).collect::<Vec<u64>>()), 499_500);
        let pool = ThreadPool::new(2).unwrap();
        let rate = read_bandwidth(&pool, 32 << 20).unwrap();
        assert!(rate.median > 1e7 && rate.best >= rate.median && rate.best < 1e13, "{rate:?}");
    }

    /// An impossible buffer is an error, not an abort.
    #[test]
    fn refuses_an_impossible_size() {
        let pool = ThreadPool::new(1).unwrap();
        assert_eq!(read_bandwidth(&pool, 1 << 60).unwrap_err().code(), "bandwidth_out_of_memory");
    }
}
