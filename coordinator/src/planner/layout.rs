//! Bands and what their bytes are for.

use super::request::Bands;
use super::{LayerSizes, ModelSummary, Refusal};
use spillway_kernels::activations::{Activations, Forms};
use spillway_protocol::plan::{KV_BLOCK_TOKENS, Limits, StageBytes};
use spillway_worker_cpu::band::codes;
use std::ops::Range;

/// Cuts `layers` layers into contiguous bands.
pub(super) fn bands(layers: usize, wish: &Bands) -> Result<Vec<Range<usize>>, Refusal> {
    let counts = match wish {
        Bands::Uniform(stages) => uniform(layers, *stages)?,
        Bands::Explicit(counts) => explicit(layers, counts)?,
    };
    let mut start = 0;
    Ok(counts
        .into_iter()
        .map(|count| {
            start += count;
            start - count..start
        })
        .collect())
}

/// `layers / stages` each, the remainder one by one to the first.
fn uniform(layers: usize, stages: usize) -> Result<Vec<usize>, Refusal> {
    if stages > layers {
        return Err(Refusal::TooFewLayers { stages, layers });
    }
    Ok((0..stages).map(|stage| layers / stages + usize::from(stage < layers % stages)).collect())
}

fn explicit(layers: usize, counts: &[usize]) -> Result<Vec<usize>, Refusal> {
    if let Some(stage) = counts.iter().position(|&count| count == 0) {
        return Err(Refusal::PpLayersEmptyStage { stage });
    }
    let sum = counts.iter().fold(0usize, |sum, &count| sum.saturating_add(count));
    if sum != layers {
        return Err(Refusal::PpLayersSum { sum, layers });
    }
    Ok(counts.to_vec())
}

/// Blocks that one sequence of `max_seq` tokens fills.
pub(super) fn blocks_per_sequence(max_seq: usize) -> usize {
    max_seq.div_ceil(KV_BLOCK_TOKENS)
}

/// Logit rows of one frame: enough for every live sequence, otherwise as many as fit into 16 MiB.
pub(super) fn logit_rows(vocab: usize, step: usize, parallel: usize) -> usize {
    const FRAME_BYTES: usize = 16 << 20;
    (FRAME_BYTES / (vocab.max(1) * size_of::<f32>())).clamp(parallel, step)
}

/// Charges a band for everything its worker allocates.
pub(super) fn stage_bytes(model: &ModelSummary, limits: &Limits, band: &Range<usize>) -> StageBytes {
    let layers = &model.layers[band.clone()];
    let sum = |of: fn(&LayerSizes) -> u64| layers.iter().map(of).sum::<u64>();
    let head = band.end == model.layers.len();
    StageBytes {
        weights: sum(|layer| layer.weights) + if head { model.head_bytes } else { 0 },
        embedding: if band.start == 0 { model.embedding_bytes } else { 0 },
        kv: kv_bytes(sum(|layer| layer.kv_elements), limits),
        state: sum(|layer| layer.state_values) * 4 * limits.max_sequences as u64,
        scratch: scratch_bytes(layers, limits) + if head { head_scratch_bytes(model, limits) } else { 0 },
        rings: super::rings::outgoing_bytes(model, limits, head)
            + if band.start == 0 { super::rings::incoming_bytes(model, limits) } else { 0 },
    }
}

/// KV cache of `elements` per token over all blocks.
fn kv_bytes(elements: u64, limits: &Limits) -> u64 {
    elements * limits.kv_type.bytes() * (limits.kv_blocks * KV_BLOCK_TOKENS) as u64
}

/// Buffers of the largest step, shared by all layers of the band: each as wide as the widest layer needs it, and one prepared
/// matrix input.
fn scratch_bytes(layers: &[LayerSizes], limits: &Limits) -> u64 {
    let step = limits.max_step_tokens;
    let buffers = layers.iter().map(|layer| layer.buffers.len()).max().unwrap_or(0);
    let width = |buffer: usize| layers.iter().filter_map(|layer| layer.buffers.get(buffer)).max().copied();
    let shared: usize = (0..buffers).filter_map(width).sum();
    let hidden = layers.iter().map(|layer| layer.hidden).max().unwrap_or(0);
    let widest = layers.iter().map(|layer| layer.widest_input).max().unwrap_or(0);
    let formats = layers.iter().flat_map(|layer| layer.formats.iter().copied());
    let inputs = Activations::bytes_for(step, widest, Forms::of(formats, codes(limits.activations)));
    (step * (shared + hidden) * size_of::<f32>() + inputs) as u64
}

/// Per logit row: the residual, its norm, the logits, and the prepared input of the output projection.
fn head_scratch_bytes(model: &ModelSummary, limits: &Limits) -> u64 {
    let (rows, d_model) = (limits.max_logit_rows, model.model.d_model);
    let inputs =
        Activations::bytes_for(rows, d_model, Forms::of([model.head_format], codes(limits.activations)));
    (rows * (2 * d_model + model.model.vocab) * size_of::<f32>() + inputs) as u64
}
