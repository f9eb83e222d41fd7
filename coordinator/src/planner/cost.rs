//! How long tokens take, by measured speeds. For a decoded one every stage reads its weights, its keys and values and its state once,
//! and a row goes from stage to stage. Of a prompt's only that is counted which placements differ in: what CPU workers multiply, and
//! what comes over the bus. Whole numbers throughout, so that the same input gives the same answer everywhere.

use super::request::DEFAULT_STEP;
use super::{Machine, ModelSummary};
use spillway_protocol::plan::{Execution, KV_BLOCK_TOKENS, Limits, Plan, Stage, StageBytes};
use spillway_worker_gpu::speed::DeviceSpeed;
use std::iter::Sum;
use std::ops::Add;

/// Part of the measured speed that decoding reaches, in hundredths (docs/performance.md, "Shares of measured speeds": 66 of one
/// GPU's memory, 85 to 92 of two hosts', 88 of one bus).
const OF_GPU_MEMORY: u64 = 65;
const OF_HOST_MEMORY: u64 = 90;
const OF_LINK: u64 = 88;

/// A CPU worker's part of handing a row on, in nanoseconds: half a hop between two of them (docs/performance.md).
const CPU_END_NS: u64 = 1500;

/// A time in picoseconds: one byte at the speed of the fastest memory is some.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Picoseconds(pub u128);

impl Picoseconds {
    /// Of reading so many bytes at a part of a measured speed.
    fn reading(bytes: u64, speed: u64, hundredths: u64) -> Self {
        const SECOND: u128 = 1_000_000_000_000;
        let usable = (u128::from(speed) * u128::from(hundredths)).max(1);
        Picoseconds(u128::from(bytes) * 100 * SECOND / usable)
    }

    fn from_nanoseconds(nanoseconds: u64) -> Self {
        Picoseconds(u128::from(nanoseconds) * 1000)
    }

