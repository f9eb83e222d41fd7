//! HIP's functions on the emulated driver of the calling thread.

use super::super::api::{
    CopyKind, FunctionAttribute, HipApi, RawEvent, RawFunction, RawGraph, RawGraphExec, RawGraphNode,
    RawIpcHandle, RawModule, RawStream,
};
use super::super::status::{self, Status};
use super::STATE;
use super::image::Image;
use super::state::{Id, Mark, Object, State, StreamState};
use super::work::Work;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::rc::Rc;

/// HIP's table on the emulated device.
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
        device_enable_peer_access: Some(device_peer_access),
        device_disable_peer_access: Some(device_disable_peer_access),
        memcpy_peer_async: Some(memcpy_peer_async),
        ipc_get_mem_handle: Some(ipc_get_mem_handle),
        ipc_open_mem_handle: Some(ipc_open_mem_handle),
        ipc_close_mem_handle: Some(ipc_close_mem_handle),
    }
}

/// Runs the closure on this thread's state.
fn on_state(run: impl FnOnce(&mut State) -> Result<(), Status>) -> Status {
    STATE.with_borrow_mut(|state| match state {
        Some(state) => run(state).err().unwrap_or(status::SUCCESS),
        None => status::NOT_INITIALIZED,
    })
}

/// The same for a call that fails once the device is lost.
fn call(run: impl FnOnce(&mut State) -> Result<(), Status>) -> Status {
    on_state(|state| {
        state.enter()?;
        run(state)
    })
}

/// The same for a call that releases something: it does, whatever it then reports.
fn release(run: impl FnOnce(&mut State) -> Result<(), Status>) -> Status {
    on_state(|state| {
        let entered = state.enter();
        run(state)?;
        entered
    })
}

/// Writes an output argument.
fn put<T>(to: *mut T, value: T) -> Result<(), Status> {
    if to.is_null() {
        return Err(status::INVALID_VALUE);
    }
    // SAFETY: HIP's functions get valid addresses for their outputs; null was refused.
    unsafe { to.write(value) };
    Ok(())
}

/// A handle that is a number.
fn handle<T>(id: Id) -> *mut T {
    std::ptr::without_provenance_mut(id)
}

fn id<T>(handle: *mut T) -> Id {
    handle.addr()
}

fn ordinal(number: c_int) -> Result<u32, Status> {
    u32::try_from(number).map_err(|_| status::INVALID_DEVICE)
}

/// What a kernel that never ends does to whoever waits for it.
fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

unsafe extern "C" fn init(_flags: c_uint) -> Status {
    call(|_| Ok(()))
}

unsafe extern "C" fn driver_get_version(version: *mut c_int) -> Status {
    call(|_| put(version, 1))
}

unsafe extern "C" fn get_device_count(count: *mut c_int) -> Status {
    call(|state| put(count, state.devices().cast_signed()))
}

unsafe extern "C" fn set_device(number: c_int) -> Status {
    // Whether the device that was chosen before is still there does not matter.
    on_state(|state| {
        state.count()?;
        state.choose(ordinal(number)?)
    })
}

unsafe extern "C" fn get_device_properties(properties: *mut c_void, number: c_int) -> Status {
    call(|state| {
        let info = state.describe(ordinal(number)?)?;
        // SAFETY: the table's callers pass a buffer of PROPERTY_BYTES.
        unsafe { info.write(properties) };
        Ok(())
    })
}

/// Devices without ids say so.
unsafe extern "C" fn device_get_uuid(uuid: *mut [u8; 16], number: c_int) -> Status {
    call(|state| put(uuid, state.describe(ordinal(number)?)?.uuid.ok_or(status::NOT_SUPPORTED)?))
}

unsafe extern "C" fn get_error_name(status: Status) -> *const c_char {
    status.describe().0.as_ptr()
}

/// Also says why a kernel failed. The text lives until the driver is closed, which its readers precede.
unsafe extern "C" fn get_error_string(status: Status) -> *const c_char {
    STATE.with_borrow(|state| {
        let message = state.as_ref().and_then(|state| state.message(status));
        message.unwrap_or(status.describe().1).as_ptr()
    })
}

unsafe extern "C" fn device_synchronize() -> Status {
    call(|state| if state.any_hung() { hang() } else { Ok(()) })
}

unsafe extern "C" fn mem_get_info(free: *mut usize, total: *mut usize) -> Status {
    call(|state| {
        let (free_bytes, total_bytes) = state.memory();
        put(free, usize::try_from(free_bytes).unwrap_or(usize::MAX))?;
        put(total, usize::try_from(total_bytes).unwrap_or(usize::MAX))
    })
}

unsafe extern "C" fn malloc(address: *mut *mut c_void, len: usize) -> Status {
    call(|state| put(address, state.malloc(len)?.cast()))
}

