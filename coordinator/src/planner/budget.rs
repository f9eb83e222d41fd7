//! Fitting a placement into the memories it uses: the host's, and each device's.

use super::layout::{self, Band, Processor};
use super::request::Wishes;
use super::{Advice, Machine, ModelSummary, Refusal, Shortage};
use spillway_protocol::plan::{Limits, StageBytes};

/// Part of the host's available memory that may be page-locked: one in so many bytes. Locked memory cannot be swapped or taken
/// back, and a system without any left freezes.
pub(super) const PINNED_SHARE: u64 = 2;

/// One memory, and the bands that use it.
struct Pool {
    /// For messages; empty for the host.
    place: String,
    available: u64,
    /// The option that allows no more, if more is free.
    limited_by: Option<&'static str>,
    /// The device, by its place in the survey; `None` is the host.
    device: Option<usize>,
}

/// Sizes of the smallest placement: one full sequence.
pub(super) fn least(model: &ModelSummary, wishes: &Wishes) -> Limits {
    Limits {
        max_seq: wishes.max_seq,
        max_sequences: wishes.parallel,
        kv_blocks: layout::blocks_per_sequence(wishes.max_seq),
        kv_type: wishes.kv_type,
        activations: wishes.activations,
        max_step_tokens: wishes.step,
        max_logit_rows: layout::logit_rows(model.model.vocab, wishes.step, wishes.parallel),
    }
}

/// The largest KV cache that fits, from every sequence at full length down to one.
pub(super) fn fit(
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
    bands: &[Band],
) -> Result<Limits, Refusal> {
    let least = least(model, wishes);
    let one = least.kv_blocks;
    let one_more = Limits { kv_blocks: one + 1, ..least };
    let mut more = one * (wishes.parallel - 1);
    for pool in pools(machine, wishes, bands) {
        let floor = pool.needed(model, wishes, &least, bands);
        if floor > pool.available {
            return Err(pool.shortage(model, wishes, &least, bands));
        }
        let per_block = pool.needed(model, wishes, &one_more, bands) - floor;
        let spare = (pool.available - floor).checked_div(per_block).unwrap_or(u64::MAX);
        more = more.min(usize::try_from(spare).unwrap_or(usize::MAX));
    }
    let limits = Limits { kv_blocks: one + more, ..least };
    check_pinned(bands.iter().map(|band| layout::stage_bytes(model, &limits, band)), machine)?;
    Ok(limits)
}

/// Keeps layers that devices read from host memory within the part of it that may be page-locked.
pub(super) fn check_pinned(
    stages: impl Iterator<Item = StageBytes>,
    machine: &Machine,
) -> Result<(), Refusal> {
    let (mapped, pinned) =
        stages.fold((0, 0), |(mapped, pinned), bytes| (mapped + bytes.mapped, pinned + bytes.pinned));
    let cap = machine.available_bytes / PINNED_SHARE;
    if mapped == 0 || mapped + pinned <= cap {
        return Ok(());
    }
    Err(Refusal::PinnedMemory { mapped, pinned, cap, available: machine.available_bytes })
}

/// The host's memory and that of every device in use.
fn pools(machine: &Machine, wishes: &Wishes, bands: &[Band]) -> Vec<Pool> {
    let host =
        Pool { place: String::new(), available: machine.available_bytes, limited_by: None, device: None };
    let in_use = |band: &Band| match band.processor {
        Processor::Gpu(seat) => Some(wishes.seats[seat].gpu),
        Processor::Cpu(_) => None,
    };
    let mut devices: Vec<usize> = bands.iter().filter_map(in_use).collect();
    devices.sort_unstable();
    devices.dedup();
    let devices = devices.into_iter().map(|index| {
        let gpu = &machine.gpus.gpus[index];
        let seats = wishes.seats.iter().filter(|seat| seat.gpu == index);
        let usable = seats.clone().map(super::seats::Seat::usable).min().unwrap_or(0);
        let rooms = seats.fold(0u64, |sum, seat| sum.saturating_add(seat.room()));
        let limited = wishes.seats.iter().any(|seat| seat.gpu == index && seat.free < gpu.free_bytes);
        Pool {
            limited_by: if rooms < usable { Some("split") } else { limited.then_some("vram_limit") },
            place: format!(" of device {} ({})", gpu.device.index, gpu.device.name),
            available: usable.min(rooms),
            device: Some(index),
        }
    });
    std::iter::once(host).chain(devices).collect()
}

impl Pool {
    /// What bands take of this memory.
    fn charges(&self, model: &ModelSummary, wishes: &Wishes, limits: &Limits, bands: &[Band]) -> StageBytes {
        let mut sum = StageBytes::default();
        for band in bands {
            let bytes = layout::stage_bytes(model, limits, band);
            let on_device = match band.processor {
                Processor::Cpu(_) => None,
                Processor::Gpu(seat) => Some(wishes.seats[seat].gpu),
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
                sum.mapped += bytes.mapped;
            }
        }
        sum
    }

    fn needed(&self, model: &ModelSummary, wishes: &Wishes, limits: &Limits, bands: &[Band]) -> u64 {
        self.charges(model, wishes, limits, bands).private()
    }

    fn shortage(&self, model: &ModelSummary, wishes: &Wishes, limits: &Limits, bands: &[Band]) -> Refusal {
        let charges = self.charges(model, wishes, limits, bands);
        Refusal::Memory(Box::new(Shortage {
            place: self.place.clone(),
            advice: Advice::default(),
            needed: charges.private(),
            available: self.available,
            limited_by: self.limited_by,
            weights: charges.weights + charges.mapped,
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
