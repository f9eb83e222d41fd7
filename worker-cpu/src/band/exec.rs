//! Running one operation on the rows of a step.

use super::BandError;
use super::buffers::Buffers;
use super::plan::{AttentionBufs, DeltaNetBufs, Inputs, Op, Part};
use arrayvec::ArrayVec;
use spillway_kernels::activations::Activations;
use spillway_kernels::matmul::{Kernels, MatmulJob};
use spillway_kernels::ops::attention::{AttentionDims, AttentionRows, AttentionScratch, KvCache, KvSpan};
use spillway_kernels::ops::deltanet::{DeltaNet, DeltaNetRows, DeltaNetScratch, RecurrentState, StateSpan};
use spillway_kernels::ops::{Ops, RopeTable};
use spillway_kernels::pack::PackedMatrix;
use spillway_kernels::pool::ThreadPool;
use spillway_model::program::{Buf, RESIDUAL};
use spillway_worker::fuse::{MAX_GROUP, Target};

/// What the operations of all layers share. Everything is as large as the largest step needs from the start.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) pool: ThreadPool,
    pub(super) kernels: Kernels,
    pub(super) ops: Ops,
    pub(super) buffers: Buffers,
    pub(super) inputs: Activations,
    /// Gate and up of an MLP.
    pub(super) hidden: [Vec<f32>; 2],
    pub(super) ropes: Vec<RopeTable>,
    pub(super) attention: AttentionScratch,
    pub(super) delta_net: DeltaNetScratch,
}

/// The tokens of a step, as the operations see them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) tokens: usize,
    pub(super) kv: &'a [KvSpan<'a>],
    pub(super) states: &'a [StateSpan],
    /// Width of every buffer of the layer.
    pub(super) widths: &'a [usize],
}

impl Rows<'_> {
    /// Values of a buffer that the step uses.
    fn len(&self, buf: Buf) -> usize {
        self.tokens * self.widths[usize::from(buf.0)]
    }
}

impl Engine {
    /// Runs one operation.
    pub(super) fn run(&mut self, op: &mut Op, rows: &Rows<'_>) -> Result<(), BandError> {
        match op {
            Op::Project { src, inputs, parts } => self.project(*src, inputs, parts, rows),
            Op::Mlp { src, gate_up, gate, up, hidden, down } => {
                self.gate_and_up(*src, gate_up, gate, up, rows)?;
                self.down(hidden, down, rows)
            }
            Op::Attention { bufs, dims, cache } => self.attention(bufs, *dims, cache, rows),
            Op::DeltaNet { bufs, layer, state } => self.delta_net(bufs, layer, state, rows),
            simple => self.simple(simple, rows),
        }
    }

    /// Operations on rows or heads, without matrices or state.
    fn simple(&mut self, op: &Op, rows: &Rows<'_>) -> Result<(), BandError> {
        let Self { pool, ops, buffers, ropes, .. } = self;
        match op {
            Op::Norm { src, dst, weight, eps } => buffers.write(*dst, |buffers, out| {
                ops.rms_norm(
                    pool,
                    buffers.get(*src, rows.len(*src)),
                    weight,
                    *eps,
                    &mut out[..rows.len(*dst)],
                )
            })?,
            Op::HeadNorm { buf, weight, eps } => {
                ops.head_norm(pool, buffers.get_mut(*buf, rows.len(*buf)), weight, *eps)?;
            }
            Op::SplitHeads { src, first, second, head_dim } => buffers.write(*first, |buffers, one| {
                buffers.write(*second, |buffers, two| {
                    let (one, two) = (&mut one[..rows.len(*first)], &mut two[..rows.len(*second)]);
                    ops.split_heads(pool, buffers.get(*src, rows.len(*src)), *head_dim, one, two)
                })
            })?,
            Op::Rope { buf, head_dim, rope } => {
                ops.rope(pool, buffers.get_mut(*buf, rows.len(*buf)), *head_dim, &ropes[*rope])?;
            }
            Op::Residual { src } => buffers.write(RESIDUAL, |buffers, residual| {
                ops.add(pool, &mut residual[..rows.len(RESIDUAL)], buffers.get(*src, rows.len(*src)))
            })?,
            Op::Project { .. } | Op::Mlp { .. } | Op::Attention { .. } | Op::DeltaNet { .. } => {}
        }
        Ok(())
    }

