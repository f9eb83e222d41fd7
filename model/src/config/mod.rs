//! What a model's metadata says about it, checked: every number is inside bounds that keep later arithmetic (buffer
//! widths, cache sizes, offsets) far from overflow, and numbers that depend on each other agree.

mod reader;
mod rope;

pub use rope::{RopeConfig, RopeScaling, Yarn};

use crate::error::ModelError;
use crate::gguf::{Metadata, required, shortened};
use reader::Reader;
use std::ops::RangeInclusive;

/// Bounds of each number. Real models stay well inside them.
mod bounds {
    use super::RangeInclusive;

    pub(super) const LAYERS: RangeInclusive<u32> = 1..=1024;
    pub(super) const WIDTH: RangeInclusive<u32> = 1..=1 << 16;
    pub(super) const FFN: RangeInclusive<u32> = 1..=1 << 20;
    pub(super) const HEADS: RangeInclusive<u32> = 1..=1024;
    pub(super) const HEAD_DIM: RangeInclusive<u32> = 1..=4096;
    pub(super) const CONTEXT: RangeInclusive<u32> = 1..=1 << 27;
    pub(super) const CONV_KERNEL: RangeInclusive<u32> = 2..=16;
    pub(super) const VOCAB: RangeInclusive<u32> = 1..=1 << 21;
    pub(super) const EPS: RangeInclusive<f32> = 1e-12..=0.1;
}

/// The configuration of a model. Obtained by opening a [`ModelFile`](crate::file::ModelFile) only.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// `general.architecture`; also the prefix of the model's keys.
    pub architecture: String,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Layers that a run uses (prediction layers for drafting are not counted).
    pub layers: usize,
    /// Layers after those, which predict several tokens ahead; they are skipped.
    pub nextn_layers: usize,
    /// Tokens the model distinguishes: rows of the embedding.
    pub vocab: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context_length: usize,
    /// Width of the gated MLP.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Epsilon of the RMS norms.
    pub eps: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Recurrent layers, in architectures that have them.
    pub recurrent: Option<RecurrentConfig>,
}

/// Gated DeltaNet layers of a hybrid model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecurrentConfig {
    /// Taps of the convolution, the current token included.
    pub conv_kernel: usize,
    /// Width of a key and of a value head.
    pub head_dim: usize,
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Per layer, whether it is recurrent (the others attend).
    pub layers: Vec<bool>,
}

impl ModelConfig {
    /// Reads and checks the configuration of `architecture`. `hybrid` architectures have recurrent layers.
    pub(crate) fn from_metadata(
        metadata: Metadata<'_>,
        architecture: &str,
        hybrid: bool,
    ) -> Result<ModelConfig, ModelError> {
        let keys = Reader::new(metadata, architecture);
        let blocks = keys.number("block_count", bounds::LAYERS)?;
        let nextn_layers = keys.number_or("nextn_predict_layers", 0..=*bounds::LAYERS.end(), 0)?;
        if nextn_layers >= blocks {
            return Err(
                keys.bad("nextn_predict_layers", format!("{nextn_layers} of {blocks} blocks leave no layer"))
            );
        }
        let layers = blocks - nextn_layers;
        let d_model = keys.number("embedding_length", bounds::WIDTH)?;
        let heads = keys.uniform("attention.head_count", bounds::HEADS, None)?;
        let kv_heads = keys.uniform("attention.head_count_kv", bounds::HEADS, Some(heads))?;
        if heads % kv_heads != 0 {
            return Err(keys.bad(
                "attention.head_count_kv",
                format!("{kv_heads} does not divide the {heads} query heads"),
            ));
        }
        let key_dim = head_dim(&keys, "attention.key_length", d_model, heads)?;
        let value_dim = head_dim(&keys, "attention.value_length", d_model, heads)?;
        let context_length = keys.number("context_length", bounds::CONTEXT)?;
        Ok(ModelConfig {
            architecture: architecture.to_owned(),
            d_model,
            layers,
            nextn_layers,
            vocab: vocab(&keys)?,
            context_length,
            ffn: keys.uniform("feed_forward_length", bounds::FFN, None)?,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            eps: keys.float("attention.layer_norm_rms_epsilon", bounds::EPS)?,
            rope: RopeConfig::read(&keys, key_dim, context_length)?,
            recurrent: if hybrid { Some(RecurrentConfig::read(&keys, layers, blocks)?) } else { None },
        })
    }
}

