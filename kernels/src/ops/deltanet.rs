//! Causal depthwise convolution and gated delta rule (Gated DeltaNet, arXiv 2412.06464), as Qwen3.5 uses them.
//!
//! Per token: `c = silu(conv(qkv))` is split into queries, keys and values; queries and keys are L2-normalised per head,
//! queries also divided by `sqrt(head_dim)`. Value head `j` with key head `j % key_heads` then has decay
//! `g = exp(rate_j * softplus(alpha_j + bias_j))` and strength `b = sigmoid(beta_j)`, and its state `S` becomes
//! `g S + k (b (v - g S k))`; the output is `S q`, RMS-normed per head and multiplied by `silu(gate)`.
//!
//! **Work.** One pass over (span, head, token range) for the convolution and the norms, one over (span, value head) for
//! the recurrence. In the second, a head's tokens are processed in order by one thread.

pub(crate) mod kernel;
mod state;
#[cfg(test)]
mod tests;

pub use state::RecurrentState;

use super::{Ops, OpsError, check};
use crate::disjoint::Disjoint;
use crate::lanes::LANES;
use crate::pool::{ChunkQueue, ThreadPool};
use kernel::{Conv, Head, L2Norm};

/// Tokens of one work item of the convolution.
const CONV_TOKENS: usize = 64;

/// Sizes of a DeltaNet layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaNetDims {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub value_heads: usize,
    /// Width of every head, a multiple of 16.
    pub head_dim: usize,
    /// Taps of the convolution, the current token included.
    pub conv_kernel: usize,
    /// Epsilon of the L2 norms (added to the sum) and of the gated norm (added to the mean).
    pub eps: f32,
}

impl DeltaNetDims {
    /// Channels of the convolution: queries, keys, values.
    pub fn channels(self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.head_dim
    }

    /// f32 values of one slot's convolution state.
    pub fn conv_len(self) -> usize {
        (self.conv_kernel - 1) * self.channels()
    }

    /// f32 values of one slot's matrix states.
    pub fn matrix_len(self) -> usize {
        self.value_heads * self.head_dim * self.head_dim
    }

    fn validate(self) -> Result<(), OpsError> {
        let heads = "a positive multiple of the key heads";
        let rules = [
            ("DeltaNet key heads", self.key_heads, self.key_heads > 0, "at least 1"),
            (
                "DeltaNet value heads",
                self.value_heads,
                self.value_heads > 0 && self.value_heads.is_multiple_of(self.key_heads.max(1)),
                heads,
            ),
            (
                "DeltaNet head width",
                self.head_dim,
                self.head_dim > 0 && self.head_dim.is_multiple_of(LANES),
                "a positive multiple of 16",
            ),
            ("DeltaNet convolution taps", self.conv_kernel, self.conv_kernel > 1, "at least 2"),
        ];
        match rules.into_iter().find(|(_, _, fits, _)| !fits) {
            Some((what, got, _, rule)) => Err(OpsError::Unsupported { what, got, rule }),
            None => Ok(()),
        }
    }
}

/// The weights of a DeltaNet layer, prepared for the kernels.
#[derive(Debug, Clone)]
pub struct DeltaNet {
    dims: DeltaNetDims,
    /// `[taps][channels]`.
    conv: Vec<f32>,
    rate: Vec<f32>,
    bias: Vec<f32>,
    norm: Vec<f32>,
}

impl DeltaNet {
    /// Prepares a layer: `conv` is `[channels, conv_kernel]`, oldest tap first; `decay` (`-exp(A_log)`) and `dt_bias` have
    /// one value per value head, `norm` one per dimension of a head.
    ///
    /// # Errors
    /// [`OpsError::Unsupported`] for dimensions that the kernels cannot handle, [`OpsError::Shape`] when a weight does
    /// not fit them.
    pub fn new(
        dims: DeltaNetDims,
        conv: &[f32],
        decay: &[f32],
        dt_bias: &[f32],
        norm: &[f32],
    ) -> Result<Self, OpsError> {
        dims.validate()?;
        let (channels, taps) = (dims.channels(), dims.conv_kernel);
        check("convolution weights", conv.len(), channels * taps)?;
        check("decay rates", decay.len(), dims.value_heads)?;
        check("time step biases", dt_bias.len(), dims.value_heads)?;
        check("gated norm weight", norm.len(), dims.head_dim)?;
        Ok(Self {
            dims,
            conv: (0..channels * taps).map(|i| conv[i % channels * taps + i / channels]).collect(),
            rate: decay.to_vec(),
            bias: dt_bias.to_vec(),
            norm: norm.to_vec(),
        })
    }

    /// The layer's dimensions.
    pub fn dims(&self) -> DeltaNetDims {
        self.dims
    }
}

/// Consecutive tokens of one sequence in a step.
#[derive(Debug, Clone, Copy)]
pub struct StateSpan {
    /// Row of the first token in the step's buffers; the spans of a step come in order of their rows.
    pub first_row: usize,
    /// Tokens.
    pub tokens: usize,
    /// State slot of the sequence.
    pub slot: usize,
    /// Start from the empty state instead of the slot's (the span begins its sequence).
    pub reset: bool,
}

