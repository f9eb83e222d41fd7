//! One completion: from the body to the whole answer, or to a stream of server-sent events.

use super::body::{read, to_object};
use super::chunks::Frame;
use super::error::{ApiError, json_response};
use super::request::{Asked, Endpoint, parse};
use super::routes::App;
use crate::daemon::{Ending, RequestCount, Running, ask, reached, stateless};
use crate::engine::{Completion, ErrorClass, GenerateEvent, RequestError};
use crate::sampler::draw_seed;
use axum::extract::Request;
use axum::http::{HeaderName, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use spillway_protocol::jsonl::Generate;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long a stream may say nothing. Proxies and clients give up connections that are silent for long, and a request may wait
/// in the queue for minutes.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Tells proxies not to collect a stream before they pass it on.
const UNBUFFERED: (HeaderName, &str) = (HeaderName::from_static("x-accel-buffering"), "no");

/// Answers one request.
pub async fn answer(app: App, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
    // Counted before the body is there: a request that is being sent is in flight.
    let count = app.service.count_request();
    let body = read(request).await?;
    // Fails only when it is closed, which it never is.
    let turn = app.prompts.clone().acquire_owned().await;
    let prefix = match endpoint {
        Endpoint::Chat => "chatcmpl",
        Endpoint::Text => "cmpl",
    };
    let id = format!("{prefix}-{:014x}", draw_seed());
    let for_parsing = id.clone();
    let parsed = spawn_blocking(move || parse(endpoint, to_object(&body)?, for_parsing, draw_seed()));
    let parsed = parsed.await.unwrap_or_else(|_| {
        let message = "reading the request ended unexpectedly; see the log on standard error";
        Err(ApiError::from(&RequestError::internal(message)))
    });
    let Asked { generate, stream, include_usage } = parsed?;
    let (answering, model) = Answering::start(app, generate, count).await?;
    drop(turn);
    let created = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let frame = Frame { endpoint, id, created, model, include_usage };
    if stream {
        return Ok(([UNBUFFERED], Sse::new(events(answering, frame))).into_response());
    }
    let completion = answering.whole().await?;
    Ok(json_response(StatusCode::OK, &frame.whole(&completion)))
}

/// A request in the engine. When it is dropped, because its client has gone away, the engine drops it, too.
struct Answering {
    running: Running,
    /// What the engine says. It waits here without a bound of its own: there is never more than one answer, and that is no
    /// longer than the context.
    events: UnboundedReceiver<GenerateEvent>,
    ending: watch::Receiver<Ending>,
    /// The daemon has stopped and the request been aborted.
    aborted: bool,
    _count: RequestCount,
}

/// What happens to an answer, as a client sees it.
enum Step {
    Text(String),
    Recovering { code: &'static str, message: String },
    End(Box<Result<Completion, ApiError>>),
}

impl Answering {
    /// Gives the request to the engine, once there is a model; also the name of the model.
    async fn start(app: App, generate: Generate, count: RequestCount) -> Result<(Self, String), ApiError> {
        let App { service, mut ending, .. } = app;
        let generate = Arc::new(generate);
        let asked = ask(
            &service,
            &generate,
            |defaults| &defaults.openai,
            |resident, generate| Ok((stateless(resident.engine.model(), generate)?, resident.name())),
        );
        let (asked, name) = tokio::select! {
            // Looked at first: a load that is given up at the end leaves no model.
            biased;
            () = reached(&mut ending, Ending::Stopping) => return Err(ApiError::shutting_down()),
            asked = asked => asked.map_err(|error| ApiError::from(&error))?,
        };
        let (sender, events) = unbounded_channel();
        // Fails when the client has gone away; the request is being aborted then.
        let sink = Box::new(move |event| drop(sender.send(event)));
        let running = asked.submit(sink).map_err(|error| ApiError::from(&error))?;
        Ok((Answering { running, events, ending, aborted: false, _count: count }, name))
    }

    /// What happens next. Nothing is lost when the wait is given up.
    async fn next(&mut self) -> Step {
        loop {
            let event = tokio::select! {
                event = self.events.recv() => event,
                () = reached(&mut self.ending, Ending::Stopping), if !self.aborted => {
                    self.aborted = true;
                    self.running.abort();
                    continue;
                }
            };
            let end = match event {
                Some(GenerateEvent::Started { .. }) => continue,
                Some(GenerateEvent::Token { text, .. } | GenerateEvent::Text { text }) => {
                    return Step::Text(text);
                }
                Some(GenerateEvent::Recovering { code, message }) => {
                    return Step::Recovering { code, message };
                }
                Some(GenerateEvent::Done(completion)) => Ok(completion),
                Some(GenerateEvent::Failed(error)) => Err(ApiError::from(&error)),
                // Nobody else aborts a request whose client is still there.
                Some(GenerateEvent::Aborted(_)) => Err(ApiError::shutting_down()),
                None => {
                    let message = "the engine ended before the request did; load the model again";
                    let error = RequestError::new("engine_ended", ErrorClass::Internal, message);
                    Err(ApiError::from(&error))
                }
            };
            return Step::End(Box::new(end));
        }
    }

    /// The whole answer.
    async fn whole(mut self) -> Result<Completion, ApiError> {
        loop {
            if let Step::End(end) = self.next().await {
                return *end;
            }
        }
    }
}

/// An answer on its way: what the engine still has to say, and what has been said and not been sent.
struct Streaming {
    /// None after the end.
    answering: Option<Answering>,
    frame: Frame,
    ready: VecDeque<Event>,
}

/// The answer as events. It ends with `[DONE]`, or with an error and without.
fn events(answering: Answering, frame: Frame) -> impl Stream<Item = Result<Event, Infallible>> + Send {
    let ready = frame.first().map(|first| data(&first)).into_iter().collect();
    let streaming = Streaming { answering: Some(answering), frame, ready };
    stream::unfold(streaming, |mut streaming| async {
        let event = streaming.next().await?;
        Some((Ok(event), streaming))
    })
}

impl Streaming {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let answering = self.answering.as_mut()?;
            let Ok(step) = timeout(KEEP_ALIVE, answering.next()).await else {
                return Some(Event::default().comment("waiting"));
            };
            self.take(step);
        }
    }

    /// Turns a step into events.
    fn take(&mut self, step: Step) {
        match step {
            Step::Text(text) if text.is_empty() => {}
            Step::Text(text) => self.ready.push_back(data(&self.frame.text(&text))),
            Step::Recovering { code, message } => {
                let comment = format!("recovering {code}: {message}").replace(['\r', '\n'], " ");
                self.ready.push_back(Event::default().comment(comment));
            }
            Step::End(end) => {
                self.answering = None;
                match *end {
                    Ok(completion) => {
                        self.ready.push_back(data(&self.frame.last(&completion)));
                        self.ready.extend(self.frame.usage(&completion).map(|usage| data(&usage)));
                        self.ready.push_back(Event::default().data("[DONE]"));
                    }
                    Err(error) => self.ready.push_back(data(&error.body())),
                }
            }
        }
    }
}

fn data(value: &serde_json::Value) -> Event {
    Event::default().data(value.to_string())
}
