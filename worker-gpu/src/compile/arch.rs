//! Architectures to compile for.

use super::CompileError;
use std::fmt;
use std::str::FromStr;

/// What a kernel object runs on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// An AMD GPU by its LLVM name, without feature suffixes: objects without them run on both settings.
    Amd(String),
    /// An NVIDIA GPU by its compute capability: 90 for 9.0.
    Nvidia(u32),
    /// The emulated device with waves of 32 or 64.
    Emulated {
        /// Lanes of a wave.
        wave: u32,
    },
}

/// Beginnings of the names of AMD GPUs that `kernels/hip/mma.h` uses matrix units of.
const AMD_MATRIX_UNITS: [&str; 6] = ["gfx908", "gfx90a", "gfx94", "gfx950", "gfx11", "gfx12"];

/// The oldest that current NVRTCs compile for.
const OLDEST_NVIDIA: u32 = 75;

impl Arch {
    /// Whether products of small matrices run on units of their own; elsewhere kernels emulate them, slowly.
    pub fn has_matrix_units(&self) -> bool {
        match self {
            Arch::Amd(name) => AMD_MATRIX_UNITS.iter().any(|beginning| name.starts_with(beginning)),
            Arch::Nvidia(_) => true,
            Arch::Emulated { .. } => false,
        }
    }

    /// Why no kernel of ours runs on it, if so. Newer ones than we know are tried: their compilers will say.
    pub fn without_kernels(&self) -> Option<&'static str> {
        match self {
            // Three characters for generations up to 9, the last two a stepping.
            Arch::Amd(name) if name.len() == "gfx900".len() && name.as_str() < "gfx900" => {
                Some("kernels need an AMD GPU of the gfx9 family or later")
            }
            Arch::Nvidia(number) if *number < OLDEST_NVIDIA => {
                Some("kernels need an NVIDIA GPU of compute capability 7.5 or later")
            }
            _ => None,
        }
    }
}

impl FromStr for Arch {
    type Err = CompileError;

    /// Reads a device's architecture: `gfx90a:sramecc+:xnack-`, `sm_90`, `emulated_wave64`.
    fn from_str(text: &str) -> Result<Self, CompileError> {
        let known = if let Some(number) = text.strip_prefix("sm_") {
            number.parse().ok().filter(|number| (50..1000).contains(number)).map(Arch::Nvidia)
        } else if let Some(wave) = text.strip_prefix("emulated_wave") {
            wave.parse().ok().filter(|wave| matches!(wave, 32 | 64)).map(|wave| Arch::Emulated { wave })
        } else {
            let name = text.split(':').next().unwrap_or_default();
            let number = name.strip_prefix("gfx").unwrap_or_default();
            let is_name =
                (3..=5).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_name.then(|| Arch::Amd(name.to_owned()))
        };
        known.ok_or_else(|| CompileError::UnknownArch(text.to_owned()))
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arch::Amd(name) => f.write_str(name),
            Arch::Nvidia(number) => write!(f, "sm_{number}"),
            Arch::Emulated { wave } => write!(f, "emulated_wave{wave}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first RDNA generations and the first CDNA's ancestors have none.
    #[test]
    fn knows_matrix_units() {
        for (text, has) in [
            ("gfx906", false),
            ("gfx908", true),
            ("gfx942:sramecc+", true),
            ("gfx1030", false),
            ("gfx1151", true),
            ("gfx1201", true),
            ("sm_90", true),
            ("emulated_wave32", false),
        ] {
            assert_eq!(text.parse::<Arch>().unwrap().has_matrix_units(), has, "{text}");
        }
    }

    #[test]
    fn knows_what_is_too_old() {
        let refused = |text: &str| text.parse::<Arch>().unwrap().without_kernels().is_some();
        assert!(["gfx803", "gfx701", "sm_61"].into_iter().all(refused));
        assert!(!["gfx906", "gfx90a", "gfx1030", "gfx1201", "sm_75", "sm_120"].into_iter().any(refused));
    }

    /// Device names come from drivers, and end up in command lines and file names.
    #[test]
    fn reads_what_drivers_report_and_nothing_else() {
        for (text, name) in [
            ("gfx906:sramecc+:xnack-", "gfx906"),
            ("gfx90a", "gfx90a"),
            ("gfx1151", "gfx1151"),
            ("sm_120", "sm_120"),
            ("emulated_wave64", "emulated_wave64"),
        ] {
            assert_eq!(text.parse::<Arch>().unwrap().to_string(), name);
        }
        for text in ["", "gfx", "gfx11-generic", "sm_", "sm_9x", "emulated_wave16", "gfx90a/../x", "90"] {
            assert_eq!(text.parse::<Arch>().unwrap_err().code(), "kernel_unknown_arch", "{text}");
        }
    }
}
