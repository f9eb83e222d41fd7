//! From a plan to a running engine.

use super::board::Board;
use super::driver::Driver;
use super::mailbox::Mailbox;
use super::pipeline::Pipeline;
use super::relocate::{DeviceLost, Losses, Relocation};
use super::request::RequestError;
use super::shared::Shared;
use super::supervisor::{DEFAULT_LIMIT, Supervisor};
use super::{Engine, EngineError, EngineOptions, Inner};
use crate::devices::THIS_PROGRAM;
use crate::open::LoadedModel;
use crate::planner::steps_in_flight;
use crate::workers::{LoadProgress, LoadWatcher, WorkerError, WorkerView, Workers, decide_links};
use spillway_model::gguf::FileStamp;
use spillway_protocol::frame::FrameLimits;
use spillway_protocol::plan::Plan;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

/// Requests that may wait for a slot, unless the options say otherwise.
const DEFAULT_QUEUE: usize = 256;

/// Pipeline incarnations of this process, so that no two of them share an epoch.
static NEXT_EPOCH: AtomicU64 = AtomicU64::new(1);

/// An epoch of its own, later than all before.
pub(super) fn next_epoch() -> u64 {
    NEXT_EPOCH.fetch_add(1, Ordering::Relaxed)
}

/// From the engine's thread to whoever waits for the start.
enum News {
    Progress(LoadProgress),
    Ready(Arc<Shared>),
    Failed(WorkerError),
}

pub(super) fn start(
    model: Arc<LoadedModel>,
    plan: Plan,
    options: EngineOptions,
    mut progress: impl FnMut(LoadProgress),
) -> Result<Engine, EngineError> {
    if plan.model != model.summary().model {
        let [planned, opened] = [&plan.model.path, &model.summary().model.path].map(PathBuf::clone);
        return Err(EngineError::PlanMismatch { planned, opened });
    }
    let system = |action| move |source| EngineError::System { action, source };
    let mailbox = Arc::new(Mailbox::new().map_err(|errno| system("eventfd")(errno.into()))?);
    let (news, incoming) = channel();
    let launch = Launch {
        rewindable: rewindable(&model),
        plan,
        file_stamp: model.file().gguf().stamp(),
        options,
        mailbox: mailbox.clone(),
    };
    // The thread that spawns the workers lives as long as they do: they end with it.
    let thread =
        Builder::new().name("engine".into()).spawn(move || launch.run(&news)).map_err(system("thread"))?;
    for event in incoming {
        match event {
            News::Progress(event) => progress(event),
            News::Ready(shared) => {
                let (thread_id, thread) = (thread.thread().id(), Mutex::new(Some(thread)));
                let inner = Inner { model, mailbox, shared, next_id: AtomicU64::new(1), thread, thread_id };
                return Ok(Engine { inner: Arc::new(inner) });
            }
            News::Failed(error) => {
                let _ = thread.join();
                return Err(error.into());
            }
        }
    }
    let _ = thread.join();
    Err(EngineError::Lost)
}

/// Passes progress on. Nobody listens once the start has been given up; the outcome is told all the same.
struct Starting<'a> {
    news: &'a Sender<News>,
}

impl LoadWatcher for Starting<'_> {
    fn progress(&mut self, progress: LoadProgress) {
        drop(self.news.send(News::Progress(progress)));
    }

    fn tick(&mut self, _workers: &dyn Fn() -> Vec<WorkerView>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// Whether a sequence can go on from the middle of its log: no layer keeps a state that cannot be wound back.
fn rewindable(model: &LoadedModel) -> bool {
    model.file().program().layers.iter().all(|layer| layer.recurrent.is_none())
}

/// What the engine's thread starts with.
#[derive(Debug)]
struct Launch {
    plan: Plan,
    file_stamp: Option<FileStamp>,
    options: EngineOptions,
    rewindable: bool,
    mailbox: Arc<Mailbox>,
}

impl Launch {
    fn run(self, news: &Sender<News>) {
        let epoch = next_epoch();
        let exe = self.options.worker_exe.clone().unwrap_or_else(|| PathBuf::from(THIS_PROGRAM));
        let (plan, links) = (self.plan.clone(), decide_links(&self.plan, &exe));
        match Workers::start(plan, links, self.file_stamp, exe.clone(), epoch, &mut Starting { news }) {
            Ok(workers) => self.serve(workers, exe, epoch, news),
            Err(error) => drop(news.send(News::Failed(error))),
        }
    }

    fn serve(self, workers: Workers, exe: PathBuf, epoch: u64, news: &Sender<News>) {
        let Launch { plan, file_stamp, options, rewindable, mailbox } = self;
        let plan = Arc::new(plan);
        let limits = FrameLimits::new(&plan.limits, plan.model.d_model, plan.model.vocab);
        let steps_in_flight = depth(options.steps_in_flight, &plan);
        let pipeline = Pipeline::new(workers, limits, epoch);
        let shared = Arc::new(Shared::new(plan.clone(), options.cards, limits.kv_blocks));
        shared.set_started(pipeline.views(), pipeline.links(), epoch);
        let replan = options.replan.filter(|_| options.device_lost == DeviceLost::Replan);
        let mut driver = Driver {
            board: Board::new(limits, rewindable, steps_in_flight, lift_from(&plan)),
            pipeline: Some(pipeline),
            plan,
            limits,
            steps_asked: options.steps_in_flight,
            steps_in_flight,
            supervisor: Supervisor::new(options.restart_limit.unwrap_or(DEFAULT_LIMIT)),
            relocation: Relocation { replan, exe, file_stamp, losses: Losses::default() },
            replaying: None,
            queue: options.queue.unwrap_or(DEFAULT_QUEUE),
            mailbox,
            shared: shared.clone(),
        };
        if news.send(News::Ready(shared)).is_ok() && catch_unwind(AssertUnwindSafe(|| driver.run())).is_err()
        {
            driver.fail(&RequestError::internal("the engine met a defect and has stopped; please report it"));
        }
        driver.close();
    }
}

/// New tokens of a prompt from which on a plan has layers lifted for it.
pub(super) fn lift_from(plan: &Plan) -> Option<usize> {
    plan.lift.as_ref().map(|lift| lift.from)
}

/// How many steps may be in the pipeline at once; more than there are stages would only wait in rings.
pub(super) fn depth(asked: Option<usize>, plan: &Plan) -> usize {
    asked.unwrap_or_else(|| steps_in_flight(plan)).clamp(1, plan.stages.len().max(1))
}
