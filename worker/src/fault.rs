//! Faults that tests ask for, by environment variable: a worker that fails because of what it is asked to compute cannot be
//! made with signals.

/// `abort-on-token:ID`: the process ends itself, as a crash would, when it is given this token.
const VARIABLE: &str = "SPILLWAY_FAULT";

/// The fault of this process, read once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Fault {
    fatal_token: Option<u32>,
}

impl Fault {
    pub(crate) fn from_env() -> Self {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        Self { fatal_token: text.strip_prefix("abort-on-token:").and_then(|id| id.parse().ok()) }
    }

    /// Called with the tokens of every step.
    pub(crate) fn tokens(self, ids: &[u32]) {
        if self.fatal_token.is_some_and(|fatal| ids.contains(&fatal)) {
            std::process::abort();
        }
    }
}
