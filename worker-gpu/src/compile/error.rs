//! Why a kernel could not be had.

use super::Arch;
use std::path::{Path, PathBuf};

/// Why a kernel could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// A name that is no architecture.
    #[error("{0:?} is no GPU architecture; give one like gfx1100, sm_90 or emulated_wave32")]
    UnknownArch(String),
    /// There is no compiler for the architecture and no cached object.
    #[error("no kernel compiler for {arch}: {}; {advice}", looked_for.join("; "))]
    NoCompiler {
        /// What to compile for.
        arch: Arch,
        /// What was tried, and why it does not serve.
        looked_for: Vec<String>,
        /// What to install.
        advice: &'static str,
    },
    /// The compiler refused a source.
    #[error("kernel {kernel} does not compile for {arch} with {compiler} ({status}):\n{message}")]
    Failed {
        /// Name of the source.
        kernel: String,
        /// What it was compiled for.
        arch: Arch,
        /// The compiler.
        compiler: String,
        /// How it ended.
        status: String,
        /// What it said.
        message: String,
    },
    /// The compiler's output is not what it should be.
    #[error(
        "kernel {kernel} for {arch}: the compiled object is unusable: {reason}; clean the kernel cache, then report it"
    )]
    BadObject {
        /// Name of the source.
        kernel: String,
        /// What it was compiled for.
        arch: Arch,
        /// What is wrong.
        reason: String,
    },
    /// A file or a process failed.
    #[error("kernel compiler: {action} failed for {}: {reason}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
}

impl CompileError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            CompileError::UnknownArch(_) => "kernel_unknown_arch",
            CompileError::NoCompiler { .. } => "kernel_no_compiler",
            CompileError::Failed { .. } => "kernel_compile_failed",
            CompileError::BadObject { .. } => "kernel_bad_object",
            CompileError::Io { .. } => "kernel_io_failed",
        }
    }

    pub(super) fn io(action: &'static str, path: &Path, error: &std::io::Error) -> Self {
        CompileError::Io { action, path: path.to_owned(), reason: error.to_string() }
    }
}
