//! `qwen2`: Qwen2 and Qwen2.5, with a bias on the query, key and value projections.

use super::build::{AttentionStyle, Bias, ProgramBuilder};
use crate::error::ModelError;
use crate::program::RopePairing;

const ATTENTION: AttentionStyle =
    AttentionStyle { qkv_bias: Bias::Required, output_bias: Bias::No, head_norm: false, gated: false };

pub(super) fn build(program: &mut ProgramBuilder<'_>) -> Result<(), ModelError> {
    program.transformer(RopePairing::Halves, ATTENTION);
    Ok(())
}
