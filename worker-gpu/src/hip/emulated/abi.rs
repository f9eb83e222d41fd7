//! What passes between the host and a kernel's shared object; mirrors `kernels/hip/emulated_fibers.h`.

use std::ffi::{c_char, c_void};

/// Version of the structures below.
pub(super) const ABI: u32 = 1;

/// `emulated::Launch`
#[repr(C)]
pub(super) struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: u32,
    pub shared_limit: u32,
    pub order: u32,
    pub seed: u32,
    pub stacks: *mut u8,
    pub message: *mut c_char,
    pub message_bytes: u64,
}

/// `emulated::Kernel`
#[repr(C)]
pub(super) struct Kernel {
    pub abi: u32,
    pub wave: u32,
    pub max_threads: u32,
    pub parameters: u32,
    pub parameter_bytes: *const u32,
    pub stack_bytes: u64,
    pub launch: unsafe extern "C" fn(*const Launch, *mut *mut c_void) -> i32,
}

/// What an object exports for each kernel, as `<name>_emulated`.
pub(super) type Describe = unsafe extern "C" fn() -> *const Kernel;
