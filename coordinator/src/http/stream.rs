//! An answer as server-sent events.

use super::answer::Starting;
use super::answering::{Answering, Step};
use super::chunks::Frame;
use super::error::ApiError;
use axum::http::HeaderName;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::timeout;

/// How long a stream may say nothing. Proxies and clients give up connections that are silent for long, and a request may wait
/// for a model or in the queue for minutes.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Tells proxies not to collect a stream before they pass it on.
const UNBUFFERED: (HeaderName, &str) = (HeaderName::from_static("x-accel-buffering"), "no");

/// How far an answer has come.
enum Phase {
    /// The request waits for a model, or is being made into a prompt.
    Starting(Starting),
    /// The engine has let it in.
    Running(Box<Answering>, Frame),
    Ended,
}

/// An answer on its way.
struct Streaming {
    phase: Phase,
    /// What has been said and not been sent.
    ready: VecDeque<Event>,
}

/// Answers with a stream. A refusal that comes soon is the response itself, so that clients see its status; one that comes later is
/// the only event.
pub async fn respond(mut starting: Starting) -> Result<Response, ApiError> {
    let mut streaming = Streaming { phase: Phase::Ended, ready: VecDeque::new() };
    match timeout(KEEP_ALIVE, &mut starting).await {
        Ok(started) => streaming.begin(started?),
        Err(_) => {
            streaming.ready.push_back(waiting());
            streaming.phase = Phase::Starting(starting);
        }
    }
    Ok(([UNBUFFERED], Sse::new(streaming.events())).into_response())
}

impl Streaming {
    /// It ends with `[DONE]`, or with an error and without.
    fn events(self) -> impl Stream<Item = Result<Event, Infallible>> + Send {
        stream::unfold(self, |mut streaming| async {
            let event = streaming.next().await?;
            Some((Ok(event), streaming))
        })
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            match &mut self.phase {
                Phase::Starting(starting) => match timeout(KEEP_ALIVE, starting).await {
                    Ok(Ok(started)) => self.begin(started),
                    Ok(Err(error)) => self.end(data(&error.body())),
                    Err(_) => return Some(waiting()),
                },
                Phase::Running(answering, _) => match timeout(KEEP_ALIVE, answering.next()).await {
                    Ok(step) => self.take(step),
                    Err(_) => return Some(waiting()),
                },
                Phase::Ended => return None,
            }
        }
    }

    fn begin(&mut self, (answering, frame): (Answering, Frame)) {
        self.ready.extend(frame.first().map(|first| data(&first)));
        self.phase = Phase::Running(Box::new(answering), frame);
    }

    /// Turns a step into events.
    fn take(&mut self, step: Step) {
        let Phase::Running(_, frame) = &self.phase else { return };
        match step {
            Step::Text(text) if text.is_empty() => {}
            Step::Text(text) => self.ready.push_back(data(&frame.text(&text))),
            Step::Recovering { code, message } => {
                let comment = format!("recovering {code}: {message}").replace(['\r', '\n'], " ");
                self.ready.push_back(Event::default().comment(comment));
            }
            Step::End(end) => match *end {
                Ok(completion) => {
                    self.ready.push_back(data(&frame.last(&completion)));
                    self.ready.extend(frame.usage(&completion).map(|usage| data(&usage)));
                    self.end(Event::default().data("[DONE]"));
                }
                Err(error) => self.end(data(&error.body())),
            },
        }
    }

    fn end(&mut self, last: Event) {
        self.ready.push_back(last);
        self.phase = Phase::Ended;
    }
}

fn waiting() -> Event {
    Event::default().comment("waiting")
}

fn data(value: &serde_json::Value) -> Event {
    Event::default().data(value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::to_bytes;
    use axum::http::StatusCode;
    use tokio::time::sleep;

    async fn late(seconds: u64) -> Result<(Answering, Frame), ApiError> {
        sleep(Duration::from_secs(seconds)).await;
        Err(ApiError::shutting_down())
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_the_response_unless_it_comes_so_late_that_the_client_has_to_be_told_to_wait() {
        assert_eq!(respond(Box::pin(late(9))).await.unwrap_err().code, "shutting_down");
        let response = respond(Box::pin(late(25))).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let body = to_bytes(response.into_body(), 10_000).await.unwrap();
        let body = String::from_utf8(body.to_vec()).unwrap();
        let events: Vec<_> = body.split_terminator("\n\n").collect();
        assert_eq!(events[..2], [": waiting", ": waiting"], "{body}");
        assert!(events.len() == 3 && events[2].starts_with("data: {\"error\":"), "{body}");
    }
}
