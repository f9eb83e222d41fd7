//! The answer side of a request: samples, turns tokens into text, decides the end, and collects events until the engine
//! has time to deliver them.

use super::request::{
    Completion, ErrorClass, EventSink, FinishReason, GenerateEvent, GenerateRequest, RequestError, Timings,
};
use super::text::TextStream;
use crate::sampler::{SampleError, Sampler};
use spillway_model::tokenizer::Tokenizer;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// State of one answer.
pub(super) struct Answer {
    sampler: Sampler,
    text: Option<TextStream>,
    tokenizer: Option<Arc<Tokenizer>>,
    sink: EventSink,
    /// Not yet delivered.
    events: Vec<GenerateEvent>,
    whole_text: String,
    prompt_len: usize,
    cached: usize,
    /// Most tokens, the context considered.
    max_tokens: usize,
    ignore_eos: bool,
    clock: Clock,
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("max_tokens", &self.max_tokens).finish_non_exhaustive()
    }
}

/// When things happened.
#[derive(Debug, Clone, Copy)]
struct Clock {
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Answer {
    /// An answer to `request`, whose parameters have been validated. Without a tokenizer there is no text and no end but
    /// the length.
    pub(super) fn new(
        request: &GenerateRequest,
        max_tokens: usize,
        tokenizer: Option<Arc<Tokenizer>>,
        sink: EventSink,
    ) -> Answer {
        Answer {
            sampler: Sampler::new(request.sampling.clone(), &request.prompt),
            text: tokenizer.clone().map(|tokenizer| TextStream::new(tokenizer, &request.stop)),
            tokenizer,
            sink,
            events: Vec::new(),
            whole_text: String::new(),
            prompt_len: request.prompt.len(),
            cached: 0,
            max_tokens,
            ignore_eos: request.ignore_eos,
            clock: Clock { submitted: Instant::now(), started: None, first_token: None, last_token: None },
        }
    }

    /// Tokens this answer may still need.
    pub(super) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// The request is let in, which the user hears at once: it may have to wait.
    pub(super) fn accept(&mut self) {
        (self.sink)(GenerateEvent::Accepted);
    }

    /// The request left the queue.
    pub(super) fn start(&mut self, cached_tokens: usize) {
        self.cached = cached_tokens;
        self.clock.started = Some(Instant::now());
        self.events.push(GenerateEvent::Started { cached_tokens });
    }

    /// Chooses the next token from its logits and appends it to `tokens`; true when the answer is complete.
    pub(super) fn choose(&mut self, tokens: &mut Vec<u32>, logits: &mut [f32]) -> bool {
        let id = match self.sampler.sample(logits) {
            Ok(id) => id,
            Err(error) => {
                self.fail(&sample_failure(error));
                return true;
            }
        };
        let now = Instant::now();
        self.clock.first_token.get_or_insert(now);
        self.clock.last_token = Some(now);
        if !self.ignore_eos
            && self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.is_end_of_generation(id))
        {
            self.finish(FinishReason::EndOfText, tokens);
            return true;
        }
        tokens.push(id);
        let end = self.append(id, tokens.len());
        if let Some(reason) = end {
            self.finish(reason, tokens);
        }
        end.is_some()
    }

    /// Adds a token to the text; the reason when the answer ends with it.
    fn append(&mut self, id: u32, length: usize) -> Option<FinishReason> {
        let piece = self.text.as_mut().map(|text| text.push(id)).unwrap_or_default();
        let stopped = self.text.as_ref().is_some_and(TextStream::stopped);
        self.whole_text.push_str(&piece);
        self.events.push(GenerateEvent::Token { id, text: piece, pos: length - 1 });
        match stopped {
            true => Some(FinishReason::StopString),
            false => (length - self.prompt_len >= self.max_tokens).then_some(FinishReason::Length),
        }
    }

    /// Ends the answer: what was held back comes out, then the terminal event.
    pub(super) fn finish(&mut self, reason: FinishReason, tokens: &[u32]) {
        let text = self.text.as_mut().map(TextStream::finish).unwrap_or_default();
        if !text.is_empty() {
            self.whole_text.push_str(&text);
            self.events.push(GenerateEvent::Text { text });
        }
        let generated = tokens.get(self.prompt_len..).unwrap_or_default();
        let completion = Completion {
            finish_reason: reason,
            text: std::mem::take(&mut self.whole_text),
            token_ids: generated.to_vec(),
            prompt_ids: tokens[..self.prompt_len.min(tokens.len())].to_vec(),
            timings: self.clock.timings(self.prompt_len, self.cached, generated.len()),
        };
        self.events.push(match reason {
            FinishReason::Aborted => GenerateEvent::Aborted(completion),
            _ => GenerateEvent::Done(completion),
        });
    }

    /// A worker is being replaced.
    pub(super) fn recovering(&mut self, code: &'static str, message: &str) {
        self.events.push(GenerateEvent::Recovering { code, message: message.to_owned() });
    }

    /// Ends the answer with an error.
    pub(super) fn fail(&mut self, error: &RequestError) {
        self.events.push(GenerateEvent::Failed(error.clone()));
    }

    /// Hands the collected events to the user.
    pub(super) fn deliver(&mut self) {
        self.events.drain(..).for_each(&mut self.sink);
    }
}

impl Clock {
    fn timings(&self, prompt_tokens: usize, cached_tokens: usize, generated_tokens: usize) -> Timings {
        let ms = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from).as_secs_f64() * 1e3,
            _ => 0.0,
        };
        Timings {
            queue_ms: ms(Some(self.submitted), self.started),
            prompt_tokens,
            cached_tokens,
            prefill_ms: ms(self.started, self.first_token),
            generated_tokens,
            decode_ms: ms(self.first_token, self.last_token),
            ttft_ms: ms(Some(self.submitted), self.first_token),
        }
    }
}

fn sample_failure(error: SampleError) -> RequestError {
    let class = match error {
        SampleError::NonFinite => ErrorClass::Internal,
        SampleError::NothingLeft => ErrorClass::Validation,
    };
    RequestError::new(error.code(), class, error.to_string())
}
