//! Bands and what their bytes are for.

use super::request::{Split, Wishes};
use super::{LayerSizes, ModelSummary, Refusal};
use spillway_kernels::activations::{Activations, Forms};
use spillway_protocol::plan::{KV_BLOCK_TOKENS, Limits, StageBytes};
use spillway_worker_cpu::band::codes;
use spillway_worker_gpu::band::Needs;
use std::ops::Range;

/// A band of layers and what runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Band {
    pub layers: Range<usize>,
    pub processor: Processor,
    /// Whether the band before may write into this one's device.
    pub landing: bool,
}

/// What runs a band.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Processor {
    /// A CPU worker, the n-th.
    Cpu(usize),
    /// A GPU, by its place in the survey.
    Gpu(usize),
}

/// Cuts `layers` layers into contiguous bands: CPU workers first, then GPUs with the last `gpu_layers` layers.
pub(super) fn bands(layers: usize, wishes: &Wishes, gpu_layers: usize) -> Result<Vec<Band>, Refusal> {
    let Wishes { gpus, split, .. } = wishes;
    let (counts, cpu_stages) = match split {
        Split::Explicit { counts, cpu_stages } => (explicit(layers, counts)?, *cpu_stages),
        Split::Uniform { cpu_stages, gpu_stages } => {
            let spilled = layers - gpu_layers;
            let cpu_stages = if spilled > 0 { *cpu_stages } else { 0 };
            let mut counts = uniform(spilled, cpu_stages)?;
            counts.extend(uniform(gpu_layers, *gpu_stages)?);
            (counts, cpu_stages)
        }
    };
    let mut start = 0;
    let processors = (0..cpu_stages).map(Processor::Cpu).chain(gpus.iter().copied().map(Processor::Gpu));
    Ok(counts
        .into_iter()
        .zip(processors)
        .enumerate()
        .map(|(stage, (count, processor))| {
            start += count;
            let landing = wishes.peer_copies && stage > cpu_stages;
            Band { layers: start - count..start, processor, landing }
        })
        .collect())
}

/// `layers / stages` each, the remainder one by one to the first.
fn uniform(layers: usize, stages: usize) -> Result<Vec<usize>, Refusal> {
    if stages == 0 && layers == 0 {
        return Ok(Vec::new());
    }
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
pub(super) fn stage_bytes(model: &ModelSummary, limits: &Limits, band: &Band) -> StageBytes {
    let layers = &model.layers[band.layers.clone()];
    let sum = |of: fn(&LayerSizes) -> u64| layers.iter().map(of).sum::<u64>();
    let (embed, head) = (band.layers.start == 0, band.layers.end == model.layers.len());
    let at_head = |bytes: u64| if head { bytes } else { 0 };
    let (weights, scratch, pinned) = match band.processor {
        Processor::Cpu(_) => (
            sum(|layer| layer.weights) + at_head(model.head_bytes),
            scratch_bytes(layers, limits) + at_head(head_scratch_bytes(model, limits)),
            0,
        ),
        Processor::Gpu(_) => gpu_bytes(model, limits, band),
    };
    StageBytes {
        weights,
        embedding: if embed { model.embedding_bytes } else { 0 },
        kv: kv_bytes(sum(|layer| layer.kv_elements), limits),
        state: sum(|layer| layer.state_values) * 4 * limits.max_sequences as u64,
        scratch,
        rings: super::rings::outgoing_bytes(model, limits, head)
            + if embed { super::rings::incoming_bytes(model, limits) } else { 0 },
        pinned,
    }
}

/// Weights and scratch on a device, and page-locked host memory.
fn gpu_bytes(model: &ModelSummary, limits: &Limits, band: &Band) -> (u64, u64, u64) {
    let (layers, head) = (&model.layers[band.layers.clone()], band.layers.end == model.layers.len());
    let weights: u64 = layers.iter().map(|layer| layer.gpu.weights).sum();
    let needs = layers.iter().map(|layer| &layer.gpu.needs);
    let needs = Needs::new(model.gpu_widths, needs, head, *limits);
    let head_weights = if head { model.gpu_head_bytes } else { 0 };
    let landing = if band.landing { needs.landing_bytes(super::RING_SLOTS as usize) } else { 0 };
    (weights + head_weights, needs.scratch_bytes() + landing, needs.pinned_bytes())
}

/// Width of every buffer: as wide as the widest layer needs it.
fn buffer_widths(layers: &[LayerSizes]) -> Vec<usize> {
    let buffers = layers.iter().map(|layer| layer.buffers.len()).max().unwrap_or(0);
    let width = |buffer: usize| layers.iter().filter_map(|layer| layer.buffers.get(buffer)).max().copied();
    (0..buffers).filter_map(width).collect()
}

/// KV cache of `elements` per token over all blocks.
fn kv_bytes(elements: u64, limits: &Limits) -> u64 {
    elements * limits.kv_type.bytes() * (limits.kv_blocks * KV_BLOCK_TOKENS) as u64
}

/// Buffers of the largest step, shared by all layers of the band: each as wide as the widest layer needs it, and one prepared
/// matrix input.
fn scratch_bytes(layers: &[LayerSizes], limits: &Limits) -> u64 {
    let step = limits.max_step_tokens;
    let shared: usize = buffer_widths(layers).into_iter().sum();
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
