//! What a run has shown, in numbers.

use crate::clients::Seen;
use crate::faults::Fault;
use serde_json::Value;
use std::collections::BTreeMap;

/// Parts of a recovery, as `diag` names them.
const PARTS: [&str; 5] = ["detect_ms", "backoff_ms", "respawn_ms", "load_ms", "replay_ms"];

/// Counts and times of a run.
#[derive(Debug, Default)]
pub struct Figures {
    faults: BTreeMap<&'static str, usize>,
    /// Times when there was no worker to do anything to.
    missed: usize,
    crashes: usize,
    epoch: u64,
    recoveries: BTreeMap<&'static str, Vec<f64>>,
    /// Memory of the daemon after a tenth of the faults.
    pub kib_early: u64,
    /// Memory of the daemon after all of them.
    pub kib_late: u64,
}

impl Figures {
    /// A fault was injected, or there was nobody to inject it into.
    pub fn count(&mut self, fault: Option<&Fault>) {
        match fault {
            Some(fault) => {
                *self.faults.entry(fault.name).or_default() += 1;
                self.crashes += usize::from(fault.is_crash);
            }
            None => self.missed += 1,
        }
    }

    /// Faults that look like the work of what was computed.
    pub fn crashes(&self) -> usize {
        self.crashes
    }

    /// Remembers the times of the last recovery, once.
    pub fn note_recovery(&mut self, diag: &Value) {
        let Some(recovery) = diag["recovery"].as_object() else { return };
        let epoch = recovery["epoch"].as_u64().unwrap();
        if epoch > self.epoch {
            self.epoch = epoch;
            for part in PARTS {
                self.recoveries.entry(part).or_default().push(recovery[part].as_f64().unwrap());
            }
        }
    }

    /// Prints everything.
    pub fn report(&mut self, what: &str, seen: &[Seen], diag: &Value) {
        let mut latencies: Vec<f64> = seen
            .iter()
            .flat_map(|client| &client.latencies)
            .map(|time| time.as_secs_f64() * 1000.0)
            .collect();
        let sum = |part: fn(&Seen) -> usize| seen.iter().map(part).sum::<usize>();
        println!(
            "chaos: {what}: {} faults, {} more found no worker, {} workers replaced, {} answers, none lost or changed, {} condemned, {} announced recoveries",
            self.faults.values().sum::<usize>(),
            self.missed,
            diag["restarts"],
            latencies.len(),
            sum(|client| client.condemned),
            sum(|client| client.recovering),
        );
        println!("chaos: {what}: {:?}", self.faults);
        println!("chaos: {what}: daemon's own memory {} KiB, then {} KiB", self.kib_early, self.kib_late);
        println!("chaos: {what}: answer in ms: {}", percentiles(&mut latencies));
        for (part, times) in &mut self.recoveries {
            println!("chaos: {what}: recovery, {part}: {}", percentiles(times));
        }
    }
}

/// Median, 99th percentile and largest.
fn percentiles(values: &mut [f64]) -> String {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values.get(((values.len() as f64 - 1.0) * share).round() as usize).copied();
    match (at(0.5), at(0.99), at(1.0)) {
        (Some(p50), Some(p99), Some(max)) => {
            format!("p50 {p50:.1}, p99 {p99:.1}, max {max:.1} of {}", values.len())
        }
        _ => "none".to_owned(),
    }
}
