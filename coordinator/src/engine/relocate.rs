//! After the loss of a device: the model is placed anew on what is left, the whole pipeline starts on it in a new epoch, and every
//! request goes on where it was.
//!
//! The engine knows nothing of machines and devices: whoever started it gives it a [`Replan`].

use super::driver::Driver;
use super::pipeline::Pipeline;
use super::recover::{Attempts, Meanwhile, Setback};
use super::request::RequestError;
use super::start::{depth, lift_from, next_epoch};
use super::supervisor::WINDOW;
use crate::cards::{CardLocks, LockError};
use crate::devices::SearchError;
use crate::planner::Refusal;
use crate::workers::{Link, WorkerError, Workers, decide_links};
use spillway_model::gguf::FileStamp;
use spillway_protocol::frame::FrameLimits;
use spillway_protocol::plan::{Execution, GpuDevice, Plan, Stage};
use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use thiserror::Error;

/// What happens when a device does not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceLost {
    /// The model is placed anew on what is left.
    #[default]
    Replan,
    /// Every request fails.
    Fail,
}

/// A placement and the locks on its cards.
#[derive(Debug, Clone)]
pub struct Placed {
    /// Who runs what.
    pub plan: Plan,
    /// Held as long as the placement is used.
    pub cards: CardLocks,
}

