//! After a failed worker: another one takes its place, and every request goes on where it was.
//!
//! The other workers keep their weights. A new epoch begins: frames of the old one, still in rings or computed just now, are
//! dropped by whoever finds them. Sequences are computed again from the tokens the engine has of them, and since no chunking
//! changes a bit, answers go on as if nothing had happened. Commands are served meanwhile.

use super::driver::{Driver, Next};
use super::mailbox::Command;
use super::recovery::{Replaying, ms};
use super::relocate::Replan;
use super::request::RequestError;
use super::start::next_epoch;
use super::supervisor::Verdict;
use crate::workers::{LoadProgress, LoadWatcher, Revival, WorkerError, WorkerView};
use nix::poll::{PollFd, PollFlags, poll};
use spillway_protocol::jsonl::Recovery;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest sleep during a wait, in milliseconds.
const TICK: u8 = 20;

/// What has been done about a failure so far.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    /// Of the failure that began it.
    code: &'static str,
    detect: Duration,
    count: u32,
    pub backoff: Duration,
    pub replan: Duration,
    respawn: Duration,
    pub load: Duration,
    /// Workers that took another one's place.
    restarts: usize,
    /// Where they are.
    stages: BTreeSet<usize>,
}

/// What can be done about a failure.
#[derive(Debug)]
enum Remedy {
    /// Other workers take the place of those that have failed.
    Replace,
    /// The model is placed anew.
    Relocate(Arc<dyn Replan>),
}

impl Remedy {
    /// The end of a sentence about a failure.
    fn words(&self) -> &'static str {
        match self {
            Remedy::Replace => "it is replaced",
            Remedy::Relocate(_) => "the model is placed anew",
        }
    }
}

/// Why an attempt did not succeed.
#[derive(Debug)]
pub(super) enum Setback {
    /// Another one may.
    Worker(WorkerError),
    /// No other one will: the last word to every request.
    Final(RequestError),
}

impl Driver {
    /// Replaces what has failed, as often as it takes, or gives up and ends every request.
    pub(super) fn recover(&mut self, mut error: WorkerError) -> Next {
        let detect = self.pipeline.as_ref().map_or(Duration::ZERO, |pipeline| pipeline.unnoticed(&error));
        let mut attempts = Attempts { code: error.code(), detect, ..Attempts::default() };
        loop {
            // One event has one cause: a request that is ended for it, or else the worker or its device.
            let condemned = self.board.rewind(&error);
            let gone = self.loses_device(&error, condemned);
            let verdict = self.delay(&error, condemned).and_then(|delay| Ok((delay, self.remedy(gone)?)));
            let (delay, remedy) = match verdict {
                Ok(verdict) => verdict,
                Err(end) => {
                    self.fail(&end);
                    return Next::GoOn;
                }
            };
            self.announce(&error, remedy.words());
            attempts.count += 1;
            let outcome = match remedy {
                Remedy::Replace => self.replace(delay, &mut attempts),
                Remedy::Relocate(replan) => self.relocate(replan, delay, &mut attempts),
            };
            match outcome {
                Ok(Some(epoch)) => {
                    self.recovered(epoch, &attempts);
                    return Next::GoOn;
                }
                Ok(None) => return Next::Stop,
                Err(Setback::Worker(again)) => error = again,
                Err(Setback::Final(error)) => {
                    self.fail(&error);
                    return Next::GoOn;
                }
            }
        }
    }

    /// How long to wait before the next start, or why there is none.
    fn delay(&mut self, error: &WorkerError, condemned: bool) -> Result<Duration, RequestError> {
        if condemned {
            self.supervisor.explained();
            return Ok(Duration::ZERO);
        }
        match self.supervisor.judge(Instant::now()) {
            Verdict::Restart(delay) if !error.is_final() => Ok(delay),
            _ => Err(RequestError::given_up(error, self.supervisor.recent())),
        }
    }

    /// What to do, when a device is `gone` or not, or why there is nothing.
    fn remedy(&self, gone: bool) -> Result<Remedy, RequestError> {
        // Without a pipeline, the last attempt was on another placement, which did not start either.
        if !gone && self.pipeline.is_some() {
            return Ok(Remedy::Replace);
        }
        self.relocation.replan.clone().map(Remedy::Relocate).ok_or_else(|| {
            RequestError::device_lost(
                &self.relocation.losses.words(),
                "the model is not to be placed anew (supervision.device_lost)",
            )
        })
    }

    /// Tells everyone that something is being done about a failure.
    fn announce(&mut self, error: &WorkerError, remedy: &str) {
        tracing::warn!(code = error.code(), recent = self.supervisor.recent(), "{error}; {remedy}");
        self.replaying = None;
        self.board.tell_recovering(error.code(), &error.to_string());
        self.shared.set_recovering(error);
        if let Some(pipeline) = &self.pipeline {
            self.shared.set_workers(pipeline.views());
        }
        self.tell();
    }

