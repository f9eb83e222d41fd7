//! How long a recovery took, part by part.

use serde::Serialize;
use std::time::{Duration, Instant};

/// One recovery: from the failure of a worker until requests are where they were. Times in milliseconds; where several attempts
/// were needed, those of all of them. One that another failure interrupts is not told of.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Recovery {
    /// The pipeline incarnation that it began.
    pub epoch: u64,
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
    /// Computing sequences again up to where they were.
    pub replay_ms: f64,
}

impl Recovery {
    /// Writes it into the log.
    pub(super) fn tell(&self) {
        tracing::info!(
            epoch = self.epoch,
            code = self.code,
            stages = ?self.stages,
            attempts = self.attempts,
            detect_ms = self.detect_ms,
            backoff_ms = self.backoff_ms,
            replan_ms = self.replan_ms,
            respawn_ms = self.respawn_ms,
            load_ms = self.load_ms,
            replay_ms = self.replay_ms,
            "recovered"
        );
    }
}

/// A recovery whose sequences are computed again.
#[derive(Debug)]
pub(super) struct Replaying {
    /// Since when.
    pub since: Instant,
    /// All but that time.
    pub recovery: Recovery,
}

impl Replaying {
    /// Every sequence is where it was.
    pub(super) fn over(self) -> Recovery {
        Recovery { replay_ms: ms(self.since.elapsed()), ..self.recovery }
    }
}

/// For the fields of [`Recovery`], to a microsecond.
pub(super) fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}
