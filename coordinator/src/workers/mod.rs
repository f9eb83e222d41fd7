//! Worker processes: spawning, handshake, loading, watching, ending.
//!
//! For a plan of `n` stages there are `n + 1` rings: token ids into stage 0, residual rows between stages, logits out of
//! the last one. All of them, the status pages and the control sockets are anonymous and inherited by number, so nothing
//! has to be cleaned up: when [`Workers`] is dropped, on whatever path, every process is killed and reaped and the
//! segments go with their last holder.

mod error;
mod lifecycle;
mod links;
mod load;
mod memory;
mod process;
mod visibility;
mod worker;

pub use error::{Ending, SetupError, WorkerError, WorkerName};
use lifecycle::Change;
pub use lifecycle::Lifecycle;
pub(crate) use links::decide as decide_links;
pub use links::{Link, LinkPath};
pub(crate) use process::is_stopped;
use process::{Inherited, WorkerProcess};
use spillway_protocol::channel;
use spillway_protocol::control::ToWorker;
use spillway_protocol::frame::{FrameKind, FrameLimits};
use spillway_protocol::plan::{Execution, Plan};
use spillway_protocol::ring::{Ring, RingConsumer, RingProducer};
use spillway_protocol::states::StateMemory;
use spillway_protocol::status::{Status, StatusReader};
use spillway_worker::Worker as _;
use spillway_worker_cpu::CpuWorker;
use spillway_worker_gpu::GpuWorker;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use visibility::Visibility;
pub use worker::WorkerView;
use worker::{Started, Worker};

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

/// What it takes to start a worker, again if need be.
#[derive(Debug)]
struct Recipe {
    plan: Plan,
    /// Of the model's file, as the coordinator has it open.
    file_stamp: Option<[i64; 4]>,
    exe: PathBuf,
    /// Ring `i` leads into stage `i`, the last one out of the last stage. One that another worker holds outlives a worker: the next
    /// one takes the end of its predecessor over.
    rings: Vec<Ring>,
    /// Holds the states of lifted layers, for CPU workers and the GPU's that lifts them; as long-lived.
    states: Option<StateMemory>,
    /// How rows are to get from one GPU to the next.
    decided: Vec<Link>,
}

/// A ring between the coordinator and a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Edge {
    /// Into stage 0.
    Tokens,
    /// Out of the last stage.
    Logits,
}

/// What loading tells its caller, who may have work to do meanwhile.
pub(crate) trait LoadWatcher {
    /// A stage has stored more.
    fn progress(&mut self, progress: LoadProgress);
    /// Called at least every [`load::TICK`] with what there is to see; `Break` gives the load up.
    fn tick(&mut self, workers: &dyn Fn() -> Vec<WorkerView>) -> ControlFlow<()>;
}

