//! A model as a program: layers of [`Step`]s over named weights.
//!
//! An architecture file turns a configuration into a [`Program`]; workers interpret it with their own kernels and
//! never see an architecture name. Every step works on *rows*: one row per token of the current batch, so a buffer of
//! width `w` holds `[n_tokens, w]` f32 values. Buffer 0 of every layer is the residual stream (width `d_model`); the
//! other buffers are scratch that lives for one layer.

use std::ops::Range;
use std::sync::Arc;

/// Index into [`Layer::buffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Buf(pub u16);

/// The residual stream, buffer 0 of every layer.
pub const RESIDUAL: Buf = Buf(0);

/// A weight by its name in the container, with the shape the program needs.
///
/// A matrix is `[rows, cols]` row-major (GGUF `ne = [cols, rows]`), mapping a vector of `cols` to `rows`. A vector has
/// `rows == 1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightRef {
    /// Tensor name as the container spells it.
    pub name: String,
    /// Output width (1 for a vector).
    pub rows: usize,
    /// Input width, the contiguous dimension.
    pub cols: usize,
}

/// How rotary embedding pairs dimensions inside the rotated part of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// `(i, i + rotary_dim / 2)`: GPT-NeoX order, Qwen.
    Halves,
    /// `(2 i, 2 i + 1)`: the order of `llama` GGUF files, whose converter permutes q and k.
    Adjacent,
}

/// Rotary position embedding: pair `i` at position `p` turns by `p * inv_freq[i]`, then scales by `magnitude`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Rotated dimensions of each head, `2 * inv_freq.len()`; the rest pass through.
    pub rotary_dim: usize,
    /// Which dimensions form a pair.
    pub pairing: RopePairing,
    /// Angular frequency per pair, radians per position, with every scaling of the file already applied.
    pub inv_freq: Arc<[f32]>,
    /// Factor on cos and sin (YaRN's attention factor; 1.0 otherwise).
    pub magnitude: f32,
}

/// Causal grouped-query attention over a paged KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; query head `j` reads kv head `j / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a query and key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Factor on `q · k` before the softmax.
    pub scale: f32,
}

/// Causal depthwise convolution followed by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), as Qwen3.5 uses it.
///
/// Value head `j` uses key head `j % key_heads` (the tiled order of GGUF files).
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaNetSpec {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a key and of a value head.
    pub head_dim: usize,
    /// Taps of the convolution, the current token included.
    pub conv_kernel: usize,
    /// Epsilon of the L2 norms (added to the sum) and of the gated RMS norm (added to the mean).
    pub eps: f32,
    /// Convolution taps, one row per channel, oldest first: `[channels, conv_kernel]`.
    pub conv: WeightRef,
    /// Decay per value head, `-exp(A_log)`.
    pub decay: WeightRef,
    /// Bias on the time step per value head.
    pub dt_bias: WeightRef,
    /// Weight of the gated RMS norm, `head_dim` wide, shared by all heads.
    pub norm: WeightRef,
}

impl DeltaNetSpec {
    /// Channels of the convolution: queries, keys, values in this order.
    pub fn channels(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.head_dim
    }
}

/// One operation of a layer. Reads and writes whole rows of the named buffers.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the fields are the names in each variant's formula")]
pub enum Step {
    /// `dst = rms_norm(src) * weight`, over the whole row.
    Norm { src: Buf, dst: Buf, weight: WeightRef, eps: f32 },
    /// `dst = weight · src (+ bias)`.
    Linear { src: Buf, dst: Buf, weight: WeightRef, bias: Option<WeightRef> },
    /// In-place RMS norm of every `head_dim` run of `buf` with a shared weight (QK norm).
    HeadNorm { buf: Buf, head_dim: usize, weight: WeightRef, eps: f32 },
    /// `src` holds per head `[query | gate]`; splits it into two buffers of half the width.
    SplitHeads { src: Buf, first: Buf, second: Buf, head_dim: usize },
    /// In-place rotary embedding of every head of `buf`; `rope` indexes [`Program::ropes`].
    Rope { buf: Buf, head_dim: usize, rope: usize },
    /// Appends `k`, `v` to the layer's KV cache, then attends. With `gate`, `dst *= sigmoid(gate)`.
    Attention { q: Buf, k: Buf, v: Buf, gate: Option<Buf>, dst: Buf, spec: AttentionSpec },
    /// Convolution, delta rule and gated norm; updates the layer's recurrent state.
    DeltaNet { qkv: Buf, gate: Buf, alpha: Buf, beta: Buf, dst: Buf, spec: DeltaNetSpec },
    /// `dst = down · (silu(gate · src) ⊙ (up · src))`.
    GatedMlp { src: Buf, dst: Buf, gate: WeightRef, up: WeightRef, down: WeightRef },
    /// `residual += src`.
    Residual { src: Buf },
}

