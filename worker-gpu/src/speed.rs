//! How fast a device is: what placement decides by when it is asked to decide by speed.
//!
//! Measured with copies, which every driver has and which need no kernel. They stand in for what kernels read: how close they
//! come has not been measured, and placement only compares devices. The caller sees to it that nobody else uses the device meanwhile.

use crate::hip::{Device, HipError, Stream};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Largest copy inside the device: beyond the caches of any card.
const LARGEST: usize = 256 << 20;
/// Largest copy over the bus.
const LARGEST_OVER_BUS: usize = 64 << 20;
/// Smallest copy that tells anything.
const SMALLEST: usize = 64 << 10;
/// Part of the free memory that a copy may take at either end: one in so many bytes.
const SHARE: usize = 32;
/// A row of a large model.
const ROW: usize = 20 << 10;
/// Copies before the first that counts: idle devices and links run slower until they are used.
const WARM_UP: Duration = Duration::from_millis(50);
/// Copies of one pass, queued together; passes; and when no further pass is begun.
const COPIES: u32 = 4;
const PASSES: usize = 5;
const ENOUGH: Duration = Duration::from_millis(300);
/// Trips of a row that are timed.
const TRIPS: usize = 33;

/// Speed of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSpeed {
    /// Bytes a second that the device reads of its memory.
    pub memory: u64,
    /// Bytes a second that reach it from page-locked host memory.
    pub link: u64,
    /// Nanoseconds of a row from the device to the host and back, each way waited for.
    pub hop_ns: u64,
}

impl DeviceSpeed {
    /// Measures a device that is otherwise idle. Takes a second at most on a card of today.
    ///
    /// # Errors
    /// The driver fails, or the device has too little free memory.
    pub fn measure(device: &Device) -> Result<DeviceSpeed, HipError> {
        let bytes = (device.memory()?.free / SHARE / ROW * ROW).clamp(SMALLEST, LARGEST);
        let over_bus = bytes.min(LARGEST_OVER_BUS);
        let stream = Stream::new(device)?;
        let source = device.allocate("source of a speed test", bytes)?;
        let target = device.allocate("target of a speed test", bytes)?;
        let host = device.allocate_pinned("host memory of a speed test", over_bus)?;
        // Memory that was never written may not be there yet.
        stream.fill(source.slice(), 1)?;
        host.write(0, &vec![1; over_bus])?;
        let landing = target.slice().part(0, over_bus)?;
        // Every byte is read and written.
        let memory = rate(&stream, 2 * bytes, || stream.copy_within(target.slice(), source.slice()))?;
        let link = rate(&stream, over_bus, || stream.upload(landing, &host, 0))?;
        let row = target.slice().part(0, ROW)?;
        let hop_ns = median(TRIPS, || {
            stream.download(&host, 0, row)?;
            stream.synchronize()?;
            stream.upload(row, &host, 0)?;
            stream.synchronize()
        })?;
        Ok(DeviceSpeed { memory, link, hop_ns })
    }
}

/// Bytes a second of the fastest pass: slower ones were disturbed.
fn rate(stream: &Stream, moved: usize, copy: impl Fn() -> Result<(), HipError>) -> Result<u64, HipError> {
    let pass = |copies: u32| -> Result<Duration, HipError> {
        let start = Instant::now();
        (0..copies).try_for_each(|_| copy())?;
        stream.synchronize()?;
        Ok(start.elapsed() / copies)
    };
    let start = Instant::now();
    while start.elapsed() < WARM_UP {
        pass(1)?;
    }
    let start = Instant::now();
    let mut best = pass(COPIES)?;
    for _ in 1..PASSES {
        if start.elapsed() > ENOUGH {
            break;
        }
        best = best.min(pass(COPIES)?);
    }
    let rate = moved as u128 * 1_000_000_000 / best.as_nanos().max(1);
    Ok(u64::try_from(rate).unwrap_or(u64::MAX).max(1))
}

/// Nanoseconds of the median trip.
fn median(trips: usize, trip: impl Fn() -> Result<(), HipError>) -> Result<u64, HipError> {
    let time = |_| -> Result<Duration, HipError> {
        let start = Instant::now();
        trip()?;
        Ok(start.elapsed())
    };
    let mut times = (0..trips).map(time).collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    let middle = times.get(trips / 2).copied().unwrap_or_default();
    Ok(u64::try_from(middle.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hip::Driver;

    fn measured(provider: &str, ordinal: u32) -> Result<DeviceSpeed, HipError> {
        let driver = Driver::open(&provider.parse().unwrap()).unwrap();
        DeviceSpeed::measure(&Device::open(&driver, ordinal).unwrap())
    }

    /// What is measured is what the device does, for each of several: at most what was set, and not far below it.
    #[test]
    fn speeds_are_those_of_the_device() {
        let settings = "emulated:devices=2,memory=32MiB,bandwidth=400MiB/100MiB,link=20MiB/50MiB";
        for (ordinal, memory, link) in [(0, 400, 20), (1, 100, 50)] {
            let speed = measured(settings, ordinal).unwrap();
            let near = |found: u64, set: u64| found <= set << 20 && found > (set << 20) / 2;
            assert!(near(speed.memory, memory) && near(speed.link, link), "{ordinal}: {speed:?}");
            // 40 KiB in all.
            assert!(speed.hop_ns > (40 << 10) * 1_000_000_000 / (link << 20), "{ordinal}: {speed:?}");
        }
    }

    /// A device without room is an error, not a panic.
    #[test]
    fn a_device_without_room_is_not_measured() {
        assert_eq!(measured("emulated:memory=80KiB", 0).unwrap_err().code(), "gpu_out_of_memory");
    }
}
