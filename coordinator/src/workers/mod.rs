//! Worker processes: spawning, handshake, loading, watching, ending.

/// Load progress of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Place in the pipeline, 0-based.
    pub stage: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// Weight bytes the stage has stored so far.
    pub done: u64,
    /// Weight bytes of the stage.
    pub total: u64,
}
