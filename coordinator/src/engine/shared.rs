//! What the engine's thread shows the outside while it works.

use super::board::Board;
use super::readiness::Readiness;
use super::recovery;
use super::request::RequestError;
use crate::cards::CardLocks;
use crate::workers::{Lifecycle, Link, WorkerError, WorkerView, is_stopped};
use serde::Serialize;
use spillway_protocol::control::LoadStats;
use spillway_protocol::jsonl::Recovery;
use spillway_protocol::plan::Plan;
use spillway_protocol::status::WorkerState;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What the engine is doing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EngineStatus {
    /// Whether requests are accepted.
    pub ready: bool,
    /// Why not, when a worker has failed.
    pub failure: Option<String>,
    /// Requests that generate.
    pub live: usize,
    /// Requests that wait for a slot.
    pub queued: usize,
    /// KV blocks reserved by live requests.
    pub kv_blocks_used: usize,
    /// KV blocks of the plan.
    pub kv_blocks_total: usize,
    /// Tokens run since the start, prompt and answer.
    pub tokens_done: u64,
    /// Failure of a worker that is being replaced now; requests are accepted and wait.
    pub recovering: Option<String>,
    /// Workers replaced since the start.
    pub restarts: u64,
    /// The last recovery that is over.
    pub recovery: Option<Recovery>,
    /// Pipeline incarnation: one more with every recovery.
    pub epoch: u64,
    /// Per stage.
    pub stages: Vec<StageStatus>,
    /// Between neighbouring stages on GPUs.
    pub links: Vec<Link>,
}

/// One worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StageStatus {
    /// Process id.
    pub pid: u32,
    /// What it allocated.
    pub loaded: LoadStats,
    /// Where it is between its start and its end.
    pub lifecycle: Lifecycle,
    /// What it is in the middle of; `ended` when the process is gone.
    pub state: &'static str,
    /// Bytes of weights that it has stored, and all of its band; zeros until it says so.
    pub stored: (u64, u64),
    /// Step in hand, or the last one.
    pub step: u64,
    /// Steps done.
    pub steps: u64,
    /// Nanoseconds computing.
    pub busy_ns: u64,
    /// Nanoseconds waiting for input or for room.
    pub wait_ns: u64,
    /// Nanoseconds copying frames.
    pub copy_ns: u64,
}

/// Numbers that the engine's thread updates and anyone may read.
#[derive(Debug)]
pub(super) struct Shared {
    plan: Mutex<Arc<Plan>>,
    cards: Mutex<CardLocks>,
    kv_blocks: AtomicUsize,
    workers: Mutex<Vec<WorkerView>>,
    links: Mutex<Vec<Link>>,
    recovering: Mutex<Option<Recovering>>,
    /// Why the step under way may never come back.
    stalled: Mutex<Option<String>>,
    recovery: Mutex<Option<Recovery>>,
    restarts: AtomicU64,
    epoch: AtomicU64,
    live: AtomicUsize,
    queued: AtomicUsize,
    blocks_used: AtomicUsize,
    tokens_done: AtomicU64,
    failure: Mutex<Option<RequestError>>,
}

/// Workers are being replaced.
#[derive(Debug)]
struct Recovering {
    /// When the first of them was found to have failed.
    since: Instant,
    /// The last failure.
    reason: String,
}

