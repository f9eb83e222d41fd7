//! How residual rows get from a stage on a GPU to the next one: through the ring, or straight into its memory.
//!
//! The driver's word counts for nothing: before workers start, every pair of neighbours is looked up among the results of link tests, and tested
//! if it is not there. After all have loaded, so that links are the last thing that takes memory of a device, the later stage shares
//! memory and the earlier one opens it. Whatever fails on the way, rows go through the ring, and the reason is told.

use super::error::WorkerError;
use super::lifecycle::{Change, Lifecycle};
use super::load::{STOPPED_LIMIT, TICK, wait_for_news};
use super::{LoadProgress, LoadWatcher, Worker};
use serde::Serialize;
use spillway_protocol::control::{DeviceShare, FromWorker, ToWorker};
use spillway_protocol::plan::{GpuDevice, Plan};
use spillway_protocol::ring::{RingConsumer, Wait};
use spillway_worker_gpu::links::{self, End, Verdict};
use spillway_worker_gpu::{link_cache, probe_command};
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest silence of a worker that was asked to share or open memory.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Which way rows take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkPath {
    /// Written into the next stage's memory by the device.
    Peer,
    /// Through the ring in the host's memory.
    Staged,
}

impl LinkPath {
    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            LinkPath::Peer => "peer",
            LinkPath::Staged => "staged",
        }
    }
}

/// Two neighbouring stages on GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Link {
    /// The earlier stage; the other one follows it.
    pub from: usize,
    /// Which way rows take.
    pub path: LinkPath,
    /// Why they do not take the shorter one.
    pub reason: Option<String>,
}

impl Link {
    fn peer(from: usize) -> Self {
        Link { from, path: LinkPath::Peer, reason: None }
    }

    fn staged(from: usize, reason: impl Into<String>) -> Self {
        Link { from, path: LinkPath::Staged, reason: Some(reason.into()) }
    }

    /// A link that was wished for.
    fn refused(from: usize, reason: String) -> Self {
        tracing::warn!(from, to = from + 1, %reason, "rows between two GPUs go through the host");
        Self::staged(from, reason)
    }
}

/// The links of a plan as tests allow them. Takes seconds where a pair was never tested, minutes where a device does not answer. Before the
/// workers start: tests need memory of the devices, which these take.
pub(crate) fn decide(plan: &Plan, exe: &Path) -> Vec<Link> {
    let pairs = plan.stages.windows(2).enumerate();
    let gpus = pairs.filter_map(|(from, pair)| Some((from, pair[0].device()?, pair[1].device()?)));
    let decide = |(from, first, second)| {
        if !plan.peer_copies {
            return Link::staged(from, "peer copies are switched off");
        }
        allowed(exe, first, second).map_or_else(|reason| Link::refused(from, reason), |()| Link::peer(from))
    };
    gpus.map(decide).collect()
}

/// Whether the first device may write into the second one's memory, or why not.
fn allowed(exe: &Path, first: &GpuDevice, second: &GpuDevice) -> Result<(), String> {
    if first.provider != second.provider {
        return Err("the devices belong to different drivers".into());
    }
    match verdict(exe, &End::from(first), &End::from(second))? {
        Verdict::Works { .. } => Ok(()),
        Verdict::Refused { reason } => Err(reason),
    }
}

/// What a test found, now or earlier.
fn verdict(exe: &Path, first: &End, second: &End) -> Result<Verdict, String> {
    let cache = link_cache();
    if let Some(known) = cache.find(first, second) {
        return Ok(known);
    }
    let found = links::test(&probe_command(exe), first, second)?;
    if let Err(error) = cache.store(first, second, &found) {
        tracing::warn!(%error, "the result of a link test cannot be kept; the next load tests again");
    }
    Ok(found)
}

/// Arranges those of the links decided on that are not in `links`, puts them there and tells of them, and lets every worker serve. After
/// an error it can be called again. What comes out of `logits` meanwhile belongs to steps that are forgotten.
pub(super) fn arrange(
    workers: &mut [Worker],
    logits: &mut RingConsumer,
    decided: &[Link],
    links: &mut Vec<Link>,
    watcher: &mut dyn LoadWatcher,
) -> Result<(), WorkerError> {
    // A worker that was left in the middle of sending answers when the one after it has taken old frames out of the ring.
    if workers.iter().any(|worker| worker.state() == Lifecycle::Ready) {
        let_serve(workers)?;
    }
    for decided in decided {
        let from = decided.from;
        if links.iter().any(|link| link.from == from) {
            continue;
        }
        let mut link = decided.clone();
        if link.path == LinkPath::Peer
            && let Err(reason) = connect(workers, logits, from, watcher)?
        {
            link = Link::refused(from, reason);
        }
        watcher.progress(LoadProgress::Link(link.clone()));
        links.push(link);
    }
    links.sort_by_key(|link| link.from);
    let_serve(workers)
}

/// Tells every worker that does not know yet that steps may come.
fn let_serve(workers: &mut [Worker]) -> Result<(), WorkerError> {
    for worker in workers.iter_mut().filter(|worker| worker.state() == Lifecycle::Loaded) {
        worker.send(&ToWorker::Serve)?;
        worker.enter(Change::Served, "every worker has loaded");
    }
    Ok(())
}

