//! What a model is: containers, configuration, architectures as step programs, tokenizer, chat template.

pub mod arch;
pub mod chat;
pub mod config;
pub mod error;
pub mod file;
pub mod gguf;
pub mod inspect;
pub mod program;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;
pub mod tokenizer;
