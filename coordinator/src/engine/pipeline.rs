//! The workers as one function: steps go in, logits come out in the same order.

use super::watchdog::{Awaited, Watchdog};
use crate::workers::{Edge, Link, LoadWatcher, Revival, WorkerError, WorkerView, Workers};
use spillway_protocol::frame::{self, FrameError, FrameLimits, StepFrame};
use spillway_protocol::ring::{RingError, Wait};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Longest sleep between two looks at whether the workers are still there and whether a command has come.
const LOOK: Duration = Duration::from_millis(20);

/// The loaded pipeline with the buffers that steps need.
#[derive(Debug)]
pub(super) struct Pipeline {
    workers: Workers,
    limits: FrameLimits,
    epoch: u64,
    /// Number of the next step.
    step: u64,
    /// Steps under way, oldest first.
    under_way: VecDeque<Awaited>,
    watchdog: Watchdog,
    doubt: Option<Doubt>,
    /// When every worker was last known to be there.
    alive: Instant,
    frame: StepFrame,
    ids: Vec<u32>,
    row: Vec<f32>,
}

/// A worker has been silent for too long, but may only be waiting for a processor.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    stage: usize,
    /// Its silence when the doubt arose, and how long it had waited for processors until then.
    silence: Duration,
    starved: Duration,
}

impl Doubt {
    /// Whether it has been silent for as long again without wanting for a processor.
    fn is_over(&self, silence: Duration, starved: Duration) -> bool {
        silence.saturating_sub(self.silence)
            > self.silence.saturating_add(starved.saturating_sub(self.starved))
    }
}

/// The step that comes back next, as it was sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected {
    pub step: u64,
    /// Logit rows it asked for.
    pub rows: usize,
}

/// What a look at the last ring brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Collected {
    /// Nothing for a while; the workers are alive.
    Nothing,
    /// Some rows; the step goes on.
    Rows,
    /// The step is complete.
    Step,
}

impl Pipeline {
    pub(super) fn new(workers: Workers, limits: FrameLimits, epoch: u64) -> Pipeline {
        Pipeline {
            workers,
            epoch,
            step: 1,
            under_way: VecDeque::new(),
            watchdog: Watchdog::default(),
            doubt: None,
            alive: Instant::now(),
            frame: StepFrame::with_limits(&limits),
            ids: Vec::with_capacity(limits.max_tokens),
            row: vec![0.0; limits.vocab],
            limits,
        }
    }

    /// Lets `fill` compose the next step and sends it; false when it had nothing to send.
    pub(super) fn send(
        &mut self,
        fill: impl FnOnce(u64, u64, &mut StepFrame, &mut Vec<u32>) -> Result<bool, FrameError>,
    ) -> Result<bool, WorkerError> {
        if !fill(self.epoch, self.step, &mut self.frame, &mut self.ids).map_err(WorkerError::Unsendable)? {
            return Ok(false);
        }
        self.under_way.push_back(Awaited { step: self.step, tokens: self.ids.len() });
        while let Err(trouble) = self.write() {
            self.explain(trouble, Edge::Tokens)?;
        }
        self.step += 1;
        Ok(true)
    }

    fn write(&mut self) -> Result<(), Trouble> {
        match self.workers.tokens.wait(LOOK)? {
            Wait::Ready(mut slot) => {
                frame::write_tokens(&mut slot, &self.frame, &self.ids).map_err(Trouble::Unsendable)?;
                slot.publish();
                Ok(())
            }
            Wait::TimedOut => Err(Trouble::Silence),
            Wait::Closed => Err(Trouble::Closed),
        }
    }

    /// Waits a little for logits of the `expected` step and passes its rows to `on_row` in order.
    pub(super) fn collect(
        &mut self,
        expected: Expected,
        on_row: &mut dyn FnMut(usize, &mut [f32]),
    ) -> Result<Collected, WorkerError> {
        match self.read(expected, on_row) {
            Ok(Collected::Step) => {
                (self.doubt, self.alive) = (None, Instant::now());
                if let Some(awaited) = self.under_way.pop_front() {
                    self.watchdog.done(Instant::now(), awaited, LOOK);
                }
                Ok(Collected::Step)
            }
            Ok(collected) => Ok(collected),
            Err(trouble) => self.explain(trouble, Edge::Logits).map(|()| Collected::Nothing),
        }
    }

    fn read(
        &mut self,
        expected: Expected,
        on_row: &mut dyn FnMut(usize, &mut [f32]),
    ) -> Result<Collected, Trouble> {
        let slot = match self.workers.logits.wait(LOOK)? {
            Wait::Ready(slot) => slot,
            Wait::TimedOut => return Err(Trouble::Silence),
            Wait::Closed => return Err(Trouble::Closed),
        };
        let about = frame::read_logits(&slot, &self.limits)?;
        if about.epoch < self.epoch {
            return Ok(Collected::Nothing);
        }
        if about.epoch > self.epoch || about.step != expected.step {
            return Err(FrameError::Inconsistent("it answers another step than the one that is due").into());
        }
        let end = about.first_row + about.rows;
        if end > expected.rows || about.last && end != expected.rows {
            return Err(FrameError::Inconsistent("it has other logit rows than were asked for").into());
        }
        for row in 0..about.rows {
            frame::read_logit_row(&slot, &about, row, &self.limits, &mut self.row)?;
            on_row(about.first_row + row, &mut self.row);
        }
        Ok(if about.last { Collected::Step } else { Collected::Rows })
    }