/// Opens a way from stage `from` into the memory of the next; the inner error is the reason why there is none.
fn connect(
    workers: &mut [Worker],
    logits: &mut RingConsumer,
    from: usize,
    watcher: &mut dyn LoadWatcher,
) -> Result<Result<(), String>, WorkerError> {
    let share: Result<DeviceShare, String> = match ask(workers, logits, from + 1, &ToWorker::Offer, watcher)?
    {
        FromWorker::Offered(share) => share,
        other => return Err(workers[from + 1].protocol_error(format!("{other:?} while linking"))),
    };
    // Without memory to write into, the earlier stage must not keep what it may have had.
    let connect = ToWorker::Connect(share.as_ref().ok().cloned());
    match ask(workers, logits, from, &connect, watcher)? {
        FromWorker::Connected(connected) => Ok(share.and(connected)),
        other => Err(workers[from].protocol_error(format!("{other:?} while linking"))),
    }
}

/// Waits until the worker of a stage has left the steps of earlier incarnations behind: the one that `epoch` names begins.
pub(super) fn begin(
    workers: &mut [Worker],
    logits: &mut RingConsumer,
    stage: usize,
    epoch: u64,
    watcher: &mut dyn LoadWatcher,
) -> Result<(), WorkerError> {
    match ask(workers, logits, stage, &ToWorker::Begin(epoch), watcher)? {
        FromWorker::Begun => Ok(()),
        other => Err(workers[stage].protocol_error(format!("{other:?} where a new epoch begins"))),
    }
}

/// Whether a message answers a question about links or epochs.
pub(super) fn is_answer(message: &FromWorker) -> bool {
    matches!(message, FromWorker::Offered(_) | FromWorker::Connected(_) | FromWorker::Begun)
}

/// Sends a request to the worker of a stage and waits for its answer, as long as it can give one and all others are there. One that is
/// in the middle of sending waits for those after it, and the last one for room among its logits.
fn ask(
    workers: &mut [Worker],
    logits: &mut RingConsumer,
    stage: usize,
    request: &ToWorker,
    watcher: &mut dyn LoadWatcher,
) -> Result<FromWorker, WorkerError> {
    workers[stage].send(request)?;
    workers[stage].unanswered += 1;
    let asked = Instant::now();
    loop {
        while let Ok(Wait::Ready(forgotten)) = logits.try_next() {
            drop(forgotten);
        }
        match workers[stage].next_answer()? {
            Some(FromWorker::Failed { code, message }) => return Err(workers[stage].reported(code, message)),
            Some(answer) => return Ok(answer),
            None => {}
        }
        let others = workers.iter_mut().filter(|worker| worker.stage != stage);
        if let Some(error) = others.map(Worker::failure).find_map(|failure| failure) {
            return Err(error);
        }
        let silence = asked.elapsed();
        let is_stopped = |worker: &Worker| silence > STOPPED_LIMIT && worker.life.process().is_stopped();
        if let Some(worker) = workers.iter_mut().find(|worker| is_stopped(worker)) {
            return Err(worker.silent(silence, "linking, stopped by a signal"));
        }
        if silence > ANSWER_LIMIT {
            return Err(workers[stage].silent(silence, "linking"));
        }
        if watcher.tick(&|| workers.iter().map(Worker::view).collect()).is_break() {
            return Err(WorkerError::GivenUp);
        }
        wait_for_news(&workers[stage..=stage], TICK);
    }
}

#[cfg(test)]
mod tests {
    use super::super::WorkerView;
    use super::super::worker::puppet;
    use super::*;
    use spillway_protocol::ring::Ring;
    use std::ops::ControlFlow;

    /// Waits for ever, or not at all.
    struct Patience(ControlFlow<()>);

    impl LoadWatcher for Patience {
        fn progress(&mut self, _: LoadProgress) {}

        fn tick(&mut self, _: &dyn Fn() -> Vec<WorkerView>) -> ControlFlow<()> {
            self.0
        }
    }

    fn offered(reason: &str) -> FromWorker {
        FromWorker::Offered(Err(reason.to_owned()))
    }

    /// A question is given up when another worker fails; its answer may come at any time, also after the next question.
    #[test]
    fn answers_to_questions_that_were_given_up_are_passed_over() {
        let (worker, mut end) = puppet(0);
        let ring = Ring::create(1, 64).unwrap();
        let mut logits = RingConsumer::attach(ring.dup().unwrap()).unwrap();
        let mut workers = [worker];
        let mut offer = |workers: &mut [Worker], patience| {
            ask(workers, &mut logits, 0, &ToWorker::Offer, &mut Patience(patience))
        };
        let given_up = offer(&mut workers, ControlFlow::Break(()));
        assert!(matches!(given_up, Err(WorkerError::GivenUp)), "{given_up:?}");
        end.send(&offered("while others load")).unwrap();
        let news = workers[0].next_message();
        assert!(matches!(news, Ok(None)), "{news:?}");
        for _ in 0..2 {
            offer(&mut workers, ControlFlow::Break(())).unwrap_err();
        }
        for reason in ["late", "too late", "at last"] {
            end.send(&offered(reason)).unwrap();
        }
        let answer = offer(&mut workers, ControlFlow::Continue(())).unwrap();
        assert!(matches!(&answer, FromWorker::Offered(Err(reason)) if reason == "at last"), "{answer:?}");
        end.send(&offered("unasked")).unwrap();
        let failure = workers[0].failure();
        assert!(matches!(failure, Some(WorkerError::Protocol { .. })), "{failure:?}");
    }
}
