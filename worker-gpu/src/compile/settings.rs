//! Where compilers and the cache are.

use std::ffi::OsString;
use std::path::PathBuf;

/// A program with its first arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildCommand {
    /// The executable.
    pub program: PathBuf,
    /// Arguments that come before those of the job.
    pub arguments: Vec<OsString>,
}

/// Where compilers and the cache are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Folder of compiled objects; created when needed.
    pub cache: PathBuf,
    /// The clang to use, instead of ROCm's or the system's.
    pub clang: Option<PathBuf>,
    /// The NVRTC library to use, instead of the first that loads.
    pub nvrtc: Option<PathBuf>,
    /// The C++ compiler to use for the emulated device, instead of the system's.
    pub cxx: Option<PathBuf>,
    /// What runs [`super::nvrtc::child`] with the job's arguments; without it NVRTC is not used.
    pub nvrtc_child: Option<ChildCommand>,
    /// What runs [`super::tied::child`] with a compiler and its arguments; without it compilers are started as they are, and
    /// may outlive this process.
    pub compiler_child: Option<ChildCommand>,
    /// More flags for the C++ compiler of the emulated device: a sanitizer's.
    pub cxx_flags: Vec<String>,
}

impl Settings {
    /// Compilers and a cache folder; everything else is looked for.
    pub fn with_cache(cache: PathBuf) -> Self {
        Self {
            cache,
            clang: None,
            nvrtc: None,
            cxx: None,
            nvrtc_child: None,
            compiler_child: None,
            cxx_flags: Vec::new(),
        }
    }

    /// From the environment: `SPILLWAY_KERNEL_CACHE` (else `spillway/kernels` in the XDG cache folder), `SPILLWAY_CLANG`,
    /// `SPILLWAY_NVRTC`, `SPILLWAY_CXX`. Empty variables count as unset.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let shared = || {
            let absolute = path("XDG_CACHE_HOME").filter(|folder| folder.is_absolute());
            absolute.or_else(|| Some(path("HOME")?.join(".cache"))).unwrap_or_else(std::env::temp_dir)
        };
        let cache =
            path("SPILLWAY_KERNEL_CACHE").unwrap_or_else(|| shared().join("spillway").join("kernels"));
        Self {
            clang: path("SPILLWAY_CLANG"),
            nvrtc: path("SPILLWAY_NVRTC"),
            cxx: path("SPILLWAY_CXX"),
            ..Self::with_cache(cache)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache_with(variables: &[(&str, &str)]) -> PathBuf {
        let lookup = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        };
        Settings::from_variables(lookup).cache
    }

    /// The XDG specification: an unset, empty or relative XDG_CACHE_HOME means `~/.cache`.
    #[test]
    fn the_cache_is_where_xdg_says() {
        let home = ("HOME", "/home/a");
        assert_eq!(cache_with(&[home]), PathBuf::from("/home/a/.cache/spillway/kernels"));
        assert_eq!(
            cache_with(&[home, ("XDG_CACHE_HOME", "")]),
            PathBuf::from("/home/a/.cache/spillway/kernels")
        );
        assert_eq!(
            cache_with(&[home, ("XDG_CACHE_HOME", "x")]),
            PathBuf::from("/home/a/.cache/spillway/kernels")
        );
        assert_eq!(cache_with(&[home, ("XDG_CACHE_HOME", "/c")]), PathBuf::from("/c/spillway/kernels"));
        assert_eq!(cache_with(&[home, ("SPILLWAY_KERNEL_CACHE", "/k")]), PathBuf::from("/k"));
    }
}
