//! Chooses the next token from a row of logits.
//!
//! The order is fixed: logit bias, penalties, temperature, top-k, top-p, min-p, draw. Top-p and min-p see the
//! probabilities that the temperature has already shaped, each among what the filter before it left. Ties go to the lower
//! id. The outcome depends on the row, the parameters, the sequence's own tokens and its own random numbers, and on
//! nothing that runs beside it.
//!
//! Tokens more than [`DEPTH`] nats below the best one are never drawn: all of them together weigh less than half a unit
//! in the last place of an f32 sum. Weights of a whole row are summed up block by block. A row is read once, which leaves the largest value of each block; only blocks that can hold
//! a candidate are looked at again. Nothing is allocated once the buffers have grown to a model's size.

mod candidates;
mod params;
mod peaks;
mod penalty;
mod random;

use candidates::{Candidates, Scale};
pub use params::{Bounds, MIN_P, PENALTY, ParamError, REPEAT_PENALTY, SamplingParams, TEMPERATURE, TOP_P};
use peaks::{Peak, Peaks};
use penalty::Window;
use random::Random;
pub use random::draw_seed;
use spillway_kernels::ops::Ops;
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

/// The sampling state of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    random: Random,
    window: Option<Window>,
    peaks: Peaks,
    candidates: Candidates,
    /// Of the weights of each block of a row.
    sums: Vec<f64>,
    ops: Ops,
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
        Sampler {
            random: Random::new(params.seed),
            window,
            peaks: Peaks::default(),
            candidates: Candidates::default(),
            sums: Vec::new(),
            ops: Ops::fastest(),
            params,
        }
    }

    /// Chooses a token and counts it as part of the sequence. `logits` (one per token of the vocabulary) is scratch
    /// afterwards.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<u32, SampleError> {
        // What is not finite stays so, whatever is added and multiplied: one look afterwards sees it.
        self.adjust(logits);
        let best = self.peaks.scan(logits).ok_or(SampleError::NonFinite)?;
        if best.value == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft);
        }
        let token = if self.params.temperature > 0.0 { self.draw(logits, best) } else { best.index };
        if let Some(window) = &mut self.window {
            window.push(token);
        }
        Ok(token)
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

    fn draw(&mut self, logits: &mut [f32], best: Peak) -> u32 {
        let SamplingParams { temperature, top_k, top_p, min_p, .. } = self.params;
        let scale = Scale { best: best.value, inverse: 1.0 / temperature };
        let (candidates, ops, unit) = (&mut self.candidates, self.ops, self.random.unit());
        if top_k > 0 {
            candidates.take_top_k(ops, logits, &mut self.peaks, scale, top_k as usize);
            if top_p < 1.0 {
                candidates.keep_top_p(f64::from(top_p) * candidates.total());
            }
        } else if top_p < 1.0 {
            candidates.take_top_p(ops, logits, &self.peaks, scale, top_p);
        } else if min_p > 0.0 {
            candidates.take_about(ops, logits, &self.peaks, scale, min_p);
        } else {
            let drawn = candidates::draw_from_all(ops, logits, &self.peaks, scale, unit, &mut self.sums);
            return drawn.unwrap_or(best.index);
        }
        candidates.keep_min_p(min_p);
        candidates.draw(unit).unwrap_or(best.index)
    }
}

#[cfg(test)]
mod tests;
