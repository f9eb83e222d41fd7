//! A placement that a memory is too small for: the arithmetic, and what to do.

use super::advice::Advice;
use thiserror::Error;

/// The arithmetic of a placement that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "the placement needs {} of memory{place} (weights {}, KV cache {} for {} tokens, states {}, scratch {}, buffers {}), but \
     {}: {} too little; use a smaller file{}{}",
    bytes(.needed), bytes(.weights), bytes(.kv), kv_tokens, bytes(.state), bytes(.scratch), bytes(.buffers),
    self.granted(), bytes(&needed.saturating_sub(*.available)), self.to_lower(), advice
)]
pub struct Shortage {
    /// Which memory: ` of device 0 (its name)`; empty for the host's.
    pub place: String,
    /// What would fit.
    pub advice: Advice,
    /// Sum of everything below.
    pub needed: u64,
    /// Memory that the placement may take.
    pub available: u64,
    /// The option of the request that allows no more, if more is free.
    pub limited_by: Option<&'static str>,
    /// Weights of all stages.
    pub weights: u64,
    /// KV cache for `kv_tokens`.
    pub kv: u64,
    /// Tokens of one full sequence, the least a plan provides for.
    pub kv_tokens: usize,
    /// Recurrent states of all slots.
    pub state: u64,
    /// Activations.
    pub scratch: u64,
    /// Rings between the stages, and page-locked memory for copies to and from devices.
    pub buffers: u64,
    /// Longest sequence.
    pub max_seq: usize,
    /// State slots.
    pub parallel: usize,
    /// Tokens of the largest step.
    pub step: usize,
}

impl Shortage {
    fn granted(&self) -> String {
        match self.limited_by {
            Some(option) => format!("{option} allows {}", bytes(&self.available)),
            None => format!("{} are available", bytes(&self.available)),
        }
    }

    /// The numbers that can be lower and are not the least already.
    fn to_lower(&self) -> String {
        let numbers = [
            ("max_seq", self.max_seq, 1),
            ("parallel", self.parallel, 1),
            ("the step size", self.step, self.parallel),
        ];
        let high = numbers.iter().filter(|(_, number, least)| number > least);
        let words: Vec<String> = high.map(|(name, number, _)| format!("{name} ({number})")).collect();
        match words.as_slice() {
            [] => String::new(),
            [one] => format!(", or lower {one}"),
            [first @ .., last] => format!(", or lower {} or {last}", first.join(", ")),
        }
    }
}

fn bytes(count: &u64) -> String {
    super::render::bytes(*count)
}
