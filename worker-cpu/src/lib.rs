//! Runs a band of layers on the CPU: as a library ([`band`]) and as a worker process ([`process::run`]).

pub mod args;
pub mod band;
mod fuse;
pub mod load;
pub mod process;

pub use process::run;
