//! The functions of libcuda that stand behind HIP's. Declarations follow `cuda.h` of CUDA 12; version suffixes name the
//! functions that programs built with it get.

use super::super::api::function_table;
use super::super::library::OpenLibrary;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `CUresult`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct CuResult(pub c_int);

/// `CUdeviceptr`
pub(super) type CuAddress = u64;
/// `CUdevice`
pub(super) type CuDevice = c_int;
/// A handle: `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUgraph` or `CUgraphExec`.
pub(super) type CuHandle = *mut c_void;

/// `CUipcMemHandle`
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CuIpcHandle(pub [u8; 64]);

/// `CUdevice_attribute`
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct CuDeviceAttribute(pub c_int);

impl CuDeviceAttribute {
    pub const SHARED_BYTES_PER_BLOCK: Self = Self(8);
    pub const WARP_SIZE: Self = Self(10);
    pub const MULTIPROCESSOR_COUNT: Self = Self(16);
    pub const INTEGRATED: Self = Self(18);
    pub const PCI_BUS_ID: Self = Self(33);
    pub const PCI_DEVICE_ID: Self = Self(34);
    pub const PCI_DOMAIN_ID: Self = Self(50);
    pub const COMPUTE_CAPABILITY_MAJOR: Self = Self(75);
    pub const COMPUTE_CAPABILITY_MINOR: Self = Self(76);
    pub const SHARED_BYTES_PER_BLOCK_OPTIN: Self = Self(97);
}

/// `CUjit_option`
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct CuJitOption(pub c_int);

impl CuJitOption {
    pub const ERROR_LOG_BUFFER: Self = Self(5);
    pub const ERROR_LOG_BUFFER_SIZE_BYTES: Self = Self(6);
}

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
pub(super) const FUNC_MAX_DYNAMIC_SHARED: c_int = 8;

function_table! {
    /// libcuda.
    pub(super) struct CudaDriver returning CuResult;
    required {
        init = "cuInit"(c_uint);
        driver_get_version = "cuDriverGetVersion"(*mut c_int);
        device_get_count = "cuDeviceGetCount"(*mut c_int);
        device_get = "cuDeviceGet"(*mut CuDevice, c_int);
        device_get_name = "cuDeviceGetName"(*mut c_char, c_int, CuDevice);
        device_get_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], CuDevice);
        device_get_attribute = "cuDeviceGetAttribute"(*mut c_int, CuDeviceAttribute, CuDevice);
        device_total_mem = "cuDeviceTotalMem_v2"(*mut usize, CuDevice);
        primary_context_retain = "cuDevicePrimaryCtxRetain"(*mut CuHandle, CuDevice);
        context_set_current = "cuCtxSetCurrent"(CuHandle);
        context_synchronize = "cuCtxSynchronize"();
        mem_get_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);

        mem_alloc = "cuMemAlloc_v2"(*mut CuAddress, usize);
        mem_free = "cuMemFree_v2"(CuAddress);
        mem_host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        mem_free_host = "cuMemFreeHost"(*mut c_void);
        mem_host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
        mem_host_unregister = "cuMemHostUnregister"(*mut c_void);
        mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"(*mut CuAddress, *mut c_void, c_uint);

        memcpy_htod = "cuMemcpyHtoD_v2"(CuAddress, *const c_void, usize);
        memcpy_dtoh = "cuMemcpyDtoH_v2"(*mut c_void, CuAddress, usize);
        memcpy_dtod = "cuMemcpyDtoD_v2"(CuAddress, CuAddress, usize);
        memcpy_htod_async = "cuMemcpyHtoDAsync_v2"(CuAddress, *const c_void, usize, CuHandle);
        memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2"(*mut c_void, CuAddress, usize, CuHandle);
        memcpy_dtod_async = "cuMemcpyDtoDAsync_v2"(CuAddress, CuAddress, usize, CuHandle);
        memcpy_peer_async = "cuMemcpyPeerAsync"(CuAddress, CuHandle, CuAddress, CuHandle, usize, CuHandle);
        memset_d8_async = "cuMemsetD8Async"(CuAddress, u8, usize, CuHandle);

        stream_create = "cuStreamCreate"(*mut CuHandle, c_uint);
        stream_destroy = "cuStreamDestroy_v2"(CuHandle);
        stream_synchronize = "cuStreamSynchronize"(CuHandle);
        stream_query = "cuStreamQuery"(CuHandle);
        stream_wait_event = "cuStreamWaitEvent"(CuHandle, CuHandle, c_uint);
        stream_begin_capture = "cuStreamBeginCapture_v2"(CuHandle, c_uint);
        stream_end_capture = "cuStreamEndCapture"(CuHandle, *mut CuHandle);

        event_create = "cuEventCreate"(*mut CuHandle, c_uint);
        event_destroy = "cuEventDestroy_v2"(CuHandle);
        event_record = "cuEventRecord"(CuHandle, CuHandle);
        event_synchronize = "cuEventSynchronize"(CuHandle);
        event_query = "cuEventQuery"(CuHandle);
        event_elapsed_time = "cuEventElapsedTime"(*mut f32, CuHandle, CuHandle);

        module_load_data = "cuModuleLoadDataEx"(
            *mut CuHandle, *const c_void, c_uint, *mut CuJitOption, *mut *mut c_void,
        );
        module_unload = "cuModuleUnload"(CuHandle);
        module_get_function = "cuModuleGetFunction"(*mut CuHandle, CuHandle, *const c_char);
        func_get_attribute = "cuFuncGetAttribute"(*mut c_int, c_uint, CuHandle);
        func_set_attribute = "cuFuncSetAttribute"(CuHandle, c_int, c_int);
        launch_kernel = "cuLaunchKernel"(
            CuHandle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CuHandle,
            *mut *mut c_void, *mut *mut c_void,
        );

        graph_instantiate = "cuGraphInstantiateWithFlags"(*mut CuHandle, CuHandle, u64);
        graph_launch = "cuGraphLaunch"(CuHandle, CuHandle);
        graph_exec_destroy = "cuGraphExecDestroy"(CuHandle);
        graph_destroy = "cuGraphDestroy"(CuHandle);

        device_can_access_peer = "cuDeviceCanAccessPeer"(*mut c_int, CuDevice, CuDevice);
        context_enable_peer_access = "cuCtxEnablePeerAccess"(CuHandle, c_uint);
        context_disable_peer_access = "cuCtxDisablePeerAccess"(CuHandle);
        ipc_get_mem_handle = "cuIpcGetMemHandle"(*mut CuIpcHandle, CuAddress);
        ipc_open_mem_handle = "cuIpcOpenMemHandle_v2"(*mut CuAddress, CuIpcHandle, c_uint);
        ipc_close_mem_handle = "cuIpcCloseMemHandle"(CuAddress);
    }
    optional {}
}

static DRIVER: OnceLock<CudaDriver> = OnceLock::new();

/// Looks up all functions, once a process.
pub(super) fn install(library: &OpenLibrary) -> Result<(), &'static str> {
    if DRIVER.get().is_none() {
        // SAFETY: the declarations above are those of cuda.h, and an open library is never unloaded.
        let driver = unsafe { CudaDriver::look_up(|symbol| library.find(symbol)) }?;
        // A second thread may have been faster: the tables are equal.
        let _ = DRIVER.set(driver);
    }
    Ok(())
}

/// The driver, once installed.
pub(super) fn get() -> Option<&'static CudaDriver> {
    DRIVER.get()
}
