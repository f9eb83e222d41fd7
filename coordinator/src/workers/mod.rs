//! Worker processes: spawning, handshake, loading, watching, ending.
//!
//! For a plan of `n` stages there are `n + 1` rings: token ids into stage 0, residual rows between stages, logits out of
//! the last one. All of them, the status pages and the control sockets are anonymous and inherited by number, so nothing
//! has to be cleaned up: when [`Workers`] is dropped, on whatever path, every process is killed and reaped and the
//! segments go with their last holder.

mod error;
mod links;
mod load;
mod memory;
mod process;
mod visibility;

pub use error::{Ending, SetupError, WorkerError, WorkerName};
pub use links::{Link, LinkPath};
use process::{Inherited, WorkerProcess};
use spillway_protocol::channel::{self, CoordinatorEnd};
use spillway_protocol::control::{FromWorker, LoadStats, ToWorker};
use spillway_protocol::frame::{FrameKind, FrameLimits};
use spillway_protocol::plan::{Execution, Plan};
use spillway_protocol::ring::{Ring, RingConsumer, RingProducer};
use spillway_protocol::status::{Status, StatusReader};
use spillway_worker::Worker as _;
use spillway_worker_cpu::CpuWorker;
use spillway_worker_gpu::GpuWorker;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use visibility::Visibility;

/// How long workers may take to end after they were asked to.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(2);

/// What there is to tell while a pipeline is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadProgress {
    /// A stage has stored more of its weights.
    Weights {
        /// Place in the pipeline, 0-based.
        stage: usize,
        /// Stages of the pipeline.
        stages: usize,
        /// Weight bytes the stage has stored so far.
        done: u64,
        /// Weight bytes of the stage.
        total: u64,
    },
    /// It is known how rows get from a stage on a GPU to the next one.
    Link(Link),
}

/// One worker as the coordinator sees it.
#[derive(Debug)]
struct Worker {
    stage: usize,
    layers: Range<usize>,
    process: WorkerProcess,
    control: CoordinatorEnd,
    status: Arc<StatusReader>,
    stats: LoadStats,
    loaded: bool,
    /// It has been told to serve steps.
    serving: bool,
    /// Not yet known to have failed.
    alive: bool,
    /// Processes that the system had killed for want of memory when this one was started.
    memory_kills: u64,
}

impl Worker {
    fn name(&self) -> WorkerName {
        WorkerName { stage: self.stage, layers: self.layers.clone(), pid: self.process.pid() }
    }

    fn died(&mut self) -> WorkerError {
        self.alive = false;
        let ending = match self.process.ending() {
            Ending::Exited(status)
                if status.signal() == Some(libc::SIGKILL) && memory::kills() > self.memory_kills =>
            {
                Ending::OutOfMemory { charged: self.status.read().bytes_allocated }
            }
            ending => ending,
        };
        WorkerError::Died { worker: self.name(), ending }
    }

    fn protocol_error(&self, reason: String) -> WorkerError {
        WorkerError::Protocol { worker: self.name(), reason }
    }

    /// Why the worker does not serve any more, if so.
    fn failure(&mut self) -> Option<WorkerError> {
        match self.next_message() {
            Ok(None) => None,
            Ok(Some(FromWorker::Failed { code, message })) => {
                self.alive = false;
                Some(WorkerError::Reported { worker: self.name(), code, message })
            }
            Ok(Some(message)) => {
                self.alive = false;
                Some(self.protocol_error(format!("{message:?} while serving")))
            }
            Err(error) => {
                self.alive = false;
                Some(error)
            }
        }
    }
}

/// What the outside may know about a worker while it serves.
#[derive(Debug, Clone)]
pub struct WorkerView {
    /// Process id.
    pub pid: u32,
    /// Whether it was there when the view was made.
    pub alive: bool,
    /// Its status page.
    pub status: Arc<StatusReader>,
    /// What it allocated.
    pub stats: LoadStats,
}

/// What it takes to start a worker, again if need be.
#[derive(Debug)]
struct Recipe {
    plan: Plan,
    /// Of the model's file, as the coordinator has it open.
    file_stamp: Option<[i64; 4]>,
    exe: PathBuf,
    /// Ring `i` leads into stage `i`, the last one out of the last stage. They outlive the workers: a new one takes the ends
    /// of its predecessor over.
    rings: Vec<Ring>,
    /// How rows are to get from one GPU to the next.
    decided: Vec<Link>,
}

