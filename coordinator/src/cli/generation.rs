//! One answer, as `run` and `chat` show it: text as it comes, an end, and Ctrl-C in between.

use super::failure::Failure;
use super::interrupt::{Interrupts, Wake};
use crate::engine::{Completion, Engine, GenerateEvent, GenerateRequest};
use std::io;

/// How an answer ended without an error.
#[derive(Debug)]
pub enum Answer {
    /// By itself.
    Complete(Completion),
    /// The user pressed Ctrl-C; holds what there was.
    Cancelled(Completion),
}

/// A piece of an answer: text, and the token that made it certain unless it was held back until the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Token id.
    pub token: Option<u32>,
    /// Complete UTF-8, possibly empty.
    pub text: String,
}

/// Generates an answer and hands over its pieces. Ctrl-C, and an error of `show`, end the request.
pub fn generate(
    engine: &Engine,
    interrupts: &Interrupts,
    request: GenerateRequest,
    mut show: impl FnMut(Piece) -> Result<(), Failure>,
) -> Result<Answer, Failure> {
    let (sender, receiver) = interrupts.channel();
    let sink = Box::new(move |event| {
        // Fails only when this function has returned early with an error; the request is being aborted then.
        drop(sender.send(Wake::Item(event)));
    });
    let id = engine.submit(request, sink)?;
    loop {
        let piece = match receiver.recv() {
            Err(_) => return Err(io::Error::other("the engine ended before the answer did").into()),
            Ok(Wake::Interrupt) => {
                engine.abort(id);
                continue;
            }
            // The log tells of recoveries.
            Ok(Wake::Item(
                GenerateEvent::Accepted | GenerateEvent::Started { .. } | GenerateEvent::Recovering { .. },
            )) => continue,
            Ok(Wake::Item(GenerateEvent::Token { id, text, .. })) => Piece { token: Some(id), text },
            Ok(Wake::Item(GenerateEvent::Text { text })) => Piece { token: None, text },
            Ok(Wake::Item(GenerateEvent::Done(completion))) => return Ok(Answer::Complete(completion)),
            Ok(Wake::Item(GenerateEvent::Aborted(completion))) => return Ok(Answer::Cancelled(completion)),
            Ok(Wake::Item(GenerateEvent::Failed(error))) => return Err(error.into()),
        };
        if let Err(failure) = show(piece) {
            engine.abort(id);
            return Err(failure);
        }
    }
}
