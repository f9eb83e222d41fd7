//! HIP's functions on libcuda. Flags and enumerations have equal values in both, so they pass through.

use super::super::api::{
    CopyKind, FunctionAttribute, HipApi, RawEvent, RawFunction, RawGraph, RawGraphExec, RawGraphNode,
    RawIpcHandle, RawModule, RawStream,
};
use super::super::properties::{DeviceInfo, PciAddress};
use super::super::status::{self, Status};
use super::context;
use super::driver::{
    self, CuAddress, CuDeviceAttribute, CuHandle, CuIpcHandle, CuJitOption, CudaDriver,
    FUNC_MAX_DYNAMIC_SHARED,
};
use super::status::from_cuda;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// HIP's table on libcuda.
pub(super) fn table() -> HipApi {
    HipApi {
        init,
        driver_get_version,
        get_device_count,
        set_device,
        get_error_name,
        get_error_string,
        device_synchronize,
        mem_get_info,
        malloc,
        free,
        host_malloc,
        host_free,
        host_register,
        host_unregister,
        host_get_device_pointer,
        memcpy,
        memcpy_async,
        memset_async,
        stream_create_with_flags,
        stream_destroy,
        stream_synchronize,
        stream_query,
        stream_wait_event,
        event_create_with_flags,
        event_destroy,
        event_record,
        event_synchronize,
        event_query,
        event_elapsed_time,
        module_load_data,
        module_unload,
        module_get_function,
        func_get_attribute,
        module_launch_kernel,
        get_device_properties: Some(get_device_properties),
        get_device_properties_r0000: None,
        device_get_uuid: Some(device_get_uuid),
        stream_begin_capture: Some(stream_begin_capture),
        stream_end_capture: Some(stream_end_capture),
        graph_instantiate: Some(graph_instantiate),
        graph_launch: Some(graph_launch),
        graph_exec_destroy: Some(graph_exec_destroy),
        graph_destroy: Some(graph_destroy),
        device_can_access_peer: Some(device_can_access_peer),
        device_enable_peer_access: Some(device_enable_peer_access),
        device_disable_peer_access: Some(device_disable_peer_access),
        memcpy_peer_async: Some(memcpy_peer_async),
        ipc_get_mem_handle: Some(ipc_get_mem_handle),
        ipc_open_mem_handle: Some(ipc_open_mem_handle),
        ipc_close_mem_handle: Some(ipc_close_mem_handle),
    }
}

/// An address as libcuda takes it.
fn cu(address: *const c_void) -> CuAddress {
    address.expose_provenance() as CuAddress
}

fn settle(result: Result<(), Status>) -> Status {
    result.err().unwrap_or(status::SUCCESS)
}

/// Runs the closure on the driver, or reports that there is none.
fn on_driver(run: impl FnOnce(&CudaDriver) -> driver::CuResult) -> Status {
    driver::get().map_or(status::NOT_INITIALIZED, |driver| from_cuda(run(driver)))
}

/// Declares shims that hand their arguments to one function of libcuda each.
macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*) = $target:ident($($value:expr),*);)*) => {
        $(unsafe extern "C" fn $name($($arg: $type),*) -> Status {
            // SAFETY: the table's callers keep the contract of HIP's function, which is that of CUDA's.
            on_driver(|driver| unsafe { (driver.$target)($($value),*) })
        })*
    };
}