    fn project(
        &mut self,
        src: Buf,
        inputs: &Inputs,
        parts: &[Part],
        rows: &Rows<'_>,
    ) -> Result<(), BandError> {
        let Self { pool, kernels, buffers, inputs: prepared, .. } = self;
        kernels.prepare(pool, buffers.get(src, rows.len(src)), inputs.cols, inputs.forms, prepared)?;
        let mut outs: ArrayVec<(Buf, Vec<f32>), MAX_GROUP> = ArrayVec::new();
        for part in parts {
            let dst = destination(part.into);
            outs.push((dst, buffers.take(dst)));
        }
        let jobs =
            parts.iter().zip(&mut outs).map(|(part, (dst, out))| job(part, &mut out[..rows.len(*dst)]));
        let mut jobs: ArrayVec<MatmulJob<'_>, MAX_GROUP> = jobs.collect();
        let result = kernels.matmul(pool, prepared, &mut jobs);
        drop(jobs);
        for (dst, out) in outs {
            buffers.put(dst, out);
        }
        Ok(result?)
    }

    /// `hidden[0] = silu(gate · src) ⊙ (up · src)`.
    fn gate_and_up(
        &mut self,
        src: Buf,
        inputs: &Inputs,
        gate: &PackedMatrix,
        up: &PackedMatrix,
        rows: &Rows<'_>,
    ) -> Result<(), BandError> {
        let Self { pool, kernels, ops, buffers, inputs: prepared, hidden: [gated, upper], .. } = self;
        let gated = &mut gated[..rows.tokens * gate.rows()];
        let upper = &mut upper[..rows.tokens * up.rows()];
        kernels.prepare(pool, buffers.get(src, rows.len(src)), inputs.cols, inputs.forms, prepared)?;
        kernels.matmul(pool, prepared, &mut [MatmulJob::store(gate, gated), MatmulJob::store(up, upper)])?;
        Ok(ops.silu_mul(pool, gated, upper)?)
    }

    /// The product of `hidden[0]` with `down`.
    fn down(&mut self, inputs: &Inputs, down: &Part, rows: &Rows<'_>) -> Result<(), BandError> {
        let Self { pool, kernels, buffers, inputs: prepared, hidden: [gated, _], .. } = self;
        let gated = &gated[..rows.tokens * inputs.cols];
        kernels.prepare(pool, gated, inputs.cols, inputs.forms, prepared)?;
        let dst = destination(down.into);
        let out = buffers.get_mut(dst, rows.len(dst));
        Ok(kernels.matmul(pool, prepared, &mut [job(down, out)])?)
    }

    fn attention(
        &mut self,
        bufs: &AttentionBufs,
        dims: AttentionDims,
        cache: &mut KvCache,
        rows: &Rows<'_>,
    ) -> Result<(), BandError> {
        let Self { pool, ops, buffers, attention, .. } = self;
        let done = buffers.write(bufs.dst, |buffers, out| {
            let read = |buf: Buf| buffers.get(buf, rows.len(buf));
            let out = &mut out[..rows.len(bufs.dst)];
            let gate = bufs.gate.map(read);
            let values = AttentionRows { q: read(bufs.q), k: read(bufs.k), v: read(bufs.v), gate, out };
            ops.attention(pool, cache, dims, rows.kv, values, attention)
        });
        Ok(done?)
    }

    fn delta_net(
        &mut self,
        bufs: &DeltaNetBufs,
        layer: &DeltaNet,
        state: &mut RecurrentState,
        rows: &Rows<'_>,
    ) -> Result<(), BandError> {
        let Self { pool, ops, buffers, delta_net, .. } = self;
        let done = buffers.write(bufs.dst, |buffers, out| {
            let read = |buf: Buf| buffers.get(buf, rows.len(buf));
            let out = &mut out[..rows.len(bufs.dst)];
            let (qkv, gate) = (read(bufs.qkv), read(bufs.gate));
            let values = DeltaNetRows { qkv, gate, alpha: read(bufs.alpha), beta: read(bufs.beta), out };
            ops.delta_net(pool, layer, state, rows.states, values, delta_net)
        });
        Ok(done?)
    }
}

fn destination(into: Target) -> Buf {
    match into {
        Target::Store(buf) => buf,
        Target::AddToResidual => RESIDUAL,
    }
}

fn job<'a>(part: &'a Part, out: &'a mut [f32]) -> MatmulJob<'a> {
    let job = match part.into {
        Target::Store(_) => MatmulJob::store(&part.weight, out),
        Target::AddToResidual => MatmulJob::add(&part.weight, out),
    };
    job.with_bias(part.bias.as_deref())
}