/// What loading tells its caller, who may have work to do meanwhile.
pub(crate) trait LoadWatcher {
    /// A stage has stored more.
    fn progress(&mut self, progress: LoadProgress);
    /// Called at least every [`load::TICK`]; `Break` gives the load up.
    fn tick(&mut self) -> ControlFlow<()>;
}

/// The loaded pipeline. Dropping it kills what has not ended.
#[derive(Debug)]
pub struct Workers {
    recipe: Recipe,
    workers: Vec<Worker>,
    links: Vec<Link>,
    /// Into stage 0.
    pub(crate) tokens: RingProducer,
    /// Out of the last stage.
    pub(crate) logits: RingConsumer,
}

impl Workers {
    /// Spawns the workers of `plan` and waits until every band is loaded. Must be called from a thread that outlives the
    /// workers (see [`WorkerProcess::spawn`]).
    pub(crate) fn start(
        plan: Plan,
        file_stamp: Option<[i64; 4]>,
        exe: PathBuf,
        epoch: u64,
        watcher: &mut dyn LoadWatcher,
    ) -> Result<Workers, WorkerError> {
        // Tests need memory of the devices, which the workers are about to take.
        let decided = links::decide(&plan, &exe);
        let rings = make_rings(&plan)?;
        let recipe = Recipe { plan, file_stamp, exe, rings, decided };
        let stages = recipe.plan.stages.len();
        let workers: Result<Vec<Worker>, WorkerError> =
            (0..stages).map(|stage| recipe.spawn(stage)).collect();
        let attach = || -> Result<(RingProducer, RingConsumer), SetupError> {
            let (first, last) = (&recipe.rings[0], &recipe.rings[stages]);
            Ok((RingProducer::attach(first.dup()?)?, RingConsumer::attach(last.dup()?)?))
        };
        let (tokens, mut logits) = attach()?;
        if recipe.plan.stages.iter().all(|stage| matches!(stage.execution, Execution::Gpu { .. })) {
            logits.set_patience(GpuWorker::PATIENCE);
        }
        let workers = workers?;
        let mut workers = Workers { recipe, workers, links: Vec::new(), tokens, logits };
        workers.load(epoch, watcher)?;
        let executions = workers.recipe.plan.stages.iter().map(|stage| &stage.execution);
        load::report_spill(executions.zip(workers.workers.iter().map(|worker| &worker.stats)));
        Ok(workers)
    }

    /// Replaces every worker that does not serve any more, and waits until the new ones have loaded for `epoch`. The others
    /// keep what they hold. After an error the pipeline does not serve; the call can be made again.
    pub(crate) fn revive(
        &mut self,
        epoch: u64,
        watcher: &mut dyn LoadWatcher,
    ) -> Result<Vec<usize>, WorkerError> {
        let mut replaced = Vec::new();
        for stage in 0..self.workers.len() {
            let worker = &mut self.workers[stage];
            if worker.loaded && worker.alive && worker.failure().is_none() {
                continue;
            }
            worker.process.kill();
            *worker = self.recipe.spawn(stage)?;
            replaced.push(stage);
        }
        self.load(epoch, watcher)?;
        Ok(replaced)
    }

    /// Lets every worker that has no band load its own, arranges their links, and lets them serve.
    fn load(&mut self, epoch: u64, watcher: &mut dyn LoadWatcher) -> Result<(), WorkerError> {
        load::load_all(&mut self.workers, &self.recipe, epoch, watcher)?;
        self.links = links::arrange(&mut self.workers, &self.recipe.decided, &self.links, watcher)?;
        Ok(())
    }

    /// Whether a signal has stopped the worker of a stage.
    pub(crate) fn is_stopped(&self, stage: usize) -> bool {
        self.workers[stage].process.is_stopped()
    }

    /// How long the worker of a stage has wanted a processor and had none, in all.
    pub(crate) fn starved(&self, stage: usize) -> Duration {
        self.workers[stage].process.starved()
    }

    /// Ends a worker that does not make progress.
    pub(crate) fn give_up(&mut self, stage: usize, silence: Duration) -> WorkerError {
        let worker = &mut self.workers[stage];
        let stopped = worker.process.is_stopped();
        worker.alive = false;
        worker.process.kill();
        WorkerError::Hung { worker: worker.name(), silence, stopped }
    }

