//! The table of HIP functions.
//!
//! Types and numbers are those of ROCm's headers (`tests/rocm_declarations.rs` compares them); names are HIP's without
//! the prefix. Optional functions may be missing in a library: asking for one that is missing is an error that names it.

use super::HipError;
use super::status::Status;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Declares a table of functions that are found by name: required ones, and ones that a library may lack.
macro_rules! function_table {
    (
        $(#[$doc:meta])*
        $vis:vis struct $table:ident returning $status:ty;
        required { $($name:ident = $symbol:literal ( $($type:ty),* $(,)? ) $(-> $ret:ty)?;)* }
        optional { $($opt:ident = $opt_symbol:literal ( $($opt_type:ty),* $(,)? );)* }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        $vis struct $table {
            $(#[doc = concat!("`", $symbol, "`")]
            $vis $name: unsafe extern "C" fn($($type),*) -> function_table!(@status $status $(, $ret)?),)*
            $(#[doc = concat!("`", $opt_symbol, "`, which a library may lack")]
            $vis $opt: Option<unsafe extern "C" fn($($opt_type),*) -> $status>,)*
        }

        impl $table {
            /// Fills the table by looking up every name.
            ///
            /// # Errors
            /// The name of the first required function that is missing.
            ///
            /// # Safety
            /// `find` must return addresses of functions that have the declared types and stay loaded.
            $vis unsafe fn look_up(
                mut find: impl FnMut(&'static str) -> Option<std::ptr::NonNull<std::ffi::c_void>>,
            ) -> Result<Self, &'static str> {
                // SAFETY: the caller vouches for the types; a data pointer and a function pointer have one size here.
                unsafe {
                    Ok(Self {
                        $($name: std::mem::transmute::<
                            std::ptr::NonNull<std::ffi::c_void>,
                            unsafe extern "C" fn($($type),*) -> function_table!(@status $status $(, $ret)?),
                        >(find($symbol).ok_or($symbol)?),)*
                        $($opt: find($opt_symbol).map(|address| {
                            std::mem::transmute::<
                                std::ptr::NonNull<std::ffi::c_void>,
                                unsafe extern "C" fn($($opt_type),*) -> $status,
                            >(address)
                        }),)*
                    })
                }
            }
        }
    };
    (@status $status:ty) => { $status };
    (@status $status:ty, $ret:ty) => { $ret };
}
pub(crate) use function_table;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident, $pointee:ident;)*) => {
        $($(#[$doc])*
        pub type $name = *mut $pointee;
        #[doc = concat!("What a [`", stringify!($name), "`] points at; known to the library alone.")]
        #[repr(C)]
        #[derive(Debug)]
        pub struct $pointee {
            _private: [u8; 0],
        })*
    };
}

opaque! {
    /// `hipStream_t`
    RawStream, StreamTag;
    /// `hipEvent_t`
    RawEvent, EventTag;
    /// `hipModule_t`
    RawModule, ModuleTag;
    /// `hipFunction_t`
    RawFunction, FunctionTag;
    /// `hipGraph_t`
    RawGraph, GraphTag;
    /// `hipGraphExec_t`
    RawGraphExec, GraphExecTag;
    /// `hipGraphNode_t`
    RawGraphNode, GraphNodeTag;
}

/// `hipMemcpyKind`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct CopyKind(pub c_uint);

impl CopyKind {
    /// Host memory to device memory.
    pub const HOST_TO_DEVICE: Self = Self(1);
    /// Device memory to host memory.
    pub const DEVICE_TO_HOST: Self = Self(2);
    /// Between addresses of one device.
    pub const DEVICE_TO_DEVICE: Self = Self(3);
}

/// `hipIpcMemHandle_t`: bytes that another process can open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct RawIpcHandle {
    /// The bytes.
    pub reserved: [u8; 64],
}

/// `hipFunction_attribute`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct FunctionAttribute(pub c_uint);

impl FunctionAttribute {
    /// Largest block the function can run with.
    pub const MAX_THREADS_PER_BLOCK: Self = Self(0);
    /// Static shared memory in bytes.
    pub const SHARED_SIZE_BYTES: Self = Self(1);
    /// Private memory of a thread in bytes: spills and indexed arrays.
    pub const LOCAL_SIZE_BYTES: Self = Self(3);
    /// Registers of a thread.
    pub const NUM_REGS: Self = Self(4);
}

/// `hipStreamNonBlocking`: no implicit order with the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `hipEventDisableTiming`
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// `hipHostMallocPortable`
pub const HOST_MALLOC_PORTABLE: c_uint = 1;
/// `hipHostMallocMapped`
pub const HOST_MALLOC_MAPPED: c_uint = 2;
/// `hipHostRegisterPortable`
pub const HOST_REGISTER_PORTABLE: c_uint = 1;
/// `hipHostRegisterMapped`
pub const HOST_REGISTER_MAPPED: c_uint = 2;
/// `hipStreamCaptureModeThreadLocal`
pub const CAPTURE_THREAD_LOCAL: c_uint = 1;
/// `hipIpcMemLazyEnablePeerAccess`
pub const IPC_LAZY_PEER_ACCESS: c_uint = 1;

