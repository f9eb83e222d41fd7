//! A request in the engine, heard by one client.

use super::error::ApiError;
use crate::daemon::{Asked, Ending, RequestCount, Running, reached};
use crate::engine::{Completion, ErrorClass, GenerateEvent, RequestError};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;

/// A request in the engine. When it is dropped, because its client has gone away, the engine drops it, too.
pub struct Answering {
    running: Running,
    /// What the engine has said when it let the request in.
    first: Option<GenerateEvent>,
    /// What the engine says. It waits here without a bound of its own: there is never more than one answer, and that is no
    /// longer than the context.
    events: UnboundedReceiver<GenerateEvent>,
    ending: watch::Receiver<Ending>,
    /// The daemon has stopped and the request been aborted.
    aborted: bool,
    _count: RequestCount,
}

/// What happens to an answer, as a client sees it.
pub enum Step {
    Text(String),
    Recovering { code: &'static str, message: String },
    End(Box<Result<Completion, ApiError>>),
}

impl Answering {
    /// Gives a request to the engine and waits until that has let it in or refused it.
    pub async fn start(
        asked: Asked,
        count: RequestCount,
        ending: watch::Receiver<Ending>,
    ) -> Result<Self, ApiError> {
        let (sender, mut events) = unbounded_channel();
        // Fails when the client has gone away; the request is being aborted then.
        let sink = Box::new(move |event| drop(sender.send(event)));
        let running = asked.submit(sink).map_err(|error| ApiError::from(&error))?;
        let first = match events.recv().await {
            Some(GenerateEvent::Failed(error)) => return Err(ApiError::from(&error)),
            first => first,
        };
        Ok(Answering { running, first, events, ending, aborted: false, _count: count })
    }

    /// What happens next. Nothing is lost when the wait is given up.
    pub async fn next(&mut self) -> Step {
        loop {
            let event = match self.first.take() {
                Some(first) => Some(first),
                None => tokio::select! {
                    event = self.events.recv() => event,
                    () = reached(&mut self.ending, Ending::Stopping), if !self.aborted => {
                        self.aborted = true;
                        self.running.abort();
                        continue;
                    }
                },
            };
            let end = match event {
                Some(GenerateEvent::Accepted | GenerateEvent::Started { .. }) => continue,
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
    pub async fn whole(mut self) -> Result<Completion, ApiError> {
        loop {
            if let Step::End(end) = self.next().await {
                return *end;
            }
        }
    }
}
