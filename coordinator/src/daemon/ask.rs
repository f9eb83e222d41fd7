//! From a `generate`, whichever front it came through, to a request in the engine.

use super::conversation::Conversation;
use super::service::{Held, NO_MODEL, Resident};
use super::start::blocking;
use crate::config::{Generation, Generations};
use crate::engine::{Engine, ErrorClass, EventSink, GenerateRequest, RequestError, RequestId};
use crate::prompt::{self, ChatPrompt, PromptError};
use crate::sampler::SamplingParams;
use serde_json::Value;
use spillway_protocol::jsonl::{Generate, Source};
use std::sync::Arc;

/// Seed of a request that brings none: equal requests get equal answers, as in the v1 protocol.
const SEED: u64 = 0x1357_9BDF;

/// A request that the engine can take.
pub struct Asked {
    held: Held,
    engine: Engine,
    request: GenerateRequest,
}

/// A request in the engine. Dropping it aborts the request.
#[derive(Debug)]
pub struct Running {
    /// Keeps the model from being replaced while the request runs.
    _held: Held,
    engine: Engine,
    id: RequestId,
}

/// Takes what the request leaves out from `defaults`, and has `build` make the prompt, and whatever else, on a thread where it may
/// take its time. That goes on when this is given up, so whatever bounds it belongs to `build`.
pub async fn ask<T: Send + 'static>(
    held: Held,
    generate: &Arc<Generate>,
    defaults: fn(&Generations) -> &Generation,
    build: impl FnOnce(&Resident, &Generate) -> Result<(Vec<u32>, T), PromptError> + Send + 'static,
) -> Result<(Asked, T), RequestError> {
    let Some(resident) = held.as_ref().cloned() else {
        return Err(RequestError::new("no_model_loaded", ErrorClass::Validation, NO_MODEL));
    };
    let (engine, settings) = (resident.engine.clone(), defaults(&resident.generations).clone());
    let for_prompt = generate.clone();
    let (prompt, rest) = match blocking(move || build(&resident, &for_prompt)).await {
        Ok(Ok(built)) => built,
        Ok(Err(error)) => return Err(refusal(&error)),
        Err(_) => {
            let message = "making the prompt ended unexpectedly; see the log on standard error";
            return Err(RequestError::internal(message));
        }
    };
    let request = GenerateRequest {
        prompt,
        max_tokens: max_tokens(generate, &settings),
        sampling: sampling(generate, &settings.sampling),
        stop: generate.stop.clone(),
        ignore_eos: generate.ignore_eos,
    };
    Ok((Asked { held, engine, request }, rest))
}

fn refusal(error: &PromptError) -> RequestError {
    let class = match error {
        PromptError::TooLong { .. } => ErrorClass::ContextLength,
        PromptError::NoTokenizer | PromptError::NoTools | PromptError::Template(_) => ErrorClass::Validation,
    };
    RequestError::new(error.code(), class, error.to_string())
}

impl Asked {
    /// Gives the request to the engine, which may refuse it.
    pub fn submit(self, events: EventSink) -> Result<Running, RequestError> {
        let Asked { held, engine, request } = self;
        let id = engine.submit(request, events)?;
        Ok(Running { _held: held, engine, id })
    }
}

impl Running {
    /// Ends the request; its last event still comes.
    pub fn abort(&self) {
        self.engine.abort(self.id);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The engine passes over requests that have ended.
        self.abort();
    }
}

/// Token ids of a request that stands alone; a turn counts as the first of a conversation.
pub fn stateless(engine: &Engine, generate: &Generate) -> Result<Vec<u32>, PromptError> {
    match &generate.source {
        Source::Ids(ids) => Ok(ids.clone()),
        Source::Raw(text) => prompt::raw(engine.model(), text, engine.plan().limits.max_seq),
        Source::Messages(messages) => render(engine, generate, messages),
        Source::Turn { prompt, system } => {
            let (messages, _) = Conversation::default().begin(0, prompt, system.as_deref());
            render(engine, generate, &messages)
        }
    }
}

/// Token ids of a conversation, with what the request says about the template.
pub fn render(engine: &Engine, generate: &Generate, messages: &[Value]) -> Result<Vec<u32>, PromptError> {
    let chat = ChatPrompt {
        messages,
        tools: generate.tools.as_deref(),
        enable_thinking: generate.enable_thinking,
        kwargs: &generate.template_kwargs,
    };
    prompt::chat(engine.model(), &chat, engine.plan().limits.max_seq)
}

/// Most tokens of the answer.
pub fn max_tokens(generate: &Generate, settings: &Generation) -> usize {
    generate.max_tokens.map_or(settings.max_tokens, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// Sampling as the engine takes it; settings say what the request leaves out, and the engine checks the ranges.
#[expect(
    clippy::cast_possible_truncation,
    reason = "sampling computes in f32; its ranges are checked afterwards"
)]
fn sampling(generate: &Generate, settings: &SamplingParams) -> SamplingParams {
    let real = |value: Option<f64>, default: f32| value.map_or(default, |value| value as f32);
    SamplingParams {
        temperature: real(generate.temperature, settings.temperature),
        top_k: generate.top_k.map_or(settings.top_k, |k| u32::try_from(k).unwrap_or(u32::MAX)),
        top_p: real(generate.top_p, settings.top_p),
        min_p: real(generate.min_p, settings.min_p),
        repeat_penalty: real(generate.repeat_penalty, settings.repeat_penalty),
        presence_penalty: real(generate.presence_penalty, settings.presence_penalty),
        frequency_penalty: real(generate.frequency_penalty, settings.frequency_penalty),
        repeat_window: generate
            .repeat_window
            .map_or(settings.repeat_window, |n| usize::try_from(n).unwrap_or(usize::MAX)),
        seed: generate.seed.unwrap_or(SEED),
        logit_bias: generate.logit_bias.clone(),
    }
}
