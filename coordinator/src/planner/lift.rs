//! Prompts of layers that spilled to CPU workers: whether the GPU behind them lifts these layers, and from how many tokens on.
//!
//! It then reads their weights from page-locked host memory, once a step, and has keys, values and states of its own for them. That is
//! charged like everything else; unless it is asked for, it is done only where no KV block is lost by it.

use super::budget;
use super::cost::{self, Picoseconds};
use super::layout::{Band, Processor};
use super::request::{Division, Offload, Prompts, Wishes};
use super::{Machine, ModelSummary, Refusal, bytes, place};
use spillway_protocol::plan::{Lift, Limits, Plan, Residency, Stage};
use spillway_worker::states::{AreaSize, areas};
use std::ops::Range;

/// New tokens of a prompt from which on layers are lifted where speeds are not known.
const UNMEASURED: usize = 32;

/// How the warning begins.
const WARNING: &str = "prompts run on the CPU";

/// What is lifted, and the bands and limits with it.
#[derive(Debug)]
pub(super) struct Lifted {
    pub bands: Vec<Band>,
    pub limits: Limits,
    pub lift: Option<Lift>,
    /// Why nothing is, although it could be.
    pub warning: Option<String>,
}

/// Lifts what spilled to CPU workers, if the request and the memories allow it.
///
/// # Errors
/// It must be lifted and does not fit.
pub(super) fn lifted(
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
    bands: Vec<Band>,
    limits: Limits,
) -> Result<Lifted, Refusal> {
    let unlifted = |bands, warning| Ok(Lifted { bands, limits, lift: None, warning });
    let Some(stage) = bands.iter().position(|band| matches!(band.processor, Processor::Gpu(_))) else {
        return unlifted(bands, None);
    };
    let layers = 0..bands[stage].layers.start;
    if layers.is_empty() || wishes.prompts == Prompts::Cpu {
        return unlifted(bands, None);
    }
    let (from, why) = threshold(model, machine, wishes, &layers);
    if from > limits.max_seq {
        return unlifted(bands, None);
    }
    let mut with = bands.clone();
    with[stage].lifts = true;
    let forced = wishes.prompts == Prompts::Gpu;
    let reason = match budget::fit(model, machine, wishes, &with) {
        Ok(fitting) if forced || fitting.kv_blocks == limits.kv_blocks => {
            let shared = shared_bytes(model, &layers, &fitting);
            let lift = Some(Lift { layers, stage, from, shared, why });
            return Ok(Lifted { bands: with, limits: fitting, lift, warning: None });
        }
        Err(refusal) if forced => {
            return Err(Refusal::PromptsOnGpu { reason: reason(&refusal), code: refusal.code() });
        }
        Err(refusal) => reason(&refusal),
        Ok(fitting) => format!(
            "of {} KV blocks {} would be left; offload_prompts `gpu` takes the others",
            limits.kv_blocks, fitting.kv_blocks
        ),
    };
    let spilled = layers.len();
    let warning = format!("{WARNING} in the {spilled} layers that spilled, not on the GPU: {reason}");
    unlifted(bands, Some(warning))
}

/// What is in the way, without the advice that is for others.
fn reason(refusal: &Refusal) -> String {
    match refusal {
        Refusal::PinnedMemory { mapped, pinned, cap, available } => format!(
            "{} of weights and {} of buffers would be page-locked, and only {}, half of the {} available, may be",
            bytes(*mapped),
            bytes(*pinned),
            bytes(*cap),
            bytes(*available)
        ),
        other => other.to_string(),
    }
}

/// Where prompts run on the CPU for want of memory, says with how many resident layers less they would not.
pub(super) fn with_advice(mut plan: Plan, model: &ModelSummary, machine: &Machine, wishes: &Wishes) -> Plan {
    let on_device = |stage: &Stage| stage.residency.iter().filter(|home| **home == Residency::Device).count();
    let resident: usize = plan.stages.iter().map(on_device).sum();
    let wishes = Wishes { offload: Offload::Cpu, ..wishes.clone() };
    let lifts = |fewer: &usize| place(model, machine, &wishes, *fewer).is_ok_and(|plan| plan.lift.is_some());
    let may_move = plan.lift.is_none() && !matches!(wishes.division, Division::Explicit(_));
    // The warning about prompts is the last one.
    if let Some(warning) = plan.warnings.last_mut().filter(|warning| may_move && warning.starts_with(WARNING))
        && let Some(fewer) = (1..resident).rev().find(lifts)
    {
        warning.push_str(&format!("; with gpu_layer_budget {fewer} they would run there"));
    }
    plan
}

/// Bytes of the memory for the states of `layers`.
pub(super) fn shared_bytes(model: &ModelSummary, layers: &Range<usize>, limits: &Limits) -> u64 {
    let sizes = model.layers[layers.clone()].iter().map(|layer| -> &[AreaSize] { &layer.states });
    areas(sizes, limits).0 as u64
}

/// New tokens from which on a prompt is faster with `layers` lifted, and what decided.
fn threshold(
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
    layers: &Range<usize>,
) -> (usize, String) {
    if wishes.prompts == Prompts::Gpu {
        return (1, "offload_prompts asks for it".to_owned());
    }
    let lifted = &model.layers[layers.clone()];
    let speed = wishes.speeds.as_ref().and_then(|speeds| speeds.first());
    let (Some(speed), Some(products)) = (speed, machine.products) else {
        return (UNMEASURED, "speeds were not measured".to_owned());
    };
    let pass = cost::over_link(lifted.iter().map(|layer| layer.gpu.mapped).sum(), *speed);
    let token = cost::multiplying(lifted.iter().map(|layer| layer.elements).sum(), products);
    let why = format!(
        "their weights take {:.1} ms over the bus, and the CPU {:.2} ms a token, as was measured",
        pass.milliseconds(),
        token.milliseconds()
    );
    (break_even(pass, token), why)
}

/// Tokens whose time on the CPU is that of a pass of the weights over the bus, at least 1.
fn break_even(pass: Picoseconds, token: Picoseconds) -> usize {
    usize::try_from(pass.0.div_ceil(token.0.max(1))).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_lifted_when_the_cpu_would_take_as_long_as_the_bus() {
        let tokens = |pass, token| break_even(Picoseconds(pass), Picoseconds(token));
        assert_eq!((tokens(40_000, 3_340), tokens(40_000, 40_000), tokens(40_000, 40_001)), (12, 1, 1));
        assert_eq!((tokens(0, 5), tokens(7, 0)), (1, 7), "speeds beyond measure");
    }
}
