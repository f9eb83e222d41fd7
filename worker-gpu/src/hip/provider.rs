//! Who fills the table.

use super::emulated::Settings;
use super::{Driver, HipError, amd, cuda};
use std::fmt;
use std::rc::Rc;
use std::str::FromStr;

/// A source of devices, chosen by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Provider {
    /// AMD's libamdhip64.
    Amd,
    /// NVIDIA's libcuda.
    Cuda,
    /// The host itself; never chosen unless it is named.
    Emulated(Box<Settings>),
}

impl Provider {
    /// Name without options.
    pub fn name(&self) -> &'static str {
        match self {
            Provider::Amd => "amd",
            Provider::Cuda => "cuda",
            Provider::Emulated(_) => "emulated",
        }
    }

    /// What device memory is handed out in: a size is rounded up to whole pages. CUDA and ROCm take 2 MiB for anything that is
    /// not small.
    pub(super) fn page_bytes(&self) -> usize {
        match self {
            Provider::Amd | Provider::Cuda => 2 << 20,
            Provider::Emulated(settings) => settings.page,
        }
    }

    /// What to check when the provider works but finds no device.
    pub(super) fn no_device_advice(&self) -> &'static str {
        match self {
            Provider::Amd => amd::NO_DEVICE_ADVICE,
            Provider::Cuda => cuda::NO_DEVICE_ADVICE,
            Provider::Emulated(_) => "give the emulated device at least one device (devices=1)",
        }
    }
}

impl FromStr for Provider {
    type Err = HipError;

    /// Reads `amd`, `cuda`, `emulated` or `emulated:option=value,...`.
    fn from_str(text: &str) -> Result<Self, HipError> {
        let (name, options) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let unknown = |reason: String| HipError::UnknownProvider { name: text.to_owned(), reason };
        match (name, options) {
            ("amd", None) => Ok(Provider::Amd),
            ("cuda", None) => Ok(Provider::Cuda),
            ("emulated", options) => {
                let settings = Settings::parse(options.unwrap_or_default()).map_err(unknown)?;
                Ok(Provider::Emulated(Box::new(settings)))
            }
            ("amd" | "cuda", Some(_)) => Err(unknown(format!("{name} takes no options"))),
            _ => Err(unknown("the name is unknown".to_owned())),
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Provider::Emulated(settings) => write!(f, "emulated:{settings}"),
            other => f.write_str(other.name()),
        }
    }
}

/// What a search for real devices brought: drivers that have devices, and why the others have none.
#[derive(Debug)]
pub struct Found {
    /// Open drivers with at least one device.
    pub drivers: Vec<Rc<Driver>>,
    /// One reason for each provider without.
    pub absent: Vec<HipError>,
}

/// Looks for real devices, AMD's first. The emulated device is not looked for.
pub fn search() -> Found {
    let mut found = Found { drivers: Vec::new(), absent: Vec::new() };
    for provider in [Provider::Amd, Provider::Cuda] {
        match Driver::open(&provider) {
            Ok(driver) => found.drivers.push(driver),
            Err(reason) => found.absent.push(reason),
        }
    }
    found
}
