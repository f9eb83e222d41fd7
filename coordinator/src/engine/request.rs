//! What a user of the engine sends and receives.

use super::supervisor::WINDOW;
use crate::sampler::{ParamError, SamplingParams};
use crate::workers::WorkerError;
use serde::Serialize;
use spillway_model::tokenizer::Tokenizer;
use spillway_protocol::plan::Plan;
use thiserror::Error;

/// Names a request for its life. Never reused by one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

/// A text to continue.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// Token ids of the prompt. Empty: the vocabulary's beginning-of-sequence token stands in, or the request is
    /// refused with `empty_prompt` when there is none.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; clipped to the room left in the context. 0 = done at once with no token.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Strings that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Continue through end-of-generation tokens (they become part of the answer).
    pub ignore_eos: bool,
}

/// Token ids whose logits are wanted at every position (teacher forcing).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreRequest {
    /// The sequence.
    pub ids: Vec<u32>,
    /// Tokens per step; the plan's largest step when left out.
    pub chunk: Option<usize>,
}

/// Where the events of a request go. Called on the engine's thread: it must not block.
pub type EventSink = Box<dyn FnMut(GenerateEvent) + Send>;

/// What happens to a request, in order: `Accepted`, `Started`, then `Token`, `Text` and `Recovering` any number of times, and
/// exactly one of `Done`, `Failed`, `Aborted`. The last one may come at any time, and `Failed` alone where the queue is full. The pieces of text concatenate to [`Completion::text`].
#[derive(Debug, Clone, PartialEq)]
pub enum GenerateEvent {
    /// The request has got a slot or a place in the queue.
    Accepted,
    /// The request left the queue.
    Started {
        /// Prompt tokens that were already in the slot and are not computed again.
        cached_tokens: usize,
    },
    /// A worker failed and is being replaced; the answer goes on afterwards where it was. After the loss of a device a second
    /// one, `device_replanned`, tells that the model has been placed anew.
    Recovering {
        /// Code of the failure.
        code: &'static str,
        /// What happened.
        message: String,
    },
    /// A token was chosen.
    Token {
        /// Its id.
        id: u32,
        /// Text that became certain with it: complete UTF-8, possibly empty while a stop string may be forming.
        text: String,
        /// Position in the sequence, prompt included.
        pos: usize,
    },
    /// Text that was held back and is released at the end, with no token of its own.
    Text {
        /// Complete UTF-8, never empty.
        text: String,
    },
    /// The answer is complete.
    Done(Completion),
    /// The request ended with an error.
    Failed(RequestError),
    /// The request was aborted; holds what had been generated.
    Aborted(Completion),
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose an end-of-generation token.
    EndOfText,
    /// A stop string appeared.
    StopString,
    /// `max_tokens` or the context is used up.
    Length,
    /// The user ended it.
    Aborted,
}

impl FinishReason {
    /// The word in JSON: `stop`, `length` or `aborted`.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::EndOfText | FinishReason::StopString => "stop",
            FinishReason::Length => "length",
            FinishReason::Aborted => "aborted",
        }
    }
}

/// Times of one request, in milliseconds, and what they cover.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Timings {
    /// From submission to leaving the queue.
    pub queue_ms: f64,
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: usize,
    /// Prompt tokens taken from the slot instead of computed.
    pub cached_tokens: usize,
    /// From leaving the queue to the first token.
    pub prefill_ms: f64,
    /// Generated tokens.
    pub generated_tokens: usize,
    /// From the first to the last token.
    pub decode_ms: f64,
    /// From submission to the first token.
    pub ttft_ms: f64,
}

impl Timings {
    /// Computed prompt tokens per second; 0 when nothing was computed.
    pub fn prefill_tok_s(&self) -> f64 {
        rate(self.prompt_tokens - self.cached_tokens.min(self.prompt_tokens), self.prefill_ms)
    }
    /// Tokens after the first per second; 0 with fewer than two tokens.
    pub fn decode_tok_s(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode_ms)
    }
}

fn rate(count: usize, ms: f64) -> f64 {
    if ms > 0.0 { count as f64 * 1e3 / ms } else { 0.0 }
}

/// A finished answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The answer, stop string excluded.
    pub text: String,
    /// Generated ids, the ending end-of-generation token excluded.
    pub token_ids: Vec<u32>,
    /// Prompt ids as they were run.
    pub prompt_ids: Vec<u32>,
    /// Times.
    pub timings: Timings,
}

/// Kind of a request error: what a client should make of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// May work when tried again.
    Transient,
    /// A field has a value that cannot be used.
    Validation,
    /// Too long for the loaded context.
    ContextLength,
    /// Something this build or model cannot do.
    Unsupported,
    /// A defect of Spillway.
    Internal,
}

impl ErrorClass {
    /// The word in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorClass::Transient => "transient",
            ErrorClass::Validation => "validation",
            ErrorClass::ContextLength => "context_length",
            ErrorClass::Unsupported => "unsupported",
            ErrorClass::Internal => "internal",
        }
    }
}

/// Why a request was refused or ended early.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct RequestError {
    /// Stable code, for example `context_length_exceeded`, `queue_full`, `worker_died`.
    pub code: &'static str,
    /// Kind.
    pub class: ErrorClass,
    /// What happened, why, what to do.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// The parameter that is wrong, where the code does not tell.
    pub field: Option<&'static str>,
    /// Whether the engine has given up: nothing can be asked of it any more.
    pub given_up: bool,
}

/// Longest stop string in bytes, and most of them: beyond that a request is a mistake.
const MAX_STOP_BYTES: usize = 1024;
const MAX_STOPS: usize = 64;