    /// Whether a ring's trouble means that the pipeline is over, and why. Who has brought it about does not serve any more.
    fn explain(&mut self, trouble: Trouble, edge: Edge) -> Result<(), WorkerError> {
        match trouble {
            Trouble::Silence => self.check().and_then(|()| self.watch()),
            // The word of the worker at the other end may take a moment to arrive.
            Trouble::Closed => Err(self.workers.await_failure(edge, Duration::from_secs(1))),
            // A ring whose shared words make no sense: a dying worker explains it better than the ring does.
            Trouble::Ring(error) => Err(match self.workers.failure() {
                Some(failure) => failure,
                None => self.workers.end_at(edge, error.to_string()),
            }),
            Trouble::Frame(error) => {
                Err(self.workers.end_at(edge, format!("it wrote a frame that cannot be used: {error}")))
            }
            Trouble::Unsendable(error) => Err(WorkerError::Unsendable(error)),
        }
    }

    /// Whether the step that is due makes progress. A worker that hangs is killed.
    fn watch(&mut self) -> Result<(), WorkerError> {
        let Some(&awaited) = self.under_way.front() else { return Ok(()) };
        let Some(silent) = self.watchdog.look(Instant::now(), awaited, self.workers.pages()) else {
            self.doubt = None;
            return Ok(());
        };
        // One that is stopped while it waits for room takes none that there is.
        let stopped = (silent.first..=silent.stage).find(|&stage| self.workers.is_stopped(stage));
        if stopped.is_none() {
            if !silent.hung {
                return Ok(());
            }
            // On a machine with more work than processors, a worker may be waiting for one.
            let starved = self.workers.starved(silent.stage);
            let doubt =
                *self.doubt.get_or_insert(Doubt { stage: silent.stage, silence: silent.silence, starved });
            if !doubt.is_over(silent.silence, starved) {
                return Ok(());
            }
        }
        self.doubt = None;
        Err(self.workers.end_hung(stopped.unwrap_or(silent.stage), silent.silence))
    }

    /// Why the step under way may never come back, if it seems so.
    pub(super) fn stalled(&self) -> Option<String> {
        let Doubt { stage, silence, .. } = self.doubt?;
        Some(format!(
            "stage {stage} made no progress in a step for {:.1} s; it is being watched",
            silence.as_secs_f64()
        ))
    }

    /// Replaces workers that have failed and begins a new epoch: steps under way are forgotten. After an error the call can be
    /// made again.
    pub(super) fn revive(
        &mut self,
        epoch: u64,
        watcher: &mut dyn LoadWatcher,
        revival: &mut Revival,
    ) -> Result<(), WorkerError> {
        self.under_way.clear();
        self.watchdog.rest();
        self.doubt = None;
        self.epoch = epoch;
        let revived = self.workers.revive(epoch, watcher, revival);
        self.alive = Instant::now();
        revived
    }

    /// Whether every worker is still there.
    pub(super) fn check(&mut self) -> Result<(), WorkerError> {
        match self.workers.failure() {
            Some(error) => Err(error),
            None => {
                self.alive = Instant::now();
                Ok(())
            }
        }
    }

    /// The next word of a worker, or its end, will be noticed at once.
    pub(super) fn listens(&mut self) {
        self.alive = Instant::now();
    }

    /// The longest time for which `error` can have gone unnoticed.
    pub(super) fn unnoticed(&self, error: &WorkerError) -> Duration {
        match error {
            WorkerError::Hung { silence, .. } => *silence,
            _ => self.alive.elapsed(),
        }
    }

    /// The next start has to wait.
    pub(super) fn back_off(&mut self) {
        self.workers.back_off();
    }

    /// Ends the workers; there will be no others.
    pub(super) fn give_up(self, cause: &str) {
        self.workers.give_up(cause);
    }

    /// Descriptors that become readable when a worker is gone.
    pub(super) fn watch_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.workers.watch_fds()
    }

    /// Status pages and load statistics.
    pub(super) fn views(&self) -> Vec<WorkerView> {
        self.workers.views()
    }

    /// How rows get from one GPU to the next.
    pub(super) fn links(&self) -> Vec<Link> {
        self.workers.links().to_vec()
    }

    /// Ends the workers in an orderly way.
    pub(super) fn shutdown(self) {
        self.workers.shutdown();
    }
}

/// Why a ring gave nothing.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("nothing has come for a while")]
    Silence,
    #[error("the other end is closed")]
    Closed,
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error("a frame that cannot be read: {0}")]
    Frame(#[from] FrameError),
    #[error("a frame that cannot be written: {0}")]
    Unsendable(FrameError),
}
