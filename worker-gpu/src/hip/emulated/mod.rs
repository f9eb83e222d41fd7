//! The emulated device: HIP's calls on host memory, kernels as C++ with one fiber per thread.
//!
//! It is how the GPU worker, its pipelines and its failures run where there is no GPU. Streams run their work when it is
//! queued, on the calling thread, so every run is the same; what a real device leaves undefined is a failure here. It is
//! strict where drivers are lax: a copy outside an allocation, a pageable host address in a capture, a second free.
//!
//! A driver's state belongs to the thread that opened it, as all of Spillway's device calls do; one at a time a thread.

mod abi;
mod heap;
mod image;
mod ipc;
mod settings;
mod shims;
mod state;
mod work;

pub use settings::{Faults, LaneOrder, Settings};

use super::HipError;
use super::api::HipApi;
use state::State;
use std::cell::RefCell;

thread_local! {
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
}

/// The open emulated device of a thread; closes it on drop.
#[derive(Debug)]
pub(super) struct World(std::marker::PhantomData<*const ()>);

impl Drop for World {
    fn drop(&mut self) {
        STATE.with_borrow_mut(Option::take);
    }
}

/// Opens the emulated device on this thread.
pub(super) fn open(settings: &Settings) -> Result<(HipApi, World), HipError> {
    STATE.with_borrow_mut(|state| {
        if state.is_some() {
            return Err(HipError::EmulatedBusy);
        }
        *state = Some(State::new(settings.clone()));
        Ok((shims::table(), World(std::marker::PhantomData)))
    })
}

/// Counters of this thread's emulated device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Live allocations, registrations, streams, events, modules and graphs.
    pub live: usize,
    /// Calls that took a resource, so far: what [`Faults::fail_allocation`] counts.
    pub allocations: u64,
    /// Kernels launched so far, replays included.
    pub launches: u64,
    /// Bytes copied from host memory to devices so far.
    pub uploaded: u64,
    /// Calls so far.
    pub calls: u64,
    /// Frees of memory that was not the last allocated of its kind, which fragments drivers' heaps.
    pub out_of_order_frees: u64,
}

/// Counters of the emulated device that is open on this thread; zeros when none is.
pub fn counters() -> Counters {
    STATE.with_borrow(|state| state.as_ref().map(State::counters).unwrap_or_default())
}
