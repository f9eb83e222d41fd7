//! How long a recovery took, part by part.

use spillway_protocol::jsonl::Recovery;
use std::time::{Duration, Instant};

/// Writes a recovery into the log.
pub(super) fn tell(recovery: &Recovery) {
    tracing::info!(
        epoch = recovery.epoch,
        code = recovery.code,
        stages = ?recovery.stages,
        attempts = recovery.attempts,
        detect_ms = recovery.detect_ms,
        backoff_ms = recovery.backoff_ms,
        replan_ms = recovery.replan_ms,
        respawn_ms = recovery.respawn_ms,
        load_ms = recovery.load_ms,
        replay_ms = recovery.replay_ms,
        "recovered"
    );
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
