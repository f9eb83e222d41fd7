//! The worker process that owns one GPU.
//!
//! - [`hip`]: the device. One table of HIP functions, filled by AMD's library, by NVIDIA's driver or by the emulated
//!   device, and owning types above it.
//! - [`compile`]: the out-of-process kernel compiler and its cache.
//! - [`launch`]: one typed function per operation of a model.
//!
//! Everything that touches a device happens on one thread; the types enforce it (none of them is `Send`).

pub mod compile;
pub mod hip;
pub mod launch;
