//! How large a step may be where the request leaves it open.
//!
//! A GPU reads weights, of which some come over the bus, once for a step, and its products of more tokens run nearer to its peak:
//! a prompt of 2048 tokens took 0.83 of the time in one step of what it took in four (docs/performance.md). Larger steps need more
//! scratch, so they are taken only where nothing else of the placement changes for them.

use super::request::{Offload, Wishes};
use super::{Machine, ModelSummary, Plan, place};
use spillway_protocol::plan::{Residency, Stage};

/// Largest step where only one sequence runs: nobody waits for its end.
const ALONE: usize = 2048;
/// Largest step where others may wait.
const SHARED: usize = 1024;

/// The same placement with larger steps, where the request names no size and one GPU computes everything, or all of a prompt since it
/// lifts what spilled to the CPU: with several stages, steps of one prompt are in all of them at once, and small ones fill them better.
pub(super) fn enlarged(model: &ModelSummary, machine: &Machine, wishes: &Wishes, plan: Plan) -> Plan {
    let Some(last) = plan.stages.len().checked_sub(1) else { return plan };
    let (alone, lifts) = (last == 0, plan.lift.as_ref().is_some_and(|lift| lift.stage == last));
    if !wishes.step_is_open || plan.stages[last].device().is_none() || !(alone || lifts) {
        return plan;
    }
    let on_device = |stage: &Stage| stage.residency.iter().filter(|home| **home == Residency::Device).count();
    let resident = plan.stages.iter().map(on_device).sum();
    let offload = if lifts { Offload::Cpu } else { Offload::Pcie };
    let sizes = [ALONE, SHARED].into_iter().skip(usize::from(wishes.parallel > 1));
    let larger = |size: usize| {
        let step = size.min(wishes.max_seq);
        let wishes = Wishes { step, offload, ..wishes.clone() };
        let larger = (step > plan.limits.max_step_tokens).then(|| place(model, machine, &wishes, resident));
        let same = |larger: &Plan| {
            larger.limits.kv_blocks == plan.limits.kv_blocks && larger.lift.is_some() == lifts
        };
        larger?.ok().filter(same)
    };
    match sizes.map(larger).find_map(|larger| larger) {
        Some(mut larger) => {
            larger.stages[0].why.clone_from(&plan.stages[0].why);
            larger
        }
        None => plan,
    }
}
