//! Bands and what their bytes are for.

use super::request::{Division, Offload, Wishes};
use super::split::{self, Job};
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
    /// Layers whose weights a GPU reads from host memory: the first so many.
    pub mapped: usize,
    /// Whether a GPU runs the layers before its own, too, for prompts, out of host memory.
    pub lifts: bool,
}

/// What runs a band.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Processor {
    /// A CPU worker, the n-th.
    Cpu(usize),
    /// A GPU, by its seat in the pipeline.
    Gpu(usize),
}

/// Cuts the model into contiguous bands: CPU workers first, then GPUs. The last `resident` layers are in devices' memory; those
/// before them run on CPU workers, or on the first GPU out of host memory.
pub(super) fn bands(
    model: &ModelSummary,
    wishes: &Wishes,
    least: &Limits,
    resident: usize,
) -> Result<Vec<Band>, Refusal> {
    let layers = model.layers.len();
    let spilled = layers - resident;
    let (on_cpu, mapped) = match wishes.offload {
        Offload::Cpu => (spilled, 0),
        Offload::Pcie => (0, spilled),
    };
    let gpus = wishes.seats.len();
    let (cpu_counts, mut gpu_counts) = match &wishes.division {
        Division::Explicit(counts) => {
            let counts = explicit(layers, counts)?;
            let (cpu, gpu) = counts.split_at(counts.len() - gpus);
            (cpu.to_vec(), gpu.to_vec())
        }
        Division::Uniform => {
            (spilled_to(on_cpu, gpus, wishes.cpu_stages)?, uniform_on_gpus(resident, gpus, layers)?)
        }
        Division::Weighted => {
            // Refuses what has too few layers.
            uniform_on_gpus(resident, gpus, layers)?;
            let speeds = wishes.speeds.as_deref().map(split::told_apart);
            let speeds = speeds.as_deref();
            let job =
                Job { model, limits: least, seats: &wishes.seats, speeds, peer_copies: wishes.peer_copies };
            let mut counts = job.counts(on_cpu..layers, mapped);
            counts[0] -= mapped;
            (spilled_to(on_cpu, gpus, wishes.cpu_stages)?, counts)
        }
    };
    if let Some(first) = gpu_counts.first_mut() {
        *first += mapped;
    }
    let processors = (0..cpu_counts.len()).map(Processor::Cpu).chain((0..gpus).map(Processor::Gpu));
    let mut start = 0;
    Ok(cpu_counts
        .iter()
        .chain(&gpu_counts)
        .zip(processors)
        .map(|(count, processor)| {
            start += count;
            let landing = takes_rows_from_gpu(processor, wishes.peer_copies);
            let mapped = if processor == Processor::Gpu(0) { mapped } else { 0 };
            Band { layers: start - count..start, processor, landing, mapped, lifts: false }
        })
        .collect())
}

/// Whether the band before may write into this one's device.
pub(super) fn takes_rows_from_gpu(processor: Processor, peer_copies: bool) -> bool {
    peer_copies && matches!(processor, Processor::Gpu(index) if index > 0)
}

/// Uniform bands of resident layers. The only GPU may have none: then it reads everything from host memory.
fn uniform_on_gpus(resident: usize, gpus: usize, layers: usize) -> Result<Vec<usize>, Refusal> {
    match spread(resident, gpus) {
        _ if gpus == 1 => Ok(vec![resident]),
        Err(_) if resident < layers => Err(Refusal::BudgetBelowGpus { budget: resident, gpus }),
        spread => spread,
    }
}

/// Uniform bands of CPU workers, none where there is nothing to run.
fn spilled_to(layers: usize, gpus: usize, workers: usize) -> Result<Vec<usize>, Refusal> {
    match spread(layers, workers) {
        _ if layers == 0 => Ok(Vec::new()),
        Err(_) if gpus > 0 => Err(Refusal::SpillBelowWorkers { spilled: layers, workers }),
        spread => spread,
    }
}

/// `layers / stages` each, the remainder one by one to the first.
fn spread(layers: usize, stages: usize) -> Result<Vec<usize>, Refusal> {
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
    // A GPU has states of its own for layers that it lifts.
    let first = if band.lifts { 0 } else { band.layers.start };
    let layers = &model.layers[first..band.layers.end];
    let sum = |of: fn(&LayerSizes) -> u64| layers.iter().map(of).sum::<u64>();
    let (embed, head) = (band.layers.start == 0, band.layers.end == model.layers.len());
    let of_processor = match band.processor {
        Processor::Cpu(_) => cpu_bytes(model, limits, layers, head),
        Processor::Gpu(_) => gpu_bytes(model, limits, band),
    };
    StageBytes {
        embedding: if embed { model.embedding_bytes } else { 0 },
        kv: kv_bytes(sum(|layer| layer.kv_elements), limits),
        state: sum(|layer| layer.state_values) * 4 * limits.max_sequences as u64,
        rings: super::rings::outgoing_bytes(model, limits, head)
            + if embed { super::rings::incoming_bytes(model, limits) } else { 0 },
        ..of_processor
    }
}

/// Weights and scratch of a CPU worker.
fn cpu_bytes(model: &ModelSummary, limits: &Limits, layers: &[LayerSizes], head: bool) -> StageBytes {
    let at_head = |bytes: u64| if head { bytes } else { 0 };
    StageBytes {
        weights: layers.iter().map(|layer| layer.weights).sum::<u64>() + at_head(model.head_bytes),
        scratch: scratch_bytes(layers, limits) + at_head(head_scratch_bytes(model, limits)),
        ..StageBytes::default()
    }
}

/// Weights and scratch on a device, and page-locked host memory.
fn gpu_bytes(model: &ModelSummary, limits: &Limits, band: &Band) -> StageBytes {
    let Band { layers: Range { start, end }, mapped, lifts, landing, .. } = band.clone();
    let (first, head) = (if lifts { 0 } else { start }, end == model.layers.len());
    let (layers, own) = (&model.layers[first..end], start - first);
    let (in_host, on_device) = layers.split_at(own + mapped);
    let weights: u64 = on_device.iter().map(|layer| layer.gpu.weights).sum();
    let needs = layers.iter().map(|layer| &layer.gpu.needs);
    let needs = Needs::new(model.gpu_widths, needs, head, *limits);
    let groups = in_host.iter().map(|layer| layer.gpu.largest_group);
    let needs = if lifts { needs.with_lifted(groups) } else { needs.with_mapped(groups) };
    let landing = if landing { needs.landing_bytes(super::RING_SLOTS as usize) } else { 0 };
    StageBytes {
        weights: weights + if head { model.gpu_head_bytes } else { 0 },
        scratch: needs.scratch_bytes() + landing,
        pinned: needs.pinned_bytes(),
        mapped: in_host.iter().map(|layer| layer.gpu.mapped).sum(),
        ..StageBytes::default()
    }
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
