//! One `generate`: from the message to its one last event.

use super::client::{AbortReason, Client};
use super::conversation::Turn;
use super::order::Ticket;
use super::service::{Held, Resident, blocking};
use crate::config::Generation;
use crate::engine::{
    Completion, Engine, ErrorClass, EventSink, GenerateEvent, GenerateRequest, RequestError,
};
use crate::open::LoadedModel;
use crate::prompt::{self, ChatPrompt, PromptError};
use crate::sampler::SamplingParams;
use serde_json::Value;
use spillway_protocol::jsonl::{Class, Done, ErrorEvent, Event, Generate, Source};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Seed of a request that brings none: equal requests get equal answers, as in the v1 protocol.
const SEED: u64 = 0x1357_9BDF;

/// A request that the engine can take.
struct Prepared {
    /// Keeps the model from being replaced while the request runs.
    _held: Held,
    engine: Engine,
    request: GenerateRequest,
    /// The turn to add to the conversation when it is answered.
    turn: Option<Turn>,
}

/// How the engine ended a request.
enum End {
    Done(Completion),
    Failed(RequestError),
    Aborted,
}

/// Answers a request: tokens go to the client as they come, the last event is returned.
pub async fn answer(
    client: Arc<Client>,
    generate: Generate,
    mut aborted: oneshot::Receiver<AbortReason>,
    ticket: Ticket,
) -> Event {
    let id = generate.id.clone();
    let generate = Arc::new(generate);
    let prepared = tokio::select! {
        Ok(reason) = &mut aborted => return Event::Aborted { id, reason },
        prepared = prepare(&client, generate, ticket) => match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Event::Error(error),
        },
    };
    let (end, mut ended) = oneshot::channel();
    let Prepared { _held, engine, request, turn } = prepared;
    let request = match engine.submit(request, sink(&client, &id, end)) {
        Ok(request) => request,
        Err(error) => return Event::Error(request_error(&id, &error)),
    };
    let mut reason = "engine";
    let end = tokio::select! {
        Ok(why) = &mut aborted => {
            reason = why;
            engine.abort(request);
            ended.await
        }
        end = &mut ended => end,
    };
    match end {
        Ok(End::Done(completion)) => {
            if let Some(turn) = turn {
                client.conversation().join(&turn, &completion.text);
            }
            Event::Done(done(id, &completion))
        }
        Ok(End::Failed(error)) => Event::Error(request_error(&id, &error)),
        Ok(End::Aborted) => Event::Aborted { id, reason },
        Err(_) => {
            let message = "the engine ended before the request did; load the model again".to_owned();
            Event::Error(ErrorEvent::new(Some(id), "engine_ended", Class::Internal, message))
        }
    }
}

/// Passes tokens on, and the end to whoever waits for it.
fn sink(client: &Arc<Client>, id: &str, end: oneshot::Sender<End>) -> EventSink {
    let (outbox, id) = (client.outbox.clone(), id.to_owned());
    let mut end = Some(end);
    let mut finish = move |with: End| {
        // The waiting task lives until it hears the end; a second end would be the engine's mistake and is dropped.
        if let Some(end) = end.take() {
            drop(end.send(with));
        }
    };
    Box::new(move |event| match event {
        GenerateEvent::Started { .. } => {}
        GenerateEvent::Recovering { code, message } => {
            outbox.push(&Event::Recovering { id: id.clone(), code, message });
        }
        GenerateEvent::Token { text, .. } | GenerateEvent::Text { text } => {
            if !text.is_empty() {
                outbox.push(&Event::Token { id: id.clone(), text });
            }
        }
        GenerateEvent::Done(completion) => finish(End::Done(completion)),
        GenerateEvent::Failed(error) => finish(End::Failed(error)),
        GenerateEvent::Aborted(_) => finish(End::Aborted),
    })
}

/// Waits for the model and turns the request into tokens.
async fn prepare(
    client: &Arc<Client>,
    generate: Arc<Generate>,
    mut ticket: Ticket,
) -> Result<Prepared, ErrorEvent> {
    ticket.admitted().await;
    let held = client.service.hold().await;
    let Some(resident) = held.as_ref().cloned() else {
        let message = "no model is loaded; send a load message first".to_owned();
        return Err(ErrorEvent::new(
            Some(generate.id.clone()),
            "no_model_loaded",
            Class::Validation,
            message,
        ));
    };
    let (engine, settings) = (resident.engine.clone(), resident.generation.clone());
    let builder = Builder { client: client.clone(), generate: generate.clone(), resident };
    let built = blocking(move || builder.build()).await;
    let failed = |code, class, message| ErrorEvent::new(Some(generate.id.clone()), code, class, message);
    let (prompt, turn) = match built {
        Ok(Ok(built)) => built,
        Ok(Err(error)) => return Err(failed(error.code(), Class::Validation, error.to_string())),
        Err(_) => {
            let message = "making the prompt ended unexpectedly; see the log on standard error".to_owned();
            return Err(failed("internal", Class::Internal, message));
        }
    };
    let request = GenerateRequest {
        prompt,
        max_tokens: max_tokens(&generate, &settings),
        sampling: sampling(&generate, &settings.sampling),
        stop: generate.stop.clone(),
        ignore_eos: generate.ignore_eos,
    };
    Ok(Prepared { _held: held, engine, request, turn })
}