unsafe extern "C" fn free(address: *mut c_void) -> Status {
    release(|state| state.free(address.addr()))
}

unsafe extern "C" fn host_malloc(address: *mut *mut c_void, len: usize, _flags: c_uint) -> Status {
    call(|state| put(address, state.host_malloc(len)?.cast()))
}

unsafe extern "C" fn host_free(address: *mut c_void) -> Status {
    release(|state| state.host_free(address.addr()))
}

unsafe extern "C" fn host_register(address: *mut c_void, len: usize, _flags: c_uint) -> Status {
    call(|state| state.register(address.expose_provenance(), len))
}

unsafe extern "C" fn host_unregister(address: *mut c_void) -> Status {
    release(|state| state.unregister(address.addr()))
}

unsafe extern "C" fn host_get_device_pointer(
    on_device: *mut *mut c_void,
    address: *mut c_void,
    _flags: c_uint,
) -> Status {
    call(|state| {
        state.check_mapped(address.addr())?;
        put(on_device, address)
    })
}

fn copy_work(to: *mut c_void, from: *const c_void, len: usize) -> Work {
    Work::Copy { to: to.expose_provenance(), from: from.expose_provenance(), len }
}

unsafe extern "C" fn memcpy(to: *mut c_void, from: *const c_void, len: usize, kind: CopyKind) -> Status {
    call(|state| {
        state.check_copy(to.addr(), from.addr(), len, kind)?;
        // SAFETY: both ranges were checked, or are the caller's host memory.
        unsafe { std::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), len) };
        Ok(())
    })
}

unsafe extern "C" fn memcpy_async(
    to: *mut c_void,
    from: *const c_void,
    len: usize,
    kind: CopyKind,
    stream: RawStream,
) -> Status {
    call(|state| {
        state.check_copy(to.addr(), from.addr(), len, kind)?;
        let work = if state.is_peer_copy(to.addr(), from.addr(), len)? {
            Work::PeerCopy { to: to.expose_provenance(), from: from.expose_provenance(), len }
        } else {
            copy_work(to, from, len)
        };
        state.queue(id(stream), work)
    })
}

unsafe extern "C" fn memcpy_peer_async(
    to: *mut c_void,
    to_ordinal: c_int,
    from: *const c_void,
    from_ordinal: c_int,
    len: usize,
    stream: RawStream,
) -> Status {
    call(|state| {
        state.check_device_range(Some(ordinal(to_ordinal)?), to.addr(), len)?;
        state.check_device_range(Some(ordinal(from_ordinal)?), from.addr(), len)?;
        let (to, from) = (to.expose_provenance(), from.expose_provenance());
        state.queue(id(stream), Work::PeerCopy { to, from, len })
    })
}

unsafe extern "C" fn memset_async(to: *mut c_void, value: c_int, len: usize, stream: RawStream) -> Status {
    call(|state| {
        state.check_device_range(None, to.addr(), len)?;
        state.queue(id(stream), Work::Fill { to: to.expose_provenance(), value: value.to_le_bytes()[0], len })
    })
}

unsafe extern "C" fn stream_create_with_flags(stream: *mut RawStream, _flags: c_uint) -> Status {
    call(|state| put(stream, handle(state.create(Object::Stream(StreamState::default()))?)))
}

unsafe extern "C" fn stream_destroy(stream: RawStream) -> Status {
    release(|state| state.destroy(id(stream), |object| matches!(object, Object::Stream(_))))
}

unsafe extern "C" fn stream_synchronize(stream: RawStream) -> Status {
    call(|state| if state.is_hung(id(stream))? { hang() } else { Ok(()) })
}

unsafe extern "C" fn stream_query(stream: RawStream) -> Status {
    call(|state| if state.is_hung(id(stream))? { Err(status::NOT_READY) } else { Ok(()) })
}

unsafe extern "C" fn stream_wait_event(stream: RawStream, event: RawEvent, _flags: c_uint) -> Status {
    call(|state| {
        state.mark(id(event))?;
        state.queue(id(stream), Work::Wait { event: id(event) })
    })
}

unsafe extern "C" fn event_create_with_flags(event: *mut RawEvent, _flags: c_uint) -> Status {
    call(|state| put(event, handle(state.create(Object::Event(Mark::Never))?)))
}

unsafe extern "C" fn event_destroy(event: RawEvent) -> Status {
    release(|state| state.destroy(id(event), |object| matches!(object, Object::Event(_))))
}

unsafe extern "C" fn event_record(event: RawEvent, stream: RawStream) -> Status {
    call(|state| {
        state.mark(id(event))?;
        state.queue(id(stream), Work::Record { event: id(event) })
    })
}

unsafe extern "C" fn event_synchronize(event: RawEvent) -> Status {
    call(|state| if matches!(state.mark(id(event))?, Mark::Hung) { hang() } else { Ok(()) })
}

