//! Instruction sets the kernels are written for, and which of them this process uses.
//!
//! The choice is made once at run time: the best set the CPU has, or the one that the environment variable
//! [`ENV`] names (so that a bug report can be bisected). Nothing depends on compile-time target features.

use std::fmt;
use thiserror::Error;

/// Environment variable that forces a kernel set by name.
pub const ENV: &str = "SPILLWAY_KERNELS";

/// A family of kernels, from slowest to fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelSet {
    /// Portable code, the reference for all others.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// As `Avx512`, with the 8-bit dot product instruction.
    Avx512Vnni,
}

/// Why a kernel set could not be chosen.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IsaError {
    /// No set has this name.
    #[error("`{name}` (compute.kernels, {ENV}) names no kernel set; this CPU has: {}", list(available))]
    Unknown {
        /// The name asked for.
        name: String,
        /// What the CPU has.
        available: Vec<KernelSet>,
    },
    /// The CPU lacks the set.
    #[error(
        "the kernel set `{set}` (compute.kernels, {ENV}) needs instructions that this CPU lacks; it has: {}",
        list(available)
    )]
    Unsupported {
        /// The set asked for.
        set: KernelSet,
        /// What the CPU has.
        available: Vec<KernelSet>,
    },
}

impl IsaError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            IsaError::Unknown { .. } => "kernel_set_unknown",
            IsaError::Unsupported { .. } => "kernel_set_unsupported",
        }
    }
}

fn list(sets: &[KernelSet]) -> String {
    sets.iter().map(|set| set.name()).collect::<Vec<_>>().join(", ")
}

impl KernelSet {
    /// Every set, slowest first.
    pub const ALL: [KernelSet; 4] =
        [KernelSet::Scalar, KernelSet::Avx2, KernelSet::Avx512, KernelSet::Avx512Vnni];

    /// Their names, in the same order.
    pub const NAMES: [&str; 4] = [
        KernelSet::Scalar.name(),
        KernelSet::Avx2.name(),
        KernelSet::Avx512.name(),
        KernelSet::Avx512Vnni.name(),
    ];

    /// Name as used in [`ENV`] and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            KernelSet::Scalar => "scalar",
            KernelSet::Avx2 => "avx2",
            KernelSet::Avx512 => "avx512",
            KernelSet::Avx512Vnni => "avx512vnni",
        }
    }

    /// The set of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.name() == name)
    }

    /// Whether this CPU (and operating system) can run the set.
    #[cfg(target_arch = "x86_64")]
    pub fn is_supported(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            KernelSet::Scalar => true,
            KernelSet::Avx2 => has!("avx2") && has!("fma") && has!("f16c"),
            KernelSet::Avx512 => {
                KernelSet::Avx2.is_supported()
                    && has!("avx512f")
                    && has!("avx512bw")
                    && has!("avx512vl")
                    && has!("avx512dq")
            }
            KernelSet::Avx512Vnni => KernelSet::Avx512.is_supported() && has!("avx512vnni"),
        }
    }

    /// Whether this CPU (and operating system) can run the set.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_supported(self) -> bool {
        self == KernelSet::Scalar
    }

    /// Every set this CPU can run, slowest first; `Scalar` is always there.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|set| set.is_supported()).collect()
    }

    /// The fastest set this CPU can run.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|set| set.is_supported()).unwrap_or(KernelSet::Scalar)
    }

    /// The set that `forced` names, else the fastest one.
    ///
    /// # Errors
    /// A name that is unknown, or a set that this CPU lacks.
    pub fn choose(forced: Option<&str>) -> Result<Self, IsaError> {
        let Some(name) = forced else { return Ok(Self::detect()) };
        let available = Self::available();
        match Self::from_name(name) {
            None => Err(IsaError::Unknown { name: name.to_owned(), available }),
            Some(set) if set.is_supported() => Ok(set),
            Some(set) => Err(IsaError::Unsupported { set, available }),
        }
    }

    /// The set that the environment variable [`ENV`] names; the fastest one when it is unset or empty.
    ///
    /// # Errors
    /// A name that is unknown, or a set that this CPU lacks.
    pub fn from_env() -> Result<Self, IsaError> {
        let value = std::env::var_os(ENV).filter(|value| !value.is_empty());
        Self::choose(value.as_deref().map(|v| v.to_string_lossy()).as_deref())
    }
}

impl fmt::Display for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_again() {
        for (set, name) in KernelSet::ALL.into_iter().zip(KernelSet::NAMES) {
            assert_eq!((set.name(), KernelSet::from_name(name)), (name, Some(set)));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_and_the_available_sets_are_listed() {
        let error = KernelSet::choose(Some("neon")).expect_err("neon is no kernel set here");
        assert_eq!(error.code(), "kernel_set_unknown");
        assert!(error.to_string().contains("neon") && error.to_string().contains("scalar"));
    }

    #[test]
    fn a_set_the_cpu_lacks_is_refused_by_name() {
        for set in KernelSet::ALL {
            match KernelSet::choose(Some(set.name())) {
                Ok(chosen) => assert!(chosen == set && set.is_supported()),
                Err(error) => {
                    assert!(!set.is_supported());
                    assert_eq!(error.code(), "kernel_set_unsupported");
                }
            }
        }
    }

    #[test]
    fn without_a_name_the_fastest_set_is_chosen() {
        assert_eq!(KernelSet::choose(None), Ok(KernelSet::detect()));
        assert_eq!(KernelSet::available().last(), Some(&KernelSet::detect()));
    }
}
