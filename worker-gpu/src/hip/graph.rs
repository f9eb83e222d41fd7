//! Captured work.

use super::api::{self, HipApi};
use super::{Device, HipError, Stream};

/// Work that was captured from a stream and is replayed in one call. Everything it touches must outlive its replays.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    exec: api::RawGraphExec,
}

/// A graph as captured, not yet executable. Destroyed on drop.
struct Captured<'a> {
    device: &'a Device,
    raw: api::RawGraph,
}

impl Drop for Captured<'_> {
    fn drop(&mut self) {
        if let Ok(HipApi { graph_destroy: Some(destroy), .. }) = self.device.api() {
            // SAFETY: the handle is live, or null after a failed capture, and dies here.
            self.device.driver().check_drop(unsafe { destroy(self.raw) }, "hipGraphDestroy");
        }
    }
}

impl Graph {
    pub(super) fn capture<E: From<HipError>>(
        stream: &Stream,
        queue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let device = stream.device();
        let api = device.api()?;
        let begin = HipApi::optional(api.stream_begin_capture, "hipStreamBeginCapture")?;
        let end = HipApi::optional(api.stream_end_capture, "hipStreamEndCapture")?;
        let instantiate = HipApi::optional(api.graph_instantiate, "hipGraphInstantiate")?;
        HipApi::optional(api.graph_destroy, "hipGraphDestroy")?;
        HipApi::optional(api.graph_exec_destroy, "hipGraphExecDestroy")?;

        // SAFETY: the stream is live.
        let status = unsafe { begin(stream.raw(), api::CAPTURE_THREAD_LOCAL) };
        device.check(status, "hipStreamBeginCapture", || "starting a capture".to_owned())?;
        let queued = queue();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the stream is live and being captured; the function writes one handle.
        let ended = unsafe { end(stream.raw(), &mut raw) };
        let captured = (!raw.is_null()).then_some(Captured { device, raw });
        queued?;
        device.check(ended, "hipStreamEndCapture", || "ending a capture".to_owned())?;
        let Some(captured) = captured else {
            return Err(HipError::FunctionMissing { symbol: "hipStreamEndCapture" }.into());
        };

        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is live; the function writes one handle, and takes no error node and no log.
        let status =
            unsafe { instantiate(&mut exec, captured.raw, std::ptr::null_mut(), std::ptr::null_mut(), 0) };
        device.check(status, "hipGraphInstantiate", || "instantiating a captured graph".to_owned())?;
        Ok(Self { device: device.clone(), exec })
    }

    /// Queues a replay.
    ///
    /// # Errors
    /// It cannot be queued.
    ///
    /// # Safety
    /// What the captured work touches must be live, as for the launches that were captured.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), HipError> {
        let function = HipApi::optional(self.device.api()?.graph_launch, "hipGraphLaunch")?;
        // SAFETY: both handles are live; the rest is the caller's.
        let status = unsafe { function(self.exec, stream.raw()) };
        self.device.check(status, "hipGraphLaunch", || "replaying a graph".to_owned())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(HipApi { graph_exec_destroy: Some(destroy), .. }) = self.device.api() {
            // SAFETY: the handle is live and dies here.
            self.device.driver().check_drop(unsafe { destroy(self.exec) }, "hipGraphExecDestroy");
        }
    }
}
