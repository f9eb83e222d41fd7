//! kernels

pub mod activations;
pub mod device_layout;
mod disjoint;
pub mod formats;
pub mod hip;
pub mod isa;
mod lanes;
pub mod matmul;
pub mod membw;
pub mod ops;
pub mod pack;
pub mod pool;
pub mod products;
pub mod topology;
