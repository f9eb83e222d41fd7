//! Sampling parameters: what a user may ask for, and the ranges in which it means something.

use thiserror::Error;

/// How the next token is chosen. Start from [`SamplingParams::default`] (greedy, no penalty) and set fields; an engine
/// calls [`SamplingParams::validate`] before it accepts a request.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 = greedy (the arg max, ties to the lower id).
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 = all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose probabilities sum to at least this; 1 = all.
    pub top_p: f32,
    /// Keep tokens at least this times as likely as the most likely one; 0 = all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the window; 1 = off.
    pub repeat_penalty: f32,
    /// Subtracted from the logit of every token in the window; 0 = off.
    pub presence_penalty: f32,
    /// Subtracted from the logit once per occurrence in the window; 0 = off.
    pub frequency_penalty: f32,
    /// Last tokens (prompt and answer) that penalties look at; 0 turns them off.
    pub repeat_window: usize,
    /// Seed of the random numbers: the same seed gives the same text on the same plan, whatever else runs.
    pub seed: u64,
    /// Added to the logits of single tokens before anything else; `-inf` bans a token.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_window: 128,
            seed: 0,
            logit_bias: Vec::new(),
        }
    }
}

/// A sampling parameter outside its range.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{field} is {found}, but must be {expected}")]
pub struct ParamError {
    /// Name of the field as users spell it.
    pub field: &'static str,
    /// What was given.
    pub found: String,
    /// The range it must lie in.
    pub expected: &'static str,
}

impl ParamError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        "invalid_sampling_parameter"
    }
}

/// The numbers that a parameter may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// The smallest.
    pub low: f32,
    /// The largest.
    pub high: f32,
    /// Both in words.
    pub words: &'static str,
}

impl Bounds {
    /// Whether `value` lies within; not a number does not.
    pub fn contains(&self, value: f32) -> bool {
        value >= self.low && value <= self.high
    }
}

/// Bounds of [`SamplingParams::temperature`].
pub const TEMPERATURE: Bounds = Bounds { low: 0.0, high: 100.0, words: "between 0 and 100" };
/// Bounds of [`SamplingParams::top_p`].
pub const TOP_P: Bounds = Bounds { low: f32::MIN_POSITIVE, high: 1.0, words: "above 0 and at most 1" };
/// Bounds of [`SamplingParams::min_p`].
pub const MIN_P: Bounds = Bounds { low: 0.0, high: 1.0, words: "between 0 and 1" };
/// Bounds of [`SamplingParams::repeat_penalty`].
pub const REPEAT_PENALTY: Bounds = Bounds { low: 0.01, high: 100.0, words: "between 0.01 and 100" };
/// Bounds of [`SamplingParams::presence_penalty`] and [`SamplingParams::frequency_penalty`].
pub const PENALTY: Bounds = Bounds { low: -100.0, high: 100.0, words: "between -100 and 100" };

impl SamplingParams {
    /// Checks every field; `vocab` bounds the token ids of `logit_bias`.
    pub fn validate(&self, vocab: usize) -> Result<(), ParamError> {
        let fields = [
            ("temperature", self.temperature, TEMPERATURE),
            ("top_p", self.top_p, TOP_P),
            ("min_p", self.min_p, MIN_P),
            ("repeat_penalty", self.repeat_penalty, REPEAT_PENALTY),
            ("presence_penalty", self.presence_penalty, PENALTY),
            ("frequency_penalty", self.frequency_penalty, PENALTY),
        ];
        for (field, value, bounds) in fields {
            if !bounds.contains(value) {
                return Err(ParamError { field, found: value.to_string(), expected: bounds.words });
            }
        }
        for &(id, bias) in &self.logit_bias {
            if id as usize >= vocab {
                let expected = "a token id of the vocabulary";
                return Err(ParamError { field: "logit_bias", found: format!("for token {id}"), expected });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                let expected = "a finite number or -inf";
                return Err(ParamError { field: "logit_bias", found: bias.to_string(), expected });
            }
        }
        Ok(())
    }

    /// Whether any penalty changes logits.
    pub(super) fn has_penalties(&self) -> bool {
        self.repeat_window > 0
            && (self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0)
    }
}
