//! Marks in a stream.

use super::{Device, HipError, api, status};

/// A point in a stream's work that can be waited for. Destroyed on drop.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: api::RawEvent,
}

impl Event {
    /// An event for waiting.
    ///
    /// # Errors
    /// The driver is out of resources or the device is lost.
    pub fn new(device: &Device) -> Result<Self, HipError> {
        Self::with_flags(device, api::EVENT_DISABLE_TIMING)
    }

    /// An event that also notes the time.
    ///
    /// # Errors
    /// As for [`Event::new`].
    pub fn timed(device: &Device) -> Result<Self, HipError> {
        Self::with_flags(device, 0)
    }

    fn with_flags(device: &Device, flags: std::ffi::c_uint) -> Result<Self, HipError> {
        let mut raw = std::ptr::null_mut();
        let function = device.api()?.event_create_with_flags;
        // SAFETY: the function writes one handle.
        let status = unsafe { function(&mut raw, flags) };
        device.check(status, "hipEventCreateWithFlags", || "creating an event".to_owned())?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Waits on the host until the stream has come to it. Returns at once when it was never recorded.
    ///
    /// # Errors
    /// Work in front of it failed.
    pub fn synchronize(&self) -> Result<(), HipError> {
        // SAFETY: the handle is live.
        let status = unsafe { (self.device.api()?.event_synchronize)(self.raw) };
        self.device.check(status, "hipEventSynchronize", || "waiting for an event".to_owned())
    }

    /// Whether the stream has come to it.
    ///
    /// # Errors
    /// Work in front of it failed.
    pub fn is_done(&self) -> Result<bool, HipError> {
        // SAFETY: the handle is live.
        match unsafe { (self.device.api()?.event_query)(self.raw) } {
            status::NOT_READY => Ok(false),
            status => {
                self.device.check(status, "hipEventQuery", || "asking for an event".to_owned())?;
                Ok(true)
            }
        }
    }

    /// Milliseconds from `start` to this event; both timed and done.
    ///
    /// # Errors
    /// One of them is not.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32, HipError> {
        let mut milliseconds = 0.0;
        // SAFETY: both handles are live; the function writes one number.
        let status =
            unsafe { (self.device.api()?.event_elapsed_time)(&mut milliseconds, start.raw, self.raw) };
        self.device.check(status, "hipEventElapsedTime", || "timing between events".to_owned())?;
        Ok(milliseconds)
    }

    pub(super) fn raw(&self) -> api::RawEvent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is live and dies here.
        self.device.release("hipEventDestroy", |api| unsafe { (api.event_destroy)(self.raw) });
    }
}
