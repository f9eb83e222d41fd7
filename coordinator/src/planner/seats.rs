//! The GPUs of a pipeline: what may be taken of each, and whether they go together.

use super::gpus::{Gpu, GpuSurvey};
use super::{PlacementRequest, Refusal, size};

/// Part of a device's free memory that is left to its driver: one in so many bytes.
const DRIVER_SHARE: u64 = 64;

/// Largest difference of free memory that uniform bands accept, in bytes (2.0 GB), unless the request says otherwise.
pub(crate) const TOLERANCE: u64 = 2_000_000_000;

/// A GPU of the pipeline, one per GPU stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seat {
    /// Its place in the survey.
    pub gpu: usize,
    /// Memory that can be allocated on it: what is free, or the smaller card that the request wants to plan for.
    pub free: u64,
    /// What the stage may take, where the request says so.
    pub budget: Option<u64>,
}

impl Seat {
    /// Bytes of the device that all its stages together may take.
    pub fn usable(&self) -> u64 {
        usable(self.free)
    }

    /// Bytes of the device that this stage may take.
    pub fn room(&self) -> u64 {
        self.budget.map_or(self.usable(), |budget| budget.min(self.usable()))
    }
}

/// What stages may take of a device with so many bytes free; the rest is its driver's.
pub(super) fn usable(free: u64) -> u64 {
    free - free / DRIVER_SHARE
}

/// Seats on `gpus`, places in `survey`.
pub(super) fn seats(
    gpus: &[usize],
    survey: &GpuSurvey,
    request: &PlacementRequest,
) -> Result<Vec<Seat>, Refusal> {
    let limits = sizes("vram_limit", request.vram_limit.as_deref(), gpus.len())?;
    let seat = |(place, &gpu): (usize, &usize)| {
        let free = survey.gpus[gpu].free_bytes;
        Seat { gpu, free: limits.as_ref().map_or(free, |limits| free.min(limits[place])), budget: None }
    };
    Ok(gpus.iter().enumerate().map(seat).collect())
}

/// Reads one size for every GPU, or one for all.
pub(super) fn sizes(
    field: &'static str,
    asked: Option<&str>,
    gpus: usize,
) -> Result<Option<Vec<u64>>, Refusal> {
    let Some(asked) = asked.map(str::trim).filter(|asked| !asked.is_empty()) else { return Ok(None) };
    if gpus == 0 {
        return Err(Refusal::NeedsGpu { field });
    }
    let read = |entry: &str| {
        size::read(entry).ok_or_else(|| Refusal::SizeUnreadable { field, entry: entry.trim().into() })
    };
    let mut sizes = asked.split(',').map(read).collect::<Result<Vec<u64>, _>>()?;
    if sizes.len() == 1 {
        sizes.resize(gpus, sizes[0]);
    }
    if sizes.len() != gpus {
        return Err(Refusal::SizeCount { field, entries: sizes.len(), devices: gpus });
    }
    Ok(Some(sizes))
}

/// Refuses cards of several architectures: kernels of different ones round differently, and one of them may lack kernels.
pub(super) fn check_architectures(seats: &[Seat], survey: &GpuSurvey) -> Result<(), Refusal> {
    let Some(first) = seats.first().map(|seat| &survey.gpus[seat.gpu]) else { return Ok(()) };
    let others = seats.iter().map(|seat| &survey.gpus[seat.gpu]);
    match others.into_iter().find(|gpu| gpu.device.arch != first.device.arch) {
        Some(other) => Err(Refusal::ArchMismatch { first: in_words(first), other: in_words(other) }),
        None => Ok(()),
    }
}

/// Refuses uniform bands on cards of very different free memory: the smallest decides what fits.
pub(super) fn check_difference(
    seats: &[Seat],
    survey: &GpuSurvey,
    tolerance: Option<&str>,
) -> Result<(), Refusal> {
    let tolerance = tolerance.map(str::trim).filter(|text| !text.is_empty());
    let tolerance = tolerance.map_or(Ok(TOLERANCE), |text| {
        let unreadable = || Refusal::ToleranceUnreadable { asked: text.into() };
        read_tolerance(text).ok_or_else(unreadable)
    })?;
    let (Some(least), Some(most)) =
        (seats.iter().min_by_key(|seat| seat.free), seats.iter().max_by_key(|seat| seat.free))
    else {
        return Ok(());
    };
    if most.free - least.free <= tolerance {
        return Ok(());
    }
    let words = |seat: &Seat| in_words(&survey.gpus[seat.gpu]);
    Err(Refusal::VramDifference {
        least: words(least),
        least_free: least.free,
        most: words(most),
        most_free: most.free,
        tolerance,
    })
}

/// Reads a number of GB, as settings allow it, into bytes.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "more than all bytes there are is all of them"
)]
fn read_tolerance(text: &str) -> Option<u64> {
    let gigabytes: f64 = text.parse().ok()?;
    (gigabytes.is_finite() && gigabytes >= 0.0).then(|| (gigabytes * 1e9).round() as u64)
}

fn in_words(gpu: &Gpu) -> String {
    format!("device {} ({}, {})", gpu.device.index, gpu.device.name, gpu.device.arch)
}
