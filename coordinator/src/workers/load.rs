//! Handshake and loading, all workers at once.

use super::error::{LOADING, WorkerError};
use super::lifecycle::{Change, Lifecycle};
use super::links::is_answer;
use super::worker::{LOG_TARGET, Worker};
use super::{LoadProgress, LoadWatcher, Recipe};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use spillway_protocol::channel::{ChannelError, Received};
use spillway_protocol::control::{FromWorker, LayerBytes, LoadBand, LoadStats, PROTOCOL_VERSION, ToWorker};
use spillway_protocol::plan::{Execution, Plan, Stage};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Longest silence before the worker's first word, and between two reports of a load.
const HELLO_LIMIT: Duration = Duration::from_secs(20);
const LOAD_LIMIT: Duration = Duration::from_secs(60);
/// The same for a process that is known to be stopped.
pub(super) const STOPPED_LIMIT: Duration = Duration::from_secs(1);
/// How often silence is looked at, and whoever waits.
pub(super) const TICK: Duration = Duration::from_millis(50);

/// What a worker that has been silent for so long should have done by now.
fn overdue(state: Lifecycle, silence: Duration) -> Option<&'static str> {
    match state {
        Lifecycle::Spawning => (silence > HELLO_LIMIT).then_some("starting"),
        Lifecycle::Loading => (silence > LOAD_LIMIT).then_some(LOADING),
        // Who has loaded waits for the others.
        _ => None,
    }
}

