//! From the program's steps to operations with their weights: what is done once, at load.

use crate::load::{LoadError, Loader, Need};
use spillway_kernels::activations::{Codes, Forms};
use spillway_kernels::ops::SharedPart;
use spillway_kernels::ops::attention::{AttentionDims, KvCache, KvElement};
use spillway_kernels::ops::deltanet::{DeltaNet, RecurrentState};
use spillway_kernels::pack::PackedMatrix;
use spillway_model::program::{AttentionSpec, Buf, Layer, Step, WeightRef};
use spillway_worker::fuse::{self, Fused, Projection, Target, fuse};
use spillway_worker::states::{delta_net_dims, kv_dims};
use std::vec::IntoIter;

/// One operation of a layer, ready to run.
#[derive(Debug)]
pub(super) enum Op {
    Norm { src: Buf, dst: Buf, weight: Vec<f32>, eps: f32 },
    Project { src: Buf, inputs: Inputs, parts: Vec<Part> },
    HeadNorm { buf: Buf, weight: Vec<f32>, eps: f32 },
    SplitHeads { src: Buf, first: Buf, second: Buf, head_dim: usize },
    Rope { buf: Buf, head_dim: usize, rope: usize },
    Attention { bufs: AttentionBufs, dims: AttentionDims, cache: KvCache },
    DeltaNet { bufs: DeltaNetBufs, layer: DeltaNet, state: RecurrentState },
    Mlp { src: Buf, gate_up: Inputs, gate: PackedMatrix, up: PackedMatrix, hidden: Inputs, down: Part },
    Residual { src: Buf },
}

/// Width and forms in which matrices read their common input.
#[derive(Debug, Clone)]
pub(super) struct Inputs {
    pub(super) cols: usize,
    pub(super) forms: Forms,
}

/// One matrix of a group and where its product goes.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) weight: PackedMatrix,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) into: Target,
}

/// Buffers of an attention step.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionBufs {
    pub(super) q: Buf,
    pub(super) k: Buf,
    pub(super) v: Buf,
    pub(super) gate: Option<Buf>,
    pub(super) dst: Buf,
}

/// Buffers of a DeltaNet step.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaNetBufs {
    pub(super) qkv: Buf,
    pub(super) gate: Buf,
    pub(super) alpha: Buf,
    pub(super) beta: Buf,
    pub(super) dst: Buf,
}

/// What the plan decides for every layer: the state it keeps, and what its quantised matrices read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub(super) kv_blocks: usize,
    pub(super) kv_element: KvElement,
    pub(super) slots: usize,
    pub(super) codes: Codes,
}

/// The weights of a layer in the order in which [`layer_ops`] asks for them.
pub(super) fn needs(layer: &Layer) -> Vec<Need<'_>> {
    layer.steps.iter().flat_map(step_needs).collect()
}

fn step_needs(step: &Step) -> Vec<Need<'_>> {
    match step {
        Step::Linear { weight, bias, .. } => {
            std::iter::once(Need::Matrix(weight)).chain(bias.iter().map(Need::Values)).collect()
        }
        Step::GatedMlp { gate, up, down, .. } => [gate, up, down].map(Need::Matrix).to_vec(),
        other => other.weights().into_iter().map(Need::Values).collect(),
    }
}

/// Loads a layer's weights into its operations. Its states are kept in `shared` memory, in the order of its steps, or in private memory
/// where there is none.
pub(super) fn layer_ops(
    layer: &Layer,
    loader: &mut Loader<'_>,
    settings: &Settings,
    shared: Vec<SharedPart>,
) -> Result<Vec<Op>, LoadError> {
    let mut shared = shared.into_iter();
    fuse(&layer.steps).into_iter().map(|fused| op(fused, loader, settings, &mut shared)).collect()
}

fn op(
    fused: Fused<'_>,
    loader: &mut Loader<'_>,
    settings: &Settings,
    shared: &mut IntoIter<SharedPart>,
) -> Result<Op, LoadError> {
    match fused {
        Fused::Project { src, parts } => {
            let parts =
                parts.iter().map(|projection| part(projection, loader)).collect::<Result<Vec<_>, _>>()?;
            let inputs = Inputs::of(parts.iter().map(|part| &part.weight), settings.codes);
            Ok(Op::Project { src, inputs, parts })
        }
        Fused::Mlp { src, gate, up, down, into } => {
            let (gate, up) = (loader.matrix(gate)?, loader.matrix(up)?);
            let down = Part { weight: loader.matrix(down)?, bias: None, into };
            let gate_up = Inputs::of([&gate, &up], settings.codes);
            let hidden = Inputs::of([&down.weight], settings.codes);
            Ok(Op::Mlp { src, gate_up, gate, up, hidden, down })
        }
        Fused::Single(step) => single(step, loader, settings, shared),
    }
}

