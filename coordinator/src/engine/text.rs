//! Tokens to the text a user sees: whole characters, no control tokens, nothing of a stop string.

use spillway_model::text::{StopMatcher, Utf8Stream};
use spillway_model::tokenizer::Tokenizer;
use std::sync::Arc;

/// The text of one answer, token by token.
#[derive(Debug)]
pub(super) struct TextStream {
    tokenizer: Arc<Tokenizer>,
    characters: Utf8Stream,
    stops: StopMatcher,
    stopped: bool,
    /// Characters on their way to the stop matcher; reused.
    fresh: String,
}

impl TextStream {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, stops: &[String]) -> TextStream {
        TextStream {
            tokenizer,
            characters: Utf8Stream::default(),
            stops: StopMatcher::new(stops.iter().cloned()),
            stopped: false,
            fresh: String::new(),
        }
    }

    /// The text that became certain with a token: possibly nothing, since a character or a stop string may be incomplete.
    /// Control tokens are not part of the text.
    pub(super) fn push(&mut self, id: u32) -> String {
        let mut shown = String::new();
        if !self.tokenizer.is_control(id) {
            self.fresh.clear();
            self.characters.push(self.tokenizer.token_bytes(id).unwrap_or_default(), &mut self.fresh);
            self.stopped = self.stops.push(&self.fresh, &mut shown).is_some();
        }
        shown
    }

    /// Whether a stop string has appeared.
    pub(super) fn stopped(&self) -> bool {
        self.stopped
    }

    /// What was held back, at the end of an answer.
    pub(super) fn finish(&mut self) -> String {
        let mut shown = String::new();
        self.fresh.clear();
        self.characters.finish(&mut self.fresh);
        self.stopped |= self.stops.push(&self.fresh, &mut shown).is_some();
        self.stops.finish(&mut shown);
        shown
    }
}
