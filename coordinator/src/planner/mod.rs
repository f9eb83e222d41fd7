//! Placement: a pure function from sizes and wishes to a [`Plan`] or a [`Refusal`].
//!
//! CPU workers come first in the pipeline and run the layers that spill; GPUs follow, in the order in which they are named.
//! Bands are uniform unless `pp_layers` says otherwise. The KV pool is sized for every sequence at full length and shrinks,
//! when the host's memory or a device's is short, down to one full sequence; what does not fit then is a refusal with the
//! arithmetic in it.

mod budget;
mod gpus;
mod layout;
mod machine;
mod refusal;
mod render;
mod request;
mod rings;
mod summary;

pub use gpus::{DeviceWish, Gpu, GpuSurvey};
use layout::{Band, Processor};
pub use machine::{Machine, NumaNode};
pub use refusal::{Refusal, Shortage};
pub use render::{bytes, table};
pub use request::PlacementRequest;
use request::{Budget, Split, Wishes};
pub(crate) use rings::RING_SLOTS;
use spillway_protocol::plan::{Execution, PLAN_VERSION, Plan, Residency, Stage};
pub use summary::{GpuSizes, LayerSizes, ModelSummary};

/// Decides which process runs which layers. Pure: the same arguments give the same plan.
pub fn plan(model: &ModelSummary, machine: &Machine, request: &PlacementRequest) -> Result<Plan, Refusal> {
    let wishes = request.read(model, &machine.gpus)?;
    let layers = model.layers.len();
    match wishes.budget {
        Budget::Layers(count) => place(model, machine, &wishes, count.min(layers)),
        Budget::All => place(model, machine, &wishes, layers)
            .map_err(|refusal| with_fitting_budget(refusal, model, machine, &wishes)),
        Budget::Auto => {
            let most = most_that_fits(model, machine, &wishes).unwrap_or(layers);
            place(model, machine, &wishes, most)
        }
    }
}

/// A plan with the last `gpu_layers` layers on GPUs.
fn place(
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
    gpu_layers: usize,
) -> Result<Plan, Refusal> {
    let bands = layout::bands(model.layers.len(), wishes, gpu_layers)?;
    let limits = budget::fit(model, machine, wishes, &bands)?;
    let stages = bands
        .iter()
        .map(|band| Stage {
            layers: band.layers.clone(),
            embed: band.layers.start == 0,
            head: band.layers.end == model.layers.len(),
            execution: execution(machine, wishes.threads, &bands, band.processor),
            residency: match band.processor {
                Processor::Cpu(_) => Residency::Host,
                Processor::Gpu(_) => Residency::Device,
            },
            bytes: layout::stage_bytes(model, &limits, band),
            why: why(wishes, &bands, band, model.layers.len()),
        })
        .collect();
    let peer_copies = wishes.peer_copies;
    Ok(Plan { version: PLAN_VERSION, model: model.model.clone(), limits, peer_copies, stages })
}

/// The largest number of layers on GPUs that fits, if any.
fn most_that_fits(model: &ModelSummary, machine: &Machine, wishes: &Wishes) -> Option<usize> {
    (1..=model.layers.len()).rev().find(|&layers| place(model, machine, wishes, layers).is_ok())
}

/// Tells which budget would fit where everything does not.
fn with_fitting_budget(
    refusal: Refusal,
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
) -> Refusal {
    match refusal {
        Refusal::Memory(shortage) if matches!(wishes.split, Split::Uniform { .. }) => {
            let fitting_budget = most_that_fits(model, machine, wishes);
            Refusal::Memory(Box::new(Shortage { fitting_budget, ..*shortage }))
        }
        refusal => refusal,
    }
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
fn execution(machine: &Machine, threads: Option<usize>, bands: &[Band], processor: Processor) -> Execution {
    let index = match processor {
        Processor::Cpu(index) => index,
        Processor::Gpu(index) => {
            return Execution::Gpu { device: machine.gpus.gpus[index].device.clone() };
        }
    };
    let workers = bands.iter().filter(|band| matches!(band.processor, Processor::Cpu(_))).count();
    let node = if workers > 1 && machine.nodes.len() > 1 {
        machine.nodes.get(index % machine.nodes.len())
    } else {
        None
    };
    let cpus = node.map_or(machine.cpus, |node| node.cpus.min(machine.cpus));
    Execution::Cpu { threads: threads.unwrap_or(cpus).max(1), node: node.map(|node| node.id) }
}

fn why(wishes: &Wishes, bands: &[Band], band: &Band, layers: usize) -> String {
    let here = band.layers.len();
    let on_gpus = bands.iter().filter(|band| matches!(band.processor, Processor::Gpu(_)));
    let gpu_layers: usize = on_gpus.clone().map(|band| band.layers.len()).sum();
    let gpus = on_gpus.count();
    let place = match (gpus, band.processor) {
        (0, _) => "no GPU in this placement".to_owned(),
        (_, Processor::Cpu(_)) => {
            format!("the first {} of {layers} layers spill to the CPU", layers - gpu_layers)
        }
        (_, Processor::Gpu(_)) if gpu_layers == layers => format!("all {layers} layers on {gpus} GPUs"),
        (_, Processor::Gpu(_)) => format!("the last {gpu_layers} of {layers} layers on {gpus} GPUs"),
    };
    match &wishes.split {
        Split::Explicit { .. } => format!("{place}: pp_layers asks for {here} layers here"),
        Split::Uniform { .. } if bands.len() == 1 && gpus == 0 => {
            format!("{place}: one CPU worker runs everything")
        }
        Split::Uniform { .. } if gpus == 0 => {
            format!(
                "{place}: {layers} layers over {} CPU workers, {here} here (remainder first)",
                bands.len()
            )
        }
        Split::Uniform { .. } => format!("{place}, {here} here (remainder first)"),
    }
}

#[cfg(test)]
mod tests;