/// Every value is replaced as a whole, so that a thread which panicked with a lock left nothing half-done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(plan: Arc<Plan>, cards: CardLocks, kv_blocks: usize) -> Shared {
        Shared {
            plan: Mutex::new(plan),
            cards: Mutex::new(cards),
            kv_blocks: AtomicUsize::new(kv_blocks),
            workers: Mutex::default(),
            links: Mutex::default(),
            recovering: Mutex::new(None),
            stalled: Mutex::new(None),
            recovery: Mutex::new(None),
            restarts: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            queued: AtomicUsize::new(0),
            blocks_used: AtomicUsize::new(0),
            tokens_done: AtomicU64::new(0),
            failure: Mutex::new(None),
        }
    }

    pub(super) fn publish(&self, board: &Board) {
        self.live.store(board.live(), Relaxed);
        self.queued.store(board.waiting(), Relaxed);
        self.blocks_used.store(board.blocks_used(), Relaxed);
        self.tokens_done.store(board.tokens_done(), Relaxed);
    }

    pub(super) fn plan(&self) -> Arc<Plan> {
        lock(&self.plan).clone()
    }

    pub(super) fn cards(&self) -> CardLocks {
        lock(&self.cards).clone()
    }

    /// Another placement takes the place of the present one, whose cards are free now.
    pub(super) fn set_placement(&self, plan: Arc<Plan>, cards: CardLocks, kv_blocks: usize) {
        *lock(&self.plan) = plan;
        *lock(&self.cards) = cards;
        self.kv_blocks.store(kv_blocks, Relaxed);
    }

    /// The pipeline serves.
    pub(super) fn set_started(&self, workers: Vec<WorkerView>, links: Vec<Link>, epoch: u64) {
        *lock(&self.links) = links;
        *lock(&self.workers) = workers;
        self.epoch.store(epoch, Relaxed);
    }

    /// A worker is being replaced.
    pub(super) fn set_recovering(&self, error: &WorkerError) {
        let mut recovering = lock(&self.recovering);
        let since = recovering.as_ref().map_or_else(Instant::now, |before| before.since);
        *recovering = Some(Recovering { since, reason: error.to_string() });
        *lock(&self.stalled) = None;
    }

    /// What there is to see of workers while some of them load.
    pub(super) fn set_workers(&self, workers: Vec<WorkerView>) {
        *lock(&self.workers) = workers;
    }

    /// `replaced` workers have been replaced, and a new epoch begins.
    pub(super) fn set_recovered(
        &self,
        workers: Vec<WorkerView>,
        links: Vec<Link>,
        epoch: u64,
        replaced: usize,
    ) {
        self.set_started(workers, links, epoch);
        *lock(&self.recovering) = None;
        self.restarts.fetch_add(replaced as u64, Relaxed);
    }

    /// A recovery is over: every sequence is where it was.
    pub(super) fn set_recovery(&self, recovery: Recovery) {
        recovery::tell(&recovery);
        *lock(&self.recovery) = Some(recovery);
    }

    /// Whether the step under way gets on, or why not.
    pub(super) fn set_stalled(&self, reason: Option<String>) {
        *lock(&self.stalled) = reason;
    }

    /// The pipeline is gone, and its workers with it.
    pub(super) fn set_ended(&self) {
        lock(&self.workers).iter_mut().for_each(|worker| worker.lifecycle = Lifecycle::Failed);
    }

    pub(super) fn set_failure(&self, error: RequestError) {
        *lock(&self.recovering) = None;
        *lock(&self.stalled) = None;
        self.set_ended();
        lock(&self.failure).get_or_insert(error);
    }

    /// Why nothing runs any more, if so.
    pub(super) fn failure(&self) -> Option<RequestError> {
        lock(&self.failure).clone()
    }

    pub(super) fn readiness(&self) -> Readiness {
        if let Some(failure) = self.failure() {
            return Readiness::not("failed", failure.message);
        }
        if let Some(Recovering { since, reason }) = &*lock(&self.recovering) {
            return Readiness::recovering(since.elapsed(), reason.clone());
        }
        match lock(&self.stalled).clone().or_else(|| self.stopped()) {
            Some(reason) => Readiness::not("stalled", reason),
            None => Readiness::ready(),
        }
    }

    /// Which worker a signal has stopped: while there is no step to do, nobody else notices.
    fn stopped(&self) -> Option<String> {
        let workers = lock(&self.workers);
        let (stage, worker) = workers.iter().enumerate().find(|(_, worker)| is_stopped(worker.pid))?;
        Some(format!("the worker of stage {stage} (process {}) has been stopped by a signal", worker.pid))
    }

    pub(super) fn status(&self) -> EngineStatus {
        let failure = self.failure();
        let recovering = lock(&self.recovering).as_ref().map(|recovering| recovering.reason.clone());
        let workers = lock(&self.workers);
        EngineStatus {
            ready: failure.is_none() && recovering.is_none(),
            failure: failure.map(|error| error.message),
            live: self.live.load(Relaxed),
            queued: self.queued.load(Relaxed),
            kv_blocks_used: self.blocks_used.load(Relaxed),
            kv_blocks_total: self.kv_blocks.load(Relaxed),
            tokens_done: self.tokens_done.load(Relaxed),
            recovering,
            restarts: self.restarts.load(Relaxed),
            recovery: lock(&self.recovery).clone(),
            epoch: self.epoch.load(Relaxed),
            stages: workers.iter().map(stage_status).collect(),
            links: lock(&self.links).clone(),
        }
    }
}

fn stage_status(view: &WorkerView) -> StageStatus {
    let page = view.status.read();
    let counters = page.counters;
    StageStatus {
        lifecycle: view.lifecycle,
        stored: view.stored,
        state: match (view.lifecycle.has_process(), page.state) {
            (false, _) => "ended",
            (true, state) => state.map_or("unknown", WorkerState::as_str),
        },
        step: page.step,
        pid: view.pid,
        loaded: view.stats.clone(),
        steps: counters.steps,
        busy_ns: counters.busy_ns,
        wait_ns: counters.wait_ns,
        copy_ns: counters.copy_ns,
    }
}