/// Sends every worker that has none its band and waits until all have loaded.
pub(super) fn load_all(
    workers: &mut [Worker],
    recipe: &Recipe,
    epoch: u64,
    watcher: &mut dyn LoadWatcher,
) -> Result<(), WorkerError> {
    let mut last_news = vec![Instant::now(); workers.len()];
    while !workers.iter().all(|worker| worker.state().holds_band()) {
        wait_for_news(workers, TICK);
        for (worker, last_news) in workers.iter_mut().zip(&mut last_news) {
            take_news(worker, last_news, recipe, epoch, watcher)?;
            check_silence(worker, last_news.elapsed())?;
        }
        if watcher.tick(&|| workers.iter().map(Worker::view).collect()).is_break() {
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
    last_news: &mut Instant,
    recipe: &Recipe,
    epoch: u64,
    watcher: &mut dyn LoadWatcher,
) -> Result<(), WorkerError> {
    while let Some(message) = worker.next_message()? {
        *last_news = Instant::now();
        match (worker.state(), message) {
            (Lifecycle::Spawning, FromWorker::Hello { protocol, .. }) => {
                worker.expect_version(protocol)?;
                worker.send(&load_message(worker, recipe, epoch))?;
                worker.enter(Change::Greeted, "it has been told what to load");
            }
            (Lifecycle::Loading, FromWorker::Progress { done, total }) => {
                worker.stored = (done, total);
                tracing::debug!(target: LOG_TARGET, stage = worker.stage, pid = worker.pid(), done, total, "loading");
                watcher.progress(LoadProgress::Weights {
                    stage: worker.stage,
                    stages: recipe.plan.stages.len(),
                    done,
                    total,
                });
            }
            (Lifecycle::Loading, FromWorker::Loaded(stats)) => {
                worker.check_stats(&stats, &recipe.plan);
                for note in &stats.notes {
                    tracing::warn!(stage = worker.stage, "{note}");
                }
                worker.stats = stats;
                worker.enter(Change::Loaded, "its band is loaded");
            }
            (_, FromWorker::Failed { code, message }) => {
                return Err(worker.reported(code, message));
            }
            (state, message) => {
                return Err(worker.protocol_error(format!("{message:?} while {}", state.as_str())));
            }
        }
    }
    Ok(())
}

fn load_message(worker: &Worker, recipe: &Recipe, epoch: u64) -> ToWorker {
    let plan = &recipe.plan;
    ToWorker::Load(Box::new(LoadBand {
        model: plan.model.path.clone(),
        file_bytes: plan.model.file_bytes,
        file_stamp: recipe.file_stamp,
        epoch,
        stage_index: worker.stage,
        stage: plan.stages[worker.stage].clone(),
        lift: plan.lift_at(worker.stage).cloned(),
        limits: plan.limits,
    }))
}

fn check_silence(worker: &mut Worker, silence: Duration) -> Result<(), WorkerError> {
    let state = worker.state();
    let stopped = !state.holds_band() && silence > STOPPED_LIMIT && worker.life.process().is_stopped();
    match overdue(state, silence).or(stopped.then_some("starting or loading, stopped by a signal")) {
        Some(phase) => Err(worker.silent(silence, phase)),
        None => Ok(()),
    }
}

impl Worker {
    fn expect_version(&mut self, found: u32) -> Result<(), WorkerError> {
        if found == PROTOCOL_VERSION {
            return Ok(());
        }
        let worker = self.name();
        Err(self.fail(WorkerError::Version { worker, found, expected: PROTOCOL_VERSION }))
    }

    /// It has said nothing for a time in which it should have.
    pub(super) fn silent(&mut self, silence: Duration, phase: &'static str) -> WorkerError {
        let (worker, seconds) = (self.name(), silence.as_secs());
        self.fail(WorkerError::Silent { worker, seconds, phase })
    }

    /// A worker that allocates something else than its plan makes every other number of the plan doubtful, but it does serve.
    fn check_stats(&self, stats: &LoadStats, plan: &Plan) {
        for Memory { name, planned, loaded } in deviations(&plan.stages[self.stage], stats) {
            tracing::warn!(
                stage = self.stage,
                planned,
                loaded,
                "a worker's {name} differs by more than 2 % from its plan"
            );
        }
    }

    /// The next message that has arrived, but for answers to questions that were given up when another worker failed.
    pub(super) fn next_message(&mut self) -> Result<Option<FromWorker>, WorkerError> {
        loop {
            match self.receive()? {
                Some(message) if is_answer(&message) && self.unanswered > 0 => self.unanswered -= 1,
                message => return Ok(message),
            }
        }
    }

    /// The same while it is asked something, with the answer to that.
    pub(super) fn next_answer(&mut self) -> Result<Option<FromWorker>, WorkerError> {
        loop {
            match self.receive()? {
                Some(message) if is_answer(&message) && self.unanswered > 1 => self.unanswered -= 1,
                Some(message) if is_answer(&message) => {
                    self.unanswered = 0;
                    return Ok(Some(message));
                }
                message => return Ok(message),
            }
        }
    }

    /// The next message that has arrived; the end of the channel is the end of the worker.
    fn receive(&mut self) -> Result<Option<FromWorker>, WorkerError> {
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

/// One kind of memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory {
    name: &'static str,
    planned: u64,
    loaded: u64,
}

/// Where a worker's memory is off its plan by more than 2 %, if it is enough to matter at all.
fn deviations(stage: &Stage, stats: &LoadStats) -> impl Iterator<Item = Memory> {
    const MATTERS: u64 = 16 << 20;
    let mapped = stats.layers.iter().map(|layer| layer.pinned).sum::<u64>() + stats.lifted_bytes;
    let of_processor = match stage.execution {
        Execution::Cpu { .. } => ("host memory", stats.host_bytes),
        Execution::Gpu { .. } => ("device memory", stats.device_bytes),
    };
    let memory = |(name, loaded), planned| Memory { name, planned, loaded };
    let memories = [
        memory(of_processor, stage.bytes.of_processor()),
        memory(("weights in page-locked host memory", mapped), stage.bytes.mapped),
    ];
    memories.into_iter().filter(|memory| {
        let difference = memory.planned.abs_diff(memory.loaded);
        difference > MATTERS && difference > memory.planned / 50
    })
}

/// Says what spilled, from what was really loaded: nothing when nothing did.
pub(super) fn report_spill<'a>(stages: impl Iterator<Item = (&'a Execution, &'a LoadStats)> + Clone) {
    if let Some(report) = spill_report(stages) {
        tracing::info!("{report}");
    }
}

fn spill_report<'a>(stages: impl Iterator<Item = (&'a Execution, &'a LoadStats)> + Clone) -> Option<String> {
    let layers: Vec<LayerBytes> =
        stages.clone().flat_map(|(_, stats)| stats.layers.iter().copied()).collect();
    let resident = layers.iter().filter(|layer| layer.device > 0).count();
    let spilled = layers.len() - resident;
    if resident + layers.iter().filter(|layer| layer.pinned > 0).count() == 0 || spilled == 0 {
        return None;
    }
    let mut report =
        format!("partial offload: {resident} resident / {spilled} spilled, first GPU layer = {spilled}");
    for (stage, (execution, stats)) in stages.enumerate() {
        let processor = match execution {
            Execution::Cpu { .. } => "CPU".to_owned(),
            Execution::Gpu { device } => format!("device {}", device.index),
        };
        report.push_str(&format!("; stage {stage} on {processor} runs {}", stats.formats.join(" ")));
        if stats.lifted_bytes > 0 {
            report.push_str(", and what spilled for prompts");
        }
    }
    Some(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_protocol::plan::{GpuDevice, Residency, StageBytes};

    const GIB: u64 = 1 << 30;

    fn on_gpu() -> Execution {
        Execution::Gpu {
            device: GpuDevice {
                index: 0,
                provider: "emulated".into(),
                ordinal: 0,
                name: "GPU".into(),
                arch: "emulated_wave32".into(),
                pci: "ffff:00:00.0".into(),
                uuid: None,
                driver: 1,
            },
        }
    }

    #[test]
    fn memory_that_is_off_its_plan_is_named_with_both_numbers() {
        let stage = Stage {
            layers: 0..2,
            embed: true,
            head: true,
            execution: on_gpu(),
            residency: vec![Residency::HostMapped, Residency::Device],
            bytes: StageBytes { weights: 2 * GIB, mapped: GIB, ..StageBytes::default() },
            why: String::new(),
        };
        let loaded = |device_bytes, pinned| LoadStats {
            device_bytes,
            layers: vec![LayerBytes { pinned, ..LayerBytes::default() }],
            ..LoadStats::default()
        };
        let off = |stats: LoadStats| deviations(&stage, &stats).collect::<Vec<_>>();
        assert_eq!(off(loaded(2 * GIB + GIB / 32, GIB - GIB / 64)), [], "within 2 %");
        let device = Memory { name: "device memory", planned: 2 * GIB, loaded: 3 * GIB };
        let pinned = Memory { name: "weights in page-locked host memory", planned: GIB, loaded: 0 };
        assert_eq!(off(loaded(3 * GIB, 0)), [device, pinned]);
    }

    #[test]
    fn what_spilled_is_told_from_what_was_loaded() {
        let layer = |device, pinned, host| LayerBytes { device, pinned, host };
        let stats = |layers: &[LayerBytes], format: &str| LoadStats {
            layers: layers.to_vec(),
            formats: vec![format.to_owned()],
            ..LoadStats::default()
        };
        let (cpu, gpu) = (Execution::Cpu { threads: 1, node: None }, on_gpu());
        let [host, device, mapped] = [layer(0, 0, 1), layer(1, 0, 0), layer(0, 1, 0)];
        let report = |stages: &[(&Execution, &LoadStats)]| spill_report(stages.iter().copied());
        assert_eq!(report(&[(&cpu, &stats(&[host], "Q4_K"))]), None, "no GPU at all");
        assert_eq!(report(&[(&gpu, &stats(&[device; 3], "Q4_K"))]), None, "all resident");
        assert_eq!(
            report(&[(&cpu, &stats(&[host; 2], "Q4_K")), (&gpu, &stats(&[device; 3], "Q6_K"))]).unwrap(),
            "partial offload: 3 resident / 2 spilled, first GPU layer = 2; stage 0 on CPU runs Q4_K; \
             stage 1 on device 0 runs Q6_K"
        );
        assert_eq!(
            report(&[(&gpu, &stats(&[mapped, device], "Q8_0"))]).unwrap(),
            "partial offload: 1 resident / 1 spilled, first GPU layer = 1; stage 0 on device 0 runs Q8_0"
        );
    }

    #[test]
    fn silence_is_judged_by_what_a_worker_has_to_do() {
        let overdue = |state, seconds| overdue(state, Duration::from_secs(seconds));
        use Lifecycle::{Loaded, Loading, Spawning};
        assert_eq!((overdue(Spawning, 20), overdue(Spawning, 21)), (None, Some("starting")));
        assert_eq!((overdue(Loading, 60), overdue(Loading, 61)), (None, Some(LOADING)));
        assert_eq!(overdue(Loaded, 9999), None, "who has loaded waits for the others");
    }
}
