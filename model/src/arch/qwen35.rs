//! `qwen35`: Qwen3.5 dense text models, a hybrid. Most layers are Gated DeltaNet, the others gated attention with a
//! norm on every query and key head and a rotary embedding of part of the head.

use super::build::{AttentionStyle, Bias, LayerBuilder, ProgramBuilder};
use crate::config::{ModelConfig, RecurrentConfig};
use crate::error::ModelError;
use crate::gguf::GgufError;
use crate::program::{DeltaNetSpec, RESIDUAL, RecurrentShape, RopePairing, Step};

const ATTENTION: AttentionStyle =
    AttentionStyle { qkv_bias: Bias::No, output_bias: Bias::No, head_norm: true, gated: true };

pub(super) fn build(program: &mut ProgramBuilder<'_>) -> Result<(), ModelError> {
    let config = program.config;
    if config.key_dim != config.value_dim {
        // The gate has the width of the query and multiplies values.
        let key = format!("{}.attention.value_length", config.architecture);
        let reason = format!("{} differs from the key width {}", config.value_dim, config.key_dim);
        return Err(ModelError::BadConfig { key, reason });
    }
    let Some(recurrent) = &config.recurrent else {
        let key = format!("{}.ssm.state_size", config.architecture);
        return Err(GgufError::MissingKey { key }.into());
    };
    let rope = program.rope(RopePairing::Halves);
    for &is_recurrent in &recurrent.layers {
        let mut layer = program.layer();
        if is_recurrent {
            delta_net(&mut layer, config, recurrent);
        } else {
            layer.attention(ATTENTION, rope);
        }
        layer.mlp("post_attention_norm");
        program.push(layer);
    }
    Ok(())
}

/// `residual += delta_net(norm(residual))`.
fn delta_net(layer: &mut LayerBuilder<'_>, config: &ModelConfig, recurrent: &RecurrentConfig) {
    let &RecurrentConfig { conv_kernel, head_dim, key_heads, value_heads, .. } = recurrent;
    let channels = (2 * key_heads + value_heads) * head_dim;
    let values = value_heads * head_dim;
    let h = layer.norm(RESIDUAL, "attn_norm");
    let qkv = layer.linear(h, "attn_qkv", channels, Bias::No);
    let gate = layer.linear(h, "attn_gate", values, Bias::No);
    let alpha = layer.linear(h, "ssm_alpha", value_heads, Bias::No);
    let beta = layer.linear(h, "ssm_beta", value_heads, Bias::No);
    let dst = layer.buffer(values);
    let spec = DeltaNetSpec {
        key_heads,
        value_heads,
        head_dim,
        conv_kernel,
        eps: config.eps,
        conv: layer.matrix("ssm_conv1d.weight", channels, conv_kernel),
        decay: layer.vector("ssm_a", value_heads),
        dt_bias: layer.vector("ssm_dt.bias", value_heads),
        norm: layer.vector("ssm_norm.weight", head_dim),
    };
    layer.step(Step::DeltaNet { qkv, gate, alpha, beta, dst, spec });
    let y = layer.linear(dst, "ssm_out", config.d_model, Bias::No);
    layer.residual(y);
    layer.keep_recurrent(RecurrentShape {
        conv_channels: channels,
        conv_taps: conv_kernel - 1,
        heads: value_heads,
        value_dim: head_dim,
        key_dim: head_dim,
    });
}
