//! After a failed worker: another one takes its place, and every request goes on where it was.
//!
//! The other workers keep their weights. A new epoch begins: frames of the old one, still in rings or computed just now, are
//! dropped by whoever finds them. Sequences are computed again from the tokens the engine has of them, and since no chunking
//! changes a bit, answers go on as if nothing had happened. Commands are served meanwhile.

use super::driver::{Driver, Next};
use super::mailbox::Command;
use super::pipeline::Pipeline;
use super::request::RequestError;
use super::start::next_epoch;
use super::supervisor::Verdict;
use crate::workers::{LoadProgress, LoadWatcher, WorkerError};
use nix::poll::{PollFd, PollFlags, poll};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Longest sleep during a wait, in milliseconds.
const TICK: u8 = 20;

impl Driver {
    /// Replaces what has failed, as often as it takes, or gives up and ends every request.
    pub(super) fn recover(&mut self, mut error: WorkerError) -> Next {
        let began = Instant::now();
        loop {
            let delay = match self.supervisor.judge(Instant::now()) {
                Verdict::Restart(delay) if !error.is_final() => delay,
                _ => {
                    self.fail(&RequestError::given_up(&error, self.supervisor.recent()));
                    return Next::GoOn;
                }
            };
            tracing::warn!(code = error.code(), recent = self.supervisor.recent(), "{error}; it is replaced");
            self.board.rewind(&error);
            self.shared.set_recovering(&error, self.pipeline.iter().flat_map(Pipeline::views).collect());
            self.tell();
            match self.replace(delay) {
                Ok(Some(replaced)) => {
                    let ms = began.elapsed().as_millis();
                    tracing::info!(stages = ?replaced, ms, "workers replaced, requests go on");
                    return Next::GoOn;
                }
                Ok(None) => return Next::Stop,
                Err(again) => error = again,
            }
        }
    }

    /// Waits, then revives the pipeline: the stages that were replaced, or nothing when the engine is to stop.
    fn replace(&mut self, delay: Duration) -> Result<Option<Vec<usize>>, WorkerError> {
        // Taken out, so that commands can be served while it loads.
        let Some(mut pipeline) = self.pipeline.take() else { return Ok(None) };
        let mut meanwhile = Meanwhile { driver: self, stop: false };
        let until = Instant::now() + delay;
        while Instant::now() < until && meanwhile.tick().is_continue() {
            meanwhile.wait();
        }
        let epoch = next_epoch();
        let revived =
            if meanwhile.stop { Err(WorkerError::GivenUp) } else { pipeline.revive(epoch, &mut meanwhile) };
        let stop = meanwhile.stop;
        if let Ok(replaced) = &revived {
            self.shared.set_recovered(pipeline.views(), pipeline.links(), epoch, replaced.len());
        }
        self.pipeline = Some(pipeline);
        match revived {
            Err(_) if stop => Ok(None),
            revived => revived.map(Some),
        }
    }
}

/// What the engine does while a worker loads.
struct Meanwhile<'a> {
    driver: &'a mut Driver,
    stop: bool,
}

impl Meanwhile<'_> {
    /// Sleeps until a command comes, for a moment at most.
    fn wait(&self) {
        // An interrupted or failed poll only means that the caller looks around earlier.
        let _ = poll(&mut [PollFd::new(self.driver.mailbox.bell(), PollFlags::POLLIN)], TICK);
    }
}

impl LoadWatcher for Meanwhile<'_> {
    fn progress(&mut self, progress: LoadProgress) {
        tracing::debug!(?progress, "a new worker loads");
    }

    /// Requests are queued, or ended when their users want that.
    fn tick(&mut self) -> ControlFlow<()> {
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