/// A head's width; the residual's share of one head when the file does not say.
fn head_dim(keys: &Reader<'_>, name: &str, d_model: usize, heads: usize) -> Result<usize, ModelError> {
    if keys.has(name) {
        return keys.number(name, bounds::HEAD_DIM);
    }
    let dim = d_model / heads;
    if d_model.is_multiple_of(heads) && u32::try_from(dim).is_ok_and(|dim| bounds::HEAD_DIM.contains(&dim)) {
        return Ok(dim);
    }
    let reason = format!("is absent, and {d_model} values cannot be shared by {heads} heads");
    Err(keys.bad(name, reason))
}

/// Size of the vocabulary: its token list, else the number the file states.
fn vocab(keys: &Reader<'_>) -> Result<usize, ModelError> {
    let list = "tokenizer.ggml.tokens";
    let Some(tokens) = keys.metadata().str_array_len(list)? else {
        return keys.number("vocab_size", bounds::VOCAB);
    };
    let in_bounds = u32::try_from(tokens).is_ok_and(|n| bounds::VOCAB.contains(&n));
    if !in_bounds {
        let reason = format!("{tokens} tokens are not within {:?}", bounds::VOCAB);
        return Err(ModelError::BadConfig { key: list.to_owned(), reason });
    }
    Ok(tokens)
}

impl RecurrentConfig {
    fn read(keys: &Reader<'_>, layers: usize, blocks: usize) -> Result<RecurrentConfig, ModelError> {
        let head_dim = keys.number("ssm.state_size", bounds::HEAD_DIM)?;
        let key_heads = keys.number("ssm.group_count", bounds::HEADS)?;
        let value_heads = keys.number("ssm.time_step_rank", bounds::HEADS)?;
        if value_heads % key_heads != 0 {
            let reason = format!("{value_heads} value heads are not a multiple of the {key_heads} key heads");
            return Err(keys.bad("ssm.time_step_rank", reason));
        }
        let inner = keys.number("ssm.inner_size", 1..=u32::MAX)?;
        if inner != value_heads * head_dim {
            let reason = format!("{inner} is not {value_heads} value heads of {head_dim}");
            return Err(keys.bad("ssm.inner_size", reason));
        }
        let conv_kernel = keys.number("ssm.conv_kernel", bounds::CONV_KERNEL)?;
        let layers = recurrent_layers(keys, layers, blocks)?;
        Ok(RecurrentConfig { conv_kernel, head_dim, key_heads, value_heads, layers })
    }
}

/// Which layers are recurrent: the explicit list when there is one, else all but every n-th.
fn recurrent_layers(keys: &Reader<'_>, layers: usize, blocks: usize) -> Result<Vec<bool>, ModelError> {
    let name = "attention.recurrent_layers";
    if let Some(mut listed) = keys.metadata().bool_array(&keys.key(name))? {
        if listed.len() != blocks && listed.len() != layers {
            return Err(keys.bad(name, format!("lists {} layers, the model has {blocks}", listed.len())));
        }
        listed.truncate(layers);
        return Ok(listed);
    }
    let interval = keys.number_or("full_attention_interval", bounds::LAYERS, 4)?;
    Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
}

/// Name of the architecture a file holds.
pub(crate) fn architecture(metadata: Metadata<'_>) -> Result<&str, ModelError> {
    let key = "general.architecture";
    Ok(required(key, metadata.str(key)?)?)
}

/// Refuses files that hold something beside a model: adapters, image projectors, importance matrices.
pub(crate) fn refuse_parts(metadata: Metadata<'_>) -> Result<(), ModelError> {
    let key = "general.type";
    match metadata.str(key)? {
        None | Some("model") => Ok(()),
        Some(other) => Err(ModelError::Unsupported {
            what: format!("{key} = {:?}", shortened(other)),
            reason: "only whole models are run".to_owned(),
        }),
    }
}
