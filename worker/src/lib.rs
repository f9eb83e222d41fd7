//! What every worker process does, whichever processor runs its band: arguments and inherited descriptors, the
//! conversation with the coordinator, the data path between its rings, and the fusion of steps.
//!
//! A worker of its own kind implements [`Worker`] (how a band is loaded) and [`Band`] (how a step runs), and hands itself
//! to [`run`].

pub mod args;
pub mod band;
pub mod embedding;
mod fault;
pub mod fuse;
pub mod process;
pub mod residual;
pub mod states;
pub mod weights;

pub use band::{Band, LoadProgress, Loaded, Rings, Worker};
pub use process::{ProcessError, run};