fn part(projection: &Projection<'_>, loader: &mut Loader<'_>) -> Result<Part, LoadError> {
    let weight = loader.matrix(projection.weight)?;
    let bias = projection.bias.map(|bias| loader.values(bias)).transpose()?;
    Ok(Part { weight, bias, into: projection.into })
}

/// Steps that fusion leaves as they are.
fn single(
    step: &Step,
    loader: &mut Loader<'_>,
    settings: &Settings,
    shared: &mut IntoIter<SharedPart>,
) -> Result<Op, LoadError> {
    let mut values = |weight: &WeightRef| loader.values(weight);
    Ok(match step {
        &Step::Norm { src, dst, ref weight, eps } => Op::Norm { src, dst, weight: values(weight)?, eps },
        &Step::HeadNorm { buf, ref weight, eps, .. } => Op::HeadNorm { buf, weight: values(weight)?, eps },
        &Step::SplitHeads { src, first, second, head_dim } => Op::SplitHeads { src, first, second, head_dim },
        &Step::Rope { buf, head_dim, rope } => Op::Rope { buf, head_dim, rope },
        &Step::Residual { src } => Op::Residual { src },
        &Step::Attention { q, k, v, gate, dst, ref spec } => {
            let &AttentionSpec { heads, scale, .. } = spec;
            let (dims, blocks, element) = (kv_dims(spec), settings.kv_blocks, settings.kv_element);
            let cache = match shared.next() {
                Some(memory) => KvCache::shared(dims, blocks, element, memory),
                None => KvCache::new(dims, blocks, element),
            }?;
            let bufs = AttentionBufs { q, k, v, gate, dst };
            Op::Attention { bufs, dims: AttentionDims { heads, scale }, cache }
        }
        &Step::DeltaNet { qkv, gate, alpha, beta, dst, ref spec } => {
            let dims = delta_net_dims(spec);
            let (conv, decay) = (values(&spec.conv)?, values(&spec.decay)?);
            let (dt_bias, norm) = (values(&spec.dt_bias)?, values(&spec.norm)?);
            let layer = DeltaNet::new(dims, &conv, &decay, &dt_bias, &norm)?;
            let state = match (shared.next(), shared.next()) {
                (Some(conv), Some(matrix)) => RecurrentState::shared(dims, settings.slots, conv, matrix),
                _ => RecurrentState::new(dims, settings.slots),
            }?;
            Op::DeltaNet { bufs: DeltaNetBufs { qkv, gate, alpha, beta, dst }, layer, state }
        }
        Step::Linear { .. } | Step::GatedMlp { .. } => {
            // `fuse` turns these into groups; as a group of one the same code loads them.
            return op(fuse::start(step), loader, settings, shared);
        }
    })
}

impl Inputs {
    fn of<'a>(weights: impl IntoIterator<Item = &'a PackedMatrix>, codes: Codes) -> Self {
        let mut inputs = Self { cols: 0, forms: Forms::default() };
        for weight in weights {
            inputs.cols = weight.cols();
            inputs.forms = inputs.forms.and(Forms::of([weight.format()], codes));
        }
        inputs
    }
}

impl Op {
    /// Every input the operation prepares for matrices.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &Inputs> {
        let (first, second) = match self {
            Op::Project { inputs, .. } => (Some(inputs), None),
            Op::Mlp { gate_up, hidden, .. } => (Some(gate_up), Some(hidden)),
            _ => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// Bytes of keys, values and states when all of them are in use: KV cache, recurrent state.
    pub(super) fn state_bytes(&self, settings: &Settings) -> (usize, usize) {
        match self {
            Op::Attention { cache, .. } => {
                (KvCache::bytes_for(cache.dims(), cache.blocks(), settings.kv_element), 0)
            }
            Op::DeltaNet { state, .. } => {
                let values = state.dims().conv_len() + state.dims().matrix_len();
                (0, state.slots() * values * size_of::<f32>())
            }
            _ => (0, 0),
        }
    }

    /// Width of the two hidden buffers of an MLP.
    pub(super) fn hidden_width(&self) -> usize {
        match self {
            Op::Mlp { hidden, .. } => hidden.cols,
            _ => 0,
        }
    }
}
