//! The engine: one plain thread that owns the workers, the slots, the KV blocks and the queue.
//!
//! A step is one forward of a set of tokens through all stages: a decode token of every answering sequence and, in what
//! room is left, prompt tokens. The thread composes a step, sends it, delivers the events of the step
//! before while the workers compute, and collects the logits. Several steps are under way at once only where the plan
//! gives every stage CPUs of its own.
//!
//! Memory is reserved when a request is let in: KV blocks for its prompt and its whole answer. A request that runs
//! therefore never waits for memory, and requests cannot block each other for ever.

mod answer;
mod bench;
mod blocks;
mod board;
mod driver;
mod error;
mod lifts;
mod mailbox;
mod pipeline;
mod readiness;
mod recover;
mod recovery;
mod relocate;
mod request;
mod schedule;
mod score;
mod sequence;
mod shared;
mod slots;
mod start;
mod supervisor;
mod text;
mod watchdog;

pub use bench::{BenchRequest, BenchResult};
pub use error::EngineError;
pub use readiness::{RECOVERY_GRACE, Readiness};
pub use relocate::{DeviceLost, Placed, Replan, ReplanError};
pub use request::{
    Completion, ErrorClass, EventSink, FinishReason, GenerateEvent, GenerateRequest, RequestError, RequestId,
    ScoreRequest, Timings,
};
pub use shared::{EngineStatus, StageStatus};
pub(crate) use supervisor::DEFAULT_LIMIT as DEFAULT_RESTART_LIMIT;

use crate::cards::CardLocks;
use crate::open::LoadedModel;
use crate::workers::LoadProgress;
use answer::Answer;
use bench::BenchJob;
use mailbox::{Command, Mailbox};
use sequence::{Output, Waiting};
use shared::Shared;
use spillway_protocol::plan::Plan;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{JoinHandle, ThreadId};

/// Choices that are neither placement nor request.
#[derive(Debug, Clone, Default)]
pub struct EngineOptions {
    /// Executable that has the `worker-cpu` subcommand; the running one when left out.
    pub worker_exe: Option<PathBuf>,
    /// Requests that may wait for a slot; default 256.
    pub queue: Option<usize>,
    /// Steps that may be in the pipeline at once; default: one per stage where every stage has CPUs of its own, else one
    /// (see [`steps_in_flight`](crate::planner::steps_in_flight)).
    pub steps_in_flight: Option<usize>,
    /// Failures of workers within a minute that are answered with a restart; one more ends every request. Default 5.
    pub restart_limit: Option<usize>,
    /// Locks on the plan's cards, held until the workers have ended.
    pub cards: CardLocks,
    /// What happens when a device does not come back.
    pub device_lost: DeviceLost,
    /// Who finds another placement then; without one every request fails.
    pub replan: Option<Arc<dyn Replan>>,
}

/// A handle to a running engine; clones share it. The engine ends with [`Engine::shutdown`] or when the last handle is
/// dropped.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    model: Arc<LoadedModel>,
    mailbox: Arc<Mailbox>,
    shared: Arc<Shared>,
    next_id: AtomicU64,
    /// The engine's thread, until someone waits for its end.
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: ThreadId,
}

impl Engine {
    /// Spawns the workers of `plan`, loads every band and waits until all are ready; `progress` is called on this thread.
    /// On an error every process and segment is gone again.
    pub fn start(
        model: Arc<LoadedModel>,
        plan: Plan,
        options: EngineOptions,
        progress: impl FnMut(LoadProgress) + Send,
    ) -> Result<Engine, EngineError> {
        start::start(model, plan, options, progress)
    }

