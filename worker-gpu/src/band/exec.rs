//! Queueing one operation on the rows of a step.

use super::attention::{AttentionBufs, HeadPlan};
use super::error::BandError;
use super::facts::{Facts, Placed};
use super::mapped::MappedBlock;
use super::needs::ScratchBytes;
use super::plan::{DeltaNetBufs, Op, Part, reads_int8};
use super::streaming::Streaming;
use crate::hip::{Arena, DeviceSlice, HipError, Stream};
use crate::launch::{
    Attention, AttentionBuffers, DeltaNet, DeltaNetBuffers, GatedBuffers, HeadSteps, Heads, Inputs, Int8Rows,
    Kernels, KvCache, LaunchError, Matrix, NormRows, Output, StepSize,
};
use spillway_model::program::{Buf, RESIDUAL};
use spillway_worker::fuse::Target;

/// Working memory on the device, shared by all layers: as large as the largest step needs.
#[derive(Debug, Clone)]
pub(super) struct Scratch {
    /// By [`Buf`] number; the residual is number 0.
    pub buffers: Vec<DeviceSlice>,
    /// Gate and up of an MLP.
    pub hidden: [DeviceSlice; 2],
    /// The input of matrices in 8-bit form.
    pub int8: DeviceSlice,
    pub attention: DeviceSlice,
    pub delta_net: DeviceSlice,
}

impl Scratch {
    pub fn allocate(arena: &mut Arena, bytes: &ScratchBytes) -> Result<Self, HipError> {
        let buffers = bytes.buffers.iter().map(|bytes| arena.allocate("buffer", *bytes));
        Ok(Self {
            buffers: buffers.collect::<Result<_, _>>()?,
            hidden: [arena.allocate("MLP gate", bytes.hidden)?, arena.allocate("MLP up", bytes.hidden)?],
            int8: arena.allocate("8-bit inputs", bytes.int8)?,
            attention: arena.allocate("attention", bytes.attention)?,
            delta_net: arena.allocate("DeltaNet", bytes.delta_net)?,
        })
    }

    /// The same for the rows of a residual of width `d_model` from `row` on.
    pub fn starting_at(&self, row: usize, d_model: usize) -> Result<Self, HipError> {
        let mut scratch = self.clone();
        let (residual, skipped) = (&mut scratch.buffers[0], row * d_model * size_of::<f32>());
        *residual = residual.part(skipped, residual.len().saturating_sub(skipped))?;
        Ok(scratch)
    }

    fn buffer(&self, buf: Buf) -> DeviceSlice {
        self.buffers[usize::from(buf.0)]
    }
}

/// The step in hand, as the operations of a layer see it.
pub(super) struct Step<'a> {
    pub kernels: &'a Kernels,
    pub stream: &'a Stream,
    pub scratch: &'a Scratch,
    pub facts: &'a Facts,
    pub placed: &'a Placed,
    pub tokens: usize,
    pub spans: usize,
    /// The largest context of any row, or more.
    pub context: usize,
    /// For a layer whose matrices come from host memory.
    pub streamed: Option<Streamed<'a>>,
}

/// How matrices get from host memory to where they are multiplied.
pub(super) struct Streamed<'a> {
    pub streaming: &'a mut Streaming,
    pub blocks: &'a [MappedBlock],
}

