//! How fast this host reads its memory and multiplies, as CPU workers do: the numbers that placement by speed needs beside those of GPUs.

use serde::{Deserialize, Serialize};
use spillway_kernels::membw::{BUFFER_BYTES, read_bandwidth};
use spillway_kernels::pool::ThreadPool;
use spillway_kernels::products::multiplications;
use spillway_worker_gpu::devices::Measure;
use spillway_worker_gpu::measurements::Measurements;

/// Part of the available memory that is read at most: one in so many bytes.
const SHARE: u64 = 4;

/// Speed of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSpeed {
    /// Threads that read together.
    pub threads: usize,
    /// Bytes a second that they read.
    pub memory: u64,
    /// Multiplications of weights a second that they do for prompts.
    pub products: u64,
}

impl HostSpeed {
    /// What was measured before, if anything was.
    pub fn look_up(results: &Measurements, threads: usize) -> Option<HostSpeed> {
        results.find(&subject(&cpu_name(&cpu_info()), threads))
    }

    /// What was measured before, or is now, with some of the `available` bytes of memory. Takes up to a second on a current host.
    ///
    /// # Errors
    /// It cannot be measured; a sentence.
    pub fn measure(
        results: &Measurements,
        threads: usize,
        available: u64,
        which: Measure,
    ) -> Result<HostSpeed, String> {
        let known = Self::look_up(results, threads);
        if let Some(known) = known.filter(|_| which == Measure::Missing) {
            return Ok(known);
        }
        let buffer = usize::try_from(available / SHARE).unwrap_or(usize::MAX).min(BUFFER_BYTES);
        let pool = ThreadPool::new(threads).map_err(|error| error.to_string())?;
        let measured = read_bandwidth(&pool, buffer).map_err(|error| error.to_string())?;
        // The fastest pass: what a busy moment takes away comes back.
        let products = multiplications(&pool).map_err(|error| error.to_string())?;
        let speed = HostSpeed { threads, memory: whole(measured.best), products: whole(products) };
        if let Err(error) = results.store(&subject(&cpu_name(&cpu_info()), threads), &speed) {
            tracing::warn!(%error, "the speed of the host cannot be kept; it will be measured again");
        }
        Ok(speed)
    }
}

/// At least 1, so that it can be divided by.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the conversion saturates")]
fn whole(per_second: f64) -> u64 {
    (per_second as u64).max(1)
}

/// What a speed is kept under: a folder may be shared by several machines.
fn subject(cpu: &str, threads: usize) -> String {
    format!("memory of a host with {cpu}, {threads} threads")
}

fn cpu_info() -> String {
    std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()
}

/// The processor's name and how many of it there are, as the system tells them.
fn cpu_name(info: &str) -> String {
    let values = |key: &'static str| {
        info.lines().filter_map(move |line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim())
        })
    };
    format!("{} x {}", values("processor").count(), values("model name").next().unwrap_or("unknown CPU"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_known_by_its_processors() {
        let info = "processor\t: 0\nmodel name\t: Some CPU\n\nprocessor\t: 1\nmodel name\t: Some CPU\n";
        assert_eq!(cpu_name(info), "2 x Some CPU");
        assert_eq!(cpu_name("Features : fp\n"), "0 x unknown CPU");
    }

    /// A known speed is not measured again: the one found is the one kept, whatever it is.
    #[test]
    fn a_speed_is_measured_where_none_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let results = Measurements::new(folder.path().to_owned());
        assert_eq!(HostSpeed::look_up(&results, 3), None);
        let kept = HostSpeed { threads: 3, memory: 5, products: 7 };
        results.store(&subject(&cpu_name(&cpu_info()), 3), &kept).unwrap();
        assert_eq!(HostSpeed::measure(&results, 3, 0, Measure::Missing), Ok(kept));
        assert_eq!(HostSpeed::look_up(&results, 4), None, "other threads, another speed");
        let failed = HostSpeed::measure(&results, 0, 1 << 20, Measure::Missing);
        assert!(failed.is_err(), "{failed:?}");
    }
}
