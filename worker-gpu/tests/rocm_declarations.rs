//! Our types and numbers are ROCm's: compared with bindings that were generated from its headers (HIP 7; they agree with
//! HIP 6 in all that is compared here). No library is needed.

use cubecl_hip_sys as rocm;
use rocm::hipDeviceProp_tR0600 as Properties;
use spillway_worker_gpu::hip::api::{self, CopyKind, FunctionAttribute, HipApi, RawIpcHandle};
use spillway_worker_gpu::hip::{R0000, R0600, status};
use std::mem::offset_of;

/// Sizes of a function's parameters and of its result, which is what the calling convention depends on.
trait Shape {
    const SIZES: &'static [usize];
}

macro_rules! shapes {
    ($(($($param:ident)*))*) => {
        $(impl<R, $($param),*> Shape for unsafe extern "C" fn($($param),*) -> R {
            const SIZES: &'static [usize] = &[size_of::<R>() $(, size_of::<$param>())*];
        })*
    };
}
shapes! {
    () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) (A B C D E F G H I J K)
}

fn sizes<F: Shape>(_: F) -> &'static [usize] {
    F::SIZES
}
fn sizes_required<F: Shape>(_: fn(&HipApi) -> F) -> &'static [usize] {
    F::SIZES
}
fn sizes_optional<F: Shape>(_: fn(&HipApi) -> Option<F>) -> &'static [usize] {
    F::SIZES
}

/// Compares fields of the table with ROCm's functions; `_` once for each parameter.
macro_rules! same_shapes {
    ($of:ident: $($field:ident = $function:ident($($param:tt)*);)*) => {
        $(assert_eq!(
            $of(|api: &HipApi| api.$field),
            sizes(rocm::$function as unsafe extern "C" fn($($param),*) -> _),
            stringify!($function),
        );)*
    };
}

#[test]
fn functions_have_roc_ms_parameters() {
    same_shapes! { sizes_required:
        init = hipInit(_);
        driver_get_version = hipDriverGetVersion(_);
        get_device_count = hipGetDeviceCount(_);
        set_device = hipSetDevice(_);
        get_error_name = hipGetErrorName(_);
        get_error_string = hipGetErrorString(_);
        device_synchronize = hipDeviceSynchronize();
        mem_get_info = hipMemGetInfo(_ _);
        malloc = hipMalloc(_ _);
        free = hipFree(_);
        host_malloc = hipHostMalloc(_ _ _);
        host_free = hipHostFree(_);
        host_register = hipHostRegister(_ _ _);
        host_unregister = hipHostUnregister(_);
        host_get_device_pointer = hipHostGetDevicePointer(_ _ _);
        memcpy = hipMemcpy(_ _ _ _);
        memcpy_async = hipMemcpyAsync(_ _ _ _ _);
        memset_async = hipMemsetAsync(_ _ _ _);
        stream_create_with_flags = hipStreamCreateWithFlags(_ _);
        stream_destroy = hipStreamDestroy(_);
        stream_synchronize = hipStreamSynchronize(_);
        stream_query = hipStreamQuery(_);
        stream_wait_event = hipStreamWaitEvent(_ _ _);
        event_create_with_flags = hipEventCreateWithFlags(_ _);
        event_destroy = hipEventDestroy(_);
        event_record = hipEventRecord(_ _);
        event_synchronize = hipEventSynchronize(_);
        event_query = hipEventQuery(_);
        event_elapsed_time = hipEventElapsedTime(_ _ _);
        module_load_data = hipModuleLoadData(_ _);
        module_unload = hipModuleUnload(_);
        module_get_function = hipModuleGetFunction(_ _ _);
        func_get_attribute = hipFuncGetAttribute(_ _ _);
        module_launch_kernel = hipModuleLaunchKernel(_ _ _ _ _ _ _ _ _ _ _);
    }
    same_shapes! { sizes_optional:
        stream_begin_capture = hipStreamBeginCapture(_ _);
        stream_end_capture = hipStreamEndCapture(_ _);
        graph_instantiate = hipGraphInstantiate(_ _ _ _ _);
        graph_launch = hipGraphLaunch(_ _);
        graph_exec_destroy = hipGraphExecDestroy(_);
        graph_destroy = hipGraphDestroy(_);
        device_get_uuid = hipDeviceGetUuid(_ _);
        get_device_properties = hipGetDevicePropertiesR0600(_ _);
        device_can_access_peer = hipDeviceCanAccessPeer(_ _ _);
        device_enable_peer_access = hipDeviceEnablePeerAccess(_ _);
        device_disable_peer_access = hipDeviceDisablePeerAccess(_);
        memcpy_peer_async = hipMemcpyPeerAsync(_ _ _ _ _ _);
        ipc_get_mem_handle = hipIpcGetMemHandle(_ _);
        ipc_open_mem_handle = hipIpcOpenMemHandle(_ _ _);
        ipc_close_mem_handle = hipIpcCloseMemHandle(_);
    }
}

