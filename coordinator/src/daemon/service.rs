//! The resident model, shared by all clients.
//!
//! A request holds the model for reading while it runs; replacing or dropping the model takes it for writing. So a load
//! waits for the requests that were accepted before it, requests accepted after it wait for the load, and nothing is
//! answered by a model that is going away. A load is validated in full before it takes the model; where there is none, it takes
//! its place at once, so that requests wait instead of being refused.

use super::start::{Before, LoadError, Start, Started, Wanted, blocking, validate};
use crate::config::{ConfigFile, Generations};
use crate::engine::{Engine, EngineOptions, Readiness, Replan, StageStatus};
use crate::planner::Machine;
use crate::workers::LoadProgress;
use spillway_protocol::jsonl::{Diagnosis, StageReport, StageSummary};
use spillway_protocol::plan::{Execution, Plan, Stage};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use tokio::sync::{OwnedMutexGuard, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// A model that can be asked.
#[derive(Debug, Clone)]
pub struct Resident {
    /// Counts loads; conversations belong to one.
    pub load: u64,
    /// When it was loaded, in seconds since 1970.
    pub loaded_at: u64,
    /// The engine that runs it.
    pub engine: Engine,
    /// What requests get that leave it out.
    pub generations: Generations,
    /// Finds it another placement, also when it is started again.
    pub replan: Arc<dyn Replan>,
}

impl Resident {
    /// The name by which clients know it: that of its file, without the ending.
    pub fn name(&self) -> String {
        let path = &self.engine.plan().model.path;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
    }
}

/// What there is to report while the model itself may be held by someone.
#[derive(Debug, Clone, Default)]
enum Shown {
    #[default]
    Nothing,
    Loading,
    Model(Resident),
}

/// The resident model and what is known about it.
#[derive(Debug, Default)]
pub struct Service {
    model: Arc<RwLock<Option<Resident>>>,
    shown: Mutex<Shown>,
    /// One load or unload at a time, from validation to the end.
    turn: Arc<tokio::sync::Mutex<Turn>>,
    /// Requests accepted and not ended.
    requests: AtomicUsize,
    /// The daemon is ending.
    draining: AtomicBool,
    /// Settings, read at every load.
    config: ConfigFile,
}

/// What loads and unloads leave for the next one.
#[derive(Debug, Default)]
struct Turn {
    /// Loads so far.
    loads: u64,
    /// What the last model was asked for with, until it is unloaded: a reload asks for the same, also when the model has failed.
    wanted: Option<Wanted>,
}

/// What is wrong without a model, in a sentence for users of every front.
pub const NO_MODEL: &str =
    "no model is loaded; send a \"load\" message over JSON lines, or start `spillway serve` again";

/// The model, held for the life of a request.
pub type Held = OwnedRwLockReadGuard<Option<Resident>>;

/// The place of the model, held by a load: requests wait.
type Slot = OwnedRwLockWriteGuard<Option<Resident>>;

/// The turn of a first load, with the place where there is no model yet.
#[derive(Debug)]
pub struct First {
    turn: OwnedMutexGuard<Turn>,
    slot: Slot,
}

impl Service {
    /// No model yet; loads follow the settings of `config`.
    pub fn new(config: ConfigFile) -> Self {
        Service { config, ..Service::default() }
    }

    /// Holds the model; waits while it is being replaced.
    pub async fn hold(&self) -> Held {
        self.model.clone().read_owned().await
    }

    /// The same without waiting; none while the model is being replaced.
    pub fn try_hold(&self) -> Option<Held> {
        self.model.clone().try_read_owned().ok()
    }

    /// Counts a request until the returned value is dropped.
    pub fn count_request(self: &Arc<Self>) -> RequestCount {
        self.requests.fetch_add(1, Ordering::Relaxed);
        RequestCount(self.clone())
    }

    /// Replaces the model. `earlier` is waited for after validation: the requests that came before the load.
    pub async fn load(
        &self,
        wanted: Wanted,
        earlier: impl Future<Output = ()>,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<Resident, LoadError> {
        let mut turn = self.turn.lock().await;
        self.replace(&mut turn, wanted, earlier, progress).await
    }

    /// Begins a first load, before there are clients: all their requests wait for it.
    pub async fn begin_first(&self) -> First {
        let turn = self.turn.clone().lock_owned().await;
        First { turn, slot: self.take_empty().await }
    }

    /// Loads the first model.
    pub async fn load_first(
        &self,
        First { mut turn, slot }: First,
        wanted: Wanted,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<Resident, LoadError> {
        self.fill(&mut turn, slot, wanted, progress).await
    }

    /// Takes the place of the model where there is none.
    async fn take_empty(&self) -> Slot {
        let slot = self.model.clone().write_owned().await;
        self.show(Shown::Loading);
        slot
    }

    /// Replaces the model by what it was asked for with: its file and the devices may have changed, and a model that has failed
    /// starts afresh.
    pub async fn reload(
        &self,
        earlier: impl Future<Output = ()>,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<Resident, LoadError> {
        let mut turn = self.turn.lock().await;
        let wanted = turn.wanted.clone().ok_or(LoadError::NothingLoaded)?;
        self.replace(&mut turn, wanted, earlier, progress).await
    }

    async fn replace(
        &self,
        turn: &mut Turn,
        wanted: Wanted,
        earlier: impl Future<Output = ()>,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<Resident, LoadError> {
        let Some(resident) = self.resident() else {
            // They are refused or have been; those that come from now on wait.
            earlier.await;
            let slot = self.take_empty().await;
            return self.fill(turn, slot, wanted, progress).await;
        };
        let (start, options) = self.validate(&wanted).await?;
        earlier.await;
        let mut slot = self.model.write().await;
        self.drop_resident(&mut slot, Shown::Loading).await;
        let error = match start.run(options.clone(), progress).await {
            Ok(started) => {
                turn.wanted = Some(wanted);
                return Ok(self.install(&mut slot, turn, started));
            }
            Err(error) => error,
        };
        let before = match Start::again(&resident).run(options, |_| {}).await {
            Ok(started) => {
                self.install(&mut slot, turn, started);
                Before::Restored
            }
            Err(error) => {
                tracing::error!(code = error.code(), "the model before did not start again: {error}");
                self.show(Shown::Nothing);
                Before::Lost
            }
        };
        Err(match error {
            LoadError::Engine { error, .. } => LoadError::Engine { error, before },
            other => other,
        })
    }

    /// Loads a model where there is none.
    async fn fill(
        &self,
        turn: &mut Turn,
        mut slot: Slot,
        wanted: Wanted,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<Resident, LoadError> {
        let started = match self.validate(&wanted).await {
            Ok((start, options)) => start.run(options, progress).await,
            Err(error) => Err(error),
        };
        match started {
            Ok(started) => {
                turn.wanted = Some(wanted);
                Ok(self.install(&mut slot, turn, started))
            }
            Err(error) => {
                self.show(Shown::Nothing);
                Err(error)
            }
        }
    }

    /// Checks everything that can be checked while a model serves.
    async fn validate(&self, wanted: &Wanted) -> Result<(Start, EngineOptions), LoadError> {
        let (wanted, config, given_back) = (wanted.clone(), self.config.clone(), self.resident_plan());
        blocking(move || validate(wanted, given_back.as_ref(), &config)).await?
    }

    /// Makes a started model the resident one.
    fn install(
        &self,
        slot: &mut Option<Resident>,
        turn: &mut Turn,
        Started { engine, generations, replan }: Started,
    ) -> Resident {
        turn.loads += 1;
        let loaded_at = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let resident = Resident { load: turn.loads, loaded_at, engine, generations, replan };
        self.show(Shown::Model(resident.clone()));
        *slot = Some(resident.clone());
        resident
    }

    /// Drops the model, if there is one, after `earlier` and the requests that hold it.
    pub async fn unload(&self, earlier: impl Future<Output = ()>) {
        let mut turn = self.turn.lock().await;
        earlier.await;
        turn.wanted = None;
        let mut slot = self.model.write().await;
        self.drop_resident(&mut slot, Shown::Nothing).await;
    }

    /// Drops the model, if there is one; `shown` is what takes its place.
    async fn drop_resident(&self, slot: &mut Option<Resident>, shown: Shown) {
        self.show(shown);
        if let Some(resident) = slot.take()
            && blocking(move || resident.engine.shutdown()).await.is_err()
        {
            tracing::error!("ending the workers of the old model has panicked");
        }
    }

    /// The model that can be asked, if there is one. Waits for nothing and holds nothing: it may be gone the next moment.
    pub fn resident(&self) -> Option<Resident> {
        match &*self.shown() {
            Shown::Model(resident) => Some(resident.clone()),
            Shown::Nothing | Shown::Loading => None,
        }
    }

    /// The daemon takes no more requests: it is not ready from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether a request that came now would be answered. Asks nobody and waits for nothing.
    pub fn readiness(&self) -> Readiness {
        if self.draining.load(Ordering::Relaxed) {
            return Readiness::not("draining", "the daemon is ending and takes no more requests");
        }
        match &*self.shown() {
            Shown::Nothing => Readiness::not("none", NO_MODEL),
            Shown::Loading => Readiness::not("loading", "a model is being loaded; requests wait for it"),
            Shown::Model(resident) => resident.engine.readiness(),
        }
    }

    /// The state of the daemon, whatever is going on.
    pub fn diagnosis(&self, id: Option<String>) -> Diagnosis {
        let shown = self.shown().clone();
        let Readiness { ready, state, reason } = self.readiness();
        let mut diagnosis = Diagnosis {
            id,
            version: env!("CARGO_PKG_VERSION"),
            arch: "cpu",
            hip_version: None,
            vram_free_mb: 0,
            vram_total_mb: 0,
            host_available_mb: Machine::detect().available_bytes >> 20,
            model_loaded: false,
            model_arch: "none".to_owned(),
            model_path: None,
            ready,
            state,
            reason,
            restarts: 0,
            recovery: None,
            epoch: 0,
            kernels: Vec::new(),
            requests: self.requests.load(Ordering::Relaxed),
            stages: Vec::new(),
            live: 0,
            queued: 0,
            tokens_done: 0,
        };
        if let Shown::Model(Resident { engine, .. }) = shown {
            let status = engine.status();
            let plan = engine.plan();
            let model = &plan.model;
            diagnosis.model_loaded = status.failure.is_none();
            diagnosis.model_arch = model.architecture.clone();
            diagnosis.model_path = Some(model.path.display().to_string());
            (diagnosis.restarts, diagnosis.epoch) = (status.restarts, status.epoch);
            diagnosis.recovery = status.recovery;
            diagnosis.kernels = status.stages.iter().map(|stage| stage.loaded.kernels.clone()).collect();
            diagnosis.stages = stages(&engine).into_iter().zip(&status.stages).map(report).collect();
            (diagnosis.live, diagnosis.queued) = (status.live, status.queued);
            diagnosis.tokens_done = status.tokens_done;
        }
        diagnosis
    }

    /// The placement of the resident model, whose memory will be given back when it is replaced. A model that has failed holds
    /// none any more.
    fn resident_plan(&self) -> Option<Plan> {
        let engine = self.resident()?.engine;
        engine.status().failure.is_none().then(|| Plan::clone(&engine.plan()))
    }

    fn show(&self, shown: Shown) {
        *self.shown() = shown;
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who runs which layers, and how rows get from one GPU to the next.
pub fn stages(engine: &Engine) -> Vec<StageSummary> {
    let status = engine.status();
    let summary = |(index, stage): (usize, &Stage)| {
        let worker = status.stages.get(index);
        let link = status.links.iter().find(|link| link.from == index);
        StageSummary {
            first_layer: stage.layers.start,
            layers: stage.layers.len(),
            target: match stage.execution {
                Execution::Cpu { .. } => "cpu",
                Execution::Gpu { .. } => "gpu",
            },
            pid: worker.map_or(0, |worker| worker.pid),
            bytes: stage.bytes.private(),
            link: link.map(|link| link.path.name()),
            link_reason: link.and_then(|link| link.reason.clone()),
            notes: worker.map(|worker| worker.loaded.notes.clone()).unwrap_or_default(),
        }
    };
    engine.plan().stages.iter().enumerate().map(summary).collect()
}

/// A stage with what its worker is doing.
fn report((stage, status): (StageSummary, &StageStatus)) -> StageReport {
    let &StageStatus { state, step, steps, busy_ns, wait_ns, copy_ns, .. } = status;
    let (lifecycle, (stored_bytes, stored_of)) = (status.lifecycle.as_str(), status.stored);
    StageReport { stage, lifecycle, state, stored_bytes, stored_of, step, steps, busy_ns, wait_ns, copy_ns }
}

/// A request that is counted as in flight while this lives.
#[derive(Debug)]
pub struct RequestCount(Arc<Service>);

impl Drop for RequestCount {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_without_a_model_or_at_its_end_is_not_ready() {
        let service = Service::default();
        let states = || {
            let Readiness { ready, state, reason } = service.readiness();
            (ready, state, reason.is_some())
        };
        assert_eq!(states(), (false, "none", true));
        service.show(Shown::Loading);
        assert_eq!(states(), (false, "loading", true));
        service.drain();
        assert_eq!(states(), (false, "draining", true));
    }
}
