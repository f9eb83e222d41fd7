//! After a failed worker: another one takes its place, and every request goes on where it was.
//!
//! The other workers keep their weights. A new epoch begins: frames of the old one, still in rings or computed just now, are
//! dropped by whoever finds them. Sequences are computed again from the tokens the engine has of them, and since no chunking
//! changes a bit, answers go on as if nothing had happened. Commands are served meanwhile.

use super::driver::{Driver, Next};
use super::mailbox::Command;
use super::pipeline::Pipeline;
use super::recovery::{Recovery, ms};
use super::request::RequestError;
use super::start::next_epoch;
use super::supervisor::Verdict;
use crate::workers::{LoadProgress, LoadWatcher, ReviveTimes, WorkerError, WorkerView};
use nix::poll::{PollFd, PollFlags, poll};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Longest sleep during a wait, in milliseconds.
const TICK: u8 = 20;

/// What has been done about a failure so far.
#[derive(Debug, Default)]
struct Attempts {
    count: u32,
    backoff: Duration,
    times: ReviveTimes,
}

impl Driver {
    /// Replaces what has failed, as often as it takes, or gives up and ends every request.
    pub(super) fn recover(&mut self, mut error: WorkerError) -> Next {
        let unnoticed = self.pipeline.as_ref().map_or(Duration::ZERO, |pipeline| pipeline.unnoticed(&error));
        let code = error.code();
        let mut attempts = Attempts::default();
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
            attempts.count += 1;
            match self.replace(delay, &mut attempts) {
                Ok(Some(replaced)) => {
                    self.recovered(
                        replaced,
                        Recovery { code, detect_ms: ms(unnoticed), ..attempts.record() },
                    );
                    return Next::GoOn;
                }
                Ok(None) => return Next::Stop,
                Err(again) => error = again,
            }
        }
    }

    /// Requests go on: says so, and how long it took.
    fn recovered(&mut self, Revived { epoch, stages }: Revived, recovery: Recovery) {
        let (views, links) =
            self.pipeline.iter().map(|it| (it.views(), it.links())).next().unwrap_or_default();
        self.shared.set_recovered(views, links, epoch, Recovery { stages, ..recovery });
        if self.board.replaying() {
            self.replaying = Some(Instant::now());
        } else {
            self.replaying = None;
            self.shared.set_replayed(Duration::ZERO);
        }
    }

    /// Waits, then revives the pipeline; none when the engine is to stop.
    fn replace(&mut self, delay: Duration, attempts: &mut Attempts) -> Result<Option<Revived>, WorkerError> {
        // Taken out, so that commands can be served while it loads.
        let Some(mut pipeline) = self.pipeline.take() else { return Ok(None) };
        let mut meanwhile = Meanwhile { driver: self, stop: false };
        let began = Instant::now();
        if !delay.is_zero() {
            pipeline.back_off();
        }
        while began.elapsed() < delay && meanwhile.tick(&|| pipeline.views()).is_continue() {
            meanwhile.wait();
        }
        attempts.backoff += began.elapsed();
        let epoch = next_epoch();
        let revived = match meanwhile.stop {
            true => Err(WorkerError::GivenUp),
            false => pipeline.revive(epoch, &mut meanwhile, &mut attempts.times),
        };
        let stop = meanwhile.stop;
        self.pipeline = Some(pipeline);
        match revived {
            Err(_) if stop => Ok(None),
            revived => revived.map(|stages| Some(Revived { epoch, stages })),
        }
    }
}

/// A pipeline that serves again.
#[derive(Debug)]
struct Revived {
    epoch: u64,
    /// Whose workers were replaced.
    stages: Vec<usize>,
}

impl Attempts {
    fn record(&self) -> Recovery {
        Recovery {
            attempts: self.count,
            backoff_ms: ms(self.backoff),
            respawn_ms: ms(self.times.respawn),
            load_ms: ms(self.times.load),
            ..Recovery::default()
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
    fn tick(&mut self, workers: &dyn Fn() -> Vec<WorkerView>) -> ControlFlow<()> {
        while let Some(command) = self.driver.mailbox.pop() {
            match command {
                Command::Submit(request) => self.driver.accept(request),
                Command::Abort(id) => self.driver.board.abort(id),
                Command::Bench(job) => drop(job.reply.send(Err(RequestError::busy()))),
                Command::Shutdown => self.stop = true,
            }
        }
        self.driver.shared.set_workers(workers());
        self.driver.tell();
        if self.stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}
