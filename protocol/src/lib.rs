//! What Spillway's processes say to each other. No policy.

pub mod channel;
pub mod control;
pub mod frame;
pub mod jsonl;
pub mod plan;
pub mod ring;
pub mod shm;
pub mod states;
pub mod status;
mod sync;

pub use shm::ShmError;
