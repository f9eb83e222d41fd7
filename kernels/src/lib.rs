//! kernels

pub mod isa;
pub mod pool;
pub mod topology;