unsafe extern "C" fn event_query(event: RawEvent) -> Status {
    call(|state| if matches!(state.mark(id(event))?, Mark::Hung) { Err(status::NOT_READY) } else { Ok(()) })
}

unsafe extern "C" fn event_elapsed_time(milliseconds: *mut f32, start: RawEvent, stop: RawEvent) -> Status {
    call(|state| match (state.mark(id(start))?, state.mark(id(stop))?) {
        (Mark::At(start), Mark::At(stop)) => put(milliseconds, (stop - start).as_secs_f32() * 1e3),
        (Mark::Never, _) | (_, Mark::Never) => Err(status::INVALID_HANDLE),
        _ => Err(status::NOT_READY),
    })
}

unsafe extern "C" fn module_load_data(module: *mut RawModule, image: *const c_void) -> Status {
    call(|state| {
        // SAFETY: the table's callers pass a whole image.
        let image = unsafe { Image::load(image.cast()) }?;
        put(module, handle(state.create(Object::Module(Rc::new(image)))?))
    })
}

unsafe extern "C" fn module_unload(module: RawModule) -> Status {
    release(|state| state.destroy(id(module), |object| matches!(object, Object::Module(_))))
}

unsafe extern "C" fn module_get_function(
    function: *mut RawFunction,
    module: RawModule,
    name: *const c_char,
) -> Status {
    // SAFETY: the table's callers pass a C string.
    call(|state| put(function, handle(state.function(id(module), unsafe { CStr::from_ptr(name) })?)))
}

unsafe extern "C" fn func_get_attribute(
    value: *mut c_int,
    attribute: FunctionAttribute,
    function: RawFunction,
) -> Status {
    call(|state| {
        let kernel = state.entry(id(function))?.kernel();
        put(
            value,
            match attribute {
                FunctionAttribute::MAX_THREADS_PER_BLOCK => kernel.max_threads.cast_signed(),
                _ => 0,
            },
        )
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
    shared: c_uint,
    stream: RawStream,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    call(|state| {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the table's callers keep the contract of hipModuleLaunchKernel.
        let work = unsafe {
            state.prepare_launch(id(function), grid, block, shared, arguments.cast_const().cast())
        }?;
        state.queue(id(stream), work)
    })
}

unsafe extern "C" fn stream_begin_capture(stream: RawStream, _mode: c_uint) -> Status {
    call(|state| state.begin_capture(id(stream)))
}

unsafe extern "C" fn stream_end_capture(stream: RawStream, graph: *mut RawGraph) -> Status {
    call(|state| put(graph, handle(state.end_capture(id(stream))?)))
}

unsafe extern "C" fn graph_instantiate(
    exec: *mut RawGraphExec,
    graph: RawGraph,
    _node: *mut RawGraphNode,
    _log: *mut c_char,
    _len: usize,
) -> Status {
    call(|state| put(exec, handle(state.instantiate(id(graph))?)))
}

unsafe extern "C" fn graph_launch(exec: RawGraphExec, stream: RawStream) -> Status {
    call(|state| state.replay(id(exec), id(stream)))
}

unsafe extern "C" fn graph_exec_destroy(exec: RawGraphExec) -> Status {
    release(|state| state.destroy(id(exec), |object| matches!(object, Object::GraphExec(_))))
}

unsafe extern "C" fn graph_destroy(graph: RawGraph) -> Status {
    release(|state| state.destroy(id(graph), |object| matches!(object, Object::Graph(_))))
}

unsafe extern "C" fn device_can_access_peer(can: *mut c_int, device: c_int, peer: c_int) -> Status {
    call(|state| {
        state.check_device(ordinal(device)?)?;
        state.check_device(ordinal(peer)?)?;
        put(can, c_int::from(device != peer))
    })
}

unsafe extern "C" fn device_peer_access(peer: c_int, _flags: c_uint) -> Status {
    call(|state| state.check_device(ordinal(peer)?))
}

unsafe extern "C" fn device_disable_peer_access(peer: c_int) -> Status {
    call(|state| state.check_device(ordinal(peer)?))
}

unsafe extern "C" fn ipc_get_mem_handle(handle: *mut RawIpcHandle, address: *mut c_void) -> Status {
    call(|state| put(handle, RawIpcHandle { reserved: state.share(address.addr())? }))
}

unsafe extern "C" fn ipc_open_mem_handle(
    address: *mut *mut c_void,
    handle: RawIpcHandle,
    _flags: c_uint,
) -> Status {
    call(|state| put(address, std::ptr::with_exposed_provenance_mut(state.import(handle.reserved)?)))
}

unsafe extern "C" fn ipc_close_mem_handle(address: *mut c_void) -> Status {
    release(|state| state.heap.close(address.addr()))
}