impl Step<'_> {
    /// Queues an operation of a layer whose buffers have the given widths.
    pub fn queue(&mut self, op: &Op, widths: &[usize]) -> Result<(), BandError> {
        let &mut Self { kernels, stream, tokens, scratch, .. } = self;
        let buffer = |buf: Buf| scratch.buffer(buf);
        let width = |buf: Buf| widths[usize::from(buf.0)];
        match op {
            Op::Norm { src, dst, norm, int8 } => {
                let int8 = int8.then(|| self.int8(norm.width)).transpose()?;
                let (x, out) = (buffer(*src), buffer(*dst));
                kernels.rms_norm(stream, norm, &NormRows { count: tokens, x, indices: None, out, int8 })?;
            }
            Op::HeadNorm { buf, norm } => {
                let (x, count) = (buffer(*buf), tokens * width(*buf) / norm.width);
                kernels.rms_norm(stream, norm, &NormRows { count, x, indices: None, out: x, int8: None })?;
            }
            Op::SplitHeads { src, first, second, head_dim } => {
                let heads = tokens * width(*first) / head_dim;
                kernels.split_heads(
                    stream,
                    buffer(*src),
                    buffer(*first),
                    buffer(*second),
                    heads,
                    *head_dim,
                )?;
            }
            Op::Rope { buf, head_dim, rope } => {
                let rope = self.facts.rope(*rope, tokens)?;
                kernels.rope(stream, buffer(*buf), &rope, tokens, width(*buf) / head_dim, *head_dim)?;
            }
            Op::Residual { src } => {
                kernels.add(stream, buffer(RESIDUAL), buffer(*src), tokens * width(RESIDUAL))?;
            }
            Op::Project { src, ready, parts } => {
                let inputs = self.inputs(buffer(*src), *ready, parts.iter().map(|part| &part.weight))?;
                if self.streamed.is_some() {
                    let mut parts = parts.clone();
                    self.enter(parts.iter_mut().map(|part| &mut part.weight))?;
                    self.project(&parts, &inputs)?;
                    self.leave()?;
                } else {
                    self.project(parts, &inputs)?;
                }
            }
            Op::Mlp { src, ready, gate, up, down } => {
                self.mlp(buffer(*src), *ready, [*gate, *up], *down)?;
            }
            Op::Attention { bufs, layer, cache } => self.attention(bufs, layer, cache)?,
            Op::DeltaNet { bufs, layer, int8 } => self.delta_net(bufs, layer, *int8)?,
        }
        Ok(())
    }

    /// The scratch for 8-bit inputs, as the step's rows of `cols` columns.
    fn int8(&self, cols: usize) -> Result<Int8Rows, LaunchError> {
        Int8Rows::new(self.scratch.int8, self.tokens, cols)
    }

    /// Prepares the common input of matrices in the forms that they read; `ready` when its 8-bit form is in the scratch.
    fn inputs<'m>(
        &self,
        src: DeviceSlice,
        ready: bool,
        mut weights: impl Iterator<Item = &'m Matrix>,
    ) -> Result<Prepared, LaunchError> {
        let Some(weight) = weights.find(|weight| reads_int8(weight)) else {
            return Ok(Prepared { values: src, int8: None });
        };
        let int8 = self.int8(weight.cols())?;
        if !ready {
            self.kernels.quantize_rows(self.stream, src, &int8)?;
        }
        Ok(Prepared { values: src, int8: Some(int8) })
    }

    /// Lets the matrices of a layer in host memory be read from where they are streamed to.
    fn enter<'m>(&mut self, matrices: impl Iterator<Item = &'m mut Matrix>) -> Result<(), BandError> {
        match &mut self.streamed {
            Some(Streamed { streaming, blocks }) => streaming.enter(self.stream, blocks, matrices),
            None => Ok(()),
        }
    }

    /// The matrices entered last are not read by what is queued from now on.
    fn leave(&mut self) -> Result<(), BandError> {
        match &mut self.streamed {
            Some(Streamed { streaming, blocks }) => streaming.leave(self.stream, blocks),
            None => Ok(()),
        }
    }

    fn project(&self, parts: &[Part], inputs: &Prepared) -> Result<(), LaunchError> {
        let of_one_format = |a: &Part, b: &Part| a.weight.format() == b.weight.format();
        parts.chunk_by(of_one_format).try_for_each(|parts| self.parts(parts, inputs))
    }

    /// Products of matrices of one format.
    fn parts(&self, parts: &[Part], inputs: &Prepared) -> Result<(), LaunchError> {
        let products: Vec<(Matrix, Output)> =
            parts.iter().map(|part| (part.weight, self.output(part))).collect();
        let inputs = inputs.of(&parts[0].weight);
        self.kernels.matmuls(self.stream, &products, inputs, self.tokens)
    }

    fn output(&self, part: &Part) -> Output {
        let output = match part.into {
            Target::Store(buf) => Output::store(self.scratch.buffer(buf)),
            Target::AddToResidual => Output::add(self.scratch.buffer(RESIDUAL)),
        };
        output.with_bias(part.bias)
    }

    fn mlp(
        &mut self,
        src: DeviceSlice,
        ready: bool,
        mut gate_up: [Matrix; 2],
        mut down: Part,
    ) -> Result<(), BandError> {
        let &mut Self { kernels, stream, scratch, tokens, .. } = self;
        let inputs = self.inputs(src, ready, gate_up.iter())?;
        let buffers = GatedBuffers { products: scratch.hidden, int8: scratch.int8 };
        self.enter(gate_up.iter_mut())?;
        let of = gate_up.each_ref().map(|weight| (weight, inputs.of(weight)));
        let inputs = kernels.gated(stream, of, tokens, &buffers, reads_int8(&down.weight))?;
        self.leave()?;
        self.enter(std::iter::once(&mut down.weight))?;
        kernels.matmul(stream, &down.weight, inputs, tokens, self.output(&down))?;
        self.leave()
    }

    fn attention(&self, bufs: &AttentionBufs, layer: &Attention, cache: &KvCache) -> Result<(), LaunchError> {
        let &Self { tokens: rows, spans, context, .. } = self;
        let buffer = |buf: Buf| self.scratch.buffer(buf);
        let dim = cache.key_dim();
        let apart = |buf: Buf, stride: usize| Heads { memory: buffer(buf), stride };
        let (q, gate) = match bufs.joined {
            Some(joined) => {
                let memory = buffer(joined);
                let skipped = dim * size_of::<f32>();
                let gates = memory.part(skipped, memory.len().saturating_sub(skipped))?;
                let stride = 2 * dim;
                (Heads { memory, stride }, Some(Heads { memory: gates, stride }))
            }
            None => (apart(bufs.q, dim), bufs.gate.map(|gate| apart(gate, cache.value_dim()))),
        };
        let buffers = AttentionBuffers {
            q,
            prepared: buffer(bufs.q),
            k: buffer(bufs.k),
            v: buffer(bufs.v),
            gate,
            out: buffer(bufs.dst),
            row_meta: self.placed.row_meta,
            span_meta: self.placed.span_meta,
            tables: self.placed.tables,
            scratch: self.scratch.attention,
        };
        let [q_steps, k_steps] = [&bufs.q_plan, &bufs.k_plan].map(|plan| self.head_steps(plan));
        let size = StepSize { rows, spans, context };
        self.kernels.attention(self.stream, layer, cache, &buffers, [&q_steps?, &k_steps?], size)
    }

    fn head_steps(&self, plan: &HeadPlan) -> Result<HeadSteps, LaunchError> {
        let rope = plan.rope.map(|rope| self.facts.rope(rope, self.tokens)).transpose()?;
        Ok(HeadSteps { norm: plan.norm, rope })
    }

    fn delta_net(&self, bufs: &DeltaNetBufs, layer: &DeltaNet, int8: bool) -> Result<(), LaunchError> {
        let buffer = |buf: Buf| self.scratch.buffer(buf);
        let buffers = DeltaNetBuffers {
            qkv: buffer(bufs.qkv),
            gate: buffer(bufs.gate),
            alpha: buffer(bufs.alpha),
            beta: buffer(bufs.beta),
            out: buffer(bufs.dst),
            int8: int8.then(|| self.int8(layer.dims.value_heads * layer.dims.head_dim)).transpose()?,
            row_meta: self.placed.row_meta,
            span_meta: self.placed.span_meta,
            scratch: self.scratch.delta_net,
        };
        self.kernels.delta_net(self.stream, layer, &buffers, self.tokens, self.spans)
    }
}

/// The input of matrices, in the forms in which any of them reads it.
pub(super) struct Prepared {
    pub values: DeviceSlice,
    pub int8: Option<Int8Rows>,
}

impl Prepared {
    /// The form that `weight` reads.
    pub fn of(&self, weight: &Matrix) -> Inputs {
        match self.int8 {
            Some(int8) if reads_int8(weight) => Inputs::Int8(int8),
            _ => Inputs::F32(self.values),
        }
    }
}
