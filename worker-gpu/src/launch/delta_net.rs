//! Causal depthwise convolution and gated delta rule (Gated DeltaNet), as the CPU worker computes them.

use super::{Check, Int8Rows, Kernels, LaunchError, RowMeta, SpanMeta, entries, queue};
use crate::hip::{Arg, DeviceSlice, HipError, Launch, Stream};

/// Head widths that the kernels are compiled for.
const HEAD_DIMS: [usize; 4] = [32, 64, 128, 256];
/// Those that fit into one block, state and all, so that a step of one token per sequence is one kernel.
const STEP_HEAD_DIMS: [usize; 3] = [32, 64, 128];
/// Threads of a block of the recurrence, and of one that finishes outputs.
const RULE_BLOCK: usize = 128;
const FINISH_BLOCK: usize = 256;
/// Rows of the state that a group of lanes holds, and most lanes of such a group and of one that norms a head; a lane has four
/// values or more.
const STATE_ROWS: usize = 2;
const MAX_STATE_LANES: usize = 16;
const MAX_NORM_LANES: usize = 32;
/// Most taps of the convolution.
const MAX_TAPS: usize = 8;
/// Most rows that a block of the convolution takes, and blocks per head from which on it takes more than one.
const MAX_RUN: usize = 8;
const CONV_BLOCKS: usize = 32;

entries!(Entries: "delta_net" {
    delta_conv_32, delta_conv_64, delta_conv_128, delta_conv_256,
    delta_rule_32, delta_rule_64, delta_rule_128, delta_rule_256,
    delta_finish_32, delta_finish_64, delta_finish_128, delta_finish_256,
});
entries!(StepEntries: "delta_step" { delta_step_32, delta_step_64, delta_step_128 });

/// Sizes of a DeltaNet layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaNetDims {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads, a multiple of the key heads; value head `j` uses key head `j % key_heads`.
    pub value_heads: usize,
    /// Width of every head.
    pub head_dim: usize,
    /// Taps of the convolution, the current token included.
    pub taps: usize,
    /// Epsilon of the L2 norms (added to the sum) and of the gated norm (added to the mean).
    pub epsilon: f32,
}

impl DeltaNetDims {
    /// Channels of the convolution: queries, keys, values.
    pub fn channels(self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.head_dim
    }

    /// f32 values of one slot's past inputs, `[taps][channels]`: that of position `p` is at `p % taps`. One place more than
    /// a step reads, so that the current input can be kept while others still read the oldest.
    pub fn history_len(self) -> usize {
        self.taps * self.channels()
    }

    /// f32 values of one slot's matrix states, `[value head][value][key]`.
    pub fn matrix_len(self) -> usize {
        self.value_heads * self.head_dim * self.head_dim
    }

    /// Bytes of working memory for steps of `rows` rows.
    pub fn scratch_bytes(self, rows: usize) -> usize {
        rows * (self.channels() + self.gates()) * size_of::<f32>()
    }

    /// Lanes that share a row of the state.
    fn state_lanes(self) -> usize {
        (self.head_dim / 4).min(MAX_STATE_LANES)
    }

    /// Decay and strength of every value head, overlap of every key head.
    fn gates(self) -> usize {
        2 * self.value_heads + self.key_heads
    }

    /// Values of a row of outputs.
    fn width(self) -> usize {
        self.value_heads * self.head_dim
    }

    /// Which of the kernels for [`HEAD_DIMS`] serves.
    fn kernel(self) -> usize {
        HEAD_DIMS.iter().position(|dim| *dim == self.head_dim).unwrap_or_default()
    }
}

/// A DeltaNet layer: weights and the states of all slots, on the device, f32.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNet {
    /// Sizes.
    pub dims: DeltaNetDims,
    /// `[channels, taps]`, oldest tap first.
    pub conv: DeviceSlice,
    /// `-exp(A_log)` per value head.
    pub decay: DeviceSlice,
    /// Bias on the time step per value head.
    pub dt_bias: DeviceSlice,
    /// Weight of the gated norm, `head_dim` wide.
    pub norm: DeviceSlice,
    /// Past inputs, [`DeltaNetDims::history_len`] values per slot. Need not be set: a span that begins a sequence resets.
    pub history: DeviceSlice,
    /// Matrix states, [`DeltaNetDims::matrix_len`] values per slot; need not be set.
    pub matrix: DeviceSlice,
}

impl DeltaNet {
    /// The past inputs of one slot, and its matrices.
    ///
    /// # Errors
    /// There is no such slot.
    pub fn slot(&self, slot: usize) -> Result<[DeviceSlice; 2], HipError> {
        let part = |memory: DeviceSlice, values: usize| {
            let bytes = values * size_of::<f32>();
            memory.part(slot.saturating_mul(bytes), bytes)
        };
        Ok([part(self.history, self.dims.history_len())?, part(self.matrix, self.dims.matrix_len())?])
    }
}