/// Size of the buffer that [`HipApi::get_device_properties`] fills: more than any version's structure.
pub const PROPERTY_BYTES: usize = 4096;

function_table! {
    /// The functions of HIP that Spillway uses.
    pub struct HipApi returning Status;
    required {
        init = "hipInit"(c_uint);
        driver_get_version = "hipDriverGetVersion"(*mut c_int);
        get_device_count = "hipGetDeviceCount"(*mut c_int);
        set_device = "hipSetDevice"(c_int);
        get_error_name = "hipGetErrorName"(Status) -> *const c_char;
        get_error_string = "hipGetErrorString"(Status) -> *const c_char;
        device_synchronize = "hipDeviceSynchronize"();
        mem_get_info = "hipMemGetInfo"(*mut usize, *mut usize);

        malloc = "hipMalloc"(*mut *mut c_void, usize);
        free = "hipFree"(*mut c_void);
        host_malloc = "hipHostMalloc"(*mut *mut c_void, usize, c_uint);
        host_free = "hipHostFree"(*mut c_void);
        host_register = "hipHostRegister"(*mut c_void, usize, c_uint);
        host_unregister = "hipHostUnregister"(*mut c_void);
        host_get_device_pointer = "hipHostGetDevicePointer"(*mut *mut c_void, *mut c_void, c_uint);

        memcpy = "hipMemcpy"(*mut c_void, *const c_void, usize, CopyKind);
        memcpy_async = "hipMemcpyAsync"(*mut c_void, *const c_void, usize, CopyKind, RawStream);
        memset_async = "hipMemsetAsync"(*mut c_void, c_int, usize, RawStream);

        stream_create_with_flags = "hipStreamCreateWithFlags"(*mut RawStream, c_uint);
        stream_destroy = "hipStreamDestroy"(RawStream);
        stream_synchronize = "hipStreamSynchronize"(RawStream);
        stream_query = "hipStreamQuery"(RawStream);
        stream_wait_event = "hipStreamWaitEvent"(RawStream, RawEvent, c_uint);

        event_create_with_flags = "hipEventCreateWithFlags"(*mut RawEvent, c_uint);
        event_destroy = "hipEventDestroy"(RawEvent);
        event_record = "hipEventRecord"(RawEvent, RawStream);
        event_synchronize = "hipEventSynchronize"(RawEvent);
        event_query = "hipEventQuery"(RawEvent);
        event_elapsed_time = "hipEventElapsedTime"(*mut f32, RawEvent, RawEvent);

        module_load_data = "hipModuleLoadData"(*mut RawModule, *const c_void);
        module_unload = "hipModuleUnload"(RawModule);
        module_get_function = "hipModuleGetFunction"(*mut RawFunction, RawModule, *const c_char);
        func_get_attribute = "hipFuncGetAttribute"(*mut c_int, FunctionAttribute, RawFunction);
        module_launch_kernel = "hipModuleLaunchKernel"(
            RawFunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, RawStream,
            *mut *mut c_void, *mut *mut c_void,
        );
    }
    optional {
        // Two layouts of one structure: ROCm 6 and later have the first name, ROCm 5 only the second.
        get_device_properties = "hipGetDevicePropertiesR0600"(*mut c_void, c_int);
        get_device_properties_r0000 = "hipGetDeviceProperties"(*mut c_void, c_int);
        device_get_uuid = "hipDeviceGetUuid"(*mut [u8; 16], c_int);

        stream_begin_capture = "hipStreamBeginCapture"(RawStream, c_uint);
        stream_end_capture = "hipStreamEndCapture"(RawStream, *mut RawGraph);
        graph_instantiate =
            "hipGraphInstantiate"(*mut RawGraphExec, RawGraph, *mut RawGraphNode, *mut c_char, usize);
        graph_launch = "hipGraphLaunch"(RawGraphExec, RawStream);
        graph_exec_destroy = "hipGraphExecDestroy"(RawGraphExec);
        graph_destroy = "hipGraphDestroy"(RawGraph);

        device_can_access_peer = "hipDeviceCanAccessPeer"(*mut c_int, c_int, c_int);
        device_enable_peer_access = "hipDeviceEnablePeerAccess"(c_int, c_uint);
        device_disable_peer_access = "hipDeviceDisablePeerAccess"(c_int);
        memcpy_peer_async = "hipMemcpyPeerAsync"(*mut c_void, c_int, *const c_void, c_int, usize, RawStream);
        ipc_get_mem_handle = "hipIpcGetMemHandle"(*mut RawIpcHandle, *mut c_void);
        ipc_open_mem_handle = "hipIpcOpenMemHandle"(*mut *mut c_void, RawIpcHandle, c_uint);
        ipc_close_mem_handle = "hipIpcCloseMemHandle"(*mut c_void);
    }
}

impl HipApi {
    /// An optional function, or the error that names it.
    pub(crate) fn optional<F: Copy>(function: Option<F>, symbol: &'static str) -> Result<F, HipError> {
        function.ok_or(HipError::FunctionMissing { symbol })
    }
}
