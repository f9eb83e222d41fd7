//! Things a file can ask for that we do not compute. Ignoring them would give wrong results, so they are refused by
//! name; keys and tensors in neither these tables nor a program are harmless and only noted.

use crate::error::ModelError;
use crate::gguf::{Metadata, Value};

/// When a value of a key asks for something.
enum Asks {
    /// Any number other than zero.
    NonZero,
    /// Any number other than zero and one.
    NotUnit,
    /// A number above zero and below the context length.
    BelowContext,
    /// This bool.
    Bool(bool),
    /// Whatever the value.
    Always,
}

/// Key (after the architecture's prefix), what value asks for something, what it asks for.
const KEYS: &[(&str, Asks, &str)] = &[
    ("expert_count", Asks::NonZero, "mixture-of-experts layers are not computed"),
    ("expert_used_count", Asks::NonZero, "mixture-of-experts layers are not computed"),
    ("expert_shared_count", Asks::NonZero, "mixture-of-experts layers are not computed"),
    ("attention.sliding_window", Asks::BelowContext, "attention over a sliding window is not computed"),
    ("attention.sliding_window_pattern", Asks::Always, "attention over a sliding window is not computed"),
    ("attention.chunk_size", Asks::BelowContext, "attention in chunks is not computed"),
    ("attention.clamp_kqv", Asks::NonZero, "clamped queries, keys and values are not computed"),
    ("attention.max_alibi_bias", Asks::NonZero, "ALiBi position bias is not computed"),
    ("attention.scale", Asks::NonZero, "an attention scale other than 1/sqrt(head width) is not computed"),
    ("attention.temperature_scale", Asks::NonZero, "attention temperature by position is not computed"),
    ("attention.temperature_length", Asks::NonZero, "attention temperature by position is not computed"),
    ("attention.causal", Asks::Bool(false), "attention to later tokens is not computed"),
    ("attention.q_lora_rank", Asks::NonZero, "multi-head latent attention is not computed"),
    ("attention.kv_lora_rank", Asks::NonZero, "multi-head latent attention is not computed"),
    ("attention.shared_kv_layers", Asks::NonZero, "layers that share their keys and values are not computed"),
    ("attn_logit_softcapping", Asks::NonZero, "capped attention scores are not computed"),
    ("final_logit_softcapping", Asks::NonZero, "capped logits are not computed"),
    ("logit_scale", Asks::NotUnit, "scaled logits are not computed"),
    ("embedding_scale", Asks::NotUnit, "scaled embeddings are not computed"),
    ("residual_scale", Asks::NotUnit, "a scaled residual stream is not computed"),
    ("use_parallel_residual", Asks::Bool(true), "attention and MLP in parallel are not computed"),
    ("pooling_type", Asks::NonZero, "it is an embedding model; only models that generate text are run"),
    ("swiglu_clamp_exp", Asks::Always, "a clamped MLP activation is not computed"),
    (
        "rope.scaling.yarn_log_multiplier",
        Asks::NonZero,
        "this variant of YaRN's attention factor is not computed",
    ),
    ("rope.freq_base_swa", Asks::Always, "a second rotary embedding for local layers is not computed"),
];

/// Keys (after the architecture's prefix) that the configuration reads, or that do not change what is computed.
const KNOWN_KEYS: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.recurrent_layers",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "full_attention_interval",
    "nextn_predict_layers",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "tensor_data_layout",
    "vocab_size",
];

/// A note on keys of the architecture that nobody here knows.
pub(crate) fn note_keys(metadata: Metadata<'_>, architecture: &str) -> Option<String> {
    let mut unknown = metadata.iter().filter_map(|(key, _)| {
        let name = key.strip_prefix(architecture)?.strip_prefix('.')?;
        let known = KNOWN_KEYS.contains(&name) || KEYS.iter().any(|(refused, ..)| *refused == name);
        (!known).then_some(key)
    });
    let first = unknown.next()?;
    Some(format!("unknown metadata keys without effect: {}, the first is {first:?}", 1 + unknown.count()))
}

