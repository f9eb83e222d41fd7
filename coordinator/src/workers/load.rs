//! Handshake and loading, all workers at once.

use super::error::WorkerError;
use super::{LoadProgress, LoadWatcher, Worker};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use spillway_protocol::channel::{ChannelError, Received};
use spillway_protocol::control::{FromWorker, LoadBand, LoadStats, PROTOCOL_VERSION, ToWorker};
use spillway_protocol::plan::Plan;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Longest silence before the worker's first word, and between two reports of a load.
const HELLO_LIMIT: Duration = Duration::from_secs(20);
const LOAD_LIMIT: Duration = Duration::from_secs(60);
/// The same for a process that is known to be stopped.
const STOPPED_LIMIT: Duration = Duration::from_secs(1);
/// How often silence is looked at, and whoever waits.
pub(super) const TICK: Duration = Duration::from_millis(50);

/// Where a worker is on its way to serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Loading,
    Loaded,
}

impl Phase {
    /// What a worker that has been silent for so long should have done by now.
    fn overdue(self, silence: Duration) -> Option<&'static str> {
        match self {
            Phase::Starting => (silence > HELLO_LIMIT).then_some("starting"),
            Phase::Loading => (silence > LOAD_LIMIT).then_some("loading"),
            Phase::Loaded => None,
        }
    }
}

/// Progress of one worker.
#[derive(Debug)]
struct Loading {
    phase: Phase,
    last_news: Instant,
}

/// Sends every worker that has none its band and waits until all have loaded.
pub(super) fn load_all(
    workers: &mut [Worker],
    plan: &Plan,
    epoch: u64,
    watcher: &mut dyn LoadWatcher,
) -> Result<(), WorkerError> {
    let state = |worker: &Worker| Loading {
        phase: if worker.loaded { Phase::Loaded } else { Phase::Starting },
        last_news: Instant::now(),
    };
    let mut states: Vec<Loading> = workers.iter().map(state).collect();
    while states.iter().any(|state| state.phase != Phase::Loaded) {
        wait_for_news(workers, TICK);
        for (worker, state) in workers.iter_mut().zip(&mut states) {
            take_news(worker, state, plan, epoch, watcher)?;
            check_silence(worker, state)?;
        }
        if watcher.tick().is_break() {
            return Err(WorkerError::GivenUp);
        }
    }
    Ok(())
}

/// Sleeps until any worker says something or leaves, or `limit` is over. An interrupted or failed poll only means that the
/// caller looks around earlier.
pub(super) fn wait_for_news(workers: &[Worker], limit: Duration) {
    let mut fds: Vec<PollFd<'_>> =
        workers.iter().map(|worker| PollFd::new(worker.control.as_fd(), PollFlags::POLLIN)).collect();
    let limit = PollTimeout::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
    let _ = poll(&mut fds, limit);
}

fn take_news(
    worker: &mut Worker,
    state: &mut Loading,
    plan: &Plan,
    epoch: u64,
    watcher: &mut dyn LoadWatcher,
) -> Result<(), WorkerError> {
    while let Some(message) = worker.next_message()? {
        state.last_news = Instant::now();
        match (state.phase, message) {
            (Phase::Starting, FromWorker::Hello { protocol, .. }) => {
                worker.expect_version(protocol)?;
                worker.send(&load_message(worker, plan, epoch))?;
                state.phase = Phase::Loading;
            }
            (Phase::Loading, FromWorker::Progress { done, total }) => {
                watcher.progress(LoadProgress::Weights {
                    stage: worker.stage,
                    stages: plan.stages.len(),
                    done,
                    total,
                });
            }
            (Phase::Loading, FromWorker::Loaded(stats)) => {
                worker.check_stats(&stats, plan);
                for note in &stats.notes {
                    tracing::warn!(stage = worker.stage, "{note}");
                }
                worker.stats = stats;
                worker.loaded = true;
                state.phase = Phase::Loaded;
            }
            (_, FromWorker::Failed { code, message }) => {
                return Err(WorkerError::Reported { worker: worker.name(), code, message });
            }
            (phase, message) => return Err(worker.protocol_error(format!("{message:?} while {phase:?}"))),
        }
    }
    Ok(())
}

fn load_message(worker: &Worker, plan: &Plan, epoch: u64) -> ToWorker {
    ToWorker::Load(Box::new(LoadBand {
        model: plan.model.path.clone(),
        file_bytes: plan.model.file_bytes,
        epoch,
        stage_index: worker.stage,
        stage: plan.stages[worker.stage].clone(),
        limits: plan.limits,
    }))
}

fn check_silence(worker: &Worker, state: &Loading) -> Result<(), WorkerError> {
    let silence = state.last_news.elapsed();
    let stopped = state.phase != Phase::Loaded && silence > STOPPED_LIMIT && worker.process.is_stopped();
    match state.phase.overdue(silence).or(stopped.then_some("starting or loading, stopped by a signal")) {
        Some(phase) => Err(WorkerError::Silent {
            worker: worker.name(),
            seconds: state.last_news.elapsed().as_secs(),
            phase,
        }),
        None => Ok(()),
    }
}

impl Worker {
    fn expect_version(&self, found: u32) -> Result<(), WorkerError> {
        if found == PROTOCOL_VERSION {
            return Ok(());
        }
        Err(WorkerError::Version { worker: self.name(), found, expected: PROTOCOL_VERSION })
    }

    /// A worker that allocates far more than its plan makes every other number of the plan doubtful, but it does serve.
    fn check_stats(&self, stats: &LoadStats, plan: &Plan) {
        const TOLERANCE: u64 = 64 << 20;
        let planned = plan.stages[self.stage].bytes.private();
        let allocated = stats.host_bytes + stats.pinned_bytes + stats.device_bytes;
        if allocated > planned + planned / 20 + TOLERANCE {
            tracing::warn!(stage = self.stage, planned, allocated, "a worker allocated more than its plan");
        }
    }

    /// The next message that has arrived; the end of the channel is the end of the worker.
    pub(super) fn next_message(&mut self) -> Result<Option<FromWorker>, WorkerError> {
        match self.control.try_receive() {
            Ok(Received::Message(message)) => Ok(Some(message)),
            Ok(Received::TimedOut) => Ok(None),
            Ok(Received::Closed) | Err(ChannelError::Closed | ChannelError::Torn { .. }) => Err(self.died()),
            Err(error) => Err(self.protocol_error(error.to_string())),
        }
    }

    pub(super) fn send(&mut self, message: &ToWorker) -> Result<(), WorkerError> {
        match self.control.send(message) {
            Ok(()) => Ok(()),
            Err(ChannelError::Closed) => Err(self.died()),
            Err(error) => Err(self.protocol_error(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_judged_by_what_a_worker_has_to_do() {
        let overdue = |phase: Phase, seconds| phase.overdue(Duration::from_secs(seconds));
        assert_eq!((overdue(Phase::Starting, 20), overdue(Phase::Starting, 21)), (None, Some("starting")));
        assert_eq!((overdue(Phase::Loading, 60), overdue(Phase::Loading, 61)), (None, Some("loading")));
        assert_eq!(overdue(Phase::Loaded, 9999), None, "who has loaded waits for the others");
    }
}