/// What making a prompt needs; runs on a thread where it may take its time.
struct Builder {
    client: Arc<Client>,
    generate: Arc<Generate>,
    resident: Resident,
}

impl Builder {
    /// Token ids, and the turn they are if they are one.
    fn build(&self) -> Result<(Vec<u32>, Option<Turn>), PromptError> {
        match &self.generate.source {
            Source::Ids(ids) => Ok((ids.clone(), None)),
            Source::Raw(text) => prompt::raw(self.model(), text).map(|ids| (ids, None)),
            Source::Messages(messages) => self.render(messages).map(|ids| (ids, None)),
            Source::Turn { prompt, system } => {
                self.build_turn(prompt, system.as_deref()).map(|(ids, turn)| (ids, Some(turn)))
            }
        }
    }

    /// A turn of the conversation, which starts anew when it would not fit any more.
    fn build_turn(&self, user: &str, system: Option<&str>) -> Result<(Vec<u32>, Turn), PromptError> {
        let begin = |system| self.client.conversation().begin(self.resident.load, user, system);
        let (messages, turn) = begin(system);
        let ids = self.render(&messages)?;
        let room = self.resident.engine.plan().limits.max_seq;
        let most = max_tokens(&self.generate, &self.resident.generation);
        let first_turn = self.client.conversation().is_empty();
        if first_turn || ids.len().saturating_add(most) <= room {
            return Ok((ids, turn));
        }
        let kept_system = {
            let mut conversation = self.client.conversation();
            let kept = conversation.system().map(str::to_owned);
            conversation.reset();
            kept
        };
        let message = format!(
            "the conversation was reset: with this turn and its answer it would be longer than max_seq = {room} tokens"
        );
        let id = self.generate.id.clone();
        self.client.outbox.push(&Event::Info { id, code: "conversation_reset", message });
        let (messages, turn) = begin(system.or(kept_system.as_deref()));
        Ok((self.render(&messages)?, turn))
    }

    fn render(&self, messages: &[Value]) -> Result<Vec<u32>, PromptError> {
        let chat = ChatPrompt {
            messages,
            tools: self.generate.tools.as_deref(),
            enable_thinking: self.generate.enable_thinking,
            kwargs: &self.generate.template_kwargs,
        };
        prompt::chat(self.model(), &chat)
    }

    fn model(&self) -> &LoadedModel {
        self.resident.engine.model()
    }
}

fn max_tokens(generate: &Generate, settings: &Generation) -> usize {
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

fn done(id: String, completion: &Completion) -> Done {
    let timings = &completion.timings;
    let busy_ms = timings.prefill_ms + timings.decode_ms;
    Done {
        id,
        tokens: timings.generated_tokens,
        tok_s: if busy_ms > 0.0 { timings.generated_tokens as f64 * 1e3 / busy_ms } else { 0.0 },
        prefill_tokens: timings.prompt_tokens,
        cached_tokens: timings.cached_tokens,
        prefill_ms: timings.prefill_ms,
        prefill_tok_s: timings.prefill_tok_s(),
        decode_tok_s: timings.decode_tok_s(),
        ttft_ms: timings.ttft_ms,
        finish_reason: completion.finish_reason.as_str(),
    }
}

fn request_error(id: &str, error: &RequestError) -> ErrorEvent {
    let class = match error.class {
        ErrorClass::Transient => Class::Transient,
        ErrorClass::Validation => Class::Validation,
        ErrorClass::ContextLength => Class::ContextLength,
        ErrorClass::Unsupported => Class::Unsupported,
        ErrorClass::Internal => Class::Internal,
    };
    let advice = if error.given_up { "; load the model again" } else { "" };
    ErrorEvent {
        id: Some(id.to_owned()),
        code: error.code.to_owned(),
        class,
        retryable: error.retryable,
        message: format!("{error}{advice}"),
    }
}
