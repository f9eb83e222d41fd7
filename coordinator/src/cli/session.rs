//! From a model file to a running engine, interruptible at any time.

use super::args::{ModelArgs, ProgressArgs};
use super::failure::Failure;
use super::interrupt::{Interrupts, Wake};
use super::progress::ProgressView;
use crate::cards::CardLocks;
use crate::config::Config;
use crate::devices::THIS_PROGRAM;
use crate::engine::{Engine, EngineError, EngineOptions};
use crate::open::{LoadedModel, TextNeed, open_model_with};
use crate::placement::Placement;
use crate::replan::Replanner;
use crate::workers::LoadProgress;
use spillway_protocol::plan::Plan;
use std::path::Path;
use std::sync::Arc;

/// A validated model and its placement; nothing is running yet.
#[derive(Debug)]
pub struct Prepared {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// Its placement.
    pub plan: Plan,
    /// What it was asked for with.
    placement: Placement,
    options: EngineOptions,
}

impl Prepared {
    /// Opens, validates and places a model.
    pub fn new(
        args: &ModelArgs,
        text: TextNeed,
        placement: Placement,
        config: &Config,
    ) -> Result<Self, Failure> {
        let model = Arc::new(open_model_with(&args.model, text, &args.tokenizer.options())?);
        let plan = placement.place(model.summary(), Path::new(THIS_PROGRAM), None)?;
        Ok(Prepared { model, plan, placement, options: config.engine_options() })
    }

    /// Starts the workers and shows how they load.
    pub fn start(self, interrupts: &Interrupts, progress: &ProgressArgs) -> Result<Session, Failure> {
        for warning in &self.plan.warnings {
            tracing::warn!("{warning}");
        }
        let cards = CardLocks::take(&self.plan, self.placement.shares_devices())?;
        let replan =
            Arc::new(Replanner::new(self.model.clone(), self.placement.request(&self.plan), &self.plan));
        let options = EngineOptions { cards, replan: Some(replan), ..self.options };
        let (sender, receiver) = interrupts.channel();
        let from_loader = sender.clone();
        std::thread::Builder::new().name("load".into()).spawn(move || {
            let result = Engine::start(self.model, self.plan, options, move |progress| {
                // Fails only when the command was interrupted and is ending.
                drop(sender.send(Wake::Item(Loading::Progress(progress))));
            });
            drop(from_loader.send(Wake::Item(Loading::Ended(result))));
        })?;
        let mut view = ProgressView::new(progress.mode());
        let result = loop {
            match receiver.recv() {
                Ok(Wake::Item(Loading::Progress(progress))) => view.show(&progress),
                Ok(Wake::Item(Loading::Ended(result))) => break result.map_err(Failure::from),
                Ok(Wake::Interrupt) => break Err(Failure::Interrupted),
                Err(_) => {
                    break Err(std::io::Error::other("the loading thread ended without a result").into());
                }
            }
        };
        view.finish();
        Ok(Session { engine: result? })
    }
}

enum Loading {
    Progress(LoadProgress),
    Ended(Result<Engine, EngineError>),
}

/// A running engine that ends with the session.
#[derive(Debug)]
pub struct Session {
    /// The engine.
    pub engine: Engine,
}

impl Session {
    /// Leaves the workers to the end of the process, which ends them. For a command that was interrupted while the engine
    /// is busy with something it cannot break off.
    pub fn abandon(self) {
        std::mem::forget(self);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}