/// The buffers of a DeltaNet step, one row per token of the step.
#[derive(Debug)]
pub struct DeltaNetRows<'a> {
    /// Inputs of the convolution, `[rows, channels]`: queries, keys, values.
    pub qkv: &'a [f32],
    /// Gate of the output, `[rows, value_heads * head_dim]`.
    pub gate: &'a [f32],
    /// Inputs of the decay, `[rows, value_heads]`.
    pub alpha: &'a [f32],
    /// Inputs of the update strength, `[rows, value_heads]`.
    pub beta: &'a [f32],
    /// Outputs, `[rows, value_heads * head_dim]`. Rows of no span are left alone.
    pub out: &'a mut [f32],
}

/// Working memory, shared by all layers and steps; grows to the largest step seen.
#[derive(Debug, Default)]
pub struct DeltaNetScratch {
    /// Convolved channels, `[head][row][head_dim]`: query heads, key heads, value heads.
    convolved: Vec<f32>,
    /// Per thread: gates of one head's tokens, then update strengths.
    gates: Vec<f32>,
    conv_items: Vec<ConvItem>,
    slots: Vec<usize>,
}

/// Some tokens of a span, one head's channels.
#[derive(Debug, Clone, Copy)]
struct ConvItem {
    span: usize,
    token: usize,
    head: usize,
}

impl DeltaNetScratch {
    /// Empty working memory.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Ops {
    /// Runs a DeltaNet layer over the step's rows and updates the states of the spans' slots.
    ///
    /// # Errors
    /// [`OpsError`] when buffers, spans, state and layer do not fit each other, and when two spans name one slot.
    /// Nothing was computed then.
    pub fn delta_net(
        &self,
        pool: &ThreadPool,
        layer: &DeltaNet,
        state: &mut RecurrentState,
        spans: &[StateSpan],
        rows: DeltaNetRows<'_>,
        scratch: &mut DeltaNetScratch,
    ) -> Result<(), OpsError> {
        validate(layer, state, spans, &rows, scratch)?;
        for span in spans.iter().filter(|span| span.reset && span.tokens > 0) {
            state.reset(span.slot)?;
        }
        let call = Call { ops: self, pool, layer, dims: layer.dims, spans };
        let n = rows.alpha.len() / layer.dims.value_heads;
        scratch.convolved.resize((n * layer.dims.channels()).max(scratch.convolved.len()), 0.0);
        call.convolve(n, rows.qkv, state.conv.values(), scratch);
        call.remember(rows.qkv, state.conv.values_mut());
        call.recur(n, rows, state.matrix.values_mut(), scratch);
        Ok(())
    }
}

/// Checks everything that the kernels rely on.
fn validate(
    layer: &DeltaNet,
    state: &RecurrentState,
    spans: &[StateSpan],
    rows: &DeltaNetRows<'_>,
    scratch: &mut DeltaNetScratch,
) -> Result<(), OpsError> {
    let dims = layer.dims;
    if state.dims() != dims {
        let (got, want) = (state.dims().matrix_len(), dims.matrix_len());
        return Err(OpsError::Shape { what: "recurrent state", got, want });
    }
    let n = rows.alpha.len() / dims.value_heads;
    check("decay inputs", rows.alpha.len(), n * dims.value_heads)?;
    check("strength inputs", rows.beta.len(), n * dims.value_heads)?;
    check("convolution inputs", rows.qkv.len(), n * dims.channels())?;
    check("DeltaNet gate", rows.gate.len(), n * dims.value_heads * dims.head_dim)?;
    check("DeltaNet output", rows.out.len(), n * dims.value_heads * dims.head_dim)?;
    let mut next_row = 0;
    scratch.slots.clear();
    for span in spans {
        // Spans come in order of their rows, so they cannot overlap.
        if span.first_row < next_row || span.tokens > n.saturating_sub(span.first_row) {
            return Err(OpsError::Shape { what: "span rows", got: span.first_row, want: next_row });
        }
        next_row = span.first_row + span.tokens;
        state.check(span.slot)?;
        scratch.slots.push(span.slot);
    }
    scratch.slots.sort_unstable();
    match scratch.slots.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(OpsError::StateSlot { slot: pair[0], slots: state.slots() }),
        None => Ok(()),
    }
}

/// A validated DeltaNet step.
struct Call<'a> {
    ops: &'a Ops,
    pool: &'a ThreadPool,
    layer: &'a DeltaNet,
    dims: DeltaNetDims,
    spans: &'a [StateSpan],
}