#[test]
fn statuses_have_roc_ms_numbers() {
    let numbers = [
        (status::SUCCESS, rocm::hipError_t_hipSuccess),
        (status::INVALID_VALUE, rocm::hipError_t_hipErrorInvalidValue),
        (status::OUT_OF_MEMORY, rocm::hipError_t_hipErrorOutOfMemory),
        (status::NOT_INITIALIZED, rocm::hipError_t_hipErrorNotInitialized),
        (status::DEINITIALIZED, rocm::hipError_t_hipErrorDeinitialized),
        (status::INVALID_CONFIGURATION, rocm::hipError_t_hipErrorInvalidConfiguration),
        (status::INVALID_DEVICE_POINTER, rocm::hipError_t_hipErrorInvalidDevicePointer),
        (status::INSUFFICIENT_DRIVER, rocm::hipError_t_hipErrorInsufficientDriver),
        (status::NO_DEVICE, rocm::hipError_t_hipErrorNoDevice),
        (status::INVALID_DEVICE, rocm::hipError_t_hipErrorInvalidDevice),
        (status::INVALID_IMAGE, rocm::hipError_t_hipErrorInvalidImage),
        (status::INVALID_CONTEXT, rocm::hipError_t_hipErrorInvalidContext),
        (status::MAP_FAILED, rocm::hipError_t_hipErrorMapFailed),
        (status::NO_BINARY_FOR_GPU, rocm::hipError_t_hipErrorNoBinaryForGpu),
        (status::ECC_NOT_CORRECTABLE, rocm::hipError_t_hipErrorECCNotCorrectable),
        (status::PEER_ACCESS_UNSUPPORTED, rocm::hipError_t_hipErrorPeerAccessUnsupported),
        (status::INVALID_KERNEL_FILE, rocm::hipError_t_hipErrorInvalidKernelFile),
        (status::SHARED_OBJECT_SYMBOL_NOT_FOUND, rocm::hipError_t_hipErrorSharedObjectSymbolNotFound),
        (status::SHARED_OBJECT_INIT_FAILED, rocm::hipError_t_hipErrorSharedObjectInitFailed),
        (status::OPERATING_SYSTEM, rocm::hipError_t_hipErrorOperatingSystem),
        (status::INVALID_HANDLE, rocm::hipError_t_hipErrorInvalidHandle),
        (status::ILLEGAL_STATE, rocm::hipError_t_hipErrorIllegalState),
        (status::NOT_FOUND, rocm::hipError_t_hipErrorNotFound),
        (status::NOT_READY, rocm::hipError_t_hipErrorNotReady),
        (status::ILLEGAL_ADDRESS, rocm::hipError_t_hipErrorIllegalAddress),
        (status::LAUNCH_OUT_OF_RESOURCES, rocm::hipError_t_hipErrorLaunchOutOfResources),
        (status::LAUNCH_TIMEOUT, rocm::hipError_t_hipErrorLaunchTimeOut),
        (status::PEER_ACCESS_ALREADY_ENABLED, rocm::hipError_t_hipErrorPeerAccessAlreadyEnabled),
        (status::PEER_ACCESS_NOT_ENABLED, rocm::hipError_t_hipErrorPeerAccessNotEnabled),
        (status::CONTEXT_IS_DESTROYED, rocm::hipError_t_hipErrorContextIsDestroyed),
        (status::ASSERT, rocm::hipError_t_hipErrorAssert),
        (status::HOST_MEMORY_ALREADY_REGISTERED, rocm::hipError_t_hipErrorHostMemoryAlreadyRegistered),
        (status::HOST_MEMORY_NOT_REGISTERED, rocm::hipError_t_hipErrorHostMemoryNotRegistered),
        (status::LAUNCH_FAILURE, rocm::hipError_t_hipErrorLaunchFailure),
        (status::NOT_SUPPORTED, rocm::hipError_t_hipErrorNotSupported),
        (status::CAPTURE_UNSUPPORTED, rocm::hipError_t_hipErrorStreamCaptureUnsupported),
        (status::CAPTURE_INVALIDATED, rocm::hipError_t_hipErrorStreamCaptureInvalidated),
        (status::CAPTURE_UNMATCHED, rocm::hipError_t_hipErrorStreamCaptureUnmatched),
        (status::CAPTURE_IMPLICIT, rocm::hipError_t_hipErrorStreamCaptureImplicit),
        (status::CAPTURED_EVENT, rocm::hipError_t_hipErrorCapturedEvent),
        (status::UNKNOWN, rocm::hipError_t_hipErrorUnknown),
        (status::RUNTIME_MEMORY, rocm::hipError_t_hipErrorRuntimeMemory),
        (status::RUNTIME_OTHER, rocm::hipError_t_hipErrorRuntimeOther),
    ];
    for (ours, theirs) in numbers {
        assert_eq!(ours.0, theirs, "{ours:?}");
    }
    assert_eq!(numbers.len(), status::ALL.len(), "every status is compared");
}

