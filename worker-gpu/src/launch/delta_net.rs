//! Causal depthwise convolution and gated delta rule (Gated DeltaNet), as the CPU worker computes them.

use super::{Check, Kernels, LaunchError, RowMeta, SpanMeta, entries, queue};
use crate::hip::{DeviceSlice, Function, Launch, Stream};

/// Head widths that the recurrence is compiled for.
const HEAD_DIMS: [usize; 4] = [32, 64, 128, 256];
/// Threads that share a row of the state.
const LANES_PER_ROW: usize = 8;
/// Threads of a block of the recurrence.
const BLOCK: usize = 256;
/// Most taps of the convolution.
const MAX_TAPS: usize = 8;

entries!(Entries: "delta_net" {
    delta_conv, delta_remember, delta_gates, delta_rule_32, delta_rule_64, delta_rule_128, delta_rule_256,
    delta_gated_norm,
});

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

    /// f32 values of one slot's past inputs, `[taps - 1][channels]`, oldest first.
    pub fn history_len(self) -> usize {
        (self.taps - 1) * self.channels()
    }

    /// f32 values of one slot's matrix states, `[value head][value][key]`.
    pub fn matrix_len(self) -> usize {
        self.value_heads * self.head_dim * self.head_dim
    }

    /// Bytes of working memory for steps of `rows` rows.
    pub fn scratch_bytes(self, rows: usize) -> usize {
        rows * (self.channels() + 2 * self.value_heads) * size_of::<f32>()
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
    /// `[rows, value_heads]` decays, then as many strengths.
    gates: DeviceSlice,
}

impl Kernels {
    /// Runs a DeltaNet layer over the step's rows and updates the states of the spans' slots.
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
        let gates_bytes = rows * 2 * dims.value_heads * size_of::<f32>();
        let gates = buffers.scratch.part(convolved_bytes, gates_bytes)?;
        let step = Step { check, layer, buffers, rows, spans, convolved, gates };
        self.convolve(stream, &step)?;
        self.remember(stream, &step)?;
        self.gates(stream, &step)?;
        self.recur(stream, &step)?;
        self.gated_norm(stream, &step)
    }

    fn convolve(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, layer, buffers, rows, .. } = *step;
        let dims = layer.dims;
        let args = [
            check.holds::<f32>("convolution inputs", buffers.qkv, rows * dims.channels())?,
            layer.history.into(),
            check.holds::<f32>("convolution weights", layer.conv, dims.channels() * dims.taps)?,
            check.holds::<RowMeta>("row facts", buffers.row_meta, rows)?,
            check.holds::<SpanMeta>("span facts", buffers.span_meta, step.spans)?,
            step.convolved.into(),
            check.number("channels", dims.channels())?.into(),
            check.number("key heads", dims.key_heads)?.into(),
            check.number("head width", dims.head_dim)?.into(),
            check.number("taps", dims.taps)?.into(),
            dims.epsilon.into(),
        ];
        let heads = dims.channels() / dims.head_dim;
        let grid = [check.number("rows", rows)?, check.number("heads", heads)?, 1];
        let launch = Launch { grid, block: head_block(dims.head_dim), shared_bytes: 0 };
        queue(stream, &self.delta_net.delta_conv, launch, &args)
    }

    /// Keeps the last inputs of every span for the next step.
    fn remember(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, layer, buffers, spans, .. } = *step;
        let args = [
            buffers.qkv.into(),
            layer.history.into(),
            buffers.span_meta.into(),
            check.number("channels", layer.dims.channels())?.into(),
            check.number("taps", layer.dims.taps)?.into(),
        ];
        let blocks = layer.dims.channels().div_ceil(BLOCK);
        let grid = [check.number("spans", spans)?, check.number("channels", blocks)?, 1];
        queue(
            stream,
            &self.delta_net.delta_remember,
            Launch { grid, block: BLOCK as u32, shared_bytes: 0 },
            &args,
        )
    }

    fn gates(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, layer, buffers, rows, .. } = *step;
        let count = rows * layer.dims.value_heads;
        let args = [
            check.holds::<f32>("decay inputs", buffers.alpha, count)?,
            check.holds::<f32>("strength inputs", buffers.beta, count)?,
            check.holds::<f32>("decay rates", layer.decay, layer.dims.value_heads)?,
            check.holds::<f32>("time step biases", layer.dt_bias, layer.dims.value_heads)?,
            step.gates.into(),
            check.number("value heads", layer.dims.value_heads)?.into(),
            check.number("gates", count)?.into(),
        ];
        let blocks = check.number("gates", count.div_ceil(BLOCK))?;
        queue(stream, &self.delta_net.delta_gates, Launch::linear(blocks, BLOCK as u32), &args)
    }

    fn recur(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, layer, buffers, rows, spans, .. } = *step;
        let dims = layer.dims;
        let args = [
            step.convolved.into(),
            step.gates.into(),
            layer.matrix.into(),
            buffers.span_meta.into(),
            check.holds::<f32>("out", buffers.out, rows * dims.value_heads * dims.head_dim)?,
            check.number("rows", rows)?.into(),
            check.number("key heads", dims.key_heads)?.into(),
            check.number("value heads", dims.value_heads)?.into(),
        ];
        let grid = [
            check.number("spans", spans)?,
            check.number("value heads", dims.value_heads)?,
            check.number("head width", dims.head_dim * LANES_PER_ROW / BLOCK)?,
        ];
        let function = self.delta_net.rule(dims.head_dim);
        queue(stream, function, Launch { grid, block: BLOCK as u32, shared_bytes: 0 }, &args)
    }

    fn gated_norm(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, layer, buffers, rows, .. } = *step;
        let dims = layer.dims;
        let args = [
            buffers.out.into(),
            check.holds::<f32>("gate", buffers.gate, rows * dims.value_heads * dims.head_dim)?,
            check.holds::<f32>("norm weight", layer.norm, dims.head_dim)?,
            check.number("head width", dims.head_dim)?.into(),
            dims.epsilon.into(),
        ];
        let blocks = check.number("heads", rows * dims.value_heads)?;
        let launch = Launch::linear(blocks, head_block(dims.head_dim));
        queue(stream, &self.delta_net.delta_gated_norm, launch, &args)
    }
}

/// Threads of a block that works on one head: whole waves of either size.
fn head_block(head_dim: usize) -> u32 {
    (head_dim as u32).next_multiple_of(64)
}

impl Entries {
    fn rule(&self, head_dim: usize) -> &Function {
        match head_dim {
            32 => &self.delta_rule_32,
            64 => &self.delta_rule_64,
            128 => &self.delta_rule_128,
            _ => &self.delta_rule_256,
        }
    }
}
