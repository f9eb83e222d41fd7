//! `qwen3`: Qwen3 dense models, with a norm on every query and key head instead of biases.

use super::build::{AttentionStyle, Bias, ProgramBuilder};
use crate::error::ModelError;
use crate::program::RopePairing;

const ATTENTION: AttentionStyle =
    AttentionStyle { qkv_bias: Bias::No, output_bias: Bias::No, head_norm: true, gated: false };

pub(super) fn build(program: &mut ProgramBuilder<'_>) -> Result<(), ModelError> {
    let rope = program.rope(RopePairing::Halves);
    for _ in 0..program.config.layers {
        let mut layer = program.layer();
        layer.attention(ATTENTION, rope);
        layer.mlp("ffn_norm");
        program.push(layer);
    }
    Ok(())
}
