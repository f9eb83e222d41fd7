//! Device sources: what a GPU runs, as text for the kernel compiler of `worker-gpu`.
//!
//! Every source is a single file over [`HEADERS`]; it compiles for AMD, NVIDIA and the emulated device. Adding a kernel is
//! a file in `hip/` and a row in [`SOURCES`].

/// One translation unit.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSource<'a> {
    /// Name of the file without its ending; also names the compiled object.
    pub name: &'a str,
    /// The text.
    pub text: &'a str,
    /// Entry points that the compiled object must have.
    pub entries: &'a [&'a str],
}

/// A header that sources may include, by file name.
#[derive(Debug, Clone, Copy)]
pub struct DeviceHeader {
    /// File name as written in `#include`.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
}

macro_rules! headers {
    ($($name:literal),* $(,)?) => {
        &[$(DeviceHeader { name: $name, text: include_str!(concat!("../hip/", $name)) }),*]
    };
}

macro_rules! sources {
    ($($name:literal: [$($entry:literal),*]),* $(,)?) => {
        &[$(DeviceSource {
            name: $name,
            text: include_str!(concat!("../hip/", $name, ".hip")),
            entries: &[$($entry),*],
        }),*]
    };
}

/// The prelude and what it includes.
pub const HEADERS: &[DeviceHeader] = headers![
    "prelude.h",
    "mma.h",
    "target_amd.h",
    "target_nvidia.h",
    "target_emulated.h",
    "emulated_fibers.h",
];

/// All kernels.
pub const SOURCES: &[DeviceSource<'static>] = sources![
    "residual_add": ["residual_add"],
    "rms_norm": ["rms_norm"],
    "gemv_q8_0": ["gemv_q8_0"],
];

/// The source with this name.
pub fn source(name: &str) -> Option<&'static DeviceSource<'static>> {
    SOURCES.iter().find(|source| source.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry point in the table without a definition would only be noticed on a device.
    #[test]
    fn every_entry_is_defined_in_its_source() {
        for source in SOURCES {
            for entry in source.entries {
                assert!(source.text.contains(&format!("KERNEL({entry},")), "{} lacks {entry}", source.name);
            }
        }
    }

    /// A header that is not in the table is missing on a machine without this source tree.
    #[test]
    fn every_included_header_is_embedded() {
        let texts = HEADERS.iter().map(|header| header.text).chain(SOURCES.iter().map(|source| source.text));
        for line in texts.flat_map(str::lines).filter(|line| line.starts_with("#include \"")) {
            let name = line.split('"').nth(1).unwrap();
            assert!(HEADERS.iter().any(|header| header.name == name), "{name} is not in HEADERS");
        }
    }
}
