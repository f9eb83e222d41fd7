//! Runs a band of layers on the CPU.

pub mod args;