impl Call<'_> {
    /// Convolution, activation and norms of all heads into `scratch.convolved`; `n` rows in the step.
    fn convolve(&self, n: usize, qkv: &[f32], history: &[f32], scratch: &mut DeltaNetScratch) {
        let DeltaNetScratch { convolved, conv_items, .. } = scratch;
        let (dim, channels) = (self.dims.head_dim, self.dims.channels());
        conv_items.clear();
        for (i, span) in self.spans.iter().enumerate() {
            for token in (0..span.tokens).step_by(CONV_TOKENS) {
                let heads = 0..channels / dim;
                conv_items.extend(heads.map(|head| ConvItem { span: i, token, head }));
            }
        }
        let out = Disjoint::new(convolved);
        let queue = ChunkQueue::new(conv_items.len(), 4);
        self.pool.run(&|_| {
            while let Some(range) = queue.take() {
                for &ConvItem { span, token, head } in &conv_items[range] {
                    let span = &self.spans[span];
                    let first_channel = head * dim;
                    let job = Conv {
                        inputs: &qkv[span.first_row * channels + first_channel..],
                        stride: channels,
                        history: &history[span.slot * self.dims.conv_len() + first_channel..],
                        history_stride: channels,
                        weights: &self.layer.conv[first_channel..],
                        taps: self.dims.conv_kernel,
                        token,
                        channels: dim,
                        norm: self.head_norm(head),
                    };
                    let tokens = CONV_TOKENS.min(span.tokens - token);
                    let at = (head * n + span.first_row + token) * dim;
                    // SAFETY: the rows are inside the step's buffers (validated); every (head, row) belongs to one
                    // item; `ops` proves the instruction set.
                    unsafe { (self.ops.table.conv)(&job, out.part(at, tokens * dim)) };
                }
            }
        });
    }

    /// The norm of a head of the convolution's channels: queries and keys have one, values none.
    fn head_norm(&self, head: usize) -> Option<L2Norm> {
        let eps = self.dims.eps;
        #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
        let query_scale = 1.0 / (self.dims.head_dim as f32).sqrt();
        match head / self.dims.key_heads {
            0 => Some(L2Norm { eps, scale: query_scale }),
            1 => Some(L2Norm { eps, scale: 1.0 }),
            _ => None,
        }
    }

    /// Keeps the last inputs of every span for the next step.
    fn remember(&self, qkv: &[f32], history: &mut [f32]) {
        let (past, channels) = (self.dims.conv_kernel - 1, self.dims.channels());
        for span in self.spans {
            let state = &mut history[span.slot * self.dims.conv_len()..][..self.dims.conv_len()];
            let new = span.tokens.min(past);
            state.copy_within(new * channels.., 0);
            let end = (span.first_row + span.tokens) * channels;
            state[(past - new) * channels..].copy_from_slice(&qkv[end - new * channels..end]);
        }
    }

    /// Recurrence and gated norm of all value heads.
    fn recur(&self, n: usize, rows: DeltaNetRows<'_>, matrix: &mut [f32], scratch: &mut DeltaNetScratch) {
        let (dim, heads, key_heads) = (self.dims.head_dim, self.dims.value_heads, self.dims.key_heads);
        let DeltaNetScratch { convolved, gates, .. } = scratch;
        let longest = self.spans.iter().map(|span| span.tokens).max().unwrap_or(0).next_multiple_of(LANES);
        gates.resize((2 * longest * self.pool.threads()).max(gates.len()), 0.0);
        let (gates, matrix, out) = (Disjoint::new(gates), Disjoint::new(matrix), Disjoint::new(rows.out));
        let convolved = &*convolved;
        let queue = ChunkQueue::new(self.spans.len() * heads, 1);
        self.pool.run(&|thread| {
            // SAFETY: every thread has its own part.
            let gates = unsafe { gates.part(2 * longest * thread, 2 * longest) };
            let (alpha, beta) = gates.split_at_mut(longest);
            while let Some(range) = queue.take() {
                let (span, j) = (&self.spans[range.start / heads], range.start % heads);
                if span.tokens == 0 {
                    continue;
                }
                let padded = span.tokens.next_multiple_of(LANES);
                for (token, (alpha, beta)) in alpha.iter_mut().zip(&mut *beta).take(span.tokens).enumerate() {
                    let at = (span.first_row + token) * heads + j;
                    (*alpha, *beta) = (rows.alpha[at], rows.beta[at]);
                }
                let tokens_of =
                    |head: usize| &convolved[(head * n + span.first_row) * dim..][..span.tokens * dim];
                let first = (span.first_row * heads + j) * dim;
                // SAFETY: slots differ between spans (validated) and heads between items; output rows of a head belong
                // to its item; `ops` proves the instruction set.
                unsafe {
                    let slot = span.slot * self.dims.matrix_len();
                    let mut head = Head {
                        q: tokens_of(j % key_heads),
                        k: tokens_of(key_heads + j % key_heads),
                        v: tokens_of(2 * key_heads + j),
                        alpha: &mut alpha[..padded],
                        beta: &mut beta[..padded],
                        rate: self.layer.rate[j],
                        bias: self.layer.bias[j],
                        state: matrix.part(slot + j * dim * dim, dim * dim),
                        gate: &rows.gate[first..],
                        out: out.part(first, dim).as_mut_ptr(),
                        stride: heads * dim,
                        norm: &self.layer.norm,
                        eps: self.dims.eps,
                        tokens: span.tokens,
                        head_dim: dim,
                    };
                    (self.ops.table.delta_rule)(&mut head);
                }
            }
        });
    }
}
