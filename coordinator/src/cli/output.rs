//! Standard output. Everything is written and flushed at once, and a reader that has gone away is its own kind of error,
//! because it ends the command with success.

use super::failure::Failure;
use serde::Serialize;
use std::io::{self, ErrorKind, Write};

/// Writes text as it is.
pub fn text(text: &str) -> Result<(), Failure> {
    bytes(text.as_bytes())
}

/// Writes bytes as they are.
pub fn bytes(bytes: &[u8]) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(failure)
}

/// Writes a value as one line of JSON.
pub fn json(value: &impl Serialize) -> Result<(), Failure> {
    let mut line = serde_json::to_vec(value).map_err(|error| Failure::Output(io::Error::other(error)))?;
    line.push(b'\n');
    bytes(&line)
}

fn failure(error: io::Error) -> Failure {
    match error.kind() {
        ErrorKind::BrokenPipe => Failure::ReaderGone,
        _ => Failure::Output(error),
    }
}

/// Tells the user something on standard error, if anyone is there to hear it.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
