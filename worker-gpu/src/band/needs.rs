//! How much memory a band needs beside its weights and states. The planner charges with it and the band allocates by it.

use super::replay::captured_partitions;
use super::streaming::{FEWEST_STREAMED, is_streamed};
use crate::hip::ALIGN;
use crate::launch::{Attention, DeltaNetDims, Int8Rows, MAX_ALONE, RowMeta, SpanMeta};
use spillway_model::program::{DeltaNetSpec, Layer, Program, Step};
use spillway_protocol::plan::{KV_BLOCK_TOKENS, Limits};
use std::mem::size_of;

/// Most scratch for attention that splits contexts over blocks, unless one row needs more; beyond it, long contexts of many
/// sequences are attended to a few rows at a time.
const MAX_ATTENTION_SCRATCH: usize = 64 << 20;
/// Weights on their way to the device: pieces of this size, of which so many are in flight.
pub(super) const UPLOAD_PIECE: usize = 16 << 20;
pub(super) const UPLOAD_PIECES: usize = 3;
/// States on their way to or from another worker's memory: as much is in flight, or what one layer keeps of one sequence if that is more.
const HANDED_OVER: usize = 4 << 20;

/// What decides the scratch of one layer, or of several together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerNeeds {
    /// Width of each buffer in f32 values per token, the residual first.
    buffers: Vec<usize>,
    /// Width of each of the two buffers between the matrices of a gated MLP.
    hidden: usize,
    /// Widest input of a matrix.
    widest_input: usize,
    /// Bytes of attention scratch per row and partition of the context.
    attention: usize,
    /// Bytes of DeltaNet scratch per row.
    delta_net: usize,
    /// Bytes of state per sequence beyond what the program says a layer keeps: the convolution's history has a place more.
    more_state: usize,
    /// Elements of a KV block, and f32 values of the larger state of a sequence: what is handed over at once.
    block: usize,
    slot: usize,
}

impl LayerNeeds {
    /// The needs of a layer.
    pub fn of(layer: &Layer) -> Self {
        let mut needs = Self { buffers: layer.buffers.clone(), ..Self::default() };
        for step in &layer.steps {
            match step {
                Step::Linear { weight, .. } => needs.widest_input = needs.widest_input.max(weight.cols),
                Step::GatedMlp { gate, up, down, .. } => {
                    needs.hidden = needs.hidden.max(gate.rows).max(up.rows);
                    needs.widest_input = needs.widest_input.max(gate.cols).max(up.cols).max(down.cols);
                }
                Step::Attention { spec, .. } => {
                    let bytes = Attention::scratch_bytes(spec.heads, spec.value_dim, 1, 1);
                    needs.attention = needs.attention.max(bytes);
                    let token = spec.kv_heads * (spec.key_dim + spec.value_dim);
                    needs.block = needs.block.max(KV_BLOCK_TOKENS * token);
                }
                Step::DeltaNet { spec, .. } => {
                    let dims = delta_net_dims(spec);
                    needs.delta_net = needs.delta_net.max(dims.scratch_bytes(1));
                    needs.more_state += dims.channels() * size_of::<f32>();
                    needs.slot = needs.slot.max(dims.matrix_len()).max(dims.history_len());
                }
                _ => {}
            }
        }
        needs
    }

    fn include(&mut self, other: &LayerNeeds) {
        self.buffers.resize(self.buffers.len().max(other.buffers.len()), 0);
        for (width, other) in self.buffers.iter_mut().zip(&other.buffers) {
            *width = (*width).max(*other);
        }
        self.hidden = self.hidden.max(other.hidden);
        self.widest_input = self.widest_input.max(other.widest_input);
        self.attention = self.attention.max(other.attention);
        self.delta_net = self.delta_net.max(other.delta_net);
        self.more_state += other.more_state; // layers share scratch, not state
        self.block = self.block.max(other.block);
        self.slot = self.slot.max(other.slot);
    }
}

pub(super) fn delta_net_dims(spec: &DeltaNetSpec) -> DeltaNetDims {
    let &DeltaNetSpec { key_heads, value_heads, head_dim, conv_kernel, eps, .. } = spec;
    DeltaNetDims { key_heads, value_heads, head_dim, taps: conv_kernel, epsilon: eps }
}

