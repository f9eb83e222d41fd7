//! Bands and what their bytes are for.

use super::request::Bands;
use super::{LayerSizes, ModelSummary, Refusal};
use spillway_protocol::plan::{KV_BLOCK_TOKENS, Limits, StageBytes};
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
    let step = limits.max_step_tokens as u64;
    StageBytes {
        weights: sum(|layer| layer.weights) + if head { model.head_bytes } else { 0 },
        embedding: if band.start == 0 { model.embedding_bytes } else { 0 },
        kv: kv_bytes(sum(|layer| layer.kv_elements), limits),
        state: sum(|layer| layer.state_values) * 4 * limits.max_sequences as u64,
        scratch: layers.iter().map(|layer| scratch_bytes(layer, step)).max().unwrap_or(0)
            + if head { head_scratch_bytes(model, limits) } else { 0 },
        rings: super::rings::outgoing_bytes(model, limits, head)
            + if band.start == 0 { super::rings::incoming_bytes(model, limits) } else { 0 },
    }
}

/// KV cache of `elements` per token over all blocks.
fn kv_bytes(elements: u64, limits: &Limits) -> u64 {
    elements * limits.kv_type.bytes() * (limits.kv_blocks * KV_BLOCK_TOKENS) as u64
}

/// Activations of a step and the quantised copy of the widest matrix input: a code per element, a scale and two sums
/// per 32.
fn scratch_bytes(layer: &LayerSizes, step: u64) -> u64 {
    let quantised = layer.widest_input + layer.widest_input.div_ceil(32) * 8;
    step * (layer.scratch_values * 4 + quantised)
}

fn head_scratch_bytes(model: &ModelSummary, limits: &Limits) -> u64 {
    (limits.max_logit_rows * (model.model.vocab + model.model.d_model) * size_of::<f32>()) as u64
}
