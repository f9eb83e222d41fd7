//! kernels

pub mod activations;
mod disjoint;
pub mod formats;
pub mod isa;
pub mod matmul;
pub mod pack;
pub mod pool;
pub mod topology;
