//! How long a recovery took, part by part.

use serde::Serialize;
use std::time::Duration;

/// One recovery: from the failure of a worker until requests are where they were. Times in milliseconds; where several attempts
/// were needed, those of all of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Recovery {
    /// Recoveries since the start, this one included.
    pub number: u64,
    /// Code of the failure that began it.
    pub code: &'static str,
    /// Stages whose workers were replaced, in the last attempt.
    pub stages: Vec<usize>,
    /// Starts that it took.
    pub attempts: u32,
    /// From the failure until it was noticed; at most this long: from the last sign of life.
    pub detect_ms: f64,
    /// Waiting before starts that follow others which failed.
    pub backoff_ms: f64,
    /// Finding another placement after the loss of a device.
    pub replan_ms: f64,
    /// Ending processes and starting others.
    pub respawn_ms: f64,
    /// Loading bands and arranging links.
    pub load_ms: f64,
    /// Computing sequences again up to where they were; none while that goes on.
    pub replay_ms: Option<f64>,
}

/// For the fields of [`Recovery`], to a microsecond.
pub(super) fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}
