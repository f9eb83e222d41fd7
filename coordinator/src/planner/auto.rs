//! `gpu_layer_budget` `auto`: of all numbers of resident layers, and of both ways to run the others unless the request names one,
//! the placement whose tokens, of answers and of prompts four times as long, take the least time by measured speeds: a layer less on a GPU may
//! make the room that prompts of all others need there. Where speeds were not measured: as many layers as fit. Every GPU of the
//! request is used, or none.

use super::cost::{self, Picoseconds};
use super::request::{Offload, Prompts, Wishes};
use super::{Machine, ModelSummary, PlacementRequest, Plan, Refusal, bytes, place};
use std::cmp::Reverse;

/// By how much rounding may put a bound above the time that it bounds: a picosecond for each of very many stages.
const ROUNDING: u128 = 1000;

/// One placement that may turn out to be the fastest.
struct Candidate<'w> {
    wishes: &'w Wishes,
    resident: usize,
    /// No placement of this kind is faster.
    bound: Picoseconds,
}

/// The best placement.
///
/// # Errors
/// None fits; the refusal is that of the placement that comes closest.
pub(super) fn best(
    model: &ModelSummary,
    machine: &Machine,
    request: &PlacementRequest,
    wishes: &Wishes,
) -> Result<Plan, Refusal> {
    let ways = ways(model, machine, request, wishes);
    if wishes.speeds.is_none() || machine.memory_bandwidth.is_none() {
        return most(model, machine, wishes, &ways);
    }
    let mut candidates: Vec<Candidate<'_>> =
        ways.iter().flat_map(|wishes| candidates(model, machine, wishes)).collect();
    // The sort is stable: of equal bounds the earlier way, and more resident layers, come first.
    candidates.sort_by_key(|candidate| candidate.bound);
    let (mut best, mut refusals) = (None::<(Picoseconds, Plan)>, Vec::new());
    for Candidate { wishes, resident, bound } in candidates {
        if best.as_ref().is_some_and(|(time, _)| bound.0 > time.0 + ROUNDING) {
            break;
        }
        match place(model, machine, wishes, resident) {
            Ok(plan) => {
                let time = cost::weighed_time(model, &plan, machine);
                if let Some(time) = time.filter(|time| best.as_ref().is_none_or(|(least, _)| time < least)) {
                    best = Some((time, plan));
                }
            }
            Err(refusal) => refusals.push(refusal),
        }
    }
    match best {
        Some((time, plan)) => Ok(with_reason(plan, &because(machine, wishes, time))),
        None => Err(closest(refusals, model, wishes)),
    }
}

/// As many resident layers as fit, in the first of the ways in which so many do.
fn most(model: &ModelSummary, machine: &Machine, wishes: &Wishes, ways: &[Wishes]) -> Result<Plan, Refusal> {
    let counts = |way| resident_counts(model, way).map(move |resident| (way, resident));
    let mut candidates: Vec<(&Wishes, usize)> = ways.iter().flat_map(counts).collect();
    // The sort is stable.
    candidates.sort_by_key(|(_, resident)| Reverse(*resident));
    let mut refusals = Vec::new();
    for (way, resident) in candidates {
        match place(model, machine, way, resident) {
            Ok(plan) => {
                let reason = "; auto, without measured speeds: as many as fit";
                return Ok(with_reason(plan, reason));
            }
            Err(refusal) => refusals.push(refusal),
        }
    }
    Err(closest(refusals, model, wishes))
}

/// Numbers of layers that GPUs can hold with these wishes, largest first. One GPU may hold none if it reads the others.
pub(super) fn resident_counts(
    model: &ModelSummary,
    wishes: &Wishes,
) -> impl DoubleEndedIterator<Item = usize> + use<> {
    let gpus = wishes.seats.len();
    let least = if gpus == 1 && wishes.offload == Offload::Pcie { 0 } else { gpus };
    let most = if gpus == 0 { 0 } else { model.layers.len() };
    (least..=most).rev()
}

