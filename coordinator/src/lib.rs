//! The coordinator: opens a model, plans where its layers run, spawns the workers, schedules sequences over them,
//! samples, and turns tokens into text. The command line and the daemon are thin users of this library:
//!
//! [`open_model`] → [`planner::plan`] → [`Engine::start`] → [`Engine::submit`].

pub mod cards;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod devices;
pub mod engine;
pub mod http;
pub mod open;
pub mod placement;
pub mod planner;
mod prompt;
pub mod replan;
pub mod sampler;
mod speeds;
pub mod workers;

pub use engine::{Engine, EngineError, GenerateEvent, GenerateRequest, RequestError, RequestId};
pub use open::{LoadedModel, OpenError, open_model};
pub use planner::{Machine, PlacementRequest, Refusal};
pub use sampler::SamplingParams;
