//! What the architecture files share: building layers out of steps, and the parts every transformer layer has.

use crate::config::ModelConfig;
use crate::program::{
    AttentionSpec, Buf, Head, KvShape, Layer, Program, RESIDUAL, RecurrentShape, RopePairing, RopeSpec, Step,
    WeightRef,
};

/// A program under construction.
pub(super) struct ProgramBuilder<'a> {
    pub(super) config: &'a ModelConfig,
    has: &'a dyn Fn(&str) -> bool,
    divisors: Option<&'a [f32]>,
    layers: Vec<Layer>,
    ropes: Vec<RopeSpec>,
}

impl<'a> ProgramBuilder<'a> {
    pub(super) fn new(
        config: &'a ModelConfig,
        has: &'a dyn Fn(&str) -> bool,
        divisors: Option<&'a [f32]>,
    ) -> Self {
        ProgramBuilder { config, has, divisors, layers: Vec::with_capacity(config.layers), ropes: Vec::new() }
    }

    /// Adds the model's rotary embedding; its index in [`Program::ropes`].
    pub(super) fn rope(&mut self, pairing: RopePairing) -> usize {
        let rope = &self.config.rope;
        self.ropes.push(RopeSpec {
            rotary_dim: rope.rotary_dim,
            pairing,
            inv_freq: rope.inv_freq(self.divisors).into(),
            magnitude: rope.magnitude(),
        });
        self.ropes.len() - 1
    }

    /// Starts the next layer.
    pub(super) fn layer(&self) -> LayerBuilder<'a> {
        let layer =
            Layer { buffers: vec![self.config.d_model], steps: Vec::new(), kv: None, recurrent: None };
        LayerBuilder {
            config: self.config,
            has: self.has,
            prefix: format!("blk.{}", self.layers.len()),
            layer,
        }
    }

    pub(super) fn push(&mut self, layer: LayerBuilder<'_>) {
        self.layers.push(layer.layer);
    }

    /// Adds the layers of a plain transformer: attention and MLP, each after a norm.
    pub(super) fn transformer(&mut self, pairing: RopePairing, style: AttentionStyle) {
        let rope = self.rope(pairing);
        for _ in 0..self.config.layers {
            let mut layer = self.layer();
            layer.attention(style, rope);
            layer.mlp("ffn_norm");
            self.push(layer);
        }
    }

    /// Adds embedding and head: the output projection is the embedding when the file has no other.
    pub(super) fn finish(self) -> Program {
        let (vocab, d_model) = (self.config.vocab, self.config.d_model);
        let embed = matrix("token_embd.weight", vocab, d_model);
        let output = "output.weight";
        let output = if (self.has)(output) { matrix(output, vocab, d_model) } else { embed.clone() };
        let head = Head { norm: vector("output_norm.weight", d_model), eps: self.config.eps, output };
        Program { d_model, vocab, embed, layers: self.layers, head, ropes: self.ropes }
    }
}

fn matrix(name: &str, rows: usize, cols: usize) -> WeightRef {
    WeightRef { name: name.to_owned(), rows, cols }
}

fn vector(name: &str, len: usize) -> WeightRef {
    matrix(name, 1, len)
}

/// Whether a projection has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bias {
    /// Never.
    No,
    /// When the file holds one.
    Optional,
    /// Always; a file without it is refused.
    Required,
}

/// What distinguishes the self-attention of one architecture from another's.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionStyle {
    /// Bias of the query, key and value projections.
    pub(super) qkv_bias: Bias,
    /// Bias of the output projection.
    pub(super) output_bias: Bias,
    /// RMS norm of every query and key head before the rotary embedding.
    pub(super) head_norm: bool,
    /// The query projection also yields a gate per value, interleaved by head.
    pub(super) gated: bool,
}

/// One layer under construction.
pub(super) struct LayerBuilder<'a> {
    config: &'a ModelConfig,
    has: &'a dyn Fn(&str) -> bool,
    prefix: String,
    layer: Layer,
}

