//! `llama`: Llama 1 to 3, SmolLM, Mistral and others of the same shape. The converter permutes query and key rows, so
//! rotary pairs are adjacent. Biases are used where a file has them.

use super::build::{AttentionStyle, Bias, ProgramBuilder};
use crate::error::ModelError;
use crate::program::RopePairing;

const ATTENTION: AttentionStyle =
    AttentionStyle { qkv_bias: Bias::Optional, output_bias: Bias::Optional, head_norm: false, gated: false };

pub(super) fn build(program: &mut ProgramBuilder<'_>) -> Result<(), ModelError> {
    program.transformer(RopePairing::Adjacent, ATTENTION);
    Ok(())
}
