//! Finding compilers, and how they are called.

use super::settings::ChildCommand;
use super::{Arch, CompileError, Settings, nvrtc};
use sha2::{Digest, Sha256};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Oldest clang whose AMD and NVIDIA back ends the sources need.
const OLDEST_CLANG: u32 = 19;

/// Names of clang in the search path, newest first.
const CLANG_NAMES: &[&str] = &["clang-22", "clang-21", "clang-20", "clang-19", "clang"];

/// Names of the C++ compiler in the search path.
const CXX_NAMES: &[&str] = &["c++", "g++", "clang++"];

/// What NVRTC's library is called, newest first.
const NVRTC_NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// From this clang on: the newest NVIDIA architecture it knows, and the PTX version that this takes. Newer GPUs run the
/// PTX of older ones. Newest clang first.
const CLANG_PTX: &[(u32, u32, &str)] = &[(20, 120, "+ptx87"), (OLDEST_CLANG, 90, "+ptx80")];

const AMD_ADVICE: &str = "install ROCm, or clang 19 or later with lld (Debian: clang-19 lld-19), or name a clang in \
                          SPILLWAY_CLANG, or fill the kernel cache on another machine";
const NVIDIA_ADVICE: &str = "install NVRTC (part of the CUDA toolkit) or clang 19 or later (Debian: clang-19), or name one \
                             in SPILLWAY_NVRTC or SPILLWAY_CLANG, or fill the kernel cache on another machine";
const CXX_ADVICE: &str = "install a C++17 compiler (Debian: g++) or name one in SPILLWAY_CXX";

/// Flags of clang for AMD: the device pass only, none of ROCm's headers and libraries.
const HIP_FLAGS: &[&str] = &[
    "-x",
    "hip",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-nogpuinc",
    "-nogpulib",
    "-fuse-cuid=none",
];

/// Flags of clang for NVIDIA: the device pass only, none of CUDA's headers and libraries, assembly text.
const PTX_FLAGS: &[&str] = &["-x", "cuda", "--cuda-device-only", "-nocudainc", "-nocudalib", "-S"];

/// Flags of both: the language, and products and sums as written, so that all targets round alike.
const CLANG_FLAGS: &[&str] = &["-O3", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra"];

/// Flags of the C++ compiler for the emulated device.
const CXX_FLAGS: &[&str] = &[
    "-x",
    "c++",
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-DSPILLWAY_EMULATED",
];

/// Asks whether this processor has a feature.
type HasFeature = fn() -> bool;

/// Instructions of this processor that make the emulated device faster without changing a result.
const HOST_FEATURES: &[(&str, HasFeature)] = &[("-mfma", has_fma), ("-mf16c", has_f16c)];

#[cfg(target_arch = "x86_64")]
fn has_fma() -> bool {
    std::arch::is_x86_feature_detected!("fma")
}
#[cfg(target_arch = "x86_64")]
fn has_f16c() -> bool {
    std::arch::is_x86_feature_detected!("f16c")
}
#[cfg(not(target_arch = "x86_64"))]
fn has_fma() -> bool {
    false
}
#[cfg(not(target_arch = "x86_64"))]
fn has_f16c() -> bool {
    false
}

/// A compiler that was found to work, with all its flags.
#[derive(Debug, Clone)]
pub(super) struct Toolchain {
    program: PathBuf,
    flags: Vec<OsString>,
    output_flag: Option<&'static str>,
    version: String,
    identity: String,
}

impl Toolchain {
    /// Finds a compiler for an architecture.
    pub fn find(arch: &Arch, settings: &Settings) -> Result<Self, CompileError> {
        let mut looked_for = Vec::new();
        let (found, advice) = match arch {
            Arch::Amd(name) => (clang_for_amd(name, settings, &mut looked_for), AMD_ADVICE),
            Arch::Nvidia(number) => (
                nvrtc_for(*number, settings, &mut looked_for)
                    .or_else(|| clang_for_nvidia(*number, settings, &mut looked_for)),
                NVIDIA_ADVICE,
            ),
            Arch::Emulated { wave } => (cxx_for_wave(*wave, settings, &mut looked_for), CXX_ADVICE),
        };
        found.ok_or(CompileError::NoCompiler { arch: arch.clone(), looked_for, advice })
    }

    fn new(
        program: PathBuf,
        flags: Vec<OsString>,
        output_flag: Option<&'static str>,
        version: String,
    ) -> Self {
        let mut hash = Sha256::new();
        hash.update(version.as_bytes());
        for flag in &flags {
            hash.update([0]);
            hash.update(flag.as_encoded_bytes());
        }
        Self { program, flags, output_flag, version, identity: super::cache::hex(&hash.finalize()[..8]) }
    }

    /// Names compiler, version and flags in the cache.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The executable.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// In words.
    pub fn describe(&self) -> String {
        format!("{} ({})", self.program.display(), self.version)
    }

    /// The call that compiles `input`, whose folder holds the headers.
    pub fn command(&self, input: &Path, output: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.flags);
        if let Some(flag) = self.output_flag {
            command.arg("-I").arg(input.parent().unwrap_or(Path::new("."))).arg(input).arg(flag).arg(output);
        } else {
            command.arg(input).arg(output);
        }
        command
    }
}

