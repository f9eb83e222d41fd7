//! Tokens that may be drawn: taken from a row with as few looks at it as the filters allow, then drawn by weight.

use super::DEPTH;
use super::peaks::Peaks;
use spillway_kernels::ops::{Exponents, Ops};
use std::cmp::Ordering;

/// What is taken off the logarithm of a least weight: far more than logarithms and exponentials are off.
const SLACK: f32 = 1e-3;

/// From logits to weights: the best token's weight is 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    pub best: f32,
    /// 1 / temperature.
    pub inverse: f32,
}

impl Scale {
    /// Logarithm of a weight. A larger logit never has a smaller one.
    fn log(self, logit: f32) -> f32 {
        (logit - self.best) * self.inverse
    }

    /// Turns a row into weights, but for blocks that hold none; the sum of each block.
    fn weigh<'a>(
        self,
        ops: Ops,
        logits: &'a mut [f32],
        peaks: &'a Peaks,
    ) -> impl Iterator<Item = f64> + use<'a> {
        let exponents = Exponents { offset: self.best, factor: self.inverse, least: -DEPTH };
        peaks.blocks_mut(logits).map(move |(max, block)| {
            let holds_any = self.log(max) >= -DEPTH;
            f64::from(if holds_any { ops.weigh(block, exponents) } else { 0.0 })
        })
    }
}

/// Logarithms become weights as those of a row do.
const OF_LOGS: Exponents = Exponents { offset: 0.0, factor: 1.0, least: -DEPTH };

/// A token that may be drawn.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    weight: f32,
}

