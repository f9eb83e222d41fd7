//! Penalties on tokens that occurred lately.

use super::SamplingParams;
use std::collections::{HashMap, VecDeque};

/// The last tokens of a sequence, counted.
#[derive(Debug, Clone)]
pub(super) struct Window {
    length: usize,
    tokens: VecDeque<u32>,
    counts: HashMap<u32, u32>,
}

impl Window {
    /// Most tokens to reserve room for up front; a longer window grows as it fills.
    const RESERVE: usize = 4096;

    pub(super) fn new(length: usize) -> Window {
        let room = length.min(Window::RESERVE);
        Window { length, tokens: VecDeque::with_capacity(room + 1), counts: HashMap::with_capacity(room + 1) }
    }

    pub(super) fn push(&mut self, token: u32) {
        if self.length == 0 {
            return;
        }
        if self.tokens.len() == self.length
            && let Some(oldest) = self.tokens.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.tokens.push_back(token);
        *self.counts.entry(token).or_insert(0) += 1;
    }

    /// Lowers the logits of the tokens in the window.
    pub(super) fn penalise(&self, params: &SamplingParams, logits: &mut [f32]) {
        for (&token, &count) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            if *logit > 0.0 {
                *logit /= params.repeat_penalty;
            } else {
                *logit *= params.repeat_penalty;
            }
            *logit -= params.presence_penalty + params.frequency_penalty * count as f32;
        }
    }
}
