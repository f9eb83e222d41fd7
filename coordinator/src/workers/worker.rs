//! One worker as the coordinator sees it: its process, where it is, and what it says.

use super::error::{Ending, WorkerError, WorkerName};
use super::lifecycle::{Change, Life, Lifecycle};
use super::memory;
use super::process::WorkerProcess;
use spillway_protocol::channel::CoordinatorEnd;
use spillway_protocol::control::{FromWorker, LoadStats};
use spillway_protocol::ring::RingError;
use spillway_protocol::status::StatusReader;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;

/// Target of the log's events about workers: `SPILLWAY_LOG=spillway::worker=info` shows every change of every worker.
pub(super) const LOG_TARGET: &str = "spillway::worker";

/// One worker as the coordinator sees it.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) stage: usize,
    pub(super) layers: Range<usize>,
    pub(super) life: Life<WorkerProcess>,
    /// Pipeline incarnation.
    pub(super) epoch: u64,
    pub(super) control: CoordinatorEnd,
    pub(super) status: Arc<StatusReader>,
    pub(super) stats: LoadStats,
    /// Bytes of weights that it has stored, and all of its band; zeros until it says so.
    pub(super) stored: (u64, u64),
    /// Questions about links that it has been asked and not answered: more than one when some were given up.
    pub(super) unanswered: usize,
    /// It has found a ring whose counters make no sense. Which of its two that is, and who wrote there, is not known.
    pub(super) distrusts_rings: bool,
    /// Processes that the system had killed for want of memory when this one was started.
    pub(super) memory_kills: u64,
}

/// What a worker needs that has just been started.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) process: WorkerProcess,
    pub(super) control: CoordinatorEnd,
    pub(super) status: Arc<StatusReader>,
    pub(super) memory_kills: u64,
}

impl Worker {
    pub(super) fn new(stage: usize, layers: Range<usize>, epoch: u64, started: Started) -> Worker {
        let Started { process, control, status, memory_kills } = started;
        let (life, stats) = (Life::new(process), LoadStats::default());
        let worker = Worker {
            stage,
            layers,
            life,
            epoch,
            control,
            status,
            stats,
            stored: (0, 0),
            unanswered: 0,
            distrusts_rings: false,
            memory_kills,
        };
        worker.tell(None, "the pipeline starts", None);
        worker
    }

    /// Lets another process take the place of this worker's, which is gone.
    pub(super) fn replace(&mut self, epoch: u64, started: Started) {
        let from = self.state();
        let Started { process, control, status, memory_kills } = started;
        if self.life.replace(process) {
            (self.epoch, self.control, self.status, self.memory_kills) =
                (epoch, control, status, memory_kills);
            (self.stats, self.stored) = (LoadStats::default(), (0, 0));
            (self.unanswered, self.distrusts_rings) = (0, false);
            self.tell(Some(from), "another process takes its place", None);
        }
    }

    pub(super) fn name(&self) -> WorkerName {
        WorkerName { stage: self.stage, layers: self.layers.clone(), pid: self.pid() }
    }

    pub(super) fn pid(&self) -> u32 {
        self.life.process().pid()
    }

    pub(super) fn state(&self) -> Lifecycle {
        self.life.state()
    }

    /// Follows a change and tells of it; one that does not apply in the present state is none.
    pub(super) fn enter(&mut self, change: Change, cause: &str) {
        self.enter_with(change, cause, None);
    }

    pub(super) fn enter_with(&mut self, change: Change, cause: &str, code: Option<&str>) {
        let from = self.state();
        if self.life.enter(change).is_some() {
            self.tell(Some(from), cause, code);
        }
    }

    /// Writes where the worker is now into the log.
    pub(super) fn tell(&self, from: Option<Lifecycle>, cause: &str, code: Option<&str>) {
        tracing::info!(
            target: LOG_TARGET,
            stage = self.stage,
            pid = self.pid(),
            epoch = self.epoch,
            from = from.map(Lifecycle::as_str),
            to = self.state().as_str(),
            code,
            cause,
            "worker"
        );
    }

    /// Its process serves no more: ends it, and gives the reason back.
    pub(super) fn fail(&mut self, error: WorkerError) -> WorkerError {
        self.enter_with(Change::Ended, &error.to_string(), Some(error.code()));
        error
    }

