//! From the program's steps to operations with their weights on the device: what is done once, at load.

use super::attention::{AttentionBufs, HeadPlan};
use super::error::BandError;
use super::load::Loader;
use super::needs::delta_net_dims;
use crate::hip::{Arena, DeviceSlice};
use crate::launch::{Attention, DeltaNet, KvCache, KvElement, Matrix};
use spillway_model::program::{AttentionSpec, Buf, DeltaNetSpec, Layer, Step, WeightRef};
use spillway_worker::fuse::{self, Fused, Projection, Target, fuse};

/// One operation of a layer, ready to be queued.
#[derive(Debug)]
pub(super) enum Op {
    Norm { src: Buf, dst: Buf, weight: DeviceSlice, eps: f32 },
    Project { src: Buf, parts: Vec<Part> },
    HeadNorm { buf: Buf, head_dim: usize, weight: DeviceSlice, eps: f32 },
    SplitHeads { src: Buf, first: Buf, second: Buf, head_dim: usize },
    Rope { buf: Buf, head_dim: usize, rope: usize },
    Attention { bufs: AttentionBufs, layer: Attention, cache: KvCache },
    DeltaNet { bufs: DeltaNetBufs, layer: DeltaNet },
    Mlp { src: Buf, gate: Matrix, up: Matrix, down: Part },
    Residual { src: Buf },
}

/// One matrix and where its product goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub weight: Matrix,
    pub bias: Option<DeviceSlice>,
    pub into: Target,
}

/// Buffers of a DeltaNet step.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaNetBufs {
    pub qkv: Buf,
    pub gate: Buf,
    pub alpha: Buf,
    pub beta: Buf,
    pub dst: Buf,
}

/// How much state every layer keeps.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateSizes {
    pub kv_blocks: usize,
    pub kv_element: KvElement,
    pub slots: usize,
}

/// Where a layer's weights and states come from and go to.
pub(super) struct Builder<'b, 'a, 'p> {
    pub loader: &'b mut Loader<'a, 'p>,
    pub arena: &'b mut Arena,
    pub sizes: StateSizes,
}

impl Builder<'_, '_, '_> {
    /// Loads a layer.
    pub fn layer(&mut self, layer: &Layer) -> Result<Vec<Op>, BandError> {
        let mut ops = Vec::new();
        for fused in fuse(&layer.steps) {
            let mut op = self.op(fused.clone())?;
            if let (Op::Attention { bufs, cache, .. }, Fused::Single(step)) = (&mut op, fused) {
                bufs.absorb(&mut ops, cache.key_dim(), steps_after(layer, step));
            }
            ops.push(op);
        }
        Ok(ops)
    }

    fn op(&mut self, fused: Fused<'_>) -> Result<Op, BandError> {
        match fused {
            Fused::Project { src, parts } => {
                let parts = parts.iter().map(|part| self.part(part)).collect::<Result<_, _>>()?;
                Ok(Op::Project { src, parts })
            }
            Fused::Mlp { src, gate, up, down, into } => {
                let (gate, up) = (self.matrix(gate)?, self.matrix(up)?);
                Ok(Op::Mlp { src, gate, up, down: Part { weight: self.matrix(down)?, bias: None, into } })
            }
            Fused::Single(step) => self.single(step),
        }
    }

    fn part(&mut self, projection: &Projection<'_>) -> Result<Part, BandError> {
        let weight = self.matrix(projection.weight)?;
        let bias = projection.bias.map(|bias| self.values(bias)).transpose()?;
        Ok(Part { weight, bias, into: projection.into })
    }

    /// Steps that fusion leaves as they are.
    fn single(&mut self, step: &Step) -> Result<Op, BandError> {
        Ok(match step {
            &Step::Norm { src, dst, ref weight, eps } => {
                Op::Norm { src, dst, weight: self.values(weight)?, eps }
            }
            &Step::HeadNorm { buf, head_dim, ref weight, eps } => {
                Op::HeadNorm { buf, head_dim, weight: self.values(weight)?, eps }
            }
            &Step::SplitHeads { src, first, second, head_dim } => {
                Op::SplitHeads { src, first, second, head_dim }
            }
            &Step::Rope { buf, head_dim, rope } => Op::Rope { buf, head_dim, rope },
            &Step::Residual { src } => Op::Residual { src },
            &Step::Attention { q, k, v, gate, dst, ref spec } => {
                let (q_plan, k_plan) = (HeadPlan::default(), HeadPlan::default());
                let bufs = AttentionBufs { q, k, v, gate, dst, joined: None, q_plan, k_plan };
                let layer = Attention { heads: spec.heads, scale: spec.scale };
                Op::Attention { bufs, layer, cache: self.cache(spec)? }
            }
            &Step::DeltaNet { qkv, gate, alpha, beta, dst, ref spec } => {
                let bufs = DeltaNetBufs { qkv, gate, alpha, beta, dst };
                Op::DeltaNet { bufs, layer: self.delta_net(spec)? }
            }
            Step::Linear { .. } | Step::GatedMlp { .. } => {
                // `fuse` turns these into groups; as a group of one the same code loads them.
                return self.op(fuse::start(step));
            }
        })
    }

    fn cache(&mut self, spec: &AttentionSpec) -> Result<KvCache, BandError> {
        let &AttentionSpec { kv_heads, key_dim, value_dim, .. } = spec;
        let StateSizes { kv_blocks, kv_element, .. } = self.sizes;
        let bytes = KvCache::bytes_for(kv_element, kv_heads, key_dim, value_dim, kv_blocks);
        let memory = self.arena.allocate("KV cache", bytes)?;
        Ok(KvCache::new(kv_element, kv_heads, key_dim, value_dim, memory)?)
    }

    fn delta_net(&mut self, spec: &DeltaNetSpec) -> Result<DeltaNet, BandError> {
        let dims = delta_net_dims(spec);
        let mut states = |label: &str, values: usize| {
            self.arena.allocate(label, self.sizes.slots * values * size_of::<f32>())
        };
        let history = states("convolution states", dims.history_len())?;
        let matrix = states("matrix states", dims.matrix_len())?;
        Ok(DeltaNet {
            dims,
            conv: self.values(&spec.conv)?,
            decay: self.values(&spec.decay)?,
            dt_bias: self.values(&spec.dt_bias)?,
            norm: self.values(&spec.norm)?,
            history,
            matrix,
        })
    }

    /// A matrix of this band.
    pub fn matrix(&mut self, weight: &WeightRef) -> Result<Matrix, BandError> {
        self.loader.matrix(self.arena, weight)
    }

    /// A vector of this band.
    pub fn values(&mut self, weight: &WeightRef) -> Result<DeviceSlice, BandError> {
        self.loader.values(self.arena, weight)
    }
}

/// The steps of a layer after one of them.
fn steps_after<'l>(layer: &'l Layer, step: &Step) -> &'l [Step] {
    let at = layer.steps.iter().position(|other| std::ptr::eq(other, step));
    &layer.steps[at.map_or(0, |at| at + 1)..]
}

/// Whether a matrix reads its input in 8-bit form.
pub(super) fn reads_int8(weight: &Matrix) -> bool {
    weight.format().is_quantised()
}