impl LayerBuilder<'_> {
    /// A new scratch buffer of `width` values per token.
    pub(super) fn buffer(&mut self, width: usize) -> Buf {
        // A layer has about ten buffers, so the number always fits.
        let buf = Buf(u16::try_from(self.layer.buffers.len()).unwrap_or(u16::MAX));
        self.layer.buffers.push(width);
        buf
    }

    fn width(&self, buf: Buf) -> usize {
        self.layer.buffers[usize::from(buf.0)]
    }

    pub(super) fn step(&mut self, step: Step) {
        self.layer.steps.push(step);
    }

    /// A matrix of this layer by its role.
    pub(super) fn matrix(&self, role: &str, rows: usize, cols: usize) -> WeightRef {
        matrix(&format!("{}.{role}", self.prefix), rows, cols)
    }

    /// A vector of this layer by its role.
    pub(super) fn vector(&self, role: &str, len: usize) -> WeightRef {
        self.matrix(role, 1, len)
    }

    /// `rms_norm(src) * weight` into a new buffer.
    pub(super) fn norm(&mut self, src: Buf, role: &str) -> Buf {
        let width = self.width(src);
        let dst = self.buffer(width);
        let weight = self.vector(&format!("{role}.weight"), width);
        self.step(Step::Norm { src, dst, weight, eps: self.config.eps });
        dst
    }

    /// A projection of `src` into a new buffer of `rows` values.
    pub(super) fn linear(&mut self, src: Buf, role: &str, rows: usize, bias: Bias) -> Buf {
        let dst = self.buffer(rows);
        let weight = self.matrix(&format!("{role}.weight"), rows, self.width(src));
        let bias = Some(self.vector(&format!("{role}.bias"), rows)).filter(|b| match bias {
            Bias::No => false,
            Bias::Optional => (self.has)(&b.name),
            Bias::Required => true,
        });
        self.step(Step::Linear { src, dst, weight, bias });
        dst
    }

    /// Adds `src` to the residual stream.
    pub(super) fn residual(&mut self, src: Buf) {
        self.step(Step::Residual { src });
    }

    /// `residual += attention(norm(residual))`.
    pub(super) fn attention(&mut self, style: AttentionStyle, rope: usize) {
        let &ModelConfig { heads, kv_heads, key_dim, value_dim, d_model, .. } = self.config;
        let h = self.norm(RESIDUAL, "attn_norm");
        let q_width = heads * key_dim;
        let projected =
            self.linear(h, "attn_q", if style.gated { 2 * q_width } else { q_width }, style.qkv_bias);
        let k = self.linear(h, "attn_k", kv_heads * key_dim, style.qkv_bias);
        let v = self.linear(h, "attn_v", kv_heads * value_dim, style.qkv_bias);
        let (q, gate) = if style.gated { self.split(projected, key_dim) } else { (projected, None) };
        for (buf, role) in [(q, "attn_q_norm.weight"), (k, "attn_k_norm.weight")] {
            if style.head_norm {
                let weight = self.vector(role, key_dim);
                self.step(Step::HeadNorm { buf, head_dim: key_dim, weight, eps: self.config.eps });
            }
            self.step(Step::Rope { buf, head_dim: key_dim, rope });
        }
        let dst = self.buffer(heads * value_dim);
        #[expect(clippy::cast_possible_truncation, reason = "computed in f64, used in f32")]
        let scale = (1.0 / (key_dim as f64).sqrt()) as f32;
        let spec = AttentionSpec { heads, kv_heads, key_dim, value_dim, scale };
        self.step(Step::Attention { q, k, v, gate, dst, spec });
        let y = self.linear(dst, "attn_output", d_model, style.output_bias);
        self.residual(y);
        self.layer.kv = Some(KvShape { kv_heads, key_dim, value_dim });
    }

    /// Splits `[query | gate]` heads.
    fn split(&mut self, src: Buf, head_dim: usize) -> (Buf, Option<Buf>) {
        let half = self.width(src) / 2;
        let (first, second) = (self.buffer(half), self.buffer(half));
        self.step(Step::SplitHeads { src, first, second, head_dim });
        (first, Some(second))
    }

    /// Declares the state a recurrent layer keeps.
    pub(super) fn keep_recurrent(&mut self, shape: RecurrentShape) {
        self.layer.recurrent = Some(shape);
    }

    /// `residual += gated_mlp(norm(residual))`; `norm` names the norm.
    pub(super) fn mlp(&mut self, norm: &str) {
        let &ModelConfig { d_model, ffn, .. } = self.config;
        let src = self.norm(RESIDUAL, norm);
        let dst = self.buffer(d_model);
        self.step(Step::GatedMlp {
            src,
            dst,
            gate: self.matrix("ffn_gate.weight", ffn, d_model),
            up: self.matrix("ffn_up.weight", ffn, d_model),
            down: self.matrix("ffn_down.weight", d_model, ffn),
        });
        self.residual(dst);
    }
}