    pub(super) fn died(&mut self) -> WorkerError {
        let ending = match self.life.process_mut().ending() {
            Ending::Exited(status)
                if status.signal() == Some(libc::SIGKILL) && memory::kills() > self.memory_kills =>
            {
                Ending::OutOfMemory { charged: self.status.read().bytes_allocated }
            }
            ending => ending,
        };
        self.fail(WorkerError::Died { worker: self.name(), ending })
    }

    pub(super) fn protocol_error(&mut self, reason: String) -> WorkerError {
        self.fail(WorkerError::Protocol { worker: self.name(), reason })
    }

    pub(super) fn reported(&mut self, code: String, message: String) -> WorkerError {
        self.distrusts_rings = code == RingError::Corrupt.code();
        self.fail(WorkerError::Reported { worker: self.name(), code, message })
    }

    /// Why the worker does not serve any more, if so.
    pub(super) fn failure(&mut self) -> Option<WorkerError> {
        match self.next_message() {
            Ok(None) => None,
            Ok(Some(FromWorker::Failed { code, message })) => Some(self.reported(code, message)),
            Ok(Some(message)) => Some(self.protocol_error(format!("{message:?} while serving"))),
            Err(error) => Some(error),
        }
    }

    /// What the outside may know.
    pub(super) fn view(&self) -> WorkerView {
        WorkerView {
            pid: self.pid(),
            lifecycle: self.state(),
            status: self.status.clone(),
            stats: self.stats.clone(),
            stored: self.stored,
        }
    }
}

/// Why workers do not serve any more, if so: of several failures the one closest to the cause.
pub(super) fn failure(workers: &mut [Worker]) -> Option<WorkerError> {
    let (found, first) =
        workers.iter_mut().enumerate().find_map(|(at, worker)| Some((at, worker.failure()?)))?;
    // It may only have followed another one, whose word has arrived by now. Its own end is our doing.
    let others = workers.iter_mut().enumerate().filter(|(at, _)| *at != found);
    let failures = others.filter_map(|(_, worker)| worker.failure());
    Some(failures.fold(first, |best, other| if other.rank() > best.rank() { other } else { best }))
}

/// What the outside may know about a worker while it serves.
#[derive(Debug, Clone)]
pub struct WorkerView {
    /// Process id.
    pub pid: u32,
    /// Where it was when the view was made.
    pub lifecycle: Lifecycle,
    /// Its status page.
    pub status: Arc<StatusReader>,
    /// What it allocated.
    pub stats: LoadStats,
    /// Bytes of weights that it has stored, and all of its band; zeros until it says so.
    pub stored: (u64, u64),
}

/// A worker that says what a test says for it.
#[cfg(test)]
pub(super) fn puppet(stage: usize) -> (Worker, spillway_protocol::channel::WorkerEnd) {
    use super::process::Inherited;
    use super::visibility::Visibility;
    use std::os::fd::AsFd;
    let status = StatusReader::create().unwrap();
    let (control, end) = spillway_protocol::channel::pair().unwrap();
    let some = || status.as_fd().try_clone_to_owned().unwrap();
    let inherited =
        Inherited { control: some(), ring_in: some(), ring_out: some(), status: some(), states: None };
    let (exe, visible) = (std::path::Path::new("/bin/true"), Visibility::default());
    let process = WorkerProcess::spawn(exe, "puppet", inherited, &visible).unwrap();
    let started = Started { process, control, status: Arc::new(status), memory_kills: 0 };
    (Worker::new(stage, stage..stage + 1, 1, started), end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a worker has said counts, not that it was ended for it.
    #[test]
    fn a_failure_is_told_as_it_was_found() {
        let [(first, _silent), (second, mut end)] = [puppet(0), puppet(1)];
        let mut workers = [first, second];
        end.send(&FromWorker::Progress { done: 1, total: 2 }).unwrap();
        drop(end);
        let failure = failure(&mut workers);
        let told = matches!(&failure, Some(WorkerError::Protocol { worker, .. }) if worker.stage == 1);
        assert!(told, "{failure:?}");
    }

    #[test]
    fn a_worker_that_reports_its_error_is_closer_to_the_cause_than_one_that_left() {
        let [(first, gone), (second, mut end)] = [puppet(0), puppet(1)];
        let mut workers = [first, second];
        drop(gone);
        end.send(&FromWorker::Failed { code: "gpu_lost".into(), message: "it is lost".into() }).unwrap();
        let failure = failure(&mut workers);
        assert_eq!(failure.map(|error| error.code()), Some("gpu_lost"));
    }
}