/// What does not depend on layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelWidths {
    /// Width of the residual.
    pub d_model: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Pairs of all rotary embeddings.
    pub rope_pairs: usize,
}

impl ModelWidths {
    /// The widths of a program.
    pub fn of(program: &Program) -> Self {
        let rope_pairs = program.ropes.iter().map(|rope| rope.inv_freq.len()).sum();
        Self { d_model: program.d_model, vocab: program.vocab, rope_pairs }
    }
}

/// What decides the scratch of a band.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    widths: ModelWidths,
    widest: LayerNeeds,
    head: bool,
    limits: Limits,
    /// Bytes of the largest group of matrices that is streamed, 0 for none.
    streamed: usize,
    /// Whether some of the layers are lifted.
    lifts: bool,
}

/// Bytes of every allocation of a band's scratch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ScratchBytes {
    /// By buffer number.
    pub buffers: Vec<usize>,
    /// Each of two.
    pub hidden: usize,
    pub int8: usize,
    pub attention: usize,
    pub delta_net: usize,
    pub facts: usize,
    /// Rows that want logits, normed in place.
    pub gathered: usize,
    pub logits: usize,
    /// Each of two places for weights that are streamed from host memory.
    pub streamed: usize,
}

impl ScratchBytes {
    /// Bytes of what all layers share, as memory is reserved for it.
    pub fn of_steps(&self) -> usize {
        let Self { buffers, hidden, int8, attention, delta_net, facts, streamed, gathered: _, logits: _ } =
            self;
        let single = [hidden, hidden, int8, attention, delta_net, facts, streamed, streamed];
        single.into_iter().chain(buffers).map(|bytes| bytes.next_multiple_of(ALIGN)).sum()
    }
}

