//! AMD's own HIP library.

use super::HipError;
use super::api::HipApi;
use super::library::Soname;

const ADVICE: &str = "install AMD's ROCm runtime (package hip-runtime-amd, or libamdhip64 of your distribution) and \
                      check that /dev/kfd and /dev/dri are readable by this user (groups render and video)";

/// Sonames of ROCm 7, 6 and 5, then whatever the system calls it.
const LIBRARY: Soname = Soname {
    provider: "amd",
    names: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"],
    advice: ADVICE,
};

/// What to check when the library finds no device.
pub(super) const NO_DEVICE_ADVICE: &str = "check that the amdgpu driver is loaded (ls /dev/kfd /dev/dri), that this \
                                           user may read them, and that HIP_VISIBLE_DEVICES does not hide the device";

/// Opens the library and fills the table.
pub(super) fn open() -> Result<HipApi, HipError> {
    let library = LIBRARY.open()?;
    // SAFETY: the declarations in `api` are those of ROCm's headers, and an open library is never unloaded.
    unsafe { HipApi::look_up(|symbol| library.find(symbol)) }.map_err(|symbol| HipError::SymbolMissing {
        library: library.name().to_owned(),
        symbol,
        advice: ADVICE,
    })
}
