//! What a model is: containers, configuration, architectures as step programs, tokenizer, chat template.

pub mod program;
