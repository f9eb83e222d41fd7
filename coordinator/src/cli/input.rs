//! Standard input as text.

use super::failure::Failure;
use std::io::{ErrorKind, Read, stdin};

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
