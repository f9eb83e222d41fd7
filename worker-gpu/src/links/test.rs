//! The test of a link: two probes, told what to copy and what to find.

use super::probe::{Answer, Leg, Order};
use super::{End, Hop, Speed, Verdict, Way};
use crate::compile::ChildCommand;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// Sizes of copies and how often each is tried: a small row, a row of a large model, chunks.
const SIZES: [(usize, u64); 4] = [(4 << 10, 12), (SMALL, 12), (1 << 20, 6), (LARGEST, 3)];
const SMALL: usize = 20 << 10;
const LARGEST: usize = 16 << 20;
/// Copies that are timed together.
const TIMED: u32 = 16;
/// Rows whose hops are timed: of one token of a large model, and of a chunk.
const HOPS: [usize; 2] = [SMALL, 10 << 20];
/// Hops of each kind: two of them take longer than the p99.
const TIMED_HOPS: u32 = 200;
/// Longest wait for one answer. Opening a device may take seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Errors that say something about this moment and not about the link.
const PASSING: [&str; 1] = ["gpu_out_of_memory"];

/// Tests the link between two devices, each opened by a process that runs [`super::probe::serve`]: `probe`.
///
/// # Errors
/// The link could not be tried; the sentence says why, and another time it may work.
pub fn test(probe: &ChildCommand, from: &End, to: &End) -> Result<Verdict, String> {
    let mut ends = [Probe::start(probe)?, Probe::start(probe)?];
    match run(&mut ends, [from, to]) {
        Ok([there, back]) => Ok(Verdict::Works { there, back }),
        Err(Ending::Link(reason)) => Ok(Verdict::Refused { reason }),
        Err(Ending::Test(reason)) => Err(reason),
    }
}

/// Why a test ended early.
enum Ending {
    /// Because of the link.
    Link(String),
    /// Because of something else.
    Test(String),
}

fn run(probes: &mut [Probe; 2], ends: [&End; 2]) -> Result<[Speed; 2], Ending> {
    for (probe, end) in probes.iter_mut().zip(ends) {
        let order = Order::Open { provider: end.provider.clone(), ordinal: end.ordinal, bytes: LARGEST };
        let opened = probe.ask(&order);
        // A device that cannot be opened says nothing about its links.
        opened.map_err(|(Ending::Link(reason) | Ending::Test(reason))| Ending::Test(reason))?;
    }
    let [first, second] = probes;
    attach(first, second)?;
    attach(second, first)?;
    for seed in 0..SIZES.iter().map(|(_, times)| *times).max().unwrap_or(0) {
        for (bytes, _) in SIZES.into_iter().filter(|(_, times)| seed < *times) {
            deliver(first, second, bytes, seed)?;
            deliver(second, first, bytes, seed)?;
        }
    }
    Ok([speed(first, second)?, speed(second, first)?])
}

/// Lets `from` write into `to`'s memory.
fn attach(from: &mut Probe, to: &mut Probe) -> Result<(), Ending> {
    match to.ask(&Order::Share)? {
        Answer::Shared { handle, bytes } => from.ask(&Order::Attach { handle, bytes }).map(drop),
        other => Err(unexpected(&other)),
    }
}

/// Copies a pattern and looks whether it has arrived.
fn deliver(from: &mut Probe, to: &mut Probe, bytes: usize, seed: u64) -> Result<(), Ending> {
    to.ask(&Order::Blank { bytes })?;
    from.ask(&Order::Send { bytes, seed })?;
    match to.ask(&Order::Check { bytes, seed })? {
        Answer::Done => Ok(()),
        Answer::Differs { at } => Err(Ending::Link(format!(
            "the driver reports success, but of a copy of {bytes} bytes byte {at} arrived wrong"
        ))),
        other => Err(unexpected(&other)),
    }
}

fn speed(from: &mut Probe, to: &mut Probe) -> Result<Speed, Ending> {
    let large_us = match from.ask(&Order::Rate { bytes: LARGEST, count: TIMED })? {
        Answer::Took { microseconds } => microseconds,
        other => return Err(unexpected(&other)),
    };
    let mut hops = Vec::new();
    for bytes in HOPS {
        let peer = times(from, bytes, Leg::Peer)?;
        // The ring's part between the two is a fraction of a microsecond.
        let (down, up) = (times(from, bytes, Leg::ToHost)?, times(to, bytes, Leg::FromHost)?);
        let staged = down.into_iter().zip(up).map(|(down, up)| down + up).collect();
        hops.extend([hop(Way::Peer, bytes, peer), hop(Way::Staged, bytes, staged)]);
    }
    Ok(Speed { gb_per_s: LARGEST as f64 / (large_us.max(1e-3) * 1e3), hops })
}

fn times(probe: &mut Probe, bytes: usize, leg: Leg) -> Result<Vec<f64>, Ending> {
    match probe.ask(&Order::Time { bytes, count: TIMED_HOPS, leg })? {
        Answer::Times { microseconds } if microseconds.len() == TIMED_HOPS as usize => Ok(microseconds),
        other => Err(unexpected(&other)),
    }
}

