//! Plans that were made before: whether one still holds, and how two differ.

use super::budget;
use super::layout::{self, Band, Processor};
use super::lift;
use super::request::{MAX_PARALLEL, MAX_STEP, MAX_THREADS};
use super::seats;
use super::{Gpu, Machine, ModelSummary, Refusal, bytes};
use serde_json::Value;
use spillway_protocol::plan::{
    Execution, GpuDevice, Lift, Limits, PLAN_VERSION, Plan, PlannedModel, Residency, Stage,
};
use std::ops::RangeInclusive;

/// Checks that a saved plan can be used as it stands: same model, same devices, and still enough memory. The file may have
/// moved; the result names it where it is now.
///
/// # Errors
/// Something differs; the refusal names it.
pub fn replay(saved: &Plan, model: &ModelSummary, machine: &Machine) -> Result<Plan, Refusal> {
    if saved.version != PLAN_VERSION {
        return Err(Refusal::PlanVersion { found: saved.version, known: PLAN_VERSION });
    }
    check_model(&saved.model, &model.model)?;
    check_stages(saved)?;
    check_limits(saved)?;
    check_lift(saved, model)?;
    check_bytes(saved, model)?;
    check_nodes(saved, machine)?;
    check_memory(saved, machine)?;
    Ok(Plan { model: model.model.clone(), ..saved.clone() })
}

fn check_model(saved: &PlannedModel, found: &PlannedModel) -> Result<(), Refusal> {
    let facts = |model: &PlannedModel| {
        let PlannedModel { path: _, file_bytes, architecture, layers, d_model, vocab, context_length } =
            model;
        [
            ("file length", file_bytes.to_string()),
            ("architecture", architecture.clone()),
            ("number of layers", layers.to_string()),
            ("width", d_model.to_string()),
            ("vocabulary", vocab.to_string()),
            ("context length", context_length.to_string()),
        ]
    };
    let pairs = facts(saved).into_iter().zip(facts(found));
    match pairs.into_iter().find(|(saved, found)| saved != found) {
        Some(((what, planned), (_, found))) => Err(Refusal::PlanOtherModel { what, planned, found }),
        None => Ok(()),
    }
}

/// A file can hold anything: every layer must be there once, in order.
fn check_stages(saved: &Plan) -> Result<(), Refusal> {
    let (mut next, layers) = (0, saved.model.layers);
    for Stage { layers: band, embed, head, residency, .. } in &saved.stages {
        let contiguous = band.start == next && band.end > next && residency.len() == band.len();
        if !contiguous || *embed != (band.start == 0) || *head != (band.end == layers) {
            return Err(Refusal::PlanMalformed { stage: band.clone(), layers });
        }
        next = band.end;
    }
    if next == layers { Ok(()) } else { Err(Refusal::PlanMalformed { stage: next..layers, layers }) }
}

/// The numbers of a request are in their ranges, as they were when the plan was made.
fn check_limits(saved: &Plan) -> Result<(), Refusal> {
    let Limits { max_seq, max_sequences, kv_blocks, max_step_tokens, max_logit_rows, .. } = saved.limits;
    let sequence = layout::blocks_per_sequence(max_seq);
    let rows = |step| layout::logit_rows(saved.model.vocab, step, max_sequences);
    let threads = saved.stages.iter().filter_map(|stage| match stage.execution {
        Execution::Cpu { threads, .. } => Some(("threads", threads, 1..=MAX_THREADS)),
        Execution::Gpu { .. } => None,
    });
    let sizes = [
        ("max_seq", max_seq, 1..=saved.model.context_length),
        ("max_sequences", max_sequences, 1..=MAX_PARALLEL),
        ("max_step_tokens", max_step_tokens, max_sequences.max(1)..=MAX_STEP),
    ];
    let within = |(_, found, allowed): &(&str, usize, RangeInclusive<usize>)| allowed.contains(found);
    let refused = |(what, found, allowed): (&'static str, usize, RangeInclusive<usize>)| {
        Refusal::PlanNumber { what, found, allowed }
    };
    if let Some(wrong) = sizes.into_iter().chain(threads).find(|size| !within(size)) {
        return Err(refused(wrong));
    }
    // Only now are these products of numbers in their ranges.
    let derived = [
        ("kv_blocks", kv_blocks, sequence..=sequence * max_sequences),
        ("max_logit_rows", max_logit_rows, rows(max_step_tokens)..=rows(max_step_tokens)),
    ];
    derived.into_iter().find(|size| !within(size)).map_or(Ok(()), |wrong| Err(refused(wrong)))
}

/// What is lifted is all that spilled to CPU workers, by the stage behind them.
fn check_lift(saved: &Plan, model: &ModelSummary) -> Result<(), Refusal> {
    let Some(Lift { layers, stage, from, shared, why: _ }) = &saved.lift else { return Ok(()) };
    let first = saved.stages.iter().position(|stage| stage.device().is_some());
    let spilled = first.map(|first| 0..saved.stages[first].layers.start).filter(|layers| !layers.is_empty());
    let reads_host = |stage: &Stage| stage.residency.contains(&Residency::HostMapped);
    let is_right = first == Some(*stage)
        && !reads_host(&saved.stages[*stage])
        && spilled.as_ref() == Some(layers)
        && *from >= 1
        && *shared == lift::shared_bytes(model, layers, &saved.limits);
    if is_right { Ok(()) } else { Err(Refusal::PlanLift { layers: layers.clone(), stage: *stage }) }
}