fn clang_for_amd(name: &str, settings: &Settings, looked_for: &mut Vec<String>) -> Option<Toolchain> {
    let clang = find_clang(settings, looked_for)?;
    let mut flags = os_strings(HIP_FLAGS);
    flags.extend(os_strings(CLANG_FLAGS));
    flags.push(format!("--offload-arch={name}").into());
    Some(Toolchain::new(clang.program, flags, Some("-o"), clang.version))
}

fn clang_for_nvidia(number: u32, settings: &Settings, looked_for: &mut Vec<String>) -> Option<Toolchain> {
    let clang = find_clang(settings, looked_for)?;
    let (_, newest, ptx) = CLANG_PTX.iter().find(|(major, ..)| clang.major >= *major)?;
    // An architecture that clang knows takes the oldest PTX that has everything, for the sake of older drivers.
    let (number, ptx) = if number > 90 { (number.min(*newest), *ptx) } else { (number, "+ptx80") };
    let mut flags = os_strings(PTX_FLAGS);
    flags.extend(os_strings(CLANG_FLAGS));
    flags.push(format!("--cuda-gpu-arch=sm_{number}").into());
    flags.push(format!("--cuda-feature={ptx}").into());
    Some(Toolchain::new(clang.program, flags, Some("-o"), clang.version))
}

fn nvrtc_for(number: u32, settings: &Settings, looked_for: &mut Vec<String>) -> Option<Toolchain> {
    let ChildCommand { program, arguments } = settings.nvrtc_child.clone()?;
    let named = settings.nvrtc.as_ref().map(|path| vec![path.clone()]);
    let candidates = named.unwrap_or_else(|| {
        let folders = [std::env::var_os("CUDA_PATH").map(|path| PathBuf::from(path).join("lib64"))];
        let in_folders = folders.into_iter().flatten().chain([PathBuf::from("/usr/local/cuda/lib64")]);
        let by_path = in_folders.flat_map(|folder| NVRTC_NAMES.iter().map(move |name| folder.join(name)));
        NVRTC_NAMES.iter().map(PathBuf::from).chain(by_path.filter(|path| path.exists())).collect()
    });
    for library in candidates {
        let mut flags = arguments.clone();
        flags.extend([library.clone().into_os_string(), number.to_string().into()]);
        let probe =
            Command::new(&program).args(&flags).arg(nvrtc::PROBE).stdin(std::process::Stdio::null()).output();
        match probe {
            Ok(output) if output.status.success() => {
                let said = String::from_utf8_lossy(&output.stdout);
                let version =
                    said.lines().find(|line| line.starts_with(nvrtc::VERSION_PREFIX)).unwrap_or_default();
                return Some(Toolchain::new(program, flags, None, version.to_owned()));
            }
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                looked_for.push(format!(
                    "{}: {}",
                    library.display(),
                    said.lines().next().unwrap_or("no answer")
                ));
            }
            Err(error) => looked_for.push(format!("{}: {error}", program.display())),
        }
    }
    None
}

