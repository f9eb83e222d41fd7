//! kernels

pub mod pool;
pub mod topology;
