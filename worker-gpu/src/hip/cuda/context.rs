//! Primary contexts, and which device the thread's calls go to.

use super::super::status::{self, Status};
use super::driver::{self, CuDevice, CuHandle};
use super::status::from_cuda;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// A context handle: an opaque token that any thread may pass to the driver.
#[derive(Clone, Copy)]
pub(super) struct Context(pub CuHandle);

// SAFETY: the driver's functions take context handles from any thread.
unsafe impl Send for Context {}

/// Contexts by device number. They stay retained: the driver cleans up when the process ends.
static CONTEXTS: Mutex<BTreeMap<c_int, Context>> = Mutex::new(BTreeMap::new());

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

/// The driver's handle of a device number.
pub(super) fn device(ordinal: c_int) -> Result<CuDevice, Status> {
    let driver = driver::get().ok_or(status::NOT_INITIALIZED)?;
    let mut device = 0;
    // SAFETY: the function writes one handle.
    match from_cuda(unsafe { (driver.device_get)(&mut device, ordinal) }) {
        status::SUCCESS => Ok(device),
        status => Err(status),
    }
}

/// The primary context of a device, retained at the first request.
pub(super) fn of(ordinal: c_int) -> Result<Context, Status> {
    let driver = driver::get().ok_or(status::NOT_INITIALIZED)?;
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = contexts.get(&ordinal) {
        return Ok(*context);
    }
    let device = device(ordinal)?;
    let mut context: CuHandle = std::ptr::null_mut();
    // SAFETY: the function writes one handle.
    match from_cuda(unsafe { (driver.primary_context_retain)(&mut context, device) }) {
        status::SUCCESS => {
            contexts.insert(ordinal, Context(context));
            Ok(Context(context))
        }
        status => Err(status),
    }
}

/// Sends this thread's calls to a device.
pub(super) fn choose(ordinal: c_int) -> Result<(), Status> {
    let driver = driver::get().ok_or(status::NOT_INITIALIZED)?;
    let context = of(ordinal)?;
    // SAFETY: the handle is retained.
    match from_cuda(unsafe { (driver.context_set_current)(context.0) }) {
        status::SUCCESS => {
            CURRENT.set(ordinal);
            Ok(())
        }
        status => Err(status),
    }
}

/// The device this thread chose last.
pub(super) fn current() -> c_int {
    CURRENT.get()
}
