//! An open provider: the table, and which device its calls go to.

use super::api::HipApi;
use super::emulated::World;
use super::properties::DeviceInfo;
use super::status::{self, Status};
use super::{HipError, Provider, amd, cuda, emulated};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::rc::Rc;

thread_local! {
    /// The device that this thread's calls go to, by provider: libraries keep it for the thread, not for their caller.
    static CURRENT: RefCell<BTreeMap<&'static str, u32>> = const { RefCell::new(BTreeMap::new()) };
}

/// A provider that was opened and has at least one device. Belongs to the thread that opened it.
#[derive(Debug)]
pub struct Driver {
    api: HipApi,
    provider: Provider,
    devices: u32,
    version: i32,
    // Closed after the table's last call: declared last, and the table is a plain value.
    _world: Option<World>,
}

impl Driver {
    /// Opens a provider.
    ///
    /// # Errors
    /// Its library or a function is missing, it has no device, or (emulated) it is already open on this thread.
    pub fn open(provider: &Provider) -> Result<Rc<Self>, HipError> {
        CURRENT.with_borrow_mut(|current| current.remove(provider.name()));
        let (api, world) = match provider {
            Provider::Amd => (amd::open()?, None),
            Provider::Cuda => (cuda::open()?, None),
            Provider::Emulated(settings) => {
                let (api, world) = emulated::open(settings)?;
                (api, Some(world))
            }
        };
        let mut driver = Self { api, provider: provider.clone(), devices: 0, version: 0, _world: world };
        driver.devices = driver.count_devices()?;
        let mut version: c_int = 0;
        // SAFETY: the function writes one number.
        let status = unsafe { (driver.api.driver_get_version)(&mut version) };
        driver.check(status, "hipDriverGetVersion", || "reading the driver's version".to_owned())?;
        driver.version = version;
        Ok(Rc::new(driver))
    }

    fn count_devices(&self) -> Result<u32, HipError> {
        let mut count: c_int = 0;
        // SAFETY: the functions take a reserved zero, and write one number.
        let status = unsafe {
            match (self.api.init)(0) {
                status::SUCCESS => (self.api.get_device_count)(&mut count),
                status => status,
            }
        };
        match u32::try_from(count) {
            Ok(count) if status.is_success() && count > 0 => Ok(count),
            _ => Err(HipError::NoDevice {
                provider: self.provider.name(),
                status: format!("{} {}", status.0, self.name_of(status)),
                advice: self.provider.no_device_advice(),
            }),
        }
    }

    /// Which provider this is; for messages and listings.
    pub fn provider(&self) -> &Provider {
        &self.provider
    }

    /// Number of devices; they are numbered from 0.
    pub fn device_count(&self) -> u32 {
        self.devices
    }

    /// The driver's own version number, as it counts.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// What device `ordinal` says about itself.
    ///
    /// # Errors
    /// There is no such device, or the driver cannot describe it.
    pub fn describe(&self, ordinal: u32) -> Result<DeviceInfo, HipError> {
        if ordinal >= self.devices {
            let provider = self.provider.name();
            return Err(HipError::NoSuchDevice { provider, ordinal, count: self.devices });
        }
        let what = || format!("describing device {ordinal}");
        DeviceInfo::read(&self.api, ordinal)?
            .map_err(|status| self.failure(status, "hipGetDeviceProperties", what()))
    }

    /// Whether `device` can address the memory of `peer`, by the driver's word alone.
    ///
    /// # Errors
    /// The driver cannot say.
    pub fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool, HipError> {
        let function = HipApi::optional(self.api.device_can_access_peer, "hipDeviceCanAccessPeer")?;
        let mut can: c_int = 0;
        // SAFETY: the function writes one number.
        let status = unsafe { function(&mut can, device as c_int, peer as c_int) };
        self.check(status, "hipDeviceCanAccessPeer", || format!("asking about devices {device} and {peer}"))?;
        Ok(can != 0)
    }

    pub(super) fn api(&self) -> &HipApi {
        &self.api
    }

    /// Sends this thread's next calls to a device.
    pub(super) fn activate(&self, ordinal: u32) -> Result<(), HipError> {
        let name = self.provider.name();
        if CURRENT.with_borrow(|current| current.get(name) == Some(&ordinal)) {
            return Ok(());
        }
        // SAFETY: takes a number.
        let status = unsafe { (self.api.set_device)(ordinal as c_int) };
        self.check(status, "hipSetDevice", || format!("choosing device {ordinal}"))?;
        CURRENT.with_borrow_mut(|current| current.insert(name, ordinal));
        Ok(())
    }

    /// Turns a status into a result; `what` says what the call was for.
    pub(super) fn check(
        &self,
        status: Status,
        call: &'static str,
        what: impl FnOnce() -> String,
    ) -> Result<(), HipError> {
        if status.is_success() { Ok(()) } else { Err(self.failure(status, call, what())) }
    }

    /// For destructors: a failure is logged, since nobody is there to receive it. That a lost device takes nothing back was
    /// told when it was lost.
    pub(super) fn check_drop(&self, status: Status, call: &'static str) {
        if !status.is_success() && !status.is_device_lost() {
            tracing::warn!(
                call,
                status = status.0,
                name = self.name_of(status),
                "releasing a device resource failed"
            );
        }
    }

    /// The error for a status that is none of success.
    pub(super) fn failure(&self, status: Status, call: &'static str, what: String) -> HipError {
        // SAFETY: the function returns a string that lives as long as the library, or null.
        let text = unsafe { text((self.api.get_error_string)(status)) };
        HipError::Call {
            call,
            what,
            status: status.0,
            name: self.name_of(status),
            text: text.unwrap_or_else(|| "no explanation".to_owned()),
            lost: status.is_device_lost(),
        }
    }

    fn name_of(&self, status: Status) -> String {
        // SAFETY: as in `failure`.
        unsafe { text((self.api.get_error_name)(status)) }.unwrap_or_else(|| "hipErrorUnknown".to_owned())
    }
}

/// # Safety
/// `string` is null or a C string that lives during the call.
unsafe fn text(string: *const std::ffi::c_char) -> Option<String> {
    // SAFETY: as required of the caller.
    (!string.is_null()).then(|| unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned())
}
