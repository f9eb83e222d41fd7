//! Bands by bytes and speed: every contiguous split is considered, and the one whose worst stage is best is taken.

use super::ModelSummary;
use super::layout::{self, Band, Processor};
use super::seats::Seat;
use spillway_protocol::plan::Limits;
use spillway_worker_gpu::speed::DeviceSpeed;
use std::ops::Range;

/// What a stage that does not fit costs at least: more than any that fits.
const DOES_NOT_FIT: u128 = 1 << 100;

/// Speeds that differ by no more than one part in so many are one speed: measurements of alike cards scatter, and alike cards
/// should get alike shares.
const SCATTER: u64 = 10;

/// What seats read a second, as far as it tells them apart.
pub(super) fn told_apart(speeds: &[DeviceSpeed]) -> Vec<u64> {
    let measured = speeds.iter().map(|speed| speed.memory);
    let (least, most) =
        (measured.clone().min().unwrap_or_default(), measured.clone().max().unwrap_or_default());
    if most - least <= most / SCATTER { vec![least; speeds.len()] } else { measured.collect() }
}

/// What is to be split.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job<'a> {
    pub model: &'a ModelSummary,
    /// Sizes of the smallest placement: one full sequence.
    pub limits: &'a Limits,
    pub seats: &'a [Seat],
    /// Bytes a second that every seat reads of its memory, where that was measured of all of them.
    pub speeds: Option<&'a [u64]>,
    /// Whether seats write into each other's memory.
    pub peer_copies: bool,
}

impl Job<'_> {
    /// How many of `layers` each seat gets. The first `mapped` ones stay with the first seat, in host memory; every seat has
    /// at least one layer beside. The caller has checked that there are enough.
    pub fn counts(&self, layers: Range<usize>, mapped: usize) -> Vec<usize> {
        let (first, end) = (layers.start, layers.end);
        let seats = self.seats.len();
        if seats == 1 {
            return vec![layers.len()];
        }
        // best[seat][to]: the least possible worst cost of seats up to `seat` with layers up to `to`, and where `seat` starts.
        let mut best = vec![vec![(u128::MAX, first); end + 1]; seats];
        for (seat, _) in self.seats.iter().enumerate() {
            let least_end = first + mapped + seat + 1;
            for to in least_end..=end - (seats - 1 - seat) {
                let starts = if seat == 0 { first..first + 1 } else { first + mapped + seat..to };
                // Of equal splits the one that gives more to earlier seats.
                for from in starts.rev() {
                    let before = if seat == 0 { 0 } else { best[seat - 1][from].0 };
                    if before >= best[seat][to].0 {
                        continue;
                    }
                    let mapped = if seat == 0 { mapped } else { 0 };
                    let worst = before.max(self.cost(seat, from..to, mapped));
                    if worst < best[seat][to].0 {
                        best[seat][to] = (worst, from);
                    }
                }
            }
        }
        let mut counts = vec![0; seats];
        let mut to = end;
        for seat in (0..seats).rev() {
            let from = best[seat][to].1;
            counts[seat] = to - from;
            to = from;
        }
        counts
    }

    /// Time for one pass over the weights where speeds are known, else the part of the room that is taken; both as fixed-point
    /// numbers, so that the same input gives the same split everywhere.
    fn cost(&self, seat: usize, layers: Range<usize>, mapped: usize) -> u128 {
        let processor = Processor::Gpu(seat);
        let landing = layout::takes_rows_from_gpu(processor, self.peer_copies);
        let band = Band { layers, processor, landing, mapped, lifts: false };
        let bytes = layout::stage_bytes(self.model, self.limits, &band);
        let (taken, room) = (bytes.of_processor(), self.seats[seat].room());
        let part = |of: u64, all: u64| (u128::from(of) << 32) / u128::from(all.max(1));
        if taken > room {
            return DOES_NOT_FIT + part(taken, room);
        }
        match self.speeds {
            Some(speeds) => part(bytes.weights, speeds[seat]),
            None => part(taken, room),
        }
    }
}
