//! Whether a request that came now would be answered: what a load balancer or a supervisor of the daemon wants to know, unlike
//! whether the process is there.
//!
//! Ready is an engine through whose whole pipeline tokens go, or would: every worker is there, none has failed or has been stopped,
//! and the step under way, if there is one, gets on. A recovery is a pause and no refusal, so that it does not count at once.

use std::time::Duration;

/// How long a recovery may last until the engine does not count as ready any more.
pub const RECOVERY_GRACE: Duration = Duration::from_secs(5);

/// Whether requests would be answered, and why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// A request that came now would be answered without a long wait for the pipeline.
    pub ready: bool,
    /// `ready`, `recovering` (a worker is being replaced, requests wait), `stalled` (a step does not get on) or `failed`; of a
    /// daemon also `none`, `loading` and `draining`.
    pub state: &'static str,
    /// One sentence, unless the state is `ready`.
    pub reason: Option<String>,
}

impl Readiness {
    /// Ready, with nothing to say.
    pub(crate) fn ready() -> Readiness {
        Readiness { ready: true, state: "ready", reason: None }
    }

    /// Not ready.
    pub(crate) fn not(state: &'static str, reason: impl Into<String>) -> Readiness {
        Readiness { ready: false, state, reason: Some(reason.into()) }
    }

    /// While workers are being replaced for `time`.
    pub(super) fn recovering(time: Duration, reason: String) -> Readiness {
        Readiness { ready: time <= RECOVERY_GRACE, state: "recovering", reason: Some(reason) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_recovery_is_a_pause_and_a_long_one_is_not() {
        let after = |seconds| Readiness::recovering(Duration::from_secs(seconds), "stage 1 died".into());
        assert!(after(5).ready && !after(6).ready);
        assert_eq!((after(9).state, after(9).reason.as_deref()), ("recovering", Some("stage 1 died")));
    }
}