/// The ways to run layers that spill: as the request says, else the first GPU before CPU workers, and those without a GPU last.
fn ways(model: &ModelSummary, machine: &Machine, request: &PlacementRequest, wishes: &Wishes) -> Vec<Wishes> {
    let mut ways = vec![wishes.clone()];
    if !wishes.offload_is_open && wishes.offload == Offload::Pcie {
        return ways;
    }
    if wishes.offload_is_open {
        ways.push(Wishes { offload: Offload::Cpu, ..wishes.clone() });
    }
    if wishes.prompts == Prompts::Gpu {
        return ways;
    }
    // What the request says of GPUs does not keep the CPU from being the faster one.
    ways.extend(request.without_gpus().read(model, &machine.gpus));
    ways
}

fn candidates<'w>(model: &ModelSummary, machine: &Machine, wishes: &'w Wishes) -> Vec<Candidate<'w>> {
    let candidate = |resident| {
        let bound = bound(model, machine, wishes, resident)?;
        Some(Candidate { wishes, resident, bound })
    };
    resident_counts(model, wishes).filter_map(candidate).collect()
}

/// The weights alone, as if the fastest GPU held all that are resident. None where a speed is not known.
fn bound(model: &ModelSummary, machine: &Machine, wishes: &Wishes, resident: usize) -> Option<Picoseconds> {
    let (spilled, kept) = model.layers.split_at(model.layers.len() - resident);
    let in_host: u64 = spilled.iter().map(|layer| layer.weights).sum();
    let Some(speeds) = wishes.speeds.as_deref().filter(|speeds| !speeds.is_empty()) else {
        return Some(cost::on_cpu(in_host + model.head_bytes, machine.memory_bandwidth?));
    };
    let fastest = speeds.iter().copied().max_by_key(|speed| speed.memory)?;
    let on_gpu = kept.iter().map(|layer| layer.gpu.weights).sum::<u64>() + model.gpu_head_bytes;
    let elsewhere = match wishes.offload {
        Offload::Cpu => cost::on_cpu(in_host, machine.memory_bandwidth?),
        Offload::Pcie => {
            cost::over_link(spilled.iter().map(|layer| layer.gpu.mapped).sum(), *speeds.first()?)
        }
    };
    Some(cost::on_gpu(on_gpu, fastest) + elsewhere)
}

/// The refusal that is the least of what is in the way.
fn closest(refusals: Vec<Refusal>, model: &ModelSummary, wishes: &Wishes) -> Refusal {
    let missing = |refusal: &Refusal| match refusal {
        Refusal::Memory(shortage) => (0, shortage.needed.saturating_sub(shortage.available)),
        _ => (1, 0),
    };
    // Without any there were more GPUs than layers.
    let none = || Refusal::TooFewLayers { stages: wishes.seats.len(), layers: model.layers.len() };
    refusals.into_iter().min_by_key(missing).unwrap_or_else(none)
}

/// What decided, with the numbers.
fn because(machine: &Machine, wishes: &Wishes, time: Picoseconds) -> String {
    let gpu = |(seat, speed): (&super::seats::Seat, &spillway_worker_gpu::speed::DeviceSpeed)| {
        format!(
            "device {} reads {}/s of its memory and {}/s of the host's",
            machine.gpus.gpus[seat.gpu].device.index,
            bytes(speed.memory),
            bytes(speed.link)
        )
    };
    let speeds = wishes.speeds.as_deref().unwrap_or_default();
    let mut measured: Vec<String> = wishes.seats.iter().zip(speeds).map(gpu).collect();
    let gpus = if measured.len() == 1 { "1 GPU".to_owned() } else { format!("{} GPUs", measured.len()) };
    measured.extend(machine.memory_bandwidth.map(|speed| format!("the CPU {}/s", bytes(speed))));
    let without = wishes.offload_is_open || wishes.offload == Offload::Cpu;
    format!(
        "; auto: about {:.1} ms for a token of an answer and {} of its prompt, the least of every budget that fits with {gpus}{}, as was measured: {}",
        time.milliseconds(),
        cost::PROMPT_TOKENS,
        if without { " and of the CPU alone" } else { "" },
        measured.join(", ")
    )
}

/// The plan, with a reason added where the spill is.
fn with_reason(mut plan: Plan, reason: &str) -> Plan {
    if let Some(stage) = plan.stages.first_mut() {
        stage.why.push_str(reason);
    }
    plan
}
