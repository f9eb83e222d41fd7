//! Placement: a pure function from sizes and wishes to a [`Plan`] or a [`Refusal`].
//!
//! Today every stage is a CPU worker; a plan already has the shape that GPU stages need. Bands are uniform unless
//! `pp_layers` says otherwise. The KV pool is sized for every sequence at full length and shrinks, when memory is
//! short, down to one full sequence; what does not fit then is a refusal with the arithmetic in it.

mod layout;
mod machine;
mod refusal;
mod render;
mod request;
mod rings;
mod summary;

pub use machine::{Machine, NumaNode};
pub use refusal::{Refusal, Shortage};
pub use render::{bytes, table};
pub use request::PlacementRequest;
use request::{Bands, Wishes};
pub(crate) use rings::RING_SLOTS;
use spillway_protocol::plan::{Execution, Limits, PLAN_VERSION, Plan, Residency, Stage};
use std::ops::Range;
pub use summary::{LayerSizes, ModelSummary};

/// Decides which process runs which layers. Pure: the same arguments give the same plan.
pub fn plan(model: &ModelSummary, machine: &Machine, request: &PlacementRequest) -> Result<Plan, Refusal> {
    let wishes = request.read(model)?;
    let bands = layout::bands(model.layers.len(), &wishes.bands)?;
    let limits = fit_limits(model, machine, &wishes, &bands)?;
    let stages = bands
        .iter()
        .enumerate()
        .map(|(index, band)| Stage {
            layers: band.clone(),
            embed: band.start == 0,
            head: band.end == model.layers.len(),
            execution: execution(machine, wishes.threads, index, bands.len()),
            residency: Residency::Host,
            bytes: layout::stage_bytes(model, &limits, band),
            why: why(&wishes.bands, model.layers.len(), bands.len(), band.len()),
        })
        .collect();
    Ok(Plan { version: PLAN_VERSION, model: model.model.clone(), limits, stages })
}

/// Steps that may be in the pipeline at once: one per stage when every stage has CPUs of its own, otherwise one, since
/// stages that share CPUs only slow each other down.
pub fn steps_in_flight(plan: &Plan) -> usize {
    let mut nodes: Vec<u32> = plan
        .stages
        .iter()
        .filter_map(|stage| match stage.execution {
            Execution::Cpu { node, .. } => node,
        })
        .collect();
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.len() == plan.stages.len() { nodes.len() } else { 1 }
}

/// The largest KV pool that fits, from every sequence at full length down to one.
fn fit_limits(
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
    bands: &[Range<usize>],
) -> Result<Limits, Refusal> {
    let one = layout::blocks_per_sequence(wishes.max_seq);
    let with_blocks = |kv_blocks| Limits {
        max_seq: wishes.max_seq,
        max_sequences: wishes.parallel,
        kv_blocks,
        kv_type: wishes.kv_type,
        activations: wishes.activations,
        max_step_tokens: wishes.step,
        max_logit_rows: layout::logit_rows(model.model.vocab, wishes.step, wishes.parallel),
    };
    let needed = |limits: &Limits| {
        bands.iter().map(|band| layout::stage_bytes(model, limits, band).private()).sum::<u64>()
    };
    let least = with_blocks(one);
    let floor = needed(&least);
    if floor > machine.available_bytes {
        return Err(shortage(model, &least, bands, machine.available_bytes));
    }
    let per_block = needed(&with_blocks(one + 1)) - floor;
    let spare = (machine.available_bytes - floor).checked_div(per_block).unwrap_or(u64::MAX);
    let more = usize::try_from(spare).unwrap_or(usize::MAX).min(one * (wishes.parallel - 1));
    Ok(with_blocks(one + more))
}

fn shortage(model: &ModelSummary, limits: &Limits, bands: &[Range<usize>], available: u64) -> Refusal {
    let mut shortage = Shortage {
        needed: 0,
        available,
        weights: 0,
        kv: 0,
        kv_tokens: limits.max_seq,
        state: 0,
        scratch: 0,
        rings: 0,
        max_seq: limits.max_seq,
        parallel: limits.max_sequences,
        step: limits.max_step_tokens,
    };
    for band in bands {
        let bytes = layout::stage_bytes(model, limits, band);
        shortage.needed += bytes.private();
        shortage.weights += bytes.weights;
        shortage.kv += bytes.kv;
        shortage.state += bytes.state;
        shortage.scratch += bytes.scratch;
        shortage.rings += bytes.rings;
    }
    Refusal::Memory(Box::new(shortage))
}

/// With several nodes and several workers, workers go round the nodes and keep to theirs; otherwise every worker uses
/// every CPU, one at a time.
fn execution(machine: &Machine, threads: Option<usize>, index: usize, stages: usize) -> Execution {
    let node = if stages > 1 && machine.nodes.len() > 1 {
        machine.nodes.get(index % machine.nodes.len())
    } else {
        None
    };
    let cpus = node.map_or(machine.cpus, |node| node.cpus.min(machine.cpus));
    Execution::Cpu { threads: threads.unwrap_or(cpus).max(1), node: node.map(|node| node.id) }
}

fn why(wish: &Bands, layers: usize, stages: usize, band: usize) -> String {
    match wish {
        Bands::Uniform(1) => "no GPU in this placement: one CPU worker runs everything".into(),
        Bands::Uniform(_) => {
            format!(
                "no GPU in this placement: {layers} layers over {stages} CPU workers, {band} here (remainder first)"
            )
        }
        Bands::Explicit(_) => format!("no GPU in this placement: pp_layers asks for {band} layers here"),
    }
}

#[cfg(test)]
mod tests;
