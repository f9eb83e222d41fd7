//! The engine's thread: takes commands, sends steps, collects logits, delivers events, and notices the end of a worker.

use super::bench::{self, BenchJob, Way};
use super::board::Board;
use super::mailbox::{Command, Mailbox};
use super::pipeline::{Collected, Expected, Pipeline};
use super::recovery::Replaying;
use super::relocate::Relocation;
use super::request::RequestError;
use super::sequence::Waiting;
use super::shared::Shared;
use super::start::lift_from;
use super::supervisor::Supervisor;
use crate::workers::WorkerError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use spillway_protocol::frame::FrameLimits;
use spillway_protocol::plan::Plan;
use std::sync::Arc;

/// Everything the engine's thread owns.
#[derive(Debug)]
pub(super) struct Driver {
    pub board: Board,
    /// None once the engine has given up, and while it recovers.
    pub pipeline: Option<Pipeline>,
    pub plan: Arc<Plan>,
    pub limits: FrameLimits,
    /// What the options say about [`Self::steps_in_flight`].
    pub steps_asked: Option<usize>,
    pub steps_in_flight: usize,
    pub supervisor: Supervisor,
    pub relocation: Relocation,
    /// The last recovery, until every sequence is where it was.
    pub replaying: Option<Replaying>,
    /// Requests that may wait for a slot.
    pub queue: usize,
    pub mailbox: Arc<Mailbox>,
    pub shared: Arc<Shared>,
}

/// Whether the engine goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    GoOn,
    Stop,
}

impl Driver {
    /// Serves until it is told to stop. A worker that fails is replaced; when that does not help, every request ends, and
    /// further ones are refused with the reason.
    pub(super) fn run(&mut self) {
        loop {
            let next = match self.round() {
                Ok(next) => next,
                Err(error) => self.recover(error),
            };
            if next == Next::Stop {
                return;
            }
        }
    }

    fn round(&mut self) -> Result<Next, WorkerError> {
        let next = self.take_commands()?;
        if next == Next::GoOn {
            self.turn()?;
        }
        Ok(next)
    }

    /// Ends everything: requests get their last event, workers end.
    pub(super) fn close(&mut self) {
        self.shared.set_failure(RequestError::stopped());
        for command in self.mailbox.close() {
            self.refuse(command);
        }
        self.board.abort_all();
        self.tell();
        if let Some(pipeline) = self.pipeline.take() {
            pipeline.shutdown();
        }
    }

    /// Fails every request and drops the workers.
    pub(super) fn fail(&mut self, error: &RequestError) {
        tracing::error!(code = error.code, "{error}");
        self.shared.set_failure(error.clone());
        if let Some(pipeline) = self.pipeline.take() {
            pipeline.give_up("the pipeline is given up");
        }
        self.board.fail_all(error);
        self.tell();
    }

    fn take_commands(&mut self) -> Result<Next, WorkerError> {
        while let Some(command) = self.mailbox.pop() {
            match command {
                Command::Submit(request) => self.accept(request),
                Command::Abort(id) => self.board.abort(id),
                Command::Bench(job) => self.bench(&job)?,
                Command::Shutdown => return Ok(Next::Stop),
            }
        }
        Ok(Next::GoOn)
    }

    pub(super) fn accept(&mut self, request: Waiting) {
        match self.shared.failure() {
            Some(error) => self.board.reject(request, &error),
            None if self.board.waiting() >= self.queue => {
                self.board.reject(request, &RequestError::queue_full(self.queue));
            }
            None => {
                self.board.enqueue(request);
                // At once, so that only requests without a slot count as waiting.
                self.board.admit();
            }
        }
    }

    /// One turn: admit, send, deliver what the last round brought while the workers compute, collect.
    fn turn(&mut self) -> Result<(), WorkerError> {
        self.board.admit();
        if let Some(pipeline) = &mut self.pipeline {
            let board = &mut self.board;
            while board.may_send() {
                if !pipeline.send(|epoch, step, frame, ids| board.next_step(epoch, step, frame, ids))? {
                    break;
                }
            }
        }
        self.tell();
        if self.board.in_flight() { self.collect() } else { self.idle() }
    }

    fn collect(&mut self) -> Result<(), WorkerError> {
        let (Some(pipeline), Some(step)) = (&mut self.pipeline, self.board.expected_step()) else {
            return Ok(());
        };
        let board = &mut self.board;
        let expected = Expected { step, rows: board.expected_rows() };
        if pipeline.collect(expected, &mut |row, logits| board.row(row, logits))? == Collected::Step {
            board.step_done();
            self.supervisor.progressed();
            self.relocation.losses.progressed();
        }
        Ok(())
    }

    /// Sleeps until a command comes or a worker has something to say.
    fn idle(&mut self) -> Result<(), WorkerError> {
        let bell = PollFd::new(self.mailbox.bell(), PollFlags::POLLIN);
        let workers = self.pipeline.iter().flat_map(Pipeline::watch_fds);
        let mut fds: Vec<PollFd<'_>> =
            std::iter::once(bell).chain(workers.map(|fd| PollFd::new(fd, PollFlags::POLLIN))).collect();
        // An interrupted or failed poll only means that this thread looks around earlier.
        let _ = poll(&mut fds, PollTimeout::NONE);
        let worker_spoke = fds[1..].iter().any(|fd| fd.any().unwrap_or(true));
        match &mut self.pipeline {
            Some(pipeline) if worker_spoke => {
                pipeline.listens();
                pipeline.check()
            }
            _ => Ok(()),
        }
    }

    fn bench(&mut self, job: &BenchJob) -> Result<(), WorkerError> {
        let idle = self.board.live() + self.board.waiting() == 0 && !self.board.in_flight();
        let (result, outcome) = match &mut self.pipeline {
            None => (Err(self.shared.failure().unwrap_or_else(RequestError::stopped)), Ok(())),
            Some(_) if !idle => (Err(RequestError::busy()), Ok(())),
            Some(pipeline) => {
                let way = Way {
                    steps: self.steps_in_flight,
                    lift_from: lift_from(&self.plan),
                    limits: &self.limits,
                };
                match bench::run(&job.request, &mut self.board, pipeline, way) {
                    Ok(result) => (Ok(result), Ok(())),
                    Err(error) => (Err(RequestError::worker(&error)), Err(error)),
                }
            }
        };
        // Whoever asked may have gone.
        let _ = job.reply.send(result);
        outcome
    }

    /// A command that came too late.
    fn refuse(&mut self, command: Command) {
        match command {
            Command::Submit(request) => self.board.reject(request, &RequestError::stopped()),
            Command::Bench(job) => {
                let _ = job.reply.send(Err(RequestError::stopped()));
            }
            Command::Abort(_) | Command::Shutdown => {}
        }
    }

    /// Shows the new state and delivers events, in this order: who hears of an end finds its memory free.
    pub(super) fn tell(&mut self) {
        self.shared.publish(&self.board);
        if let Some(replaying) = self.replaying.take_if(|_| !self.board.replaying()) {
            self.shared.set_recovery(replaying.over());
        }
        self.shared.set_stalled(self.pipeline.as_ref().and_then(Pipeline::stalled));
        self.board.deliver();
    }
}