fn cxx_for_wave(wave: u32, settings: &Settings, looked_for: &mut Vec<String>) -> Option<Toolchain> {
    let candidates =
        settings.cxx.as_ref().map_or_else(|| in_search_path(CXX_NAMES), |path| vec![path.clone()]);
    for program in candidates {
        if let Some(version) = version_line(&program, looked_for) {
            let mut flags = os_strings(CXX_FLAGS);
            flags.push(format!("-DSPILLWAY_WAVE={wave}").into());
            flags.extend(HOST_FEATURES.iter().filter(|(_, has)| has()).map(|(flag, _)| flag.into()));
            flags.extend(settings.cxx_flags.iter().map(OsString::from));
            return Some(Toolchain::new(program, flags, Some("-o"), version));
        }
    }
    looked_for.push(format!("none of {} is in the search path", CXX_NAMES.join(", ")));
    None
}

struct Clang {
    program: PathBuf,
    version: String,
    major: u32,
}

/// The clang that was named, else ROCm's, else the newest in the search path.
fn find_clang(settings: &Settings, looked_for: &mut Vec<String>) -> Option<Clang> {
    let candidates = settings.clang.as_ref().map_or_else(
        || {
            let rocm = std::env::var_os("ROCM_PATH").map(PathBuf::from);
            let rocm =
                rocm.into_iter().chain([PathBuf::from("/opt/rocm")]).map(|root| root.join("llvm/bin/clang"));
            rocm.filter(|path| path.exists()).chain(in_search_path(CLANG_NAMES)).collect()
        },
        |path| vec![path.clone()],
    );
    for program in candidates {
        let Some(version) = version_line(&program, looked_for) else { continue };
        match clang_major(&version) {
            Some(major) if major >= OLDEST_CLANG => return Some(Clang { program, version, major }),
            _ => looked_for
                .push(format!("{}: {version:?} is older than clang {OLDEST_CLANG}", program.display())),
        }
    }
    looked_for.push(format!("no clang {OLDEST_CLANG} or later in ROCm or in the search path"));
    None
}

fn clang_major(version: &str) -> Option<u32> {
    version.split("clang version ").nth(1)?.split('.').next()?.parse().ok()
}

fn version_line(program: &Path, looked_for: &mut Vec<String>) -> Option<String> {
    match Command::new(program).arg("--version").stdin(std::process::Stdio::null()).output() {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
        }
        Ok(output) => {
            looked_for.push(format!("{} --version: {}", program.display(), output.status));
            None
        }
        Err(error) => {
            looked_for.push(format!("{}: {error}", program.display()));
            None
        }
    }
}

fn in_search_path(names: &[&str]) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let found = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    found.filter(|candidate| candidate.is_file()).collect()
}

fn os_strings(flags: &[&str]) -> Vec<OsString> {
    flags.iter().map(|flag| OsStr::new(flag).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What distributions, ROCm and upstream print.
    #[test]
    fn reads_clang_versions() {
        for (line, major) in [
            ("Debian clang version 19.1.7 (3~deb12u1)", Some(19)),
            (
                "AMD clang version 20.0.0git (https://github.com/RadeonOpenCompute/llvm-project roc-7.1.0)",
                Some(20),
            ),
            ("clang version 18.1.3", Some(18)),
            ("g++ (Debian 12.2.0-14) 12.2.0", None),
        ] {
            assert_eq!(clang_major(line), major, "{line}");
        }
    }
}