/// What an attempt to revive a pipeline has done, also one that did not succeed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Revival {
    /// Time for ending processes and starting others.
    pub respawn: Duration,
    /// Time for loading bands and arranging links.
    pub load: Duration,
    /// Stages whose workers were replaced.
    pub replaced: Vec<usize>,
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
    /// Spawns the workers of `plan` and waits until every band is loaded. `decided` are its links, from [`decide_links`]. Must be
    /// called from a thread that outlives the workers (see [`WorkerProcess::spawn`]).
    pub(crate) fn start(
        plan: Plan,
        decided: Vec<Link>,
        file_stamp: Option<[i64; 4]>,
        exe: PathBuf,
        epoch: u64,
        watcher: &mut dyn LoadWatcher,
    ) -> Result<Workers, WorkerError> {
        let rings = make_rings(&plan)?;
        let states = plan.lift.as_ref().map(|lift| StateMemory::create(lift.shared));
        let states = states.transpose().map_err(SetupError::from)?;
        let recipe = Recipe { plan, file_stamp, exe, rings, states, decided };
        let stages = recipe.plan.stages.len();
        let (tokens, logits) = (recipe.tokens()?, recipe.logits()?);
        let workers = (0..stages).map(|stage| recipe.spawn(stage, epoch)).collect::<Result<_, _>>()?;
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
        revival: &mut Revival,
    ) -> Result<(), WorkerError> {
        let began = Instant::now();
        let respawned = self.respawn(epoch, &mut revival.replaced);
        revival.respawn = began.elapsed();
        respawned?;
        let began = Instant::now();
        let loaded = self.load(epoch, watcher);
        revival.load = began.elapsed();
        loaded
    }

    /// Starts a process for every stage whose worker does not hold its band any more, and tells which.
    fn respawn(&mut self, epoch: u64, replaced: &mut Vec<usize>) -> Result<(), WorkerError> {
        self.end_useless();
        self.renew_rings()?;
        let Workers { recipe, workers, links, .. } = self;
        for worker in workers {
            if worker.state().holds_band() {
                worker.epoch = epoch;
                continue;
            }
            let stage = worker.stage;
            worker.replace(epoch, recipe.start(stage)?);
            // Its links went with its predecessor.
            links.retain(|link| link.from != stage && link.from + 1 != stage);
            replaced.push(stage);
        }
        Ok(())
    }

    /// Ends every worker that does not hold its band any more, and the neighbours of one that has found a ring to make no sense: any of
    /// them may have written there.
    fn end_useless(&mut self) {
        for worker in &mut self.workers {
            if !worker.state().holds_band() || worker.failure().is_some() {
                worker.enter(Change::Ended, "it had not loaded when another one failed");
            }
        }
        let distrust = |worker: &Worker| worker.distrusts_rings.then_some(worker.stage);
        let distrusted: Vec<usize> = self.workers.iter().filter_map(distrust).collect();
        for worker in &mut self.workers {
            if distrusted.iter().any(|stage| stage.abs_diff(worker.stage) == 1) {
                worker.enter(Change::Ended, "a ring that it shares makes no sense");
            }
        }
    }

    /// Puts empty rings in the place of those that no worker holds: what has been written there may make no sense, the counters
    /// included.
    fn renew_rings(&mut self) -> Result<(), SetupError> {
        let last = self.workers.len();
        for index in 0..=last {
            let mut ends = self.workers[index.saturating_sub(1)..last.min(index + 1)].iter();
            if ends.any(|worker| worker.state().has_process()) {
                continue;
            }
            self.recipe.rings[index] = make_ring(&self.recipe.plan, index)?;
            if index == 0 {
                self.tokens = self.recipe.tokens()?;
            }
            if index == last {
                self.logits = self.recipe.logits()?;
            }
        }
        Ok(())
    }

    /// Workers that are gone will not be started before a while is over.
    pub(crate) fn back_off(&mut self) {
        for worker in &mut self.workers {
            worker.enter(Change::Delayed, "it failed before a step was done");
        }
    }

    /// Ends every worker; there will be no others.
    pub(crate) fn give_up(mut self, cause: &str) {
        for worker in &mut self.workers {
            worker.enter(Change::Ended, cause);
            worker.enter(Change::GivenUp, cause);
        }
    }

    /// Lets every worker that has no band load its own, arranges their links, and lets them serve.
    fn load(&mut self, epoch: u64, watcher: &mut dyn LoadWatcher) -> Result<(), WorkerError> {
        let lifts = self.recipe.plan.lift.as_ref().map(|lift| lift.stage);
        let survivor = lifts.filter(|stage| self.workers[*stage].state().holds_band());
        load::load_all(&mut self.workers, &self.recipe, epoch, watcher)?;
        let Workers { workers, logits, recipe, links, .. } = self;
        links::arrange(workers, logits, &recipe.decided, links, watcher)?;
        match survivor {
            // It may still be writing states that steps of this epoch begin from.
            Some(stage) => links::begin(workers, logits, stage, epoch, watcher),
            None => Ok(()),
        }
    }

    /// Whether a signal has stopped the worker of a stage.
    pub(crate) fn is_stopped(&self, stage: usize) -> bool {
        self.workers[stage].life.process().is_stopped()
    }

    /// How long the worker of a stage has wanted a processor and had none, in all.
    pub(crate) fn starved(&self, stage: usize) -> Duration {
        self.workers[stage].life.process().starved()
    }

    /// Ends a worker that does not make progress.
    pub(crate) fn end_hung(&mut self, stage: usize, silence: Duration) -> WorkerError {
        let worker = &mut self.workers[stage];
        let stopped = worker.life.process().is_stopped();
        worker.fail(WorkerError::Hung { worker: worker.name(), silence, stopped })
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
        self.workers.iter().map(Worker::view).collect()
    }

    /// How rows get from one GPU to the next.
    pub(crate) fn links(&self) -> &[Link] {
        &self.links
    }

    /// Why the pipeline does not serve any more, if so: of several failures the one closest to the cause.
    pub(crate) fn failure(&mut self) -> Option<WorkerError> {
        worker::failure(&mut self.workers)
    }

    /// Ends the worker at the other end of a ring, for what came out of the ring.
    pub(crate) fn end_at(&mut self, edge: Edge, reason: String) -> WorkerError {
        let stage = match edge {
            Edge::Tokens => 0,
            Edge::Logits => self.workers.len() - 1,
        };
        self.workers[stage].protocol_error(reason)
    }

    /// Waits until a worker that has closed its ring says why, at most `timeout`.
    pub(crate) fn await_failure(&mut self, edge: Edge, timeout: Duration) -> WorkerError {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(error) = self.failure() {
                return error;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.end_at(edge, "it has closed its ring and still runs".into());
            }
            load::wait_for_news(&self.workers, left);
        }
    }

    /// Asks every worker to end and waits; kills those that have not ended after [`SHUTDOWN_LIMIT`].
    pub(crate) fn shutdown(mut self) {
        for worker in &mut self.workers {
            // A worker that is gone already needs no message.
            let _ = worker.send(&ToWorker::Shutdown);
            worker.enter(Change::Asked, "the pipeline ends");
        }
        let deadline = Instant::now() + SHUTDOWN_LIMIT;
        for worker in &mut self.workers {
            let left = deadline.saturating_duration_since(Instant::now());
            if worker.life.process_mut().wait(left).is_none() {
                tracing::warn!(
                    stage = worker.stage,
                    pid = worker.pid(),
                    "killing a worker that does not end"
                );
            }
            worker.enter(Change::Ended, "the pipeline ends");
        }
    }
}