    /// The model that runs.
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.inner.model
    }

    /// The placement that runs: another one than was started when a device has been lost.
    pub fn plan(&self) -> Arc<Plan> {
        self.inner.shared.plan()
    }

    /// The locks on its cards.
    pub fn cards(&self) -> CardLocks {
        self.inner.shared.cards()
    }

    /// Accepts a request, or refuses it without any event. An accepted one ends in exactly one terminal event.
    pub fn submit(&self, mut request: GenerateRequest, events: EventSink) -> Result<RequestId, RequestError> {
        let (plan, tokenizer) = (self.plan(), self.model().tokenizer().cloned());
        request.check(&plan, tokenizer.as_deref())?;
        let max_tokens = request.max_tokens.min(plan.limits.max_seq - request.prompt.len());
        let answer = Answer::new(&request, max_tokens, tokenizer, events);
        self.enqueue(request.prompt, plan.limits.max_step_tokens, Output::Answer(Box::new(answer)))
    }

    /// Ends a request wherever it is; its terminal event is `Aborted` unless another one came first. Unknown and
    /// finished ids are ignored.
    pub fn abort(&self, id: RequestId) {
        // A closed mailbox means that every request has had its last event.
        let _ = self.inner.mailbox.push(Command::Abort(id));
    }

    /// Computes the logits of every position and hands them over in order (`position`, `[vocab]` logits). Blocks; runs
    /// as a request among others. `on_row` runs on the calling thread, and while it is slow the engine waits; `Break`
    /// ends the request.
    pub fn score(
        &self,
        request: &ScoreRequest,
        on_row: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), RequestError> {
        let plan = self.plan();
        request.check(&plan)?;
        let largest = plan.limits.max_step_tokens;
        let chunk = request.chunk.map_or(largest, |chunk| chunk.min(largest));
        let (sender, reader) = score::pair();
        let id = self.enqueue(request.ids.clone(), chunk, Output::Score(sender))?;
        let result = reader.read(on_row);
        // Only matters when the reader broke off.
        self.abort(id);
        result.unwrap_or_else(|| Err(RequestError::stopped()))
    }

    /// Times prefill and decode inside the engine with pseudo-random ids, ignoring end-of-generation tokens. Blocks;
    /// refused with `busy` while other requests are live.
    pub fn bench(&self, request: &BenchRequest) -> Result<BenchResult, RequestError> {
        RequestError::check_length(request.length(), self.plan().limits.max_seq)?;
        let (reply, answer) = mpsc::sync_channel(1);
        let job = BenchJob { request: *request, reply };
        self.inner.mailbox.push(Command::Bench(job)).map_err(|_| RequestError::stopped())?;
        answer.recv().unwrap_or_else(|_| Err(RequestError::stopped()))
    }

    /// What the engine is doing now.
    pub fn status(&self) -> EngineStatus {
        self.inner.shared.status()
    }

    /// Whether a request that came now would be answered.
    pub fn readiness(&self) -> Readiness {
        self.inner.shared.readiness()
    }

    /// Aborts what is live, ends the workers and waits for them (2 s, then they are killed). Idempotent. Called from an
    /// event callback, it asks for the end without waiting.
    pub fn shutdown(&self) {
        self.inner.shutdown();
    }

    fn enqueue(&self, prompt: Vec<u32>, chunk: usize, output: Output) -> Result<RequestId, RequestError> {
        if let Some(error) = self.inner.shared.failure() {
            return Err(error);
        }
        let id = RequestId(self.inner.next_id.fetch_add(1, Ordering::Relaxed));
        let request = Waiting::new(id, prompt, chunk, output);
        self.inner.mailbox.push(Command::Submit(request)).map_err(|_| RequestError::stopped())?;
        Ok(id)
    }
}

impl Inner {
    fn shutdown(&self) {
        let _ = self.mailbox.push(Command::Shutdown);
        // Before the lock, which whoever waits for this thread holds.
        if std::thread::current().id() == self.thread_id {
            return;
        }
        // Held until the end, so that everyone who asks for it waits for it.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // The thread catches its own panics and says what it has to say through events.
            let _ = thread.join();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown();
    }
}