    /// In milliseconds, for people.
    pub fn milliseconds(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl Add for Picoseconds {
    type Output = Picoseconds;

    fn add(self, other: Picoseconds) -> Picoseconds {
        Picoseconds(self.0.saturating_add(other.0))
    }
}

impl Sum for Picoseconds {
    fn sum<I: Iterator<Item = Picoseconds>>(times: I) -> Picoseconds {
        times.fold(Picoseconds::default(), Add::add)
    }
}

/// Time of reading bytes in the memory of a GPU.
pub(super) fn on_gpu(bytes: u64, speed: DeviceSpeed) -> Picoseconds {
    Picoseconds::reading(bytes, speed.memory, OF_GPU_MEMORY)
}

/// Time of a GPU reading bytes in the host's memory.
pub(super) fn over_link(bytes: u64, speed: DeviceSpeed) -> Picoseconds {
    Picoseconds::reading(bytes, speed.link, OF_LINK)
}

/// Time of CPU workers reading bytes.
pub(super) fn on_cpu(bytes: u64, bandwidth: u64) -> Picoseconds {
    Picoseconds::reading(bytes, bandwidth, OF_HOST_MEMORY)
}

/// Time of CPU workers for one token of a prompt in matrices of so many elements, at `products` multiplications a second.
pub(super) fn multiplying(elements: u64, products: u64) -> Picoseconds {
    Picoseconds::reading(elements, products, 100)
}

/// Tokens of a prompt for each of its answer, by which placements are weighed: people ask with more than they are answered.
pub(super) const PROMPT_TOKENS: u32 = 4;

/// Time of a token of an answer and of [`PROMPT_TOKENS`] of its prompt. None where a speed is not known.
pub(super) fn weighed_time(model: &ModelSummary, plan: &Plan, machine: &Machine) -> Option<Picoseconds> {
    let prompt = prompt_time(model, plan, machine).0.saturating_mul(PROMPT_TOKENS.into());
    Some(token_time(plan, machine)? + Picoseconds(prompt))
}

/// Time of a token of a prompt beside what GPUs multiply; none where it is not known how fast the CPU multiplies.
fn prompt_time(model: &ModelSummary, plan: &Plan, machine: &Machine) -> Picoseconds {
    let Some(products) = machine.products else { return Picoseconds::default() };
    // Whether there is room for larger steps is seen when the placement is chosen.
    let step = plan.limits.max_step_tokens.clamp(1, DEFAULT_STEP) as u128;
    let of_stage = |(index, stage): (usize, &Stage)| match &stage.execution {
        Execution::Cpu { .. } if plan.lift_at(index).is_some() => Picoseconds::default(),
        Execution::Cpu { .. } => {
            let elements = model.layers[stage.layers.clone()].iter().map(|layer| layer.elements).sum();
            multiplying(elements, products)
        }
        Execution::Gpu { device } => {
            let speed = machine.gpu(device).and_then(|gpu| gpu.speed);
            let pass = speed.map_or(Picoseconds::default(), |speed| over_link(stage.bytes.mapped, speed));
            Picoseconds(pass.0 / step)
        }
    };
    plan.stages.iter().enumerate().map(of_stage).sum()
}

/// Time of one token of one sequence whose context is half full. None where a speed is not known.
pub(super) fn token_time(plan: &Plan, machine: &Machine) -> Option<Picoseconds> {
    let work = (0..plan.stages.len()).map(|stage| {
        let bytes = decoding_bytes(plan, stage);
        stage_time(&plan.stages[stage].execution, &bytes, &plan.limits, machine)
    });
    let work = work.sum::<Option<Picoseconds>>()?;
    let ends = plan.stages.windows(2).flatten().map(|stage| end_time(stage, machine));
    Some(work + ends.sum::<Option<Picoseconds>>()?)
}

/// What a stage is charged for, without what it has for prompts alone: the states of lifted layers once more, and their weights.
pub(crate) fn decoding_bytes(plan: &Plan, stage: usize) -> StageBytes {
    let bytes = plan.stages[stage].bytes;
    match &plan.lift {
        Some(lift) if lift.stage == stage => {
            let sum =
                |of: fn(&StageBytes) -> u64| plan.stages[..stage].iter().map(|stage| of(&stage.bytes)).sum();
            StageBytes {
                kv: bytes.kv.saturating_sub(sum(|bytes| bytes.kv)),
                state: bytes.state.saturating_sub(sum(|bytes| bytes.state)),
                mapped: 0,
                ..bytes
            }
        }
        _ => bytes,
    }
}

fn stage_time(
    execution: &Execution,
    bytes: &StageBytes,
    limits: &Limits,
    machine: &Machine,
) -> Option<Picoseconds> {
    let read = bytes.weights.saturating_add(sequence_bytes(bytes, limits));
    match execution {
        Execution::Cpu { .. } => Some(on_cpu(read, machine.memory_bandwidth?)),
        Execution::Gpu { device } => {
            let speed = machine.gpu(device)?.speed?;
            Some(on_gpu(read, speed) + over_link(bytes.mapped, speed))
        }
    }
}

/// Keys and values up to the middle of the context, and the state, which is read and written.
fn sequence_bytes(bytes: &StageBytes, limits: &Limits) -> u64 {
    let pool = (limits.kv_blocks * KV_BLOCK_TOKENS).max(1) as u64;
    let kv = u128::from(bytes.kv) * (limits.max_seq / 2) as u128 / u128::from(pool);
    let state = 2 * bytes.state / (limits.max_sequences as u64).max(1);
    u64::try_from(kv).unwrap_or(u64::MAX).saturating_add(state)
}

/// One end of a hop.
fn end_time(stage: &Stage, machine: &Machine) -> Option<Picoseconds> {
    let nanoseconds = match &stage.execution {
        Execution::Cpu { .. } => CPU_END_NS,
        // What was measured is both ways.
        Execution::Gpu { device } => machine.gpu(device)?.speed?.hop_ns / 2,
    };
    Some(Picoseconds::from_nanoseconds(nanoseconds))
}
