//! From the program's steps to operations with their weights on the device: what is done once, at load.

use super::attention::{AttentionBufs, HeadPlan};
use super::error::BandError;
use super::load::Loader;
use super::mapped::{MappedBlock, Store};
use super::needs::delta_net_dims;
use crate::hip::{ALIGN, Arena, DeviceSlice};
use crate::launch::{Attention, DeltaNet, KvCache, KvElement, Matrix, Norm};
use spillway_model::program::{AttentionSpec, Buf, DeltaNetSpec, Layer, Step, WeightRef};
use spillway_worker::fuse::{self, Fused, Projection, Target, fuse};

/// One operation of a layer, ready to be queued.
///
/// `int8` says to write the 8-bit form of the result into the scratch as well, `ready` that the operation before did so for
/// `src`: see [`hand_over`].
#[derive(Debug)]
pub(super) enum Op {
    Norm { src: Buf, dst: Buf, norm: Norm, int8: bool },
    Project { src: Buf, ready: bool, parts: Vec<Part> },
    HeadNorm { buf: Buf, norm: Norm },
    SplitHeads { src: Buf, first: Buf, second: Buf, head_dim: usize },
    Rope { buf: Buf, head_dim: usize, rope: usize },
    Attention { bufs: AttentionBufs, layer: Attention, cache: KvCache },
    DeltaNet { bufs: DeltaNetBufs, layer: DeltaNet, int8: bool },
    Mlp { src: Buf, ready: bool, gate: Matrix, up: Matrix, down: Part },
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

impl StateSizes {
    /// Bytes of a KV cache.
    fn cache(&self, spec: &AttentionSpec) -> usize {
        let &AttentionSpec { kv_heads, key_dim, value_dim, .. } = spec;
        KvCache::bytes_for(self.kv_element, kv_heads, key_dim, value_dim, self.kv_blocks)
    }

    /// Bytes of states of so many values each.
    fn states(&self, values: usize) -> usize {
        self.slots * values * size_of::<f32>()
    }

    /// Bytes of all that a layer keeps, as memory is reserved for it.
    pub fn of_layer(&self, layer: &Layer) -> usize {
        let of_step = |step: &Step| match step {
            Step::Attention { spec, .. } => self.cache(spec).next_multiple_of(ALIGN),
            Step::DeltaNet { spec, .. } => {
                let dims = delta_net_dims(spec);
                let parts = [dims.history_len(), dims.matrix_len()];
                parts.map(|values| self.states(values).next_multiple_of(ALIGN)).iter().sum()
            }
            _ => 0,
        };
        layer.steps.iter().map(of_step).sum()
    }
}

/// Where a layer's weights and states come from and go to.
pub(super) struct Builder<'b, 'a, 'p> {
    pub loader: &'b mut Loader<'a, 'p>,
    pub arena: &'b mut Arena,
    /// Where weights go, if not to the device's memory.
    pub block: Option<MappedBlock>,
    pub sizes: StateSizes,
}

