//! Chooses the next token from a row of logits.

mod params;

pub use params::{ParamError, SamplingParams};