#[test]
fn flags_and_enumerations_have_roc_ms_values() {
    for (ours, theirs) in [
        (CopyKind::HOST_TO_DEVICE.0, rocm::hipMemcpyKind_hipMemcpyHostToDevice),
        (CopyKind::DEVICE_TO_HOST.0, rocm::hipMemcpyKind_hipMemcpyDeviceToHost),
        (CopyKind::DEVICE_TO_DEVICE.0, rocm::hipMemcpyKind_hipMemcpyDeviceToDevice),
        (api::STREAM_NON_BLOCKING, rocm::hipStreamNonBlocking),
        (api::EVENT_DISABLE_TIMING, rocm::hipEventDisableTiming),
        (api::HOST_MALLOC_PORTABLE, rocm::hipHostMallocPortable),
        (api::HOST_MALLOC_MAPPED, rocm::hipHostMallocMapped),
        (api::HOST_REGISTER_PORTABLE, rocm::hipHostRegisterPortable),
        (api::HOST_REGISTER_MAPPED, rocm::hipHostRegisterMapped),
        (api::CAPTURE_THREAD_LOCAL, rocm::hipStreamCaptureMode_hipStreamCaptureModeThreadLocal),
        (api::IPC_LAZY_PEER_ACCESS, rocm::hipIpcMemLazyEnablePeerAccess),
        (
            FunctionAttribute::MAX_THREADS_PER_BLOCK.0,
            rocm::hipFunction_attribute_HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        ),
        (
            FunctionAttribute::SHARED_SIZE_BYTES.0,
            rocm::hipFunction_attribute_HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        ),
        (
            FunctionAttribute::LOCAL_SIZE_BYTES.0,
            rocm::hipFunction_attribute_HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
        ),
        (FunctionAttribute::NUM_REGS.0, rocm::hipFunction_attribute_HIP_FUNC_ATTRIBUTE_NUM_REGS),
    ] {
        assert_eq!(ours, theirs);
    }
}

#[test]
fn structures_have_roc_ms_layout() {
    assert_eq!(size_of::<RawIpcHandle>(), size_of::<rocm::hipIpcMemHandle_t>());
    assert!(size_of::<Properties>() <= api::PROPERTY_BYTES);
    for (ours, theirs) in [
        (R0600.name, offset_of!(Properties, name)),
        (R0600.total_bytes, offset_of!(Properties, totalGlobalMem)),
        (R0600.shared_bytes, offset_of!(Properties, sharedMemPerBlock)),
        (R0600.wave, offset_of!(Properties, warpSize)),
        (R0600.compute_units, offset_of!(Properties, multiProcessorCount)),
        (R0600.pci_domain, offset_of!(Properties, pciDomainID)),
        (R0600.pci_bus, offset_of!(Properties, pciBusID)),
        (R0600.pci_device, offset_of!(Properties, pciDeviceID)),
        (R0600.integrated, offset_of!(Properties, integrated)),
        (R0600.arch, offset_of!(Properties, gcnArchName)),
    ] {
        assert_eq!(ours, theirs);
    }
}

/// The older layout has no bindings to compare with; this is the part of ROCm 5's structure up to the fields we read.
#[test]
fn the_older_layout_is_rocm_5s() {
    #[repr(C)]
    struct Rocm5 {
        name: [u8; 256],
        total_global_mem: usize,
        shared_mem_per_block: usize,
        regs_per_block: i32,
        warp_size: i32,
        max_threads_per_block: i32,
        max_threads_dim: [i32; 3],
        max_grid_size: [i32; 3],
        clock_rate: i32,
        memory_clock_rate: i32,
        memory_bus_width: i32,
        total_const_mem: usize,
        major: i32,
        minor: i32,
        multi_processor_count: i32,
        l2_cache_size: i32,
        max_threads_per_multi_processor: i32,
        compute_mode: i32,
        clock_instruction_rate: i32,
        arch: u32,
        concurrent_kernels: i32,
        pci_domain_id: i32,
        pci_bus_id: i32,
        pci_device_id: i32,
        max_shared_memory_per_multi_processor: usize,
        is_multi_gpu_board: i32,
        can_map_host_memory: i32,
        gcn_arch: i32,
        gcn_arch_name: [u8; 256],
        integrated: i32,
    }
    for (ours, theirs) in [
        (R0000.name, offset_of!(Rocm5, name)),
        (R0000.total_bytes, offset_of!(Rocm5, total_global_mem)),
        (R0000.shared_bytes, offset_of!(Rocm5, shared_mem_per_block)),
        (R0000.wave, offset_of!(Rocm5, warp_size)),
        (R0000.compute_units, offset_of!(Rocm5, multi_processor_count)),
        (R0000.pci_domain, offset_of!(Rocm5, pci_domain_id)),
        (R0000.pci_bus, offset_of!(Rocm5, pci_bus_id)),
        (R0000.pci_device, offset_of!(Rocm5, pci_device_id)),
        (R0000.integrated, offset_of!(Rocm5, integrated)),
        (R0000.arch, offset_of!(Rocm5, gcn_arch_name)),
    ] {
        assert_eq!(ours, theirs);
    }
}