/// Why there is no other placement.
#[derive(Debug, Error)]
pub enum ReplanError {
    /// The model does not fit what is left.
    #[error(transparent)]
    Plan(#[from] Refusal),
    /// A device that is left is in use by another process.
    #[error(transparent)]
    Card(#[from] LockError),
    /// What is left could not be seen; that may be otherwise soon.
    #[error("{0}")]
    Unseen(String),
}

impl From<SearchError> for ReplanError {
    fn from(error: SearchError) -> Self {
        match error {
            SearchError::Request(refusal) => ReplanError::Plan(refusal),
            SearchError::Failed(_) => ReplanError::Unseen(error.to_string()),
        }
    }
}

/// Finds another placement of the model that an engine runs.
pub trait Replan: fmt::Debug + Send + Sync {
    /// Places the model as before, without the `lost` devices: all that were lost since it was loaded. Called when its workers have
    /// ended, on a thread where it may take its time.
    ///
    /// # Errors
    /// There is none.
    fn replan(&self, lost: &[GpuDevice]) -> Result<Placed, ReplanError>;
}

/// A placement that can be started.
#[derive(Debug)]
struct Found {
    placed: Placed,
    /// How rows are to get from one GPU to the next.
    links: Vec<Link>,
}

/// What it takes to start the pipeline elsewhere.
#[derive(Debug)]
pub(super) struct Relocation {
    /// Who finds another placement; none: the loss of a device ends every request.
    pub replan: Option<Arc<dyn Replan>>,
    pub exe: PathBuf,
    pub file_stamp: Option<FileStamp>,
    pub losses: Losses,
}

/// Failures of a device without a step in between after which it counts as gone.
const GONE_IN_A_ROW: usize = 2;
/// The same for failures within [`WINDOW`], whatever was done in between.
const GONE_IN_ALL: usize = 3;

/// Remembers what devices did.
#[derive(Debug, Default)]
pub(super) struct Losses {
    recent: VecDeque<(GpuDevice, Instant)>,
    /// Since a step was completed.
    in_a_row: Vec<GpuDevice>,
    /// Those that do not come back.
    gone: Vec<GpuDevice>,
}

impl Losses {
    /// A step was completed.
    pub(super) fn progressed(&mut self) {
        self.in_a_row.clear();
    }

    /// The driver has said that a device is lost; true when it is not worth another try. A loss that a request was ended for counts
    /// only with others that no request explains.
    fn note(&mut self, now: Instant, device: &GpuDevice, condemned: bool) -> bool {
        while self.recent.front().is_some_and(|(_, at)| now.duration_since(*at) > WINDOW) {
            self.recent.pop_front();
        }
        if condemned && self.in_a_row.pop().is_some() {
            // Once for the request, not once for each of its failures.
            self.recent.pop_back();
        }
        self.recent.push_back((device.clone(), now));
        if condemned {
            return false;
        }
        self.in_a_row.push(device.clone());
        let count = |known: usize, limit| known >= limit;
        let gone = count(self.in_a_row.iter().filter(|it| it.is_same_card(device)).count(), GONE_IN_A_ROW)
            || count(self.recent.iter().filter(|(it, _)| it.is_same_card(device)).count(), GONE_IN_ALL);
        if gone && !self.gone.iter().any(|it| it.is_same_card(device)) {
            self.gone.push(device.clone());
        }
        gone
    }

    /// Which devices are gone: the beginning of a sentence.
    pub(super) fn words(&self) -> String {
        let name = |device: &GpuDevice| format!("device {} ({})", device.index, device.name);
        let names: Vec<String> = self.gone.iter().map(name).collect();
        format!("{} {} lost", names.join(" and "), if names.len() > 1 { "are" } else { "is" })
    }
}

impl Driver {
    /// Whether `error` means that its worker's device does not come back; not when a request was ended for it.
    pub(super) fn loses_device(&mut self, error: &WorkerError, condemned: bool) -> bool {
        let stage = error.lost_device().and_then(|stage| self.plan.stages.get(stage));
        match stage.map(|stage| &stage.execution) {
            Some(Execution::Gpu { device }) => self.relocation.losses.note(Instant::now(), device, condemned),
            Some(Execution::Cpu { .. }) | None => false,
        }
    }

    /// Ends what is left of the pipeline, finds another placement and starts on it; the new epoch, or none when the engine is to
    /// stop.
    pub(super) fn relocate(
        &mut self,
        replan: Arc<dyn Replan>,
        delay: Duration,
        attempts: &mut Attempts,
    ) -> Result<Option<u64>, Setback> {
        let lost = self.relocation.losses.words();
        // What is left of it holds memory of the other devices.
        if let Some(pipeline) = self.pipeline.take() {
            pipeline.give_up("a device is lost, and the model is placed anew");
            self.shared.set_ended();
        }
        let mut meanwhile = Meanwhile::new(self);
        attempts.backoff += meanwhile.pause(delay);
        if meanwhile.stops() {
            return Ok(None);
        }
        let began = Instant::now();
        let found = meanwhile.find(replan);
        attempts.replan += began.elapsed();
        let Some(Found { placed: Placed { plan, cards }, links }) = found? else { return Ok(None) };
        let (epoch, began) = (next_epoch(), Instant::now());
        let workers = meanwhile.start(plan, links, epoch);
        attempts.load += began.elapsed();
        match workers {
            Err(_) if meanwhile.stops() => Ok(None),
            Err(error) => Err(Setback::Worker(error)),
            Ok(workers) => {
                self.settle(cards, workers, epoch, &lost);
                attempts.relocated(self.plan.stages.len());
                Ok(Some(epoch))
            }
        }
    }

    /// Goes on with the placement that has been started.
    fn settle(&mut self, cards: CardLocks, workers: Workers, epoch: u64, lost: &str) {
        let plan = self.plan.clone();
        self.limits = FrameLimits::new(&plan.limits, plan.model.d_model, plan.model.vocab);
        self.steps_in_flight = depth(self.steps_asked, &plan);
        let message = format!(
            "{lost}; the model has been placed anew, on {}; answers go on and may differ by rounding",
            places(&plan)
        );
        tracing::warn!(code = "device_replanned", epoch, "{message}");
        // Before some of them lose their slots.
        self.board.tell_recovering("device_replanned", &message);
        self.board.resettle(self.limits, self.steps_in_flight, lift_from(&plan));
        self.pipeline = Some(Pipeline::new(workers, self.limits, epoch));
        self.shared.set_placement(plan, cards, self.limits.kv_blocks);
    }
}

/// Where the stages of a plan are, in words.
fn places(plan: &Plan) -> String {
    let place = |stage: &Stage| {
        let last = stage.layers.end.saturating_sub(1);
        match &stage.execution {
            Execution::Cpu { .. } => format!("the CPU (layers {}-{last})", stage.layers.start),
            Execution::Gpu { device } => {
                format!("device {} (layers {}-{last})", device.index, stage.layers.start)
            }
        }
    };
    plan.stages.iter().map(place).collect::<Vec<_>>().join(", ")
}

impl Meanwhile<'_> {
    /// Starts the workers of another plan, which is the engine's from now on: whatever fails is named by its stages.
    fn start(&mut self, plan: Plan, links: Vec<Link>, epoch: u64) -> Result<Workers, WorkerError> {
        let driver = self.driver();
        let (exe, file_stamp) = (driver.relocation.exe.clone(), driver.relocation.file_stamp);
        driver.plan = Arc::new(plan.clone());
        Workers::start(plan, links, file_stamp, exe, epoch, self)
    }

    /// Lets `replan` search, and links be tested, on a thread of its own; none when the engine is to stop, and then the search ends by
    /// itself.
    fn find(&mut self, replan: Arc<dyn Replan>) -> Result<Option<Found>, Setback> {
        let Relocation { exe, losses, .. } = &self.driver().relocation;
        let (exe, lost, words) = (exe.clone(), losses.gone.clone(), losses.words());
        let given_up = Arc::new(AtomicBool::new(false));
        let is_given_up = given_up.clone();
        let search = move || {
            let placed = replan.replan(&lost)?;
            // Tests take memory of devices that may be another model's by then.
            let tested = (!is_given_up.load(Relaxed)).then(|| decide_links(&placed.plan, &exe));
            Ok(Found { placed, links: tested.unwrap_or_default() })
        };
        let thread = std::thread::Builder::new().name("replan".into()).spawn(search);
        let thread = match thread {
            Ok(thread) => thread,
            Err(error) => return Err(Setback::Worker(WorkerError::Unseen(error.to_string()))),
        };
        while !thread.is_finished() {
            if self.serve().is_break() {
                given_up.store(true, Relaxed);
                return Ok(None);
            }
            self.wait();
        }
        match thread.join() {
            Ok(Ok(found)) => Ok(Some(found)),
            Ok(Err(ReplanError::Unseen(reason))) => Err(Setback::Worker(WorkerError::Unseen(reason))),
            Ok(Err(error)) => Err(Setback::Final(RequestError::device_lost(
                &words,
                &format!("the model cannot be placed on what is left: {error}"),
            ))),
            Err(_) => Err(Setback::Final(RequestError::internal(
                "looking for another placement has met a defect; please report it",
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: u32) -> GpuDevice {
        GpuDevice {
            index: ordinal as usize,
            provider: "emulated".into(),
            ordinal,
            name: "GPU".into(),
            arch: "emulated_wave32".into(),
            pci: format!("ffff:{ordinal:02}:00.0"),
            uuid: None,
            driver: 1,
        }
    }

    /// A request that faults whatever runs it must not take a card with it; a card that faults whatever it runs is found all the same.
    #[test]
    fn losses_that_requests_were_ended_for_count_once_each() {
        let (mut losses, now) = (Losses::default(), Instant::now());
        for request in 1..GONE_IN_ALL {
            assert!(!losses.note(now, &device(0), false), "request {request}");
            assert!(!losses.note(now, &device(0), true), "request {request} is ended");
        }
        assert!(losses.note(now, &device(0), false), "and yet another one");
    }

    #[test]
    fn a_device_is_gone_when_its_next_worker_fails_before_any_step_or_it_fails_again_and_again() {
        let (mut losses, now) = (Losses::default(), Instant::now());
        assert!(!losses.note(now, &device(0), false));
        assert!(!losses.note(now, &device(1), false), "another device");
        assert!(losses.note(now, &device(0), false));
        assert_eq!(losses.words(), "device 0 (GPU) is lost");
        assert!(losses.note(now, &device(1), false));
        assert_eq!(losses.words(), "device 0 (GPU) and device 1 (GPU) are lost");
        let mut losses = Losses::default();
        for (nth, gone) in [(1, false), (2, false), (3, true)] {
            losses.progressed();
            assert_eq!(losses.note(now, &device(1), false), gone, "loss {nth}");
        }
        losses.progressed();
        let mut losses = Losses::default();
        for minute in 0..5 {
            losses.progressed();
            assert!(!losses.note(now + minute * 2 * WINDOW, &device(1), false), "old losses are forgotten");
        }
    }
}