    /// Requests go on: says so, and how long it took.
    fn recovered(&mut self, epoch: u64, attempts: &Attempts) {
        let (views, links) =
            self.pipeline.iter().map(|it| (it.views(), it.links())).next().unwrap_or_default();
        self.shared.set_recovered(views, links, epoch, attempts.restarts);
        self.supervisor.recovered(Instant::now());
        self.replaying = Some(Replaying { since: Instant::now(), recovery: attempts.record(epoch) });
    }

    /// Waits, then revives the pipeline; its new epoch, or none when the engine is to stop.
    fn replace(&mut self, delay: Duration, attempts: &mut Attempts) -> Result<Option<u64>, Setback> {
        // Taken out, so that commands can be served while it loads.
        let Some(mut pipeline) = self.pipeline.take() else { return Ok(None) };
        if !delay.is_zero() {
            pipeline.back_off();
            self.shared.set_workers(pipeline.views());
        }
        let mut meanwhile = Meanwhile::new(self);
        attempts.backoff += meanwhile.pause(delay);
        let (epoch, mut revival) = (next_epoch(), Revival::default());
        let revived = match meanwhile.stops() {
            true => Err(WorkerError::GivenUp),
            false => pipeline.revive(epoch, &mut meanwhile, &mut revival),
        };
        let stop = meanwhile.stops();
        self.pipeline = Some(pipeline);
        attempts.add(revival);
        match revived {
            Ok(()) => Ok(Some(epoch)),
            Err(_) if stop => Ok(None),
            Err(error) => Err(Setback::Worker(error)),
        }
    }
}

impl Attempts {
    /// Adds what one of them did.
    fn add(&mut self, Revival { respawn, load, replaced }: Revival) {
        self.respawn += respawn;
        self.load += load;
        self.restarts += replaced.len();
        self.stages.extend(replaced);
    }

    /// All workers are those of another placement with so many stages.
    pub(super) fn relocated(&mut self, stages: usize) {
        self.restarts += stages;
        self.stages = (0..stages).collect();
    }

    /// All but the time until sequences are where they were.
    fn record(&self, epoch: u64) -> Recovery {
        Recovery {
            epoch,
            code: self.code,
            stages: self.stages.iter().copied().collect(),
            attempts: self.count,
            detect_ms: ms(self.detect),
            backoff_ms: ms(self.backoff),
            replan_ms: ms(self.replan),
            respawn_ms: ms(self.respawn),
            load_ms: ms(self.load),
            ..Recovery::default()
        }
    }
}

/// What the engine does while a worker loads, or something else takes its time.
#[derive(Debug)]
pub(super) struct Meanwhile<'a> {
    driver: &'a mut Driver,
    stop: bool,
}

impl<'a> Meanwhile<'a> {
    pub(super) fn new(driver: &'a mut Driver) -> Meanwhile<'a> {
        Meanwhile { driver, stop: false }
    }

    pub(super) fn driver(&mut self) -> &mut Driver {
        self.driver
    }

    /// Whether the engine has been told to stop.
    pub(super) fn stops(&self) -> bool {
        self.stop
    }

    /// Serves commands for a time, or until the engine is to stop; how long that was.
    pub(super) fn pause(&mut self, time: Duration) -> Duration {
        let began = Instant::now();
        while began.elapsed() < time && self.serve().is_continue() {
            self.wait();
        }
        began.elapsed()
    }

    /// Sleeps until a command comes, for a moment at most.
    pub(super) fn wait(&self) {
        // An interrupted or failed poll only means that the caller looks around earlier.
        let _ = poll(&mut [PollFd::new(self.driver.mailbox.bell(), PollFlags::POLLIN)], TICK);
    }

    /// Requests are queued, or ended when their users want that.
    pub(super) fn serve(&mut self) -> ControlFlow<()> {
        while let Some(command) = self.driver.mailbox.pop() {
            match command {
                Command::Submit(request) => self.driver.accept(request),
                Command::Abort(id) => self.driver.board.abort(id),
                Command::Bench(job) => drop(job.reply.send(Err(RequestError::busy()))),
                Command::Shutdown => self.stop = true,
            }
        }
        self.driver.tell();
        if self.stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl LoadWatcher for Meanwhile<'_> {
    fn progress(&mut self, progress: LoadProgress) {
        tracing::debug!(?progress, "a new worker loads");
    }

    fn tick(&mut self, workers: &dyn Fn() -> Vec<WorkerView>) -> ControlFlow<()> {
        self.driver.shared.set_workers(workers());
        self.serve()
    }
}