/// Most likely first, ties by id.
fn by_weight(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// Tokens that may be drawn, in the order in which they are.
#[derive(Debug, Clone, Default)]
pub(super) struct Candidates {
    list: Vec<Candidate>,
    scratch: Vec<f32>,
}

impl Candidates {
    /// Takes the tokens whose weight has at least the logarithm `least`, in order of their ids; the logarithms are their weights
    /// for now.
    fn take_logs(&mut self, logits: &[f32], peaks: &Peaks, scale: Scale, least: f32) {
        self.list.clear();
        for (first, block) in peaks.blocks(logits, |max| scale.log(max) >= least) {
            let logs = (first..).zip(block).map(|(id, &logit)| Candidate { id, weight: scale.log(logit) });
            self.list.extend(logs.filter(|candidate| candidate.weight >= least));
        }
    }

    /// From logarithms to weights.
    fn weigh(&mut self, ops: Ops) {
        self.scratch.clear();
        self.scratch.extend(self.list.iter().map(|candidate| candidate.weight));
        ops.weigh(&mut self.scratch, OF_LOGS);
        self.list.iter_mut().zip(&self.scratch).for_each(|(candidate, weight)| candidate.weight = *weight);
    }

    /// Takes the `keep` most likely tokens, sorted if there are more.
    pub fn take_top_k(&mut self, ops: Ops, logits: &[f32], peaks: &mut Peaks, scale: Scale, keep: usize) {
        // One more than are kept, to see whether there are more.
        let limit = peaks.reached_by(keep.saturating_add(1));
        self.take_logs(logits, peaks, scale, limit.map_or(-DEPTH, |limit| scale.log(limit).max(-DEPTH)));
        if keep < self.list.len() {
            self.list.select_nth_unstable_by(keep - 1, by_weight);
            self.list.truncate(keep);
            self.list.sort_unstable_by(by_weight);
        }
        self.weigh(ops);
    }

    /// Takes the smallest set of most likely tokens that have at least `top_p` of all weight, sorted. `logits` become weights.
    pub fn take_top_p(&mut self, ops: Ops, logits: &mut [f32], peaks: &Peaks, scale: Scale, top_p: f32) {
        let wanted = f64::from(top_p) * scale.weigh(ops, logits, peaks).sum::<f64>();
        // Few tokens have nearly all weight as a rule.
        for least in (1u8..=8).map(|part| -DEPTH * f32::from(part) / 8.0) {
            // With the slack no block is missing that holds such a weight; in the end all do.
            let least_weight = if least > -DEPTH { (least + SLACK).exp() } else { f32::MIN_POSITIVE };
            self.list.clear();
            for (first, block) in peaks.blocks(logits, |max| scale.log(max) >= least) {
                let weights = (first..).zip(block).map(|(id, &weight)| Candidate { id, weight });
                self.list.extend(weights.filter(|candidate| candidate.weight >= least_weight));
            }
            // Sums in another order differ, by far less than this.
            if self.total() >= wanted * 0.999 && self.keep_top_p(wanted) {
                return;
            }
        }
    }

    /// Takes the tokens with at least the weight `least`, and perhaps some with hardly less.
    pub fn take_about(&mut self, ops: Ops, logits: &[f32], peaks: &Peaks, scale: Scale, least: f32) {
        self.take_logs(logits, peaks, scale, (least.ln() - SLACK).max(-DEPTH));
        self.weigh(ops);
    }

    /// Sum of all weights, in order.
    pub fn total(&self) -> f64 {
        self.list.iter().map(|candidate| f64::from(candidate.weight)).sum()
    }

    /// Keeps the smallest set of most likely tokens that have at least the weight `wanted` together, sorted: only as much is sorted
    /// as is needed, a prefix that grows until it holds enough. Whether all together do.
    pub fn keep_top_p(&mut self, wanted: f64) -> bool {
        let (mut sorted, mut sum) = (0, 0.0);
        while sorted < self.list.len() {
            let rest = &mut self.list[sorted..];
            let next = rest.len().min(sorted.max(64));
            if next < rest.len() {
                rest.select_nth_unstable_by(next - 1, by_weight);
            }
            rest[..next].sort_unstable_by(by_weight);
            for index in sorted..sorted + next {
                sum += f64::from(self.list[index].weight);
                if sum >= wanted {
                    self.list.truncate(index + 1);
                    return true;
                }
            }
            sorted += next;
        }
        false
    }

    /// Keeps tokens of at least this weight.
    pub fn keep_min_p(&mut self, least: f32) {
        self.list.retain(|candidate| candidate.weight >= least);
    }

    /// Draws by weight; `unit` is uniform in `[0, 1)`. None without candidates.
    pub fn draw(&self, unit: f64) -> Option<u32> {
        let weights = self.list.iter().map(|candidate| (candidate.id, candidate.weight));
        // Rounding of the sum can leave a remainder of a few ulp; it belongs to the last candidate.
        pick(unit * self.total(), weights).or(self.list.last().map(|candidate| candidate.id))
    }
}

/// Draws from all tokens that are at most [`DEPTH`] below the best, without a list of them; `logits` become weights, and `sums` those
/// of blocks.
pub(super) fn draw_from_all(
    ops: Ops,
    logits: &mut [f32],
    peaks: &Peaks,
    scale: Scale,
    unit: f64,
    sums: &mut Vec<f64>,
) -> Option<u32> {
    sums.clear();
    sums.extend(scale.weigh(ops, logits, peaks));
    let mut left = unit * sums.iter().sum::<f64>();
    let reached = sums.iter().position(|sum| {
        let here = left < *sum;
        left -= if here { 0.0 } else { *sum };
        here
    });
    // Rounding of sums can leave a remainder of a few ulp; it belongs to the last token before it.
    let block = reached.or_else(|| sums.iter().rposition(|sum| *sum > 0.0))?;
    let (first, weights) = peaks.block(logits, block)?;
    let weights = (first..).zip(weights.iter().copied()).filter(|(_, weight)| *weight > 0.0);
    pick(left, weights.clone()).or_else(|| weights.last().map(|(id, _)| id))
}

/// The token in whose share `left` is.
fn pick(mut left: f64, weights: impl Iterator<Item = (u32, f32)>) -> Option<u32> {
    for (id, weight) in weights {
        left -= f64::from(weight);
        if left < 0.0 {
            return Some(id);
        }
    }
    None
}
