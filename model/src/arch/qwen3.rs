//! `qwen3`: Qwen3 dense models, with a norm on every query and key head instead of biases.

use super::build::{AttentionStyle, Bias, ProgramBuilder};
use crate::error::ModelError;
use crate::program::RopePairing;

const ATTENTION: AttentionStyle =
    AttentionStyle { qkv_bias: Bias::No, output_bias: Bias::No, head_norm: true, gated: false };

pub(super) fn build(program: &mut ProgramBuilder<'_>) -> Result<(), ModelError> {
    program.transformer(RopePairing::Halves, ATTENTION);
    Ok(())
}
