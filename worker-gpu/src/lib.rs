//! The worker process that owns one GPU.
//!
//! - [`hip`]: the device. One table of HIP functions, filled by AMD's library, by NVIDIA's driver or by the emulated
//!   device, and owning types above it.
//! - [`compile`]: the out-of-process kernel compiler and its cache.
//! - [`launch`]: one typed function per operation of a model.
//! - [`band`]: layers with their weights and state on a device; [`GpuWorker`] is the process that runs them.
//! - [`devices`]: which GPUs there are.
//! - [`links`]: which of them can write into each other's memory.
//! - [`speed`]: how fast they are.
//! - [`measurements`]: what was measured, on disk.
//!
//! Everything that touches a device happens on one thread; the types enforce it (none of them is `Send`).

pub mod band;
pub mod compile;
pub mod devices;
pub mod hip;
pub mod launch;
pub mod links;
pub mod measurements;
pub mod speed;
mod worker;

pub use worker::{
    COMPILER_SUBCOMMAND, GpuWorker, NVRTC_SUBCOMMAND, PROBE_SUBCOMMAND, compiler_settings, link_cache,
    probe_command, speeds,
};