/// Refuses a model whose metadata asks for something we do not compute.
pub(crate) fn refuse_keys(metadata: Metadata<'_>, architecture: &str) -> Result<(), ModelError> {
    // A file without a context length is refused for that later.
    let context =
        metadata.get(&format!("{architecture}.context_length")).and_then(|v| v.as_f64()).unwrap_or(0.0);
    for (name, asks, reason) in KEYS {
        let key = format!("{architecture}.{name}");
        let Some(value) = metadata.get(&key) else { continue };
        if asks.by(value, context) {
            return Err(ModelError::Unsupported {
                what: format!("{key} = {value}"),
                reason: (*reason).to_owned(),
            });
        }
    }
    Ok(())
}

impl Asks {
    /// Whether `value` asks for the thing; values of an unexpected type do, as we cannot tell.
    fn by(&self, value: Value<'_>, context: f64) -> bool {
        let number = value.as_f64();
        match *self {
            Asks::NonZero => number != Some(0.0),
            Asks::NotUnit => !matches!(number, Some(0.0 | 1.0)),
            Asks::BelowContext => !number.is_some_and(|n| n == 0.0 || n >= context),
            Asks::Bool(asking) => value != Value::Bool(!asking),
            Asks::Always => true,
        }
    }
}

/// Tensors, named without their layer, that change a model's results when they exist.
const TENSORS: &[(&str, &str)] = &[
    ("attn_q.bias", "a bias on queries is not part of this architecture"),
    ("attn_k.bias", "a bias on keys is not part of this architecture"),
    ("attn_v.bias", "a bias on values is not part of this architecture"),
    ("attn_output.bias", "a bias on the attention output is not part of this architecture"),
    ("attn_norm.bias", "norms with a bias are not computed"),
    ("ffn_norm.bias", "norms with a bias are not computed"),
    ("output_norm.bias", "norms with a bias are not computed"),
    ("ffn_gate.bias", "an MLP with biases is not computed"),
    ("ffn_up.bias", "an MLP with biases is not computed"),
    ("ffn_down.bias", "an MLP with biases is not computed"),
    ("output.bias", "a bias on logits is not computed"),
    ("attn_q_norm.weight", "norms on query heads are not part of this architecture"),
    ("attn_k_norm.weight", "norms on key heads are not part of this architecture"),
    ("attn_sub_norm.weight", "a norm inside attention is not part of this architecture"),
    ("ffn_sub_norm.weight", "a norm inside the MLP is not part of this architecture"),
    ("attn_post_norm.weight", "a norm after attention is not part of this architecture"),
    ("post_attention_norm.weight", "a norm after attention is not part of this architecture"),
    ("post_ffw_norm.weight", "a norm after the MLP is not part of this architecture"),
    ("attn_sinks.weight", "attention sinks are not computed"),
    ("attn_sinks", "attention sinks are not computed"),
    ("ffn_gate_inp.weight", "mixture-of-experts layers are not computed"),
    ("ffn_gate_exps.weight", "mixture-of-experts layers are not computed"),
    ("ffn_gate_shexp.weight", "mixture-of-experts layers are not computed"),
    ("rope_factors_long.weight", "LongRoPE is not computed"),
    ("rope_factors_short.weight", "LongRoPE is not computed"),
    ("token_embd_norm.weight", "a norm after the embedding is not computed"),
    ("position_embd.weight", "learned position embeddings are not computed"),
    ("cls.weight", "it is a classification model; only models that generate text are run"),
    ("cls.output.weight", "it is a classification model; only models that generate text are run"),
];

/// Suffix of scalars that some files store beside a weight to multiply it with.
const WEIGHT_SCALE: &str = ".scale";

/// Refuses tensors that the program does not use but that change the results.
pub(crate) fn refuse_tensors(unused: &[&str]) -> Result<(), ModelError> {
    for &name in unused {
        let role = split(name).map_or(name, |(_, role)| role);
        let reason = match TENSORS.iter().find(|(known, _)| *known == role) {
            Some((_, reason)) => reason,
            None if role.ends_with(WEIGHT_SCALE) => "weights with a scale of their own are not computed",
            None => continue,
        };
        return Err(ModelError::Unsupported { what: format!("tensor {name:?}"), reason: reason.to_owned() });
    }
    Ok(())
}

/// Layer and role of a layer's tensor: `blk.7.attn_q.bias` is 7 and `attn_q.bias`.
fn split(name: &str) -> Option<(usize, &str)> {
    let (layer, role) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, role))
}

/// Layer that a tensor belongs to, by its name.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    split(name).map(|(layer, _)| layer)
}
