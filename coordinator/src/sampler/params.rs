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

/// A field with a plain range: name, value, low end, high end, the range in words.
type Range = (&'static str, f32, f32, f32, &'static str);

impl SamplingParams {
    /// Checks every field; `vocab` bounds the token ids of `logit_bias`.
    pub fn validate(&self, vocab: usize) -> Result<(), ParamError> {
        let ranges: [Range; 6] = [
            ("temperature", self.temperature, 0.0, 100.0, "between 0 and 100"),
            ("top_p", self.top_p, f32::MIN_POSITIVE, 1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0, 1.0, "between 0 and 1"),
            ("repeat_penalty", self.repeat_penalty, 0.01, 100.0, "between 0.01 and 100"),
            ("presence_penalty", self.presence_penalty, -100.0, 100.0, "between -100 and 100"),
            ("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "between -100 and 100"),
        ];
        for (field, value, low, high, expected) in ranges {
            // Written so that NaN fails.
            if !(value >= low && value <= high) {
                return Err(ParamError { field, found: value.to_string(), expected });
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
