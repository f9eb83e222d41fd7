//! From what is asked for to a model that runs, or why there is none.

use super::service::Resident;
use crate::cards::{CardLocks, LockError};
use crate::config::{Config, ConfigError, ConfigFile, Generations};
use crate::devices::THIS_PROGRAM;
use crate::engine::{Engine, EngineError, EngineOptions, Replan};
use crate::open::{LoadedModel, OpenError, TextNeed, open_model_with};
use crate::placement::{Placement, PlacementError};
use crate::replan::Replanner;
use crate::workers::LoadProgress;
use spillway_model::tokenizer::TokenizerOptions;
use spillway_protocol::jsonl::{Class, ErrorEvent, PlacementParams};
use spillway_protocol::plan::Plan;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model to be loaded, and how.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The file.
    pub model: PathBuf,
    /// What the file leaves open about its tokenizer.
    pub tokenizer: TokenizerOptions,
    /// A placement that was kept, instead of one that is made.
    pub plan: Option<PathBuf>,
    /// Placement, as far as the message tells it; settings tell the rest.
    pub params: PlacementParams,
}

/// What became of the model that was loaded before one that could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// There was none.
    Nothing,
    /// It serves again.
    Restored,
    /// It could not be started again, either; the log says why.
    Lost,
}

impl Before {
    fn words(self) -> &'static str {
        match self {
            Before::Nothing => "no model is loaded now",
            Before::Restored => "the model before it serves again",
            Before::Lost => {
                "the model before it did not start again, either (see the log), so none is loaded now; `reload` tries it once more"
            }
        }
    }
}

/// Why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file was refused; nothing has changed.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The placement was refused; nothing has changed.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// Settings cannot be used; nothing has changed.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A device is in use by another process; nothing has changed.
    #[error(transparent)]
    Card(#[from] LockError),
    /// There is no model to load again.
    #[error("no model has been loaded, so there is none to load again; send a load message")]
    NothingLoaded,
    /// The workers could not be started, after the old model was dropped.
    #[error("{error}; {}", before.words())]
    Engine {
        /// Why.
        error: EngineError,
        /// What became of the model that was loaded before.
        before: Before,
    },
    /// The thread that did the work has panicked.
    #[error("loading ended unexpectedly; see the log on standard error")]
    Panicked,
}

impl LoadError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            LoadError::Open(error) => error.code(),
            LoadError::Placement(error) => error.code(),
            LoadError::Card(error) => error.code(),
            LoadError::NothingLoaded => "no_model_loaded",
            LoadError::Config(error) => error.code(),
            LoadError::Engine { error, .. } => error.code(),
            LoadError::Panicked => "internal",
        }
    }

    /// The event that tells a client.
    pub fn event(&self, id: Option<String>) -> ErrorEvent {
        let class = match self {
            _ if is_shortage(self) => Class::Transient,
            LoadError::Open(_)
            | LoadError::Placement(_)
            | LoadError::NothingLoaded
            | LoadError::Config(_) => Class::Validation,
            LoadError::Engine { .. } | LoadError::Card(_) => Class::Transient,
            LoadError::Panicked => Class::Internal,
        };
        ErrorEvent::new(id, self.code(), class, self.to_string())
    }
}

/// What the system says when it is short of something that another moment may bring back.
const SHORTAGES: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN];

/// Whether an error comes from a shortage of descriptors or memory, so that nothing need be wrong with what was asked for.
fn is_shortage(error: &(dyn Error + 'static)) -> bool {
    let os_error = |error: &(dyn Error + 'static)| error.downcast_ref::<io::Error>()?.raw_os_error();
    std::iter::successors(Some(error), |&error| error.source())
        .filter_map(os_error)
        .any(|code| SHORTAGES.contains(&code))
}

/// What it takes to start a model.
#[derive(Debug)]
pub struct Start {
    model: Arc<LoadedModel>,
    plan: Plan,
    generations: Generations,
    cards: CardLocks,
    replan: Arc<dyn Replan>,
}

/// A model that has been started.
#[derive(Debug)]
pub struct Started {
    /// The engine that runs it.
    pub engine: Engine,
    /// What requests get that leave it out.
    pub generations: Generations,
    /// Finds it another placement.
    pub replan: Arc<dyn Replan>,
}

impl Start {
    /// The same again, for a model whose workers have ended.
    pub fn again(Resident { engine, generations, replan, .. }: &Resident) -> Self {
        Self {
            model: engine.model().clone(),
            plan: Plan::clone(&engine.plan()),
            generations: generations.clone(),
            cards: engine.cards(),
            replan: replan.clone(),
        }
    }

    /// Starts it.
    pub async fn run(
        self,
        options: EngineOptions,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<Started, LoadError> {
        let Self { model, plan, generations, cards, replan } = self;
        let options = EngineOptions { cards, replan: Some(replan.clone()), ..options };
        let engine = blocking(move || Engine::start(model, plan, options, progress)).await?;
        let engine = engine.map_err(|error| LoadError::Engine { error, before: Before::Nothing })?;
        Ok(Started { engine, generations, replan })
    }
}

/// Everything that can be refused, with no side effect but the locks on devices, which go with the result.
pub fn validate(
    wanted: Wanted,
    given_back: Option<&Plan>,
    config: &ConfigFile,
) -> Result<(Start, EngineOptions), LoadError> {
    let config = Config::load(config)?;
    let model = open_model_with(&wanted.model, TextNeed::Required, &wanted.tokenizer)?;
    let placement = Placement::of(wanted.plan, config.placement(wanted.params));
    let plan = placement.place(model.summary(), Path::new(THIS_PROGRAM), given_back)?;
    for warning in &plan.warnings {
        tracing::warn!("{warning}");
    }
    let cards = CardLocks::take(&plan, placement.shares_devices())?;
    let model = Arc::new(model);
    let replan = Arc::new(Replanner::new(model.clone(), placement.request(&plan), &plan));
    let start = Start { model, plan, generations: config.generations(), cards, replan };
    Ok((start, config.engine_options()))
}

/// Runs `work` on a thread where it may take its time.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, LoadError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| LoadError::Panicked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_model::error::ModelError;
    use spillway_model::gguf::GgufError;

    /// The same file may be read the next time: a client is told to try again, not that its file is wrong.
    #[test]
    fn a_shortage_while_something_is_read_is_transient() {
        let class = |code| {
            let error = || io::Error::from_raw_os_error(code);
            let file = GgufError::InFile { path: "m".into(), error: Box::new(GgufError::Io(error())) };
            let errors = [
                LoadError::from(ConfigError::Unreadable { path: "c".into(), source: error() }),
                LoadError::from(OpenError::Model(ModelError::from(file))),
            ];
            errors.map(|error| error.event(None).class)
        };
        for code in SHORTAGES {
            assert_eq!(class(code), [Class::Transient; 2], "{code}");
        }
        assert_eq!(class(libc::EACCES), [Class::Validation; 2]);
    }
}