forward! {
    init(flags: c_uint) = init(flags);
    driver_get_version(version: *mut c_int) = driver_get_version(version);
    get_device_count(count: *mut c_int) = device_get_count(count);
    device_synchronize() = context_synchronize();
    mem_get_info(free: *mut usize, total: *mut usize) = mem_get_info(free, total);

    malloc(address: *mut *mut c_void, bytes: usize) = mem_alloc(address.cast(), bytes);
    free(address: *mut c_void) = mem_free(cu(address));
    host_malloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) = mem_host_alloc(address, bytes, flags);
    host_free(address: *mut c_void) = mem_free_host(address);
    host_register(address: *mut c_void, bytes: usize, flags: c_uint) = mem_host_register(address, bytes, flags);
    host_unregister(address: *mut c_void) = mem_host_unregister(address);
    host_get_device_pointer(on_device: *mut *mut c_void, host: *mut c_void, flags: c_uint) =
        mem_host_get_device_pointer(on_device.cast(), host, flags);
    memset_async(to: *mut c_void, value: c_int, bytes: usize, stream: RawStream) =
        memset_d8_async(cu(to), value.to_le_bytes()[0], bytes, stream.cast());

    stream_create_with_flags(stream: *mut RawStream, flags: c_uint) = stream_create(stream.cast(), flags);
    stream_destroy(stream: RawStream) = stream_destroy(stream.cast());
    stream_synchronize(stream: RawStream) = stream_synchronize(stream.cast());
    stream_query(stream: RawStream) = stream_query(stream.cast());
    stream_wait_event(stream: RawStream, event: RawEvent, flags: c_uint) =
        stream_wait_event(stream.cast(), event.cast(), flags);
    stream_begin_capture(stream: RawStream, mode: c_uint) = stream_begin_capture(stream.cast(), mode);
    stream_end_capture(stream: RawStream, graph: *mut RawGraph) = stream_end_capture(stream.cast(), graph.cast());

    event_create_with_flags(event: *mut RawEvent, flags: c_uint) = event_create(event.cast(), flags);
    event_destroy(event: RawEvent) = event_destroy(event.cast());
    event_record(event: RawEvent, stream: RawStream) = event_record(event.cast(), stream.cast());
    event_synchronize(event: RawEvent) = event_synchronize(event.cast());
    event_query(event: RawEvent) = event_query(event.cast());
    event_elapsed_time(milliseconds: *mut f32, start: RawEvent, stop: RawEvent) =
        event_elapsed_time(milliseconds, start.cast(), stop.cast());

    module_unload(module: RawModule) = module_unload(module.cast());
    func_get_attribute(value: *mut c_int, attribute: FunctionAttribute, function: RawFunction) =
        func_get_attribute(value, attribute.0, function.cast());

    graph_instantiate(exec: *mut RawGraphExec, graph: RawGraph, _node: *mut RawGraphNode, _log: *mut c_char, _len: usize) =
        graph_instantiate(exec.cast(), graph.cast(), 0);
    graph_launch(exec: RawGraphExec, stream: RawStream) = graph_launch(exec.cast(), stream.cast());
    graph_exec_destroy(exec: RawGraphExec) = graph_exec_destroy(exec.cast());
    graph_destroy(graph: RawGraph) = graph_destroy(graph.cast());

    ipc_get_mem_handle(handle: *mut RawIpcHandle, address: *mut c_void) = ipc_get_mem_handle(handle.cast(), cu(address));
    ipc_open_mem_handle(address: *mut *mut c_void, handle: RawIpcHandle, flags: c_uint) =
        ipc_open_mem_handle(address.cast(), CuIpcHandle(handle.reserved), flags);
    ipc_close_mem_handle(address: *mut c_void) = ipc_close_mem_handle(cu(address));
}

unsafe extern "C" fn set_device(ordinal: c_int) -> Status {
    settle(context::choose(ordinal))
}

extern "C" fn get_error_name(status: Status) -> *const c_char {
    status.describe().0.as_ptr()
}

extern "C" fn get_error_string(status: Status) -> *const c_char {
    status.describe().1.as_ptr()
}

unsafe extern "C" fn memcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: CopyKind) -> Status {
    // SAFETY: the table's callers keep the contract of hipMemcpy.
    on_driver(|driver| unsafe {
        match kind {
            CopyKind::HOST_TO_DEVICE => (driver.memcpy_htod)(cu(to), from, bytes),
            CopyKind::DEVICE_TO_HOST => (driver.memcpy_dtoh)(to, cu(from), bytes),
            _ => (driver.memcpy_dtod)(cu(to), cu(from), bytes),
        }
    })
}

