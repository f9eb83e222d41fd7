//! Compiled kernels on a device.

use super::api::FunctionAttribute;
use super::{Device, HipError, api};
use std::ffi::{CString, c_int};
use std::rc::Rc;

/// A compiled object, loaded. Unloaded when it and its functions are dropped.
#[derive(Debug, Clone)]
pub struct Module {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    raw: api::RawModule,
    name: String,
}

/// What a kernel takes of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionResources {
    /// Registers of a thread.
    pub registers: u32,
    /// Private memory of a thread in bytes; more than zero means spills or indexed arrays.
    pub local_bytes: u32,
    /// Static shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Largest block.
    pub max_threads: u32,
}

/// A kernel of a module.
#[derive(Debug, Clone)]
pub struct Function {
    module: Module,
    raw: api::RawFunction,
    name: Rc<str>,
    max_threads: u32,
}

impl Module {
    /// Loads an object that the kernel compiler made for this device; `name` is for messages.
    ///
    /// # Errors
    /// The device does not take the object, is out of memory, or is lost.
    pub fn load(device: &Device, name: &str, image: &[u8]) -> Result<Self, HipError> {
        // Assembly text ends with a NUL for the driver; machine code does not mind one more byte.
        let mut terminated = image.to_vec();
        terminated.push(0);
        let mut raw = std::ptr::null_mut();
        let function = device.api()?.module_load_data;
        // SAFETY: the image is complete and outlives the call.
        let status = unsafe { function(&mut raw, terminated.as_ptr().cast()) };
        device.check(status, "hipModuleLoadData", || {
            format!("loading kernel object {name} on {}", device.info().arch)
        })?;
        Ok(Self { inner: Rc::new(Inner { device: device.clone(), raw, name: name.to_owned() }) })
    }

    /// Looks up an entry point.
    ///
    /// # Errors
    /// The object has none of this name.
    pub fn function(&self, name: &str) -> Result<Function, HipError> {
        let Inner { device, raw: module, name: object } = &*self.inner;
        let c_name = CString::new(name).map_err(|_| HipError::BadLaunch {
            kernel: name.to_owned(),
            reason: "its name holds a NUL".to_owned(),
        })?;
        let mut raw = std::ptr::null_mut();
        let get_function = device.api()?.module_get_function;
        // SAFETY: the module is live; the function writes one handle.
        let status = unsafe { get_function(&mut raw, *module, c_name.as_ptr()) };
        device.check(status, "hipModuleGetFunction", || {
            format!("looking up {name} in kernel object {object}")
        })?;
        let mut function = Function { module: self.clone(), raw, name: name.into(), max_threads: 1024 };
        function.max_threads = function.resources()?.max_threads;
        Ok(function)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the handle is live and dies here; functions keep their module alive.
        self.device.release("hipModuleUnload", |api| unsafe { (api.module_unload)(self.raw) });
    }
}

impl Function {
    /// Name of the entry point.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Largest block it runs with.
    pub fn max_threads(&self) -> u32 {
        self.max_threads
    }

    /// What it takes of the device.
    ///
    /// # Errors
    /// The library cannot say.
    pub fn resources(&self) -> Result<FunctionResources, HipError> {
        Ok(FunctionResources {
            registers: self.attribute(FunctionAttribute::NUM_REGS)?,
            local_bytes: self.attribute(FunctionAttribute::LOCAL_SIZE_BYTES)?,
            shared_bytes: self.attribute(FunctionAttribute::SHARED_SIZE_BYTES)?,
            max_threads: self.attribute(FunctionAttribute::MAX_THREADS_PER_BLOCK)?,
        })
    }

    fn attribute(&self, attribute: FunctionAttribute) -> Result<u32, HipError> {
        let device = &self.module.inner.device;
        let mut value: c_int = 0;
        // SAFETY: the handle is live; the function writes one number.
        let status = unsafe { (device.api()?.func_get_attribute)(&mut value, attribute, self.raw) };
        device.check(status, "hipFuncGetAttribute", || format!("asking what {} takes", self.name))?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    pub(super) fn raw(&self) -> api::RawFunction {
        self.raw
    }
}