/// The memory of a DeltaNet step, f32, one row per token.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetBuffers {
    /// Inputs of the convolution, `[rows, channels]`.
    pub qkv: DeviceSlice,
    /// Gate of the output, `[rows, value_heads * head_dim]`.
    pub gate: DeviceSlice,
    /// Inputs of the decay, `[rows, value_heads]`.
    pub alpha: DeviceSlice,
    /// Inputs of the update strength, `[rows, value_heads]`.
    pub beta: DeviceSlice,
    /// Outputs, `[rows, value_heads * head_dim]`.
    pub out: DeviceSlice,
    /// Where to write the 8-bit form of the outputs as well.
    pub int8: Option<Int8Rows>,
    /// One [`RowMeta`] per row.
    pub row_meta: DeviceSlice,
    /// One [`SpanMeta`] per span; spans name different slots.
    pub span_meta: DeviceSlice,
    /// [`DeltaNetDims::scratch_bytes`] bytes.
    pub scratch: DeviceSlice,
}

/// One step, with its working memory cut up.
struct Step<'a> {
    check: Check,
    layer: &'a DeltaNet,
    buffers: &'a DeltaNetBuffers,
    rows: usize,
    spans: usize,
    /// `[rows, channels]`, convolved and normed.
    convolved: DeviceSlice,
    /// `[rows, value_heads]` decays, then as many strengths, then `[rows, key_heads]` overlaps of query and key.
    gates: DeviceSlice,
}

impl Kernels {
    /// Runs a DeltaNet layer over the step's rows and updates the states of the spans' slots. Every row belongs to a span, every
    /// span has at least one, and spans come in the order of their rows.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`]; sizes that the kernels cannot handle.
    pub fn delta_net(
        &self,
        stream: &Stream,
        layer: &DeltaNet,
        buffers: &DeltaNetBuffers,
        rows: usize,
        spans: usize,
    ) -> Result<(), LaunchError> {
        let check = Check("delta_net");
        let dims = layer.dims;
        check.rule(HEAD_DIMS.contains(&dims.head_dim), "head width", dims.head_dim, "32, 64, 128 or 256")?;
        check.rule((2..=MAX_TAPS).contains(&dims.taps), "taps of the convolution", dims.taps, "2 to 8")?;
        let whole = dims.key_heads > 0 && dims.value_heads.is_multiple_of(dims.key_heads);
        check.rule(whole, "value heads", dims.value_heads, "a multiple of the key heads")?;
        if rows == 0 || spans == 0 {
            return Ok(());
        }
        check.holds::<u8>("scratch", buffers.scratch, dims.scratch_bytes(rows))?;
        let convolved_bytes = rows * dims.channels() * size_of::<f32>();
        let convolved = buffers.scratch.part(0, convolved_bytes)?;
        let gates_bytes = rows * dims.gates() * size_of::<f32>();
        let gates = buffers.scratch.part(convolved_bytes, gates_bytes)?;
        let step = Step { check, layer, buffers, rows, spans, convolved, gates };
        if rows == spans && STEP_HEAD_DIMS.contains(&dims.head_dim) {
            return self.delta_step(stream, &step);
        }
        self.convolve(stream, &step)?;
        self.recur(stream, &step)?;
        self.finish(stream, &step)
    }

    /// All of it, for one row per span.
    fn delta_step(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let &Step { check, layer, buffers, rows, .. } = step;
        let dims = layer.dims;
        let [alpha, beta, rate, bias] = step.gate_args()?;
        let [meta, spans] = step.fact_args()?;
        let [codes, scales] = check.int8(buffers.int8.as_ref(), rows, dims.width())?;
        let args = [
            step.inputs()?,
            layer.history.into(),
            step.conv_weights()?,
            alpha,
            beta,
            rate,
            bias,
            step.output_gate()?,
            step.norm_weight()?,
            layer.matrix.into(),
            meta,
            spans,
            step.out()?,
            codes,
            scales,
            check.number("key heads", dims.key_heads)?.into(),
            check.number("value heads", dims.value_heads)?.into(),
            check.number("taps", dims.taps)?.into(),
            dims.epsilon.into(),
        ];
        let grid = [check.number("rows", rows)?, check.number("value heads", dims.value_heads)?, 1];
        let block = (dims.head_dim / STATE_ROWS * dims.state_lanes()) as u32;
        let StepEntries { delta_step_32, delta_step_64, delta_step_128 } = &self.delta_step;
        let function = [delta_step_32, delta_step_64, delta_step_128][dims.kernel()];
        queue(stream, function, Launch { grid, block, shared_bytes: 0 }, &args)
    }

