//! Fitting a placement into the memories it uses: the host's, and each device's.

use super::layout::{self, Band, Processor};
use super::request::Wishes;
use super::{Machine, ModelSummary, Refusal, Shortage};
use spillway_protocol::plan::{Limits, StageBytes};

/// Part of a device's free memory that is left to its driver: one in so many bytes.
const DRIVER_SHARE: u64 = 64;

/// One memory, and the bands that use it.
struct Pool {
    /// For messages; empty for the host.
    place: String,
    available: u64,
    /// The device, by its place in the survey; `None` is the host.
    device: Option<usize>,
}

/// The largest KV cache that fits, from every sequence at full length down to one.
pub(super) fn fit(
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
    bands: &[Band],
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
    let (least, one_more) = (with_blocks(one), with_blocks(one + 1));
    let mut more = one * (wishes.parallel - 1);
    for pool in pools(machine, bands) {
        let floor = pool.needed(model, &least, bands);
        if floor > pool.available {
            return Err(pool.shortage(model, &least, bands));
        }
        let per_block = pool.needed(model, &one_more, bands) - floor;
        let spare = (pool.available - floor).checked_div(per_block).unwrap_or(u64::MAX);
        more = more.min(usize::try_from(spare).unwrap_or(usize::MAX));
    }
    Ok(with_blocks(one + more))
}

/// The host's memory and that of every device in use.
fn pools(machine: &Machine, bands: &[Band]) -> Vec<Pool> {
    let host = Pool { place: String::new(), available: machine.available_bytes, device: None };
    let mut devices: Vec<usize> = bands
        .iter()
        .filter_map(|band| match band.processor {
            Processor::Gpu(device) => Some(device),
            Processor::Cpu(_) => None,
        })
        .collect();
    devices.sort_unstable();
    devices.dedup();
    let devices = devices.into_iter().map(|index| {
        let gpu = &machine.gpus.gpus[index];
        Pool {
            place: format!(" of device {} ({})", gpu.device.index, gpu.device.name),
            available: gpu.free_bytes - gpu.free_bytes / DRIVER_SHARE,
            device: Some(index),
        }
    });
    std::iter::once(host).chain(devices).collect()
}

impl Pool {
    /// What bands take of this memory.
    fn charges(&self, model: &ModelSummary, limits: &Limits, bands: &[Band]) -> StageBytes {
        let mut sum = StageBytes::default();
        for band in bands {
            let bytes = layout::stage_bytes(model, limits, band);
            let on_device = match band.processor {
                Processor::Cpu(_) => None,
                Processor::Gpu(device) => Some(device),
            };
            if self.device == on_device {
                sum.weights += bytes.weights;
                sum.kv += bytes.kv;
                sum.state += bytes.state;
                sum.scratch += bytes.scratch;
            }
            if self.device.is_none() {
                sum.rings += bytes.rings;
                sum.pinned += bytes.pinned;
            }
        }
        sum
    }

    fn needed(&self, model: &ModelSummary, limits: &Limits, bands: &[Band]) -> u64 {
        self.charges(model, limits, bands).private()
    }

    fn shortage(&self, model: &ModelSummary, limits: &Limits, bands: &[Band]) -> Refusal {
        let charges = self.charges(model, limits, bands);
        Refusal::Memory(Box::new(Shortage {
            place: self.place.clone(),
            fitting_budget: None,
            needed: charges.private(),
            available: self.available,
            weights: charges.weights,
            kv: charges.kv,
            kv_tokens: limits.max_seq,
            state: charges.state,
            scratch: charges.scratch,
            buffers: charges.rings + charges.pinned,
            max_seq: limits.max_seq,
            parallel: limits.max_sequences,
            step: limits.max_step_tokens,
        }))
    }
}
