//! Standard input as text.

use super::failure::Failure;
use std::io::{ErrorKind, Read, stdin};

/// All of standard input but the line end that programs put at the end of what they print.
pub fn line() -> Result<String, Failure> {
    let mut text = text()?;
    let kept = text.strip_suffix('\n').map(|line| line.strip_suffix('\r').unwrap_or(line).len());
    text.truncate(kept.unwrap_or(text.len()));
    Ok(text)
}

/// All of standard input.
pub fn text() -> Result<String, Failure> {
    let mut text = String::new();
    match stdin().lock().read_to_string(&mut text) {
        Ok(_) => Ok(text),
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            Err(Failure::BadInput("it is not UTF-8".to_owned()))
        }
        Err(error) => Err(Failure::Input(error)),
    }
}