unsafe extern "C" fn memcpy_async(
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    kind: CopyKind,
    stream: RawStream,
) -> Status {
    let stream = stream.cast();
    // SAFETY: the table's callers keep the contract of hipMemcpyAsync.
    on_driver(|driver| unsafe {
        match kind {
            CopyKind::HOST_TO_DEVICE => (driver.memcpy_htod_async)(cu(to), from, bytes, stream),
            CopyKind::DEVICE_TO_HOST => (driver.memcpy_dtoh_async)(to, cu(from), bytes, stream),
            _ => (driver.memcpy_dtod_async)(cu(to), cu(from), bytes, stream),
        }
    })
}

unsafe extern "C" fn memcpy_peer_async(
    to: *mut c_void,
    to_ordinal: c_int,
    from: *const c_void,
    from_ordinal: c_int,
    bytes: usize,
    stream: RawStream,
) -> Status {
    let contexts = context::of(to_ordinal).and_then(|to| Ok((to, context::of(from_ordinal)?)));
    match contexts {
        // SAFETY: the table's callers keep the contract of hipMemcpyPeerAsync; the contexts are retained.
        Ok((there, here)) => on_driver(|driver| unsafe {
            (driver.memcpy_peer_async)(cu(to), there.0, cu(from), here.0, bytes, stream.cast())
        }),
        Err(status) => status,
    }
}

/// Also logs what the driver's assembler says about assembly text that it refuses.
unsafe extern "C" fn module_load_data(module: *mut RawModule, image: *const c_void) -> Status {
    const LOG_BYTES: usize = 8192;
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = [CuJitOption::ERROR_LOG_BUFFER, CuJitOption::ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG_BYTES)];
    // SAFETY: the table's callers keep the contract of hipModuleLoadData; the options' values are a buffer and its size.
    let status = on_driver(|driver| unsafe {
        (driver.module_load_data)(module.cast(), image, 2, options.as_mut_ptr(), values.as_mut_ptr())
    });
    if !status.is_success() {
        let said = CStr::from_bytes_until_nul(&log).unwrap_or_default();
        tracing::error!(status = status.0, log = ?said, "the driver refuses a kernel image");
    }
    status
}

/// Also allows the function all the dynamic shared memory that the device can give it: HIP has no such limit to lift.
unsafe extern "C" fn module_get_function(
    function: *mut RawFunction,
    module: RawModule,
    name: *const c_char,
) -> Status {
    on_driver(|driver| {
        let mut found: CuHandle = std::ptr::null_mut();
        // SAFETY: the table's callers keep the contract of hipModuleGetFunction.
        let result = unsafe { (driver.module_get_function)(&mut found, module.cast(), name) };
        if result.0 != 0 {
            return result;
        }
        let mut fixed: c_int = 0;
        let limit = attribute(driver, context::current(), CuDeviceAttribute::SHARED_BYTES_PER_BLOCK_OPTIN)
            .unwrap_or(0);
        // SAFETY: the handle is live; the functions write one number and take numbers.
        unsafe {
            let result =
                (driver.func_get_attribute)(&mut fixed, FunctionAttribute::SHARED_SIZE_BYTES.0, found);
            if result.0 != 0 {
                return result;
            }
            function.write(found.cast());
            (driver.func_set_attribute)(found, FUNC_MAX_DYNAMIC_SHARED, (limit - fixed).max(0))
        }
    })
}

unsafe extern "C" fn module_launch_kernel(
    function: RawFunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: RawStream,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    // SAFETY: the table's callers keep the contract of hipModuleLaunchKernel.
    on_driver(|driver| unsafe {
        (driver.launch_kernel)(
            function.cast(),
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream.cast(),
            arguments,
            extra,
        )
    })
}

fn attribute(driver: &CudaDriver, ordinal: c_int, attribute: CuDeviceAttribute) -> Result<c_int, Status> {
    let device = context::device(ordinal)?;
    let mut value: c_int = 0;
    // SAFETY: the function writes one number.
    match from_cuda(unsafe { (driver.device_get_attribute)(&mut value, attribute, device) }) {
        status::SUCCESS => Ok(value),
        status => Err(status),
    }
}

