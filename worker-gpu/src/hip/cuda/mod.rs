//! NVIDIA's driver behind HIP's names: the same calls on libcuda, so that nothing above the table knows the difference.
//!
//! The driver's API is context based; a device's primary context is retained when the device is first chosen, and is the
//! one that CUDA's own runtime would use.

mod context;
mod driver;
mod shims;
mod status;

use super::HipError;
use super::api::HipApi;
use super::library::Soname;

const ADVICE: &str =
    "install NVIDIA's driver (release 525 or later); libcuda comes with it, not with the CUDA toolkit";

const LIBRARY: Soname = Soname { provider: "cuda", names: &["libcuda.so.1", "libcuda.so"], advice: ADVICE };

/// What to check when the library finds no device.
pub(super) const NO_DEVICE_ADVICE: &str = "check that the nvidia driver is loaded (nvidia-smi), that this user may read \
                                           /dev/nvidia*, and that CUDA_VISIBLE_DEVICES does not hide the device";

/// Opens the driver and fills the table.
pub(super) fn open() -> Result<HipApi, HipError> {
    let library = LIBRARY.open()?;
    driver::install(&library).map_err(|symbol| HipError::SymbolMissing {
        library: library.name().to_owned(),
        symbol,
        advice: ADVICE,
    })?;
    Ok(shims::table())
}