    /// Convolution, norms of queries and keys, and gates.
    fn convolve(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let &Step { check, layer, rows, .. } = step;
        let dims = layer.dims;
        let run = (rows / CONV_BLOCKS).clamp(1, MAX_RUN);
        let [alpha, beta, rate, bias] = step.gate_args()?;
        let [meta, spans] = step.fact_args()?;
        let args = [
            step.inputs()?,
            layer.history.into(),
            step.conv_weights()?,
            alpha,
            beta,
            rate,
            bias,
            meta,
            spans,
            step.convolved.into(),
            step.gates.into(),
            check.number("rows", rows)?.into(),
            check.number("key heads", dims.key_heads)?.into(),
            check.number("value heads", dims.value_heads)?.into(),
            check.number("taps", dims.taps)?.into(),
            (run as u32).into(),
            dims.epsilon.into(),
        ];
        // Two heads a block, and one block more for the gates.
        let blocks = dims.key_heads + dims.value_heads.div_ceil(2) + 1;
        let grid = [check.number("rows", rows.div_ceil(run))?, check.number("heads", blocks)?, 1];
        let block = 2 * dims.head_dim as u32;
        let Entries { delta_conv_32, delta_conv_64, delta_conv_128, delta_conv_256, .. } = &self.delta_net;
        let function = [delta_conv_32, delta_conv_64, delta_conv_128, delta_conv_256][dims.kernel()];
        queue(stream, function, Launch { grid, block, shared_bytes: 0 }, &args)
    }

    /// The recurrence; keeps the last inputs of every span for the next step.
    fn recur(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let &Step { check, layer, rows, spans, .. } = step;
        let dims = layer.dims;
        let [meta, span_meta] = step.fact_args()?;
        let args = [
            step.convolved.into(),
            step.gates.into(),
            step.inputs()?,
            layer.history.into(),
            layer.matrix.into(),
            meta,
            span_meta,
            step.out()?,
            check.number("rows", rows)?.into(),
            check.number("key heads", dims.key_heads)?.into(),
            check.number("value heads", dims.value_heads)?.into(),
            check.number("taps", dims.taps)?.into(),
        ];
        let state_rows = RULE_BLOCK / dims.state_lanes() * STATE_ROWS;
        let grid = [
            check.number("spans", spans)?,
            check.number("value heads", dims.value_heads)?,
            check.number("head width", dims.head_dim / state_rows)?,
        ];
        let Entries { delta_rule_32, delta_rule_64, delta_rule_128, delta_rule_256, .. } = &self.delta_net;
        let function = [delta_rule_32, delta_rule_64, delta_rule_128, delta_rule_256][dims.kernel()];
        queue(stream, function, Launch { grid, block: RULE_BLOCK as u32, shared_bytes: 0 }, &args)
    }

    /// The gated norm of the outputs.
    fn finish(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let &Step { check, layer, buffers, rows, .. } = step;
        let dims = layer.dims;
        let heads = rows * dims.value_heads;
        let [codes, scales] = check.int8(buffers.int8.as_ref(), rows, dims.width())?;
        let args = [
            step.out()?,
            step.output_gate()?,
            step.norm_weight()?,
            codes,
            scales,
            check.number("heads", heads)?.into(),
            dims.epsilon.into(),
        ];
        let lanes = (dims.head_dim / 4).min(MAX_NORM_LANES);
        let blocks = check.number("heads", (heads * lanes).div_ceil(FINISH_BLOCK))?;
        let Entries { delta_finish_32, delta_finish_64, delta_finish_128, delta_finish_256, .. } =
            &self.delta_net;
        let function = [delta_finish_32, delta_finish_64, delta_finish_128, delta_finish_256][dims.kernel()];
        queue(stream, function, Launch::linear(blocks, FINISH_BLOCK as u32), &args)
    }
}

/// Arguments that several kernels take.
impl Step<'_> {
    fn inputs(&self) -> Result<Arg, LaunchError> {
        let channels = self.layer.dims.channels();
        self.check.holds::<f32>("convolution inputs", self.buffers.qkv, self.rows * channels)
    }

    fn conv_weights(&self) -> Result<Arg, LaunchError> {
        let DeltaNetDims { taps, .. } = self.layer.dims;
        let values = self.layer.dims.channels() * taps;
        self.check.holds::<f32>("convolution weights", self.layer.conv, values)
    }

    /// Inputs of decay and strength, then rates and biases of the decay.
    fn gate_args(&self) -> Result<[Arg; 4], LaunchError> {
        let (check, heads) = (self.check, self.layer.dims.value_heads);
        Ok([
            check.holds::<f32>("decay inputs", self.buffers.alpha, self.rows * heads)?,
            check.holds::<f32>("strength inputs", self.buffers.beta, self.rows * heads)?,
            check.holds::<f32>("decay rates", self.layer.decay, heads)?,
            check.holds::<f32>("time step biases", self.layer.dt_bias, heads)?,
        ])
    }

    fn fact_args(&self) -> Result<[Arg; 2], LaunchError> {
        Ok([
            self.check.holds::<RowMeta>("row facts", self.buffers.row_meta, self.rows)?,
            self.check.holds::<SpanMeta>("span facts", self.buffers.span_meta, self.spans)?,
        ])
    }

    fn output_gate(&self) -> Result<Arg, LaunchError> {
        self.check.holds::<f32>("gate", self.buffers.gate, self.rows * self.layer.dims.width())
    }

    fn norm_weight(&self) -> Result<Arg, LaunchError> {
        self.check.holds::<f32>("norm weight", self.layer.norm, self.layer.dims.head_dim)
    }

    fn out(&self) -> Result<Arg, LaunchError> {
        self.check.holds::<f32>("out", self.buffers.out, self.rows * self.layer.dims.width())
    }
}