impl Builder<'_, '_, '_> {
    /// Loads a layer.
    pub fn layer(&mut self, layer: &Layer) -> Result<Vec<Op>, BandError> {
        let mut ops = Vec::new();
        for fused in fuse(&layer.steps) {
            let mut op = self.op(fused.clone(), &layer.buffers)?;
            if let (Op::Attention { bufs, cache, .. }, Fused::Single(step)) = (&mut op, fused) {
                bufs.absorb(&mut ops, cache.key_dim(), steps_after(layer, step));
            }
            ops.push(op);
        }
        hand_over(&mut ops);
        Ok(ops)
    }

    fn op(&mut self, fused: Fused<'_>, widths: &[usize]) -> Result<Op, BandError> {
        match fused {
            Fused::Project { src, parts } => {
                let mut parts = parts.iter().map(|part| self.part(part)).collect::<Result<Vec<_>, _>>()?;
                // One launch multiplies neighbours of one format; their order has no meaning.
                parts.sort_by_key(|part| part.weight.format().name());
                Ok(Op::Project { src, ready: false, parts })
            }
            Fused::Mlp { src, gate, up, down, into } => {
                let (gate, up) = (self.matrix(gate)?, self.matrix(up)?);
                let down = Part { weight: self.matrix(down)?, bias: None, into };
                Ok(Op::Mlp { src, ready: false, gate, up, down })
            }
            Fused::Single(step) => self.single(step, widths),
        }
    }

    fn part(&mut self, projection: &Projection<'_>) -> Result<Part, BandError> {
        let weight = self.matrix(projection.weight)?;
        let bias = projection.bias.map(|bias| self.values(bias)).transpose()?;
        Ok(Part { weight, bias, into: projection.into })
    }

    /// Steps that fusion leaves as they are.
    fn single(&mut self, step: &Step, widths: &[usize]) -> Result<Op, BandError> {
        Ok(match step {
            &Step::Norm { src, dst, ref weight, eps } => {
                let width = widths[usize::from(src.0)];
                let norm = Norm { weight: self.values(weight)?, width, epsilon: eps };
                Op::Norm { src, dst, norm, int8: false }
            }
            &Step::HeadNorm { buf, head_dim, ref weight, eps } => {
                let norm = Norm { weight: self.values(weight)?, width: head_dim, epsilon: eps };
                Op::HeadNorm { buf, norm }
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
                Op::DeltaNet { bufs, layer: self.delta_net(spec)?, int8: false }
            }
            Step::Linear { .. } | Step::GatedMlp { .. } => {
                // `fuse` turns these into groups; as a group of one the same code loads them.
                return self.op(fuse::start(step), widths);
            }
        })
    }

    fn cache(&mut self, spec: &AttentionSpec) -> Result<KvCache, BandError> {
        let &AttentionSpec { kv_heads, key_dim, value_dim, .. } = spec;
        let memory = self.arena.allocate("KV cache", self.sizes.cache(spec))?;
        Ok(KvCache::new(self.sizes.kv_element, kv_heads, key_dim, value_dim, memory)?)
    }

    fn delta_net(&mut self, spec: &DeltaNetSpec) -> Result<DeltaNet, BandError> {
        let dims = delta_net_dims(spec);
        let history = self.arena.allocate("convolution states", self.sizes.states(dims.history_len()))?;
        let matrix = self.arena.allocate("matrix states", self.sizes.states(dims.matrix_len()))?;
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
        self.loader.matrix(store(self.arena, &mut self.block), weight)
    }

    /// A vector of this band.
    pub fn values(&mut self, weight: &WeightRef) -> Result<DeviceSlice, BandError> {
        self.loader.values(store(self.arena, &mut self.block), weight)
    }
}

fn store<'m>(arena: &'m mut Arena, block: &'m mut Option<MappedBlock>) -> Store<'m> {
    match block {
        Some(block) => Store::Host(block),
        None => Store::Device(arena),
    }
}

/// The steps of a layer after one of them.
fn steps_after<'l>(layer: &'l Layer, step: &Step) -> &'l [Step] {
    let at = layer.steps.iter().position(|other| std::ptr::eq(other, step));
    &layer.steps[at.map_or(0, |at| at + 1)..]
}

/// Lets operations whose result the next one multiplies write the 8-bit form that it reads.
fn hand_over(ops: &mut [Op]) {
    for at in 1..ops.len() {
        let [before, after] = &mut ops[at - 1..=at] else { continue };
        let (src, ready, wanted) = match after {
            Op::Project { src, ready, parts } => {
                (*src, ready, parts.iter().any(|part| reads_int8(&part.weight)))
            }
            Op::Mlp { src, ready, gate, up, .. } => (*src, ready, reads_int8(gate) || reads_int8(up)),
            _ => continue,
        };
        let (dst, int8) = match before {
            Op::Norm { dst, int8, .. } => (*dst, int8),
            Op::DeltaNet { bufs, int8, .. } => (bufs.dst, int8),
            _ => continue,
        };
        *int8 = wanted && src == dst;
        *ready = *int8;
    }
}

/// Whether a matrix reads its input in 8-bit form.
pub(super) fn reads_int8(weight: &Matrix) -> bool {
    weight.format().is_quantised()
}
