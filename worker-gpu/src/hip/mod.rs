//! The device, as HIP sees it.
//!
//! [`api`] is the table of function pointers; [`Provider`] says who fills it. No other module knows the provider: above
//! the table there are only [`Device`], [`Stream`], [`DeviceBuffer`] and their like, which own what they name and free it.

mod amd;
pub mod api;
mod arena;
mod cuda;
mod device;
mod driver;
pub mod emulated;
mod error;
mod event;
mod graph;
mod launch;
mod ledger;
mod library;
mod memory;
mod module;
mod peer;
mod properties;
mod provider;
pub mod status;
mod stream;
mod sysfs;

pub use arena::{ALIGN, Arena};
pub use device::{Device, Memory};
pub use driver::Driver;
pub use error::HipError;
pub use event::Event;
pub use graph::Graph;
pub use launch::{Arg, Launch};
pub use ledger::{Kind, Ledger};
pub use memory::{DeviceBuffer, DeviceSlice, PinnedBuffer};
pub use module::{Function, FunctionResources, Module};
pub use peer::{IpcHandle, PeerBuffer};
pub use properties::{DeviceInfo, PciAddress, PropertyLayout, R0000, R0600};
pub use provider::{Found, Provider, search};
pub use status::Status;
pub use stream::Stream;
pub use sysfs::BusFacts;