fn describe(driver: &CudaDriver, ordinal: c_int) -> Result<DeviceInfo, Status> {
    let device = context::device(ordinal)?;
    let number = |wanted| attribute(driver, ordinal, wanted).map(|value| u32::try_from(value).unwrap_or(0));
    let mut name = [0u8; 256];
    let mut total_bytes = 0;
    // SAFETY: the functions write at most 256 bytes with a NUL, and one size.
    let status = unsafe {
        match from_cuda((driver.device_get_name)(name.as_mut_ptr().cast(), 256, device)) {
            status::SUCCESS => from_cuda((driver.device_total_mem)(&mut total_bytes, device)),
            status => status,
        }
    };
    if !status.is_success() {
        return Err(status);
    }
    let (major, minor) = (
        number(CuDeviceAttribute::COMPUTE_CAPABILITY_MAJOR)?,
        number(CuDeviceAttribute::COMPUTE_CAPABILITY_MINOR)?,
    );
    let shared = number(CuDeviceAttribute::SHARED_BYTES_PER_BLOCK_OPTIN)?
        .max(number(CuDeviceAttribute::SHARED_BYTES_PER_BLOCK)?);
    Ok(DeviceInfo {
        ordinal: ordinal.cast_unsigned(),
        name: CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned(),
        arch: format!("sm_{major}{minor}"),
        uuid: None,
        pci: PciAddress {
            domain: number(CuDeviceAttribute::PCI_DOMAIN_ID)?,
            bus: number(CuDeviceAttribute::PCI_BUS_ID)?,
            device: number(CuDeviceAttribute::PCI_DEVICE_ID)?,
        },
        total_bytes: total_bytes as u64,
        compute_units: number(CuDeviceAttribute::MULTIPROCESSOR_COUNT)?,
        wave: number(CuDeviceAttribute::WARP_SIZE)?,
        shared_bytes: shared.into(),
        integrated: number(CuDeviceAttribute::INTEGRATED)? != 0,
    })
}

unsafe extern "C" fn get_device_properties(properties: *mut c_void, ordinal: c_int) -> Status {
    let Some(driver) = driver::get() else { return status::NOT_INITIALIZED };
    match describe(driver, ordinal) {
        Ok(info) => {
            // SAFETY: the table's callers pass a buffer of PROPERTY_BYTES.
            unsafe { info.write(properties) };
            status::SUCCESS
        }
        Err(status) => status,
    }
}

unsafe extern "C" fn device_get_uuid(uuid: *mut [u8; 16], ordinal: c_int) -> Status {
    match context::device(ordinal) {
        // SAFETY: the function writes 16 bytes.
        Ok(device) => on_driver(|driver| unsafe { (driver.device_get_uuid)(uuid, device) }),
        Err(status) => status,
    }
}

unsafe extern "C" fn device_can_access_peer(can: *mut c_int, ordinal: c_int, peer: c_int) -> Status {
    match context::device(ordinal).and_then(|device| Ok((device, context::device(peer)?))) {
        Ok((device, peer)) => {
            // SAFETY: the function writes one number.
            on_driver(|driver| unsafe { (driver.device_can_access_peer)(can, device, peer) })
        }
        Err(status) => status,
    }
}

unsafe extern "C" fn device_enable_peer_access(peer: c_int, flags: c_uint) -> Status {
    match context::of(peer) {
        // SAFETY: the context is retained.
        Ok(context) => on_driver(|driver| unsafe { (driver.context_enable_peer_access)(context.0, flags) }),
        Err(status) => status,
    }
}

unsafe extern "C" fn device_disable_peer_access(peer: c_int) -> Status {
    match context::of(peer) {
        // SAFETY: the context is retained.
        Ok(context) => on_driver(|driver| unsafe { (driver.context_disable_peer_access)(context.0) }),
        Err(status) => status,
    }
}