/// The rings of a pipeline in order; ring `i` leads into stage `i`, the last one out of the last stage.
fn make_rings(plan: &Plan) -> Result<Vec<Ring>, SetupError> {
    (0..=plan.stages.len()).map(|index| make_ring(plan, index)).collect()
}

/// One of them.
fn make_ring(plan: &Plan, index: usize) -> Result<Ring, SetupError> {
    let kind = match index {
        0 => FrameKind::Tokens,
        index if index == plan.stages.len() => FrameKind::Logits,
        _ => FrameKind::Residual,
    };
    let limits = FrameLimits::new(&plan.limits, plan.model.d_model, plan.model.vocab);
    Ok(Ring::create(crate::planner::RING_SLOTS, limits.slot_bytes(kind))?)
}

impl Recipe {
    /// The coordinator's end of the first ring.
    fn tokens(&self) -> Result<RingProducer, SetupError> {
        Ok(RingProducer::attach(self.rings[0].dup()?)?)
    }

    /// The coordinator's end of the last ring.
    fn logits(&self) -> Result<RingConsumer, SetupError> {
        let stages = &self.plan.stages;
        let mut logits = RingConsumer::attach(self.rings[stages.len()].dup()?)?;
        if stages.iter().all(|stage| matches!(stage.execution, Execution::Gpu { .. })) {
            logits.set_patience(GpuWorker::PATIENCE);
        }
        Ok(logits)
    }

    fn spawn(&self, stage: usize, epoch: u64) -> Result<Worker, WorkerError> {
        Ok(Worker::new(stage, self.plan.stages[stage].layers.clone(), epoch, self.start(stage)?))
    }

    /// The memory for the states of lifted layers, for another worker.
    fn states_fd(&self) -> Option<Result<OwnedFd, SetupError>> {
        self.states.as_ref().map(|states| duplicate(states.as_fd()))
    }

    /// Starts the process of a stage.
    fn start(&self, stage: usize) -> Result<Started, WorkerError> {
        let status = StatusReader::create().map_err(SetupError::from)?;
        let (control, worker_end) = channel::pair().map_err(SetupError::from)?;
        let inherited = Inherited {
            control: duplicate(worker_end.as_fd())?,
            ring_in: duplicate(self.rings[stage].as_fd())?,
            ring_out: duplicate(self.rings[stage + 1].as_fd())?,
            status: duplicate(status.as_fd())?,
            states: self.plan.lift_at(stage).and(self.states_fd()).transpose()?,
        };
        let subcommand = subcommand(&self.plan.stages[stage].execution);
        let visible = Visibility::of(&self.plan, stage, &self.decided);
        Ok(Started {
            process: WorkerProcess::spawn(&self.exe, subcommand, inherited, &visible)?,
            control,
            status: Arc::new(status),
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
