//! What `bench` tells: figures and what they are made of.

use crate::planner::{bytes, decoding_bytes};
use serde::Serialize;
use spillway_kernels::membw::ReadBandwidth;
use spillway_protocol::plan::{KV_BLOCK_TOKENS, Plan};
use std::fs;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A prompt.
    Prefill,
    /// Tokens one by one.
    Decode,
}

/// Several measurements of one thing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
        let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
        Spread {
            median: f64::midpoint(at(low), at(high)),
            min: at(0),
            max: at(values.len().saturating_sub(1)),
        }
    }
}

/// One test.
#[derive(Debug, Serialize)]
pub struct Test {
    test: Kind,
    tokens: usize,
    depth: usize,
    repetitions: usize,
    tok_s: Spread,
    /// Bytes read for one decoded token: every weight, the keys and values so far, the recurrent states.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_token: Option<u64>,
    /// Those bytes times the median speed, as a share of the best measured bandwidth.
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth_share: Option<f64>,
}

impl Test {
    /// A test from the seconds of its runs.
    pub fn new(
        test: Kind,
        tokens: usize,
        depth: usize,
        seconds: &[f64],
        plan: &Plan,
        bandwidth: Option<ReadBandwidth>,
    ) -> Self {
        let rate = |&seconds: &f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        let tok_s = Spread::of(seconds.iter().map(rate).collect());
        let bytes_per_token = match test {
            Kind::Prefill => None,
            // On average over the run.
            Kind::Decode => Some(decode_bytes(plan, depth + tokens / 2)),
        };
        Test {
            test,
            tokens,
            depth,
            repetitions: seconds.len(),
            tok_s,
            bytes_per_token,
            bandwidth_share: bytes_per_token
                .zip(bandwidth)
                .map(|(bytes, bandwidth)| bytes as f64 * tok_s.median / bandwidth.best),
        }
    }
}

/// Bytes read to decode a token after `depth` others.
fn decode_bytes(plan: &Plan, depth: usize) -> u64 {
    let total = |part: fn(&spillway_protocol::plan::StageBytes) -> u64| {
        (0..plan.stages.len()).map(|stage| part(&decoding_bytes(plan, stage))).sum::<u64>()
    };
    let kv_tokens = (plan.limits.kv_blocks * KV_BLOCK_TOKENS).max(1) as u64;
    let sequences = plan.limits.max_sequences.max(1) as u64;
    total(|bytes| bytes.weights)
        + total(|bytes| bytes.kv) / kv_tokens * depth as u64
        + total(|bytes| bytes.state) / sequences
}

/// How busy the host is.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Host {
    /// Mean number of processes that run or want to, over the last minute; none where the system does not tell.
    load_1m: Option<f64>,
}

impl Host {
    /// The host now.
    pub fn now() -> Self {
        let load = fs::read_to_string("/proc/loadavg").ok();
        Host { load_1m: load.and_then(|text| text.split_whitespace().next()?.parse().ok()) }
    }
}

/// Bytes per second.
#[derive(Debug, Clone, Copy, Serialize)]
struct Bandwidth {
    best: f64,
    median: f64,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    #[serde(rename = "type")]
    kind: &'static str,
    version: &'static str,
    plan: Plan,
    /// Kernel set of every worker.
    kernels: Vec<String>,
    cpus: usize,
    /// What the threads of a worker read from memory, measured before the tests.
    read_bandwidth: Option<Bandwidth>,
    host_before: Host,
    host_after: Host,
    results: Vec<Test>,
}

impl Report {
    /// Puts everything together.
    pub fn new(
        plan: Plan,
        kernels: Vec<String>,
        read_bandwidth: Option<ReadBandwidth>,
        before: Host,
        after: Host,
        results: Vec<Test>,
    ) -> Self {
        Report {
            kind: "bench",
            version: env!("CARGO_PKG_VERSION"),
            plan,
            kernels,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            read_bandwidth: read_bandwidth.map(|ReadBandwidth { best, median }| Bandwidth { best, median }),
            host_before: before,
            host_after: after,
            results,
        }
    }
}

/// What is said before the first test.
pub fn heading(plan: &Plan, bandwidth: Option<ReadBandwidth>) -> String {
    let read =
        bandwidth.map_or_else(|| "unknown".to_owned(), |read| format!("{}/s", bytes(whole(read.best))));
    format!(
        "{} · stages: {} · memory read {read}\n{:<10} {:>7} {:>7}  {:>10} {:>10} {:>10}  {:>11}  bandwidth\n",
        plan.model.path.display(),
        plan.stages.len(),
        "test",
        "tokens",
        "depth",
        "tok/s",
        "min",
        "max",
        "bytes/token",
    )
}

/// A test as a line of the table.
pub fn line(test: &Test) -> String {
    let name = match test.test {
        Kind::Prefill => "prefill",
        Kind::Decode => "decode",
    };
    let Spread { median, min, max } = test.tok_s;
    let per_token = test.bytes_per_token.map(bytes).unwrap_or_default();
    let share = test.bandwidth_share.map(|share| format!("{:.0} %", share * 100.0)).unwrap_or_default();
    let line = format!(
        "{name:<10} {:>7} {:>7}  {median:>10.2} {min:>10.2} {max:>10.2}  {per_token:>11}  {share}",
        test.tokens, test.depth
    );
    format!("{}\n", line.trim_end())
}

/// What is said after the last test.
pub fn summary(report: &Report) -> String {
    let load = |host: Host| host.load_1m.map_or_else(|| "unknown".to_owned(), |load| format!("{load:.2}"));
    format!(
        "kernels {} · load of the host {} before, {} after, {} CPUs\n",
        report.kernels.join(", "),
        load(report.host_before),
        load(report.host_after),
        report.cpus
    )
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is positive and far below 2^64"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_the_middle_and_the_ends() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Spread::of(vec![7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }
}
