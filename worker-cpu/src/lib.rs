//! Runs a band of layers on the CPU: as a library ([`band`]) and as a worker process ([`CpuWorker`]).

pub mod band;
pub mod load;
mod trace;
mod worker;

pub use worker::{CpuWorker, Traced};
