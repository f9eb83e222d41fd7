//! The engine: one plain thread that owns the workers, the slots, the KV blocks and the queue.

mod request;

use crate::open::LoadedModel;
use crate::workers::LoadProgress;
pub use request::{
    Completion, ErrorClass, EventSink, FinishReason, GenerateEvent, GenerateRequest, RequestError, RequestId,
    Timings,
};
use serde::Serialize;
use spillway_protocol::control::LoadStats;
use spillway_protocol::plan::Plan;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

/// Choices that are neither placement nor request.
#[derive(Debug, Clone, Default)]
pub struct EngineOptions {
    /// Executable that has the `worker-cpu` subcommand; the running one when left out.
    pub worker_exe: Option<PathBuf>,
    /// Requests that may wait for a slot; default 256.
    pub queue: Option<usize>,
}

/// The pipeline could not be started.
#[derive(Debug, Error)]
pub enum EngineError {
    /// Not implemented.
    #[error("{0}")]
    Missing(String),
}

impl EngineError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        "missing"
    }
}

/// A handle to a running engine; clones share it. The engine ends with [`Engine::shutdown`] or when the last handle is
/// dropped.
#[derive(Debug, Clone)]
pub struct Engine {
    model: Arc<LoadedModel>,
    plan: Arc<Plan>,
}

/// Token ids whose logits are wanted at every position (teacher forcing).
#[derive(Debug, Clone)]
pub struct ScoreRequest {
    /// The sequence.
    pub ids: Vec<u32>,
    /// Tokens per step; the plan's largest step when left out.
    pub chunk: Option<usize>,
}

/// One timed run.
#[derive(Debug, Clone, Copy)]
pub struct BenchRequest {
    /// Tokens already in the context before the clock starts.
    pub depth: usize,
    /// Prompt tokens to time (0 = skip).
    pub prompt: usize,
    /// Tokens to decode one by one (0 = skip).
    pub generate: usize,
}

/// Times of one run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct BenchResult {
    /// Seconds for the prompt.
    pub prefill_s: f64,
    /// Seconds for the decoded tokens.
    pub decode_s: f64,
}

/// What the engine is doing.
#[derive(Debug, Clone, Serialize)]
pub struct EngineStatus {
    /// Whether requests are accepted.
    pub ready: bool,
    /// Why not, when a worker has failed.
    pub failure: Option<String>,
    /// Requests that generate.
    pub live: usize,
    /// Requests that wait for a slot.
    pub queued: usize,
    /// KV blocks in use by live requests.
    pub kv_blocks_used: usize,
    /// KV blocks of the plan.
    pub kv_blocks_total: usize,
    /// Tokens computed since the start, prompt and answer.
    pub tokens_done: u64,
    /// Per stage.
    pub stages: Vec<StageStatus>,
}

/// One worker.
#[derive(Debug, Clone, Serialize)]
pub struct StageStatus {
    /// Process id.
    pub pid: u32,
    /// What it allocated.
    pub loaded: LoadStats,
    /// Steps done.
    pub steps: u64,
    /// Nanoseconds computing.
    pub busy_ns: u64,
    /// Nanoseconds waiting for input.
    pub wait_ns: u64,
}

impl Engine {
    /// Spawns the workers of `plan`, loads every band and waits until all are ready. On an error every process and
    /// segment is gone again.
    pub fn start(
        model: Arc<LoadedModel>,
        plan: Plan,
        _options: EngineOptions,
        _progress: impl FnMut(LoadProgress) + Send,
    ) -> Result<Engine, EngineError> {
        let _ = (model, plan);
        Err(EngineError::Missing("the engine is being written".into()))
    }

    /// The model that runs.
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }

    /// The placement that was loaded.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Accepts a request, or refuses it without any event. An accepted one ends in exactly one terminal event.
    pub fn submit(&self, _request: GenerateRequest, _events: EventSink) -> Result<RequestId, RequestError> {
        Err(missing())
    }

    /// Ends a request wherever it is; its terminal event is `Aborted` unless another one came first. Unknown and
    /// finished ids are ignored.
    pub fn abort(&self, _id: RequestId) {}

    /// Computes the logits of every position and hands them over in order (`position`, `[vocab]` logits). Blocks; runs
    /// as a request among others. `on_row` runs on the calling thread; `Break` ends the request.
    pub fn score(
        &self,
        _request: &ScoreRequest,
        _on_row: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), RequestError> {
        Err(missing())
    }

    /// Times prefill and decode inside the engine with pseudo-random ids, ignoring end-of-generation tokens. Blocks;
    /// refused with `busy` while other requests are live.
    pub fn bench(&self, _request: &BenchRequest) -> Result<BenchResult, RequestError> {
        Err(missing())
    }

    /// What the engine is doing now.
    pub fn status(&self) -> EngineStatus {
        EngineStatus {
            ready: false,
            failure: None,
            live: 0,
            queued: 0,
            kv_blocks_used: 0,
            kv_blocks_total: self.plan.limits.kv_blocks,
            tokens_done: 0,
            stages: Vec::new(),
        }
    }

    /// Aborts what is live, ends the workers and waits for them (2 s, then they are killed). Idempotent.
    pub fn shutdown(&self) {}
}

fn missing() -> RequestError {
    RequestError {
        code: "missing",
        class: ErrorClass::Internal,
        message: "the engine is being written".into(),
        retryable: false,
    }
}