fn hop(way: Way, bytes: usize, mut times: Vec<f64>) -> Hop {
    times.sort_by(f64::total_cmp);
    let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).saturating_sub(1));
    let at = |percent| at(percent).copied().unwrap_or(f64::NAN);
    Hop { way, bytes, p50_us: at(50), p99_us: at(99) }
}

fn unexpected(answer: &Answer) -> Ending {
    Ending::Test(format!(
        "a probe answered {answer:?} where something else belongs; this is a fault in Spillway"
    ))
}

/// A probe as a child process; killed when it is dropped.
struct Probe {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<std::io::Result<String>>,
}

impl Probe {
    fn start(command: &ChildCommand) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("{} cannot be run: {error}", command.program.display());
        let mut child = Command::new(&command.program)
            .args(&command.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(orders), Some(stdout)) = pipes else { return Err("a probe has no pipes".into()) };
        let (sender, answers) = mpsc::channel();
        // Ends with the probe's output, or when nobody listens any more.
        std::thread::Builder::new()
            .name("probe".into())
            .spawn(move || BufReader::new(stdout).lines().try_for_each(|line| sender.send(line)))
            .map_err(failed)?;
        Ok(Self { child, orders, answers })
    }

    /// Gives an order and waits for the answer. A driver's failure, a probe that ends and one that does not answer are
    /// the link's fault.
    fn ask(&mut self, order: &Order) -> Result<Answer, Ending> {
        let text = serde_json::to_string(order).map_err(|error| Ending::Test(error.to_string()))?;
        if writeln!(self.orders, "{text}").is_err() {
            return Err(Ending::Link(format!("the driver ended the process during {order:?}")));
        }
        match self.answers.recv_timeout(ANSWER_LIMIT) {
            Ok(Ok(line)) => {
                match serde_json::from_str(&line).map_err(|error| Ending::Test(error.to_string()))? {
                    Answer::Failed { code, reason } if PASSING.contains(&code.as_str()) => {
                        Err(Ending::Test(reason))
                    }
                    Answer::Failed { reason, .. } => Err(Ending::Link(reason)),
                    answer => Ok(answer),
                }
            }
            Ok(Err(error)) => Err(Ending::Test(error.to_string())),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Ending::Link(format!("the driver ended the process during {order:?}")))
            }
            Err(RecvTimeoutError::Timeout) => {
                Err(Ending::Link(format!("no answer within {} s to {order:?}", ANSWER_LIMIT.as_secs())))
            }
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // Fails when it has ended, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fills memory with a pattern: pseudo-random words, words that count, and words of equal bits that alternate, by turns.
pub(super) fn fill_pattern(bytes: &mut [u8], seed: u64) {
    for (place, word) in (0u64..).zip(bytes.chunks_mut(size_of::<u64>())) {
        word.copy_from_slice(&pattern_word(seed, place).to_le_bytes()[..word.len()]);
    }
}

/// The first byte that is not the pattern's.
pub(super) fn first_difference(bytes: &[u8], seed: u64) -> Option<usize> {
    (0u64..).zip(bytes.chunks(size_of::<u64>())).find_map(|(place, word)| {
        let expected = pattern_word(seed, place).to_le_bytes();
        let within = word.iter().zip(expected).position(|(found, expected)| *found != expected)?;
        usize::try_from(place).ok().map(|place| place * size_of::<u64>() + within)
    })
}

fn pattern_word(seed: u64, place: u64) -> u64 {
    match seed % 3 {
        0 => mix(seed, place),
        1 => place.wrapping_mul(0x0001_0001_0001_0001).wrapping_add(seed),
        _ => {
            if (place ^ seed) & 1 == 0 {
                u64::MAX
            } else {
                0
            }
        }
    }
}

/// The finaliser of `SplitMix64` (Steele, Lea, Flood 2014) on a counter.
fn mix(seed: u64, place: u64) -> u64 {
    let mut word = (seed << 40).wrapping_add(place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the nearest rank, in whatever order the times came.
    #[test]
    fn percentiles_are_times_that_were_measured() {
        let times: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let Hop { p50_us, p99_us, .. } = hop(Way::Peer, SMALL, times);
        assert_eq!((p50_us, p99_us), (100.0, 198.0));
        let Hop { p50_us, p99_us, .. } = hop(Way::Staged, SMALL, vec![7.0]);
        assert_eq!((p50_us, p99_us), (7.0, 7.0));
    }

    /// A byte that is missing, doubled or from another pattern is found where it is, at any length.
    #[test]
    fn patterns_tell_apart_what_arrived() {
        for seed in 0..6 {
            for len in [1, 7, 8, 4096, 5003] {
                let mut bytes = vec![0; len];
                fill_pattern(&mut bytes, seed);
                assert_eq!(first_difference(&bytes, seed), None);
                bytes[len / 2] ^= 0x10;
                assert_eq!(first_difference(&bytes, seed), Some(len / 2));
                bytes[len / 2] ^= 0x10;
                assert!(len < 8 || first_difference(&bytes, seed + 1).is_some(), "{seed} {len}");
            }
        }
    }
}
