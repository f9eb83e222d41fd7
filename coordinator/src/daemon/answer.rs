//! One `generate`: from the message to its one last event.

use super::ask::{Asked, ask, max_tokens, render, stateless};
use super::client::{AbortReason, Client};
use super::conversation::Turn;
use super::order::Ticket;
use super::service::Resident;
use crate::engine::{Completion, ErrorClass, EventSink, GenerateEvent, RequestError};
use crate::prompt::PromptError;
use spillway_protocol::jsonl::{Class, Done, ErrorEvent, Event, Generate, Source};
use std::sync::Arc;
use tokio::sync::oneshot;

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
    let prepared = tokio::select! {
        Ok(reason) = &mut aborted => return Event::Aborted { id, reason },
        prepared = prepare(&client, generate, ticket) => prepared,
    };
    let (end, mut ended) = oneshot::channel();
    let submitted = prepared.and_then(|(asked, turn)| Ok((asked.submit(sink(&client, &id, end))?, turn)));
    let (running, turn) = match submitted {
        Ok(submitted) => submitted,
        Err(error) => return Event::Error(request_error(&id, &error)),
    };
    let mut reason = "engine";
    let end = tokio::select! {
        Ok(why) = &mut aborted => {
            reason = why;
            running.abort();
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
        GenerateEvent::Accepted | GenerateEvent::Started { .. } => {}
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

/// Waits for the request's turn and for the model, and makes the prompt; with it the turn to add to the conversation when it
/// is answered.
async fn prepare(
    client: &Arc<Client>,
    generate: Generate,
    mut ticket: Ticket,
) -> Result<(Asked, Option<Turn>), RequestError> {
    ticket.admitted().await;
    let for_prompt = client.clone();
    let held = client.service.hold().await;
    ask(
        held,
        &Arc::new(generate),
        |defaults| &defaults.lines,
        move |resident, generate| match &generate.source {
            Source::Turn { prompt, system } => {
                let builder = TurnBuilder { client: &for_prompt, generate, resident };
                builder.build(prompt, system.as_deref()).map(|(ids, turn)| (ids, Some(turn)))
            }
            Source::Messages(_) | Source::Raw(_) | Source::Ids(_) => {
                stateless(&resident.engine, generate).map(|ids| (ids, None))
            }
        },
    )
    .await
}

/// What making the prompt of a turn needs.
struct TurnBuilder<'a> {
    client: &'a Client,
    generate: &'a Generate,
    resident: &'a Resident,
}

impl TurnBuilder<'_> {
    /// A turn of the conversation, which starts anew when it would not fit any more.
    fn build(&self, user: &str, system: Option<&str>) -> Result<(Vec<u32>, Turn), PromptError> {
        let begin = |system| self.client.conversation().begin(self.resident.load, user, system);
        let render = |messages: &[_]| render(&self.resident.engine, self.generate, messages);
        let (messages, turn) = begin(system);
        let room = self.resident.engine.plan().limits.max_seq;
        let most = max_tokens(self.generate, &self.resident.generations.lines);
        let first_turn = self.client.conversation().is_empty();
        match render(&messages) {
            Ok(ids) if first_turn || ids.len().saturating_add(most) <= room => return Ok((ids, turn)),
            Ok(_) => {}
            Err(PromptError::TooLong { .. }) if !first_turn => {}
            Err(error) => return Err(error),
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
        Ok((render(&messages)?, turn))
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