impl GenerateRequest {
    /// Checks everything that can be refused before the request is accepted, and puts a beginning-of-sequence token in place
    /// of an empty prompt.
    pub(crate) fn check(&mut self, plan: &Plan, tokenizer: Option<&Tokenizer>) -> Result<(), RequestError> {
        if self.prompt.is_empty() {
            self.prompt.push(tokenizer.and_then(Tokenizer::bos).ok_or_else(RequestError::empty_prompt)?);
        }
        check_ids(&self.prompt, plan)?;
        self.sampling.validate(plan.model.vocab).map_err(|error| RequestError::sampling(&error))?;
        self.check_stops(tokenizer.is_some())
    }

    fn check_stops(&self, text: bool) -> Result<(), RequestError> {
        let refused = |class, message: String| Err(RequestError::new("invalid_stop", class, message));
        if !self.stop.is_empty() && !text {
            return refused(
                ErrorClass::Unsupported,
                "stop strings need a model with a tokenizer; leave stop out".into(),
            );
        }
        if self.stop.len() > MAX_STOPS {
            let message =
                format!("stop has {} strings, but at most {MAX_STOPS} are allowed", self.stop.len());
            return refused(ErrorClass::Validation, message);
        }
        match self.stop.iter().find(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
            None => Ok(()),
            Some(stop) => {
                let message =
                    format!("a stop string has {} bytes, but must have 1 to {MAX_STOP_BYTES}", stop.len());
                refused(ErrorClass::Validation, message)
            }
        }
    }
}

impl ScoreRequest {
    /// Checks everything that can be refused before the request is accepted.
    pub(crate) fn check(&self, plan: &Plan) -> Result<(), RequestError> {
        if self.ids.is_empty() {
            return Err(RequestError::empty_prompt());
        }
        if self.chunk == Some(0) {
            let message = "chunk is 0, but a step holds at least 1 token";
            return Err(RequestError::new("invalid_chunk", ErrorClass::Validation, message));
        }
        check_ids(&self.ids, plan)
    }
}

/// Whether a prompt fits the context and every id is a token.
fn check_ids(ids: &[u32], plan: &Plan) -> Result<(), RequestError> {
    RequestError::check_length(ids.len(), plan.limits.max_seq)?;
    let vocab = plan.model.vocab;
    match ids.iter().position(|&id| id as usize >= vocab) {
        None => Ok(()),
        Some(at) => {
            let message =
                format!("token id {} at position {at} is not below the vocabulary size {vocab}", ids[at]);
            Err(RequestError::new("token_out_of_range", ErrorClass::Validation, message))
        }
    }
}

impl RequestError {
    /// Refuses more tokens than the loaded context holds.
    pub(super) fn check_length(tokens: usize, max_seq: usize) -> Result<(), RequestError> {
        if tokens <= max_seq {
            return Ok(());
        }
        let message = format!(
            "{tokens} tokens do not fit the loaded context length of {max_seq} tokens; shorten the prompt or load with a larger max_seq"
        );
        Err(RequestError::new("context_length_exceeded", ErrorClass::ContextLength, message))
    }

    fn empty_prompt() -> RequestError {
        let message =
            "the prompt is empty and the vocabulary has no token that begins a text; give at least one token";
        RequestError::new("empty_prompt", ErrorClass::Validation, message)
    }

    pub(crate) fn new(code: &'static str, class: ErrorClass, message: impl Into<String>) -> RequestError {
        RequestError {
            code,
            class,
            message: message.into(),
            retryable: class == ErrorClass::Transient,
            field: None,
            given_up: false,
        }
    }

    /// A parameter of sampling is out of its range.
    fn sampling(error: &ParamError) -> RequestError {
        let field = Some(error.field);
        RequestError { field, ..RequestError::new(error.code(), ErrorClass::Validation, error.to_string()) }
    }

    /// A worker failed, and the request with it.
    pub(super) fn worker(error: &WorkerError) -> RequestError {
        RequestError::new(error.code(), ErrorClass::Transient, error.to_string())
    }

    /// Workers have failed too often; the model has to be loaded again before anything can run.
    pub(super) fn given_up(error: &WorkerError, failures: usize) -> RequestError {
        let often = match failures {
            0 | 1 => String::new(),
            _ => format!("; that was failure {failures} within {} s", WINDOW.as_secs()),
        };
        let message = format!("{error}{often}");
        RequestError { given_up: true, ..RequestError::new(error.code(), ErrorClass::Transient, message) }
    }

    /// Devices do not come back (`lost` says which), and without them the model does not run.
    pub(super) fn device_lost(lost: &str, why: &str) -> RequestError {
        let message = format!("{lost}; {why}; load the model again when that has changed");
        RequestError::new("gpu_lost", ErrorClass::Transient, message)
    }

    /// The request's own step has ended its worker twice.
    pub(super) fn poison(error: &WorkerError) -> RequestError {
        let message = format!(
            "this request has made its worker fail twice, the last time: {error}; do not send it again"
        );
        RequestError::new("poison_request", ErrorClass::Internal, message)
    }

    pub(super) fn stopped() -> RequestError {
        let message = "the engine has been shut down; load a model and send the request again";
        RequestError::new("engine_stopped", ErrorClass::Transient, message)
    }

    pub(super) fn busy() -> RequestError {
        let message =
            "a benchmark needs the engine to itself, but requests are live; wait until they are done";
        RequestError::new("busy", ErrorClass::Transient, message)
    }

    pub(super) fn queue_full(queue: usize) -> RequestError {
        let message = format!("{queue} requests are waiting already; try again when some are done");
        RequestError::new("queue_full", ErrorClass::Transient, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> RequestError {
        RequestError::new("internal", ErrorClass::Internal, message)
    }
}