/// What one layer keeps per token of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
}

/// What one layer keeps per sequence, whatever its length (f32 values).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentShape {
    /// Channels of the convolution.
    pub conv_channels: usize,
    /// Past inputs kept per channel (`conv_kernel - 1`).
    pub conv_taps: usize,
    /// Matrix states.
    pub heads: usize,
    /// Rows of a matrix state (value dimension).
    pub value_dim: usize,
    /// Columns of a matrix state (key dimension, contiguous).
    pub key_dim: usize,
}

impl RecurrentShape {
    /// f32 values of the convolution state of one sequence.
    pub fn conv_len(&self) -> usize {
        self.conv_channels * self.conv_taps
    }
    /// f32 values of the matrix states of one sequence.
    pub fn matrix_len(&self) -> usize {
        self.heads * self.value_dim * self.key_dim
    }
}

/// One layer: its scratch buffers, its steps in order, and the state it keeps.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Width of each buffer in f32 values per token; buffer 0 is the residual.
    pub buffers: Vec<usize>,
    /// Operations in execution order.
    pub steps: Vec<Step>,
    /// Set when the layer keeps keys and values.
    pub kv: Option<KvShape>,
    /// Set when the layer keeps a recurrent state.
    pub recurrent: Option<RecurrentShape>,
}

/// Final norm and output projection.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    /// RMS norm weight.
    pub norm: WeightRef,
    /// RMS norm epsilon.
    pub eps: f32,
    /// Output projection `[vocab, d_model]`; names the embedding when the file ties them.
    pub output: WeightRef,
}

/// A whole model: embedding, layers, head.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Rows of the embedding and of the output projection.
    pub vocab: usize,
    /// Token embedding `[vocab, d_model]`; a token's row starts its residual, unscaled.
    pub embed: WeightRef,
    /// Layers in order.
    pub layers: Vec<Layer>,
    /// Final norm and projection.
    pub head: Head,
    /// Rotary embeddings that [`Step::Rope`] refers to.
    pub ropes: Vec<RopeSpec>,
}

impl Step {
    /// Every weight the step needs, in a fixed order.
    pub fn weights(&self) -> Vec<&WeightRef> {
        match self {
            Step::Norm { weight, .. } | Step::HeadNorm { weight, .. } => vec![weight],
            Step::Linear { weight, bias, .. } => std::iter::once(weight).chain(bias).collect(),
            Step::DeltaNet { spec, .. } => vec![&spec.conv, &spec.decay, &spec.dt_bias, &spec.norm],
            Step::GatedMlp { gate, up, down, .. } => vec![gate, up, down],
            Step::SplitHeads { .. } | Step::Rope { .. } | Step::Attention { .. } | Step::Residual { .. } => {
                vec![]
            }
        }
    }
}

impl Layer {
    /// Every weight of the layer, in step order.
    pub fn weights(&self) -> impl Iterator<Item = &WeightRef> {
        self.steps.iter().flat_map(Step::weights)
    }
}

impl Program {
    /// Weights of the layers in `band`, without embedding and head.
    pub fn band_weights(&self, band: Range<usize>) -> impl Iterator<Item = &WeightRef> {
        self.layers[band].iter().flat_map(Layer::weights)
    }
    /// Every weight of the model: embedding, layers in order, head. A tied output projection occurs twice.
    pub fn weights(&self) -> impl Iterator<Item = &WeightRef> {
        let layers = self.layers.iter().flat_map(Layer::weights);
        std::iter::once(&self.embed).chain(layers).chain([&self.head.norm, &self.head.output])
    }
    /// Whether the output projection is the embedding matrix.
    pub fn is_tied(&self) -> bool {
        self.head.output.name == self.embed.name
    }
}
