//! What can go wrong with a device.

use super::status::{self, Status};

/// Why a device, or something on it, could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HipError {
    /// A provider's library could not be opened.
    #[error("{provider}: none of {} could be loaded ({reason}); {advice}", tried.join(", "))]
    LibraryMissing {
        /// Name of the provider.
        provider: &'static str,
        /// File names in the order tried.
        tried: Vec<String>,
        /// The loader's reason for the first of them.
        reason: String,
        /// What to install.
        advice: &'static str,
    },
    /// A library lacks a function that every supported version has.
    #[error("{library} has no function {symbol}, so it is too old; {advice}")]
    SymbolMissing {
        /// The library that was loaded.
        library: String,
        /// The function.
        symbol: &'static str,
        /// What to install.
        advice: &'static str,
    },
    /// A library lacks a function that only some features need.
    #[error(
        "this device's library has no function {symbol}; install a newer driver release to use the feature"
    )]
    FunctionMissing {
        /// The function.
        symbol: &'static str,
    },
    /// The library works but there is no device.
    #[error("{provider}: no device ({status}); {advice}")]
    NoDevice {
        /// Name of the provider.
        provider: &'static str,
        /// What the library said.
        status: String,
        /// What to check.
        advice: &'static str,
    },
    /// A device number beyond the last.
    #[error("{provider}: there is no device {ordinal}; it has {count}, numbered from 0")]
    NoSuchDevice {
        /// Name of the provider.
        provider: &'static str,
        /// The number asked for.
        ordinal: u32,
        /// Number of devices.
        count: u32,
    },
    /// Memory could not be allocated.
    #[error(
        "{label}: {bytes} bytes of {kind} memory could not be allocated ({free} of {total} bytes of the device are free); \
         give the GPU fewer layers, a shorter context or fewer sequences"
    )]
    OutOfMemory {
        /// What the memory was for.
        label: String,
        /// "device" or "pinned host".
        kind: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// Free bytes of the device.
        free: usize,
        /// All bytes of the device.
        total: usize,
    },
    /// A function of the table failed.
    #[error("{what}: {call} failed with {status} {name} ({text}){}", advice(Status(*status), *lost))]
    Call {
        /// HIP's name of the function.
        call: &'static str,
        /// What it was called for.
        what: String,
        /// The number.
        status: u32,
        /// HIP's name of the number.
        name: String,
        /// The library's explanation.
        text: String,
        /// Whether the device is unusable for this process from here on.
        lost: bool,
    },
    /// A range outside a buffer, or of the wrong size.
    #[error(
        "{what}: {bytes} bytes at {offset} are outside a buffer of {len} bytes; this is a fault in Spillway, report it"
    )]
    OutOfRange {
        /// What was attempted.
        what: &'static str,
        /// First byte.
        offset: usize,
        /// Number of bytes.
        bytes: usize,
        /// Size of the buffer.
        len: usize,
    },
    /// A launch that no device accepts.
    #[error("kernel {kernel}: cannot launch: {reason}; this is a fault in Spillway, report it")]
    BadLaunch {
        /// Name of the kernel.
        kernel: String,
        /// What is wrong.
        reason: String,
    },
    /// A provider's name that says nothing.
    #[error("{name:?} is not a device provider: {reason}; use amd, cuda or emulated[:option=value,...]")]
    UnknownProvider {
        /// What was given.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The emulated device is one per thread.
    #[error(
        "the emulated device is already open on this thread; drop the first driver before opening another"
    )]
    EmulatedBusy,
}

fn advice(status: Status, lost: bool) -> &'static str {
    match status {
        _ if lost => "; the device is lost to this process, restart the worker",
        status::OUT_OF_MEMORY => "; give the GPU fewer layers, a shorter context or fewer sequences",
        _ => "",
    }
}

impl HipError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            HipError::LibraryMissing { .. } => "gpu_library_missing",
            HipError::SymbolMissing { .. } => "gpu_library_too_old",
            HipError::FunctionMissing { .. } => "gpu_function_missing",
            HipError::NoDevice { .. } => "gpu_not_found",
            HipError::NoSuchDevice { .. } => "gpu_no_such_device",
            HipError::OutOfMemory { .. } => "gpu_out_of_memory",
            HipError::Call { lost: true, .. } => "gpu_lost",
            HipError::Call { .. } if self.status() == Some(status::OUT_OF_MEMORY) => "gpu_out_of_memory",
            HipError::Call { .. } => "gpu_call_failed",
            HipError::OutOfRange { .. } => "gpu_out_of_range",
            HipError::BadLaunch { .. } => "gpu_bad_launch",
            HipError::UnknownProvider { .. } => "gpu_unknown_provider",
            HipError::EmulatedBusy => "gpu_emulated_busy",
        }
    }

    /// The status behind a failed call.
    pub fn status(&self) -> Option<Status> {
        match self {
            HipError::Call { status, .. } => Some(Status(*status)),
            HipError::OutOfMemory { .. } => Some(status::OUT_OF_MEMORY),
            _ => None,
        }
    }
}
