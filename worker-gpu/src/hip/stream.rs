//! Queues of work.

use super::launch::{Arg, Launch, MAX_ARGS};
use super::memory::DeviceSlice;
use super::{Device, Event, Function, Graph, HipError, PinnedBuffer, api, status};
use std::ffi::c_void;

/// A queue whose work runs in order. Destroyed on drop; queued work still runs.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: api::RawStream,
}

impl Stream {
    /// A stream with no implicit order against others.
    ///
    /// # Errors
    /// The driver is out of resources or the device is lost.
    pub fn new(device: &Device) -> Result<Self, HipError> {
        let mut raw = std::ptr::null_mut();
        let function = device.api()?.stream_create_with_flags;
        // SAFETY: the function writes one handle.
        let status = unsafe { function(&mut raw, api::STREAM_NON_BLOCKING) };
        device.check(status, "hipStreamCreateWithFlags", || "creating a stream".to_owned())?;
        Ok(Self { device: device.clone(), raw })
    }

    /// The device it works on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Queues a copy of `to.len()` bytes from pinned memory at `offset`.
    ///
    /// # Errors
    /// The range is outside, or the copy cannot be queued.
    pub fn upload(&self, to: DeviceSlice, from: &PinnedBuffer, offset: usize) -> Result<(), HipError> {
        let host = from.host_ptr(offset, to.len())?.as_ptr().cast::<c_void>();
        self.copy(to.as_ptr(), host, to.len(), api::CopyKind::HOST_TO_DEVICE, "an upload")
    }

    /// Queues a copy of `from.len()` bytes to pinned memory at `offset`.
    ///
    /// # Errors
    /// The range is outside, or the copy cannot be queued.
    pub fn download(&self, to: &PinnedBuffer, offset: usize, from: DeviceSlice) -> Result<(), HipError> {
        let host = to.host_ptr(offset, from.len())?.as_ptr().cast::<c_void>();
        self.copy(host, from.as_ptr(), from.len(), api::CopyKind::DEVICE_TO_HOST, "a download")
    }

    /// Queues a copy inside the device; both sides have the same size.
    ///
    /// # Errors
    /// The sizes differ, or the copy cannot be queued.
    pub fn copy_within(&self, to: DeviceSlice, from: DeviceSlice) -> Result<(), HipError> {
        to.expect_len("copying inside the device", from.len())?;
        let kind = api::CopyKind::DEVICE_TO_DEVICE;
        self.copy(to.as_ptr(), from.as_ptr(), from.len(), kind, "a copy inside the device")
    }

    fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        kind: api::CopyKind,
        what: &'static str,
    ) -> Result<(), HipError> {
        // SAFETY: ranges were checked against their buffers; pinned memory waits for the device before it goes.
        let status = unsafe { (self.device.api()?.memcpy_async)(to, from, bytes, kind, self.raw) };
        self.device.check(status, "hipMemcpyAsync", || format!("queueing {what} of {bytes} bytes"))
    }

    /// Queues setting every byte.
    ///
    /// # Errors
    /// It cannot be queued.
    pub fn fill(&self, to: DeviceSlice, value: u8) -> Result<(), HipError> {
        // SAFETY: the range belongs to the device.
        let status =
            unsafe { (self.device.api()?.memset_async)(to.as_ptr(), value.into(), to.len(), self.raw) };
        self.device.check(status, "hipMemsetAsync", || format!("queueing a fill of {} bytes", to.len()))
    }

    /// Queues a copy between two devices' memories, both of the same size.
    ///
    /// # Errors
    /// The sizes differ, or the copy cannot be queued.
    pub fn copy_from_peer(
        &self,
        to: DeviceSlice,
        from: DeviceSlice,
        from_ordinal: u32,
    ) -> Result<(), HipError> {
        to.expect_len("copying between devices", from.len())?;
        let api = self.device.api()?;
        let function = api::HipApi::optional(api.memcpy_peer_async, "hipMemcpyPeerAsync")?;
        let [here, there] =
            [self.device.info().ordinal, from_ordinal].map(|ordinal| ordinal as std::ffi::c_int);
        // SAFETY: ranges of the two devices; the driver validates them.
        let status = unsafe { function(to.as_ptr(), here, from.as_ptr(), there, from.len(), self.raw) };
        self.device.check(status, "hipMemcpyPeerAsync", || {
            format!("queueing a copy of {} bytes from device {from_ordinal}", from.len())
        })
    }

    /// Queues a kernel.
    ///
    /// # Errors
    /// The launch is impossible (block size, number of arguments), or cannot be queued.
    ///
    /// # Safety
    /// `args` must be the kernel's parameters in order, number and size, and the memory they name must be as large as the
    /// kernel will access.
    pub unsafe fn launch(&self, function: &Function, launch: Launch, args: &[Arg]) -> Result<(), HipError> {
        let bad = |reason| HipError::BadLaunch { kernel: function.name().to_owned(), reason };
        launch.check(self.device.info().wave, function.max_threads()).map_err(bad)?;
        if args.len() > MAX_ARGS {
            return Err(bad(format!("{} arguments, at most {MAX_ARGS} are supported", args.len())));
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for (pointer, arg) in pointers.iter_mut().zip(args) {
            *pointer = arg.as_ptr();
        }
        let Launch { grid: [x, y, z], block, shared_bytes } = launch;
        // SAFETY: the handle is live, the argument array outlives the call, which copies it; the rest is the caller's.
        let status = unsafe {
            (self.device.api()?.module_launch_kernel)(
                function.raw(),
                x,
                y,
                z,
                block,
                1,
                1,
                shared_bytes,
                self.raw,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.device.check(status, "hipModuleLaunchKernel", || format!("launching {}", function.name()))
    }

    /// Queues a mark.
    ///
    /// # Errors
    /// It cannot be queued.
    pub fn record(&self, event: &Event) -> Result<(), HipError> {
        // SAFETY: both handles are live.
        let status = unsafe { (self.device.api()?.event_record)(event.raw(), self.raw) };
        self.device.check(status, "hipEventRecord", || "recording an event".to_owned())
    }

    /// Makes later work wait for a mark in another stream.
    ///
    /// # Errors
    /// It cannot be queued.
    pub fn wait_for(&self, event: &Event) -> Result<(), HipError> {
        // SAFETY: both handles are live.
        let status = unsafe { (self.device.api()?.stream_wait_event)(self.raw, event.raw(), 0) };
        self.device.check(status, "hipStreamWaitEvent", || "waiting for another stream".to_owned())
    }

    /// Waits on the host until all queued work is done.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn synchronize(&self) -> Result<(), HipError> {
        // SAFETY: the handle is live.
        let status = unsafe { (self.device.api()?.stream_synchronize)(self.raw) };
        self.device.check(status, "hipStreamSynchronize", || "waiting for a stream".to_owned())
    }

    /// Whether all queued work is done.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn is_done(&self) -> Result<bool, HipError> {
        // SAFETY: the handle is live.
        match unsafe { (self.device.api()?.stream_query)(self.raw) } {
            status::NOT_READY => Ok(false),
            status => {
                self.device.check(status, "hipStreamQuery", || "asking for a stream".to_owned())?;
                Ok(true)
            }
        }
    }

    /// Records what `queue` queues on this stream, without running it, as a graph that replays it in one call.
    ///
    /// # Errors
    /// The driver has no graphs, `queue` failed, or it queued what cannot be captured.
    pub fn capture<E: From<HipError>>(&self, queue: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        Graph::capture(self, queue)
    }

    pub(super) fn raw(&self) -> api::RawStream {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the handle is live and dies here.
        self.device.release("hipStreamDestroy", |api| unsafe { (api.stream_destroy)(self.raw) });
    }
}