/// Every stage is charged for what it will allocate.
fn check_bytes(saved: &Plan, model: &ModelSummary) -> Result<(), Refusal> {
    let (mut cpus, mut gpus) = (0.., 0..);
    for (index, stage) in saved.stages.iter().enumerate() {
        let processor = match stage.execution {
            Execution::Cpu { .. } => Processor::Cpu(cpus.next().unwrap_or_default()),
            Execution::Gpu { .. } => Processor::Gpu(gpus.next().unwrap_or_default()),
        };
        let landing = layout::takes_rows_from_gpu(processor, saved.peer_copies);
        let mapped = stage.residency.iter().filter(|place| **place == Residency::HostMapped).count();
        let lifts = saved.lift.as_ref().is_some_and(|lift| lift.stage == index);
        let band = Band { layers: stage.layers.clone(), processor, landing, mapped, lifts };
        // In another order than a planner's, the worker would look for them elsewhere.
        if stage.residency != super::residency(&band) {
            return Err(Refusal::PlanResidency { stage: stage.layers.clone() });
        }
        if layout::stage_bytes(model, &saved.limits, &band) != stage.bytes {
            return Err(Refusal::PlanBytes { stage: stage.layers.clone() });
        }
    }
    Ok(())
}

/// CPU stages that keep to a NUMA node find it.
fn check_nodes(saved: &Plan, machine: &Machine) -> Result<(), Refusal> {
    let of_stage = |stage: &Stage| match stage.execution {
        Execution::Cpu { node, .. } => node,
        Execution::Gpu { .. } => None,
    };
    let is_missing = |node: &u32| !machine.nodes.iter().any(|known| known.id == *node);
    match saved.stages.iter().filter_map(of_stage).find(is_missing) {
        Some(node) => Err(Refusal::PlanOtherNode { node }),
        None => Ok(()),
    }
}

fn check_memory(saved: &Plan, machine: &Machine) -> Result<(), Refusal> {
    let mut host = 0u64;
    let mut devices: Vec<(&Gpu, u64)> = Vec::new();
    for Stage { execution, bytes, .. } in &saved.stages {
        host = host.saturating_add(bytes.of_host());
        match execution {
            Execution::Cpu { .. } => host = host.saturating_add(bytes.of_processor()),
            Execution::Gpu { device } => {
                let gpu = find(device, machine)?;
                match devices.iter_mut().find(|(known, _)| known.device.index == gpu.device.index) {
                    Some((_, sum)) => *sum = sum.saturating_add(bytes.of_processor()),
                    None => devices.push((gpu, bytes.of_processor())),
                }
            }
        }
    }
    let of_host = ("the host".to_owned(), host, machine.available_bytes);
    let of_devices = devices.into_iter().map(|(gpu, sum)| {
        (format!("device {} ({})", gpu.device.index, gpu.device.name), sum, seats::usable(gpu.free_bytes))
    });
    match of_devices.chain([of_host]).find(|(_, needed, available)| needed > available) {
        Some((place, needed, available)) => Err(Refusal::PlanMemory { place, needed, available }),
        None => budget::check_pinned(saved.stages.iter().map(|stage| stage.bytes), machine),
    }
}

/// The device of the plan, which must be the same in every respect but its number, and usable.
fn find<'m>(planned: &GpuDevice, machine: &'m Machine) -> Result<&'m Gpu, Refusal> {
    let same = |gpu: &&Gpu| GpuDevice { index: planned.index, ..gpu.device.clone() } == *planned;
    let found = machine.gpus.gpus.iter().find(same).ok_or_else(|| Refusal::PlanOtherDevice {
        planned: format!(
            "{} ({}, {}, {})",
            planned.name,
            planned.arch,
            planned.pci,
            planned.uuid.as_deref().unwrap_or("no id")
        ),
        table: match machine.gpus.gpus.as_slice() {
            [] if machine.gpus.looked_for.is_empty() => "none".to_owned(),
            [] => format!("none ({})", machine.gpus.looked_for.join("; ")),
            _ => machine.gpus.table(),
        },
    })?;
    match &found.refused {
        Some(reason) => Err(Refusal::DeviceRefused { index: found.device.index, reason: reason.clone() }),
        None => Ok(found),
    }
}

/// One place where two plans differ.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Difference {
    /// Where, as in `stages[0].layers.end`.
    pub path: String,
    /// What the first has there; null for nothing.
    pub first: Value,
    /// What the second has there; null for nothing.
    pub second: Value,
}

/// Everything in which two plans differ, in their order.
pub fn diff(first: &Plan, second: &Plan) -> Vec<Difference> {
    let value = |plan| serde_json::to_value(plan).unwrap_or_default();
    let mut differences = Vec::new();
    compare(String::new(), &value(first), &value(second), &mut differences);
    differences
}

fn compare(path: String, first: &Value, second: &Value, found: &mut Vec<Difference>) {
    match (first, second) {
        (Value::Object(one), Value::Object(other)) => {
            let added = other.keys().filter(|key| !one.contains_key(*key));
            for key in one.keys().chain(added) {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                let of = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                compare(path, &of(one), &of(other), found);
            }
        }
        (Value::Array(one), Value::Array(other)) => {
            for index in 0..one.len().max(other.len()) {
                let of = |items: &[Value]| items.get(index).cloned().unwrap_or_default();
                compare(format!("{path}[{index}]"), &of(one), &of(other), found);
            }
        }
        _ if first == second => {}
        _ => found.push(Difference { path, first: first.clone(), second: second.clone() }),
    }
}

/// The differences for people, a line each.
pub fn differences(found: &[Difference]) -> String {
    let words = |path: &str, value: &Value| match value.as_u64() {
        Some(count) if path.contains(".bytes.") => bytes(count),
        _ => value.to_string(),
    };
    let line = |Difference { path, first, second }: &Difference| {
        format!("{path}: {} -> {}\n", words(path, first), words(path, second))
    };
    match found {
        [] => "the plans are the same\n".to_owned(),
        found => found.iter().map(line).collect(),
    }
}
