//! Chooses the next token from a row of logits.
//!
//! The order is fixed: logit bias, penalties, temperature, top-k, top-p, min-p, draw. Top-p and min-p see the
//! probabilities that the temperature has already shaped, each among what the filter before it left. Ties go to the lower
//! id. The outcome depends on the row, the parameters, the sequence's own tokens and its own random numbers, and on
//! nothing that runs beside it.
//!
//! Tokens more than [`DEPTH`] nats below the best one are never drawn: all of them together weigh less than half a unit
//! in the last place of an f32 sum. That keeps the candidates few without sorting a whole vocabulary. Nothing is
//! allocated once the buffers have grown to a model's size.

mod argmax;
mod params;
mod penalty;
mod random;

use argmax::{Peak, peak};
pub use params::{Bounds, MIN_P, PENALTY, ParamError, REPEAT_PENALTY, SamplingParams, TEMPERATURE, TOP_P};
use penalty::Window;
use random::Random;
pub use random::draw_seed;
use std::cmp::Ordering;
use thiserror::Error;

/// Nats below the best token beyond which a token is never drawn: 2^20 tokens of `e^-32` weigh 1.3e-8 together.
const DEPTH: f32 = 32.0;

/// A row from which no token can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SampleError {
    /// The model produced a value that is not a number, or infinity.
    #[error("the model produced a logit that is not finite; the file or a kernel is broken")]
    NonFinite,
    /// Every token is banned by the logit bias.
    #[error("logit_bias leaves no token to choose")]
    NothingLeft,
}

impl SampleError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            SampleError::NonFinite => "non_finite_logits",
            SampleError::NothingLeft => "no_token_left",
        }
    }
}

/// A token that may be drawn.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    /// Logit over temperature, relative to the best; then its weight `exp` of that.
    weight: f32,
}

/// Most likely first, ties by id.
fn by_weight(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// The sampling state of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    random: Random,
    window: Option<Window>,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler for a sequence that starts with `prompt`; `params` have been validated.
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Sampler {
        let window = params.has_penalties().then(|| {
            let mut window = Window::new(params.repeat_window);
            prompt[prompt.len().saturating_sub(params.repeat_window)..]
                .iter()
                .for_each(|&id| window.push(id));
            window
        });
        Sampler { random: Random::new(params.seed), window, candidates: Vec::new(), params }
    }

    /// Chooses a token and counts it as part of the sequence. `logits` (one per token of the vocabulary) is scratch
    /// afterwards.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<u32, SampleError> {
        let best = match peak(logits).ok_or(SampleError::NonFinite)? {
            best if self.is_plain() => best,
            _ => {
                self.adjust(logits);
                peak(logits).ok_or(SampleError::NonFinite)?
            }
        };
        if best.value == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft);
        }
        let token = if self.params.temperature > 0.0 { self.draw(logits, best) } else { best.index };
        if let Some(window) = &mut self.window {
            window.push(token);
        }
        Ok(token)
    }

    /// Whether logits are used as they come.
    fn is_plain(&self) -> bool {
        self.params.logit_bias.is_empty() && self.window.is_none()
    }

    fn adjust(&mut self, logits: &mut [f32]) {
        for &(id, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        if let Some(window) = &self.window {
            window.penalise(&self.params, logits);
        }
    }

    fn draw(&mut self, logits: &[f32], best: Peak) -> u32 {
        self.collect(logits, best.value);
        self.keep_top_k();
        for candidate in &mut self.candidates {
            candidate.weight = candidate.weight.exp();
        }
        self.keep_top_p();
        self.keep_min_p();
        let total: f64 = self.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
        let mut left = self.random.unit() * total;
        for candidate in &self.candidates {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return candidate.id;
            }
        }
        // Rounding of the sum can leave a remainder of a few ulp; it belongs to the last candidate.
        self.candidates.last().map_or(best.index, |candidate| candidate.id)
    }

    /// Tokens within [`DEPTH`] of the best, in order of their ids.
    fn collect(&mut self, logits: &[f32], best: f32) {
        let inverse = 1.0 / self.params.temperature;
        self.candidates.clear();
        for (id, &logit) in (0u32..).zip(logits) {
            let weight = (logit - best) * inverse;
            if weight >= -DEPTH {
                self.candidates.push(Candidate { id, weight });
            }
        }
    }

    fn keep_top_k(&mut self) {
        let keep = self.params.top_k as usize;
        if keep > 0 && keep < self.candidates.len() {
            self.candidates.select_nth_unstable_by(keep - 1, by_weight);
            self.candidates.truncate(keep);
            self.candidates.sort_unstable_by(by_weight);
        }
    }

    /// Sorts only as much as the nucleus needs: a prefix that grows until it holds enough.
    fn keep_top_p(&mut self) {
        if self.params.top_p >= 1.0 {
            return;
        }
        let total: f64 = self.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
        let wanted = f64::from(self.params.top_p) * total;
        let (mut sorted, mut sum) = (0, 0.0);
        while sorted < self.candidates.len() {
            let rest = &mut self.candidates[sorted..];
            let next = rest.len().min(sorted.max(64));
            if next < rest.len() {
                rest.select_nth_unstable_by(next - 1, by_weight);
            }
            rest[..next].sort_unstable_by(by_weight);
            for index in sorted..sorted + next {
                sum += f64::from(self.candidates[index].weight);
                if sum >= wanted {
                    self.candidates.truncate(index + 1);
                    return;
                }
            }
            sorted += next;
        }
    }

    /// The best token's weight is 1, so `min_p` is a plain threshold.
    fn keep_min_p(&mut self) {
        let least = self.params.min_p;
        if least > 0.0 {
            self.candidates.retain(|candidate| candidate.weight >= least);
        }
    }
}

#[cfg(test)]
mod tests;
