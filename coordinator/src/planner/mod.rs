//! Placement: a pure function from sizes and wishes to a [`Plan`] or a [`Refusal`].
//!
//! The last layers of a model are resident in GPUs' memory, in bands in the order in which the GPUs are named: uniform ones,
//! unless `pp_layers` or `split` says otherwise. Layers before them spill: to CPU workers in front of the pipeline, from which the first
//! GPU may lift them for prompts, or to host memory that the first GPU reads. The KV pool is sized for every sequence at full length and shrinks, when a memory is short,
//! down to one full sequence; what does not fit then is a refusal with the arithmetic in it.

mod advice;
mod auto;
mod budget;
mod cost;
mod gpus;
mod layout;
mod lift;
mod machine;
mod refusal;
mod render;
mod replay;
mod request;
mod rings;
mod seats;
mod shortage;
mod size;
mod split;
mod steps;
mod summary;
mod why;

pub use advice::Advice;
pub(crate) use cost::decoding_bytes;
pub use gpus::{DeviceWish, Gpu, GpuSurvey};
use layout::{Band, Processor};
pub use machine::{Machine, NumaNode};
pub use refusal::Refusal;
pub use render::{bytes, table};
pub use replay::{Difference, diff, differences, replay};
pub use request::PlacementRequest;
use request::Wishes;
pub(crate) use request::{Budget, MAX_PARALLEL, MAX_STAGES, MAX_STEP, MAX_THREADS, Split, read_layer_list};
#[cfg(test)]
pub(crate) use request::{DEFAULT_MAX_SEQ, DEFAULT_PARALLEL};
pub(crate) use rings::RING_SLOTS;
pub(crate) use seats::TOLERANCE;
pub use shortage::Shortage;
pub(crate) use size::read as read_size;
use spillway_protocol::plan::{Execution, PLAN_VERSION, Plan, Residency, Stage};
pub use summary::{GpuSizes, LayerSizes, ModelSummary};

/// Decides which process runs which layers. Pure: the same arguments give the same plan.
pub fn plan(model: &ModelSummary, machine: &Machine, request: &PlacementRequest) -> Result<Plan, Refusal> {
    let wishes = request.read(model, &machine.gpus)?;
    place_as(model, machine, request, &wishes)
        .map(|plan| lift::with_advice(plan, model, machine, &wishes))
        .map_err(|refusal| advice::with_advice(refusal, model, machine, request, &wishes))
}

/// A plan for a request that has been read as `wishes`.
fn place_as(
    model: &ModelSummary,
    machine: &Machine,
    request: &PlacementRequest,
    wishes: &Wishes,
) -> Result<Plan, Refusal> {
    let plan = match wishes.budget {
        Budget::All => place(model, machine, wishes, model.layers.len()),
        Budget::Layers(count) => place(model, machine, wishes, count),
        Budget::Auto => auto::best(model, machine, request, wishes),
    }?;
    Ok(steps::enlarged(model, machine, wishes, plan))
}

/// A plan with the last `resident` layers in GPUs' memory.
fn place(model: &ModelSummary, machine: &Machine, wishes: &Wishes, resident: usize) -> Result<Plan, Refusal> {
    let bands = layout::bands(model, wishes, &budget::least(model, wishes), resident)?;
    let limits = budget::fit(model, machine, wishes, &bands)?;
    let lift::Lifted { bands, limits, lift, warning } = lift::lifted(model, machine, wishes, bands, limits)?;
    let stages = bands
        .iter()
        .map(|band| Stage {
            layers: band.layers.clone(),
            embed: band.layers.start == 0,
            head: band.layers.end == model.layers.len(),
            execution: execution(machine, wishes, &bands, band.processor),
            residency: residency(band),
            bytes: layout::stage_bytes(model, &limits, band),
            why: why::why(wishes, &bands, band, model.layers.len()),
        })
        .collect();
    let (model, peer_copies) = (model.model.clone(), wishes.peer_copies);
    let warnings = wishes.warnings.iter().cloned().chain(warning).collect();
    Ok(Plan { version: PLAN_VERSION, model, limits, peer_copies, stages, lift, warnings })
}

/// Where the weights of a band's layers live.
fn residency(band: &Band) -> Vec<Residency> {
    let of = |layer: usize| match band.processor {
        Processor::Cpu(_) => Residency::Host,
        Processor::Gpu(_) if layer < band.mapped => Residency::HostMapped,
        Processor::Gpu(_) => Residency::Device,
    };
    (0..band.layers.len()).map(of).collect()
}

/// Steps that may be in the pipeline at once: one per stage when every stage has a processor of its own, otherwise one,
/// since stages that share one only slow each other down.
pub fn steps_in_flight(plan: &Plan) -> usize {
    let mut processors: Vec<String> = plan
        .stages
        .iter()
        .map(|stage| match &stage.execution {
            Execution::Cpu { node, .. } => format!("node {node:?}"),
            Execution::Gpu { device } => format!("{} {}", device.provider, device.ordinal),
        })
        .collect();
    processors.sort_unstable();
    processors.dedup();
    if processors.len() == plan.stages.len() { processors.len() } else { 1 }
}

/// With several nodes and several CPU workers, workers go round the nodes and keep to theirs; otherwise every worker uses
/// every CPU, one at a time.
fn execution(machine: &Machine, wishes: &Wishes, bands: &[Band], processor: Processor) -> Execution {
    let index = match processor {
        Processor::Cpu(index) => index,
        Processor::Gpu(seat) => {
            return Execution::Gpu { device: machine.gpus.gpus[wishes.seats[seat].gpu].device.clone() };
        }
    };
    let workers = bands.iter().filter(|band| matches!(band.processor, Processor::Cpu(_))).count();
    let node = if workers > 1 && machine.nodes.len() > 1 {
        machine.nodes.get(index % machine.nodes.len())
    } else {
        None
    };
    let cpus = node.map_or(machine.cpus, |node| node.cpus.min(machine.cpus));
    Execution::Cpu { threads: wishes.threads.unwrap_or(cpus).max(1), node: node.map(|node| node.id) }
}

#[cfg(test)]
mod tests;
