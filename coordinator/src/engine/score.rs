//! Scoring: the logits of every position of a given sequence, handed over row by row to the thread that asked.
//!
//! Rows travel through a short bounded channel and their buffers come back, so a long sequence over a large vocabulary
//! needs a handful of rows of memory. The engine waits when the reader is slow: scoring is for measuring, not for serving.

use super::request::RequestError;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// Rows on their way between the two threads.
const ROWS: usize = 4;

/// From the engine to the thread that asked.
#[derive(Debug)]
enum Message {
    Row { position: usize, logits: Vec<f32> },
    End(Result<(), RequestError>),
}

/// The engine's end.
#[derive(Debug)]
pub(super) struct ScoreSender {
    messages: SyncSender<Message>,
    spare: Receiver<Vec<f32>>,
    /// Rows handed over.
    rows: usize,
    /// The last word, until it is delivered.
    last: Option<Result<(), RequestError>>,
}

/// The asking thread's end.
#[derive(Debug)]
pub(super) struct ScoreReader {
    messages: Receiver<Message>,
    spare: Sender<Vec<f32>>,
}

pub(super) fn pair() -> (ScoreSender, ScoreReader) {
    let (messages, reader) = sync_channel(ROWS);
    let (returns, spare) = channel();
    (ScoreSender { messages, spare, rows: 0, last: None }, ScoreReader { messages: reader, spare: returns })
}

impl ScoreSender {
    /// Hands a row over, unless it was before a replay; false when nobody reads any more.
    pub(super) fn row(&mut self, position: usize, logits: &[f32]) -> bool {
        if position < self.rows {
            return true;
        }
        self.rows = position + 1;
        let mut row = self.spare.try_recv().unwrap_or_default();
        row.clear();
        row.extend_from_slice(logits);
        self.messages.send(Message::Row { position, logits: row }).is_ok()
    }

    /// Decides the last word.
    pub(super) fn end(&mut self, result: Result<(), RequestError>) {
        self.last.get_or_insert(result);
    }

    /// Says the last word, if it is decided.
    pub(super) fn deliver(&mut self) {
        if let Some(result) = self.last.take() {
            // A reader that has left needs none.
            let _ = self.messages.send(Message::End(result));
        }
    }
}

impl ScoreReader {
    /// Passes rows to `on_row` until the end, or until it breaks off; none when the engine went away without a word.
    pub(super) fn read(
        self,
        on_row: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Option<Result<(), RequestError>> {
        loop {
            match self.messages.recv().ok()? {
                Message::Row { position, logits } => {
                    if on_row(position, &logits).is_break() {
                        return Some(Ok(()));
                    }
                    // Fails only when the engine has already dropped its end after the last row.
                    let _ = self.spare.send(logits);
                }
                Message::End(result) => return Some(result),
            }
        }
    }
}