    /// Descriptors that become readable when a worker has something to say or is gone.
    pub(crate) fn watch_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.workers.iter().map(|worker| worker.control.as_fd())
    }

    /// What every worker is doing now, in pipeline order.
    pub(crate) fn pages(&self) -> impl Iterator<Item = Status> {
        self.workers.iter().map(|worker| worker.status.read())
    }

    /// Status pages and load statistics, in pipeline order.
    pub(crate) fn views(&self) -> Vec<WorkerView> {
        let view = |worker: &Worker| WorkerView {
            pid: worker.process.pid(),
            alive: worker.alive,
            status: worker.status.clone(),
            stats: worker.stats.clone(),
        };
        self.workers.iter().map(view).collect()
    }

    /// How rows get from one GPU to the next.
    pub(crate) fn links(&self) -> &[Link] {
        &self.links
    }

    /// Why the pipeline does not serve any more, if so: of several failures the one closest to the cause.
    pub(crate) fn failure(&mut self) -> Option<WorkerError> {
        self.workers.iter_mut().find_map(Worker::failure).map(|first| {
            // The one that was found first may only have followed another one, whose word has arrived by now.
            let others = self.workers.iter_mut().filter_map(Worker::failure);
            others.fold(first, |best, other| if other.rank() > best.rank() { other } else { best })
        })
    }

    /// Waits until a worker that has closed its ring says why, at most `timeout`.
    pub(crate) fn await_failure(&mut self, timeout: Duration) -> WorkerError {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(error) = self.failure() {
                return error;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return WorkerError::Frame("a ring was closed by a worker that still runs".into());
            }
            load::wait_for_news(&self.workers, left);
        }
    }

    /// Asks every worker to end and waits; kills those that have not ended after [`SHUTDOWN_LIMIT`].
    pub(crate) fn shutdown(mut self) {
        for worker in &mut self.workers {
            // A worker that is gone already needs no message.
            let _ = worker.send(&ToWorker::Shutdown);
        }
        let deadline = Instant::now() + SHUTDOWN_LIMIT;
        for worker in &mut self.workers {
            let left = deadline.saturating_duration_since(Instant::now());
            if worker.process.wait(left).is_none() {
                tracing::warn!(
                    stage = worker.stage,
                    pid = worker.process.pid(),
                    "killing a worker that does not end"
                );
            }
        }
    }
}

/// The rings of a pipeline in order; ring `i` leads into stage `i`, the last one out of the last stage.
fn make_rings(plan: &Plan) -> Result<Vec<Ring>, SetupError> {
    let limits = FrameLimits::new(&plan.limits, plan.model.d_model, plan.model.vocab);
    let kind = |edge: usize| match edge {
        0 => FrameKind::Tokens,
        edge if edge == plan.stages.len() => FrameKind::Logits,
        _ => FrameKind::Residual,
    };
    let slots = crate::planner::RING_SLOTS;
    (0..=plan.stages.len()).map(|edge| Ok(Ring::create(slots, limits.slot_bytes(kind(edge)))?)).collect()
}

impl Recipe {
    fn spawn(&self, stage: usize) -> Result<Worker, WorkerError> {
        let status = StatusReader::create().map_err(SetupError::from)?;
        let (control, worker_end) = channel::pair().map_err(SetupError::from)?;
        let inherited = Inherited {
            control: duplicate(worker_end.as_fd())?,
            ring_in: duplicate(self.rings[stage].as_fd())?,
            ring_out: duplicate(self.rings[stage + 1].as_fd())?,
            status: duplicate(status.as_fd())?,
        };
        let planned = &self.plan.stages[stage];
        let visible = Visibility::of(&self.plan, stage, &self.decided);
        Ok(Worker {
            stage,
            layers: planned.layers.clone(),
            process: WorkerProcess::spawn(&self.exe, subcommand(&planned.execution), inherited, &visible)?,
            control,
            status: Arc::new(status),
            stats: LoadStats::default(),
            loaded: false,
            serving: false,
            alive: true,
            memory_kills: memory::kills(),
        })
    }
}

/// What runs a stage.
fn subcommand(execution: &Execution) -> &'static str {
    match execution {
        Execution::Cpu { .. } => CpuWorker::NAME,
        Execution::Gpu { .. } => GpuWorker::NAME,
    }
}

fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, SetupError> {
    fd.try_clone_to_owned().map_err(|source| SetupError::Descriptor { action: "dup", source })
}