impl Needs {
    /// The needs of a band of `layers`, with the head or without.
    pub fn new<'a>(
        widths: ModelWidths,
        layers: impl IntoIterator<Item = &'a LayerNeeds>,
        head: bool,
        limits: Limits,
    ) -> Self {
        let mut widest = LayerNeeds { buffers: vec![widths.d_model], ..LayerNeeds::default() };
        layers.into_iter().for_each(|layer| widest.include(layer));
        if head {
            widest.widest_input = widest.widest_input.max(widths.d_model);
        }
        Self { widths, widest, head, limits, streamed: 0, lifts: false }
    }

    /// With layers in host memory, given by the bytes of their [`largest_group`](super::largest_group) of matrices.
    #[must_use]
    pub fn with_mapped(self, groups: impl ExactSizeIterator<Item = u64>) -> Self {
        let is_used = groups.len() >= FEWEST_STREAMED && is_streamed(self.limits.max_step_tokens);
        let streamed = if is_used { groups.max().unwrap_or(0) } else { 0 };
        Self { streamed: usize::try_from(streamed).unwrap_or(usize::MAX), ..self }
    }

    /// With layers among them that are lifted, given as those in host memory are. These are streamed however few they are: no step
    /// of one token reads them over the bus.
    #[must_use]
    pub fn with_lifted(self, groups: impl ExactSizeIterator<Item = u64>) -> Self {
        let lifts = groups.len() > 0;
        let is_used = is_streamed(self.limits.max_step_tokens);
        let streamed = groups.max().filter(|_| is_used).map_or(self.streamed as u64, |largest| largest);
        Self { streamed: usize::try_from(streamed).unwrap_or(usize::MAX), lifts, ..self }
    }

    pub(super) fn scratch(&self) -> ScratchBytes {
        let Self { widths, widest, limits, .. } = self;
        let rows = limits.max_step_tokens;
        let float = size_of::<f32>();
        let logit_rows = if self.head { limits.max_logit_rows } else { 0 };
        // What captured steps are queued with, which is up to twice what the longest sequence has.
        let row_attention = widest.attention * captured_partitions(limits.max_seq);
        let attention_rows = rows.min(limits.max_sequences.max(MAX_ALONE));
        ScratchBytes {
            buffers: widest.buffers.iter().map(|width| width * rows * float).collect(),
            hidden: widest.hidden * rows * float,
            int8: Int8Rows::bytes_for(rows.max(logit_rows), widest.widest_input),
            attention: (row_attention * attention_rows).min(MAX_ATTENTION_SCRATCH.max(row_attention)),
            delta_net: widest.delta_net * rows,
            facts: self.facts_bytes(),
            gathered: logit_rows * widths.d_model * float,
            logits: logit_rows * widths.vocab * float,
            streamed: self.streamed,
        }
    }

    /// Bytes of device memory beside weights, KV cache and the states that the program counts.
    pub fn scratch_bytes(&self) -> u64 {
        let ScratchBytes { buffers, hidden, int8, attention, delta_net, facts, gathered, logits, streamed } =
            self.scratch();
        let buffers: usize = buffers.iter().sum();
        let more_state = self.widest.more_state * self.limits.max_sequences;
        let per_step = buffers + 2 * hidden + int8 + attention + delta_net + facts + gathered + logits;
        (per_step + more_state) as u64 + 2 * streamed as u64
    }

    /// Bytes of page-locked host memory.
    pub fn pinned_bytes(&self) -> u64 {
        let logits = self.scratch().logits;
        let handed_over = if self.lifts { self.handed_over_bytes() } else { 0 };
        let steps = self.residual_bytes() + logits + self.facts_bytes() + handed_over;
        (steps + UPLOAD_PIECE * UPLOAD_PIECES) as u64
    }

    /// Bytes of the buffer through which states of lifted layers are handed over.
    pub(super) fn handed_over_bytes(&self) -> usize {
        let element = usize::try_from(self.limits.kv_type.bytes()).unwrap_or(usize::MAX);
        let largest = (self.widest.block * element).max(self.widest.slot * size_of::<f32>());
        largest.max(HANDED_OVER)
    }

    /// Bytes of device memory that the stage before writes into, for a ring of `slots` slots.
    pub fn landing_bytes(&self, slots: usize) -> u64 {
        super::edges::landing_bytes(self.residual_bytes(), slots) as u64
    }

    /// Bytes of the residual of the largest step.
    pub(super) fn residual_bytes(&self) -> usize {
        self.limits.max_step_tokens * self.widths.d_model * size_of::<f32>()
    }

    /// Bytes of the facts of the largest step: see [`super::facts`].
    fn facts_bytes(&self) -> usize {
        let Limits { max_step_tokens: rows, max_sequences, max_seq, kv_blocks, .. } = self.limits;
        let per_row = size_of::<RowMeta>() + size_of::<u32>() + 2 * self.widths.rope_pairs * size_of::<f32>();
        let blocks = (max_sequences * max_seq.div_ceil(KV_BLOCK_TOKENS)).min(kv_blocks * max_sequences);
        let parts = rows * per_row + max_sequences * size_of::<SpanMeta>() + blocks * size_of::<u32>();
        parts + super::facts::PADDING
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::PARTITION;
    use spillway_protocol::plan::{ActivationType, KvType};

    /// Captured steps are queued with a power of two of partitions. Scratch for what sequences really have was too small for
    /// them, and every long context was attended to by a few blocks.
    #[test]
    fn scratch_holds_the_partitions_of_a_captured_step() {
        let of_partition = Attention::scratch_bytes(24, 256, 1, 1);
        for max_seq in [PARTITION, 8192 + PARTITION, 262_144, 3 << 20] {
            let limits = Limits {
                max_seq,
                max_sequences: 1,
                kv_blocks: max_seq.div_ceil(KV_BLOCK_TOKENS),
                kv_type: KvType::F16,
                activations: ActivationType::Int8,
                max_step_tokens: 512,
                max_logit_rows: 1,
            };
            let widths = ModelWidths { d_model: 64, vocab: 64, rope_pairs: 0 };
            let layer = LayerNeeds { attention: of_partition, ..LayerNeeds::default() };
            let scratch = Needs::new(widths, [&layer], false, limits).scratch().attention;
            assert!(scratch >= of_partition * max_seq.div_ceil(PARTITION).next_power_of_two(), "{max_seq}");
        }
    }
}
