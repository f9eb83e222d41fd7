//! Flags of the commands about this machine: its devices, compiled kernels, settings and shells.

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::Shell;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MeasureArg {
    /// All devices that nobody uses, and the host
    Anew,
    /// Devices of which nothing is known
    Missing,
}

/// `devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Look only there: amd, cuda, or emulated with its options
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Test anew which devices can write into each other's memory
    #[arg(long)]
    pub test_links: bool,
    /// Measure how fast devices and the host read their memory: all of them, or those of which it is not known
    #[arg(long, value_enum, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "anew")]
    pub measure: Option<MeasureArg>,
    /// Measure the devices with these numbers alone, and not the host
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', requires = "measure")]
    pub only: Vec<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `kernels`.
#[derive(Debug, Subcommand)]
pub enum KernelsCommand {
    /// Compile all kernels for architectures, by default those of the GPUs of this machine
    Build(KernelsBuildArgs),
    /// List compiled kernels
    List(KernelsListArgs),
    /// Remove all compiled kernels
    Clean(KernelsListArgs),
}

/// `kernels build`.
#[derive(Debug, Args)]
pub struct KernelsBuildArgs {
    /// Architecture, for example gfx1100 or sm_90 (repeatable)
    #[arg(long, value_name = "NAME")]
    pub arch: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `kernels list` and `kernels clean`.
#[derive(Debug, Args)]
pub struct KernelsListArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// List all settings, their values, and who has set them
    List(ConfigListArgs),
    /// Print the value of a setting
    Get(ConfigKeyArgs),
    /// Write a setting into the file; everything else in it stays
    Set(ConfigSetArgs),
    /// Remove a setting from the file
    Unset(ConfigUnsetArgs),
    /// Show all about a setting: what it does and may be, who has set it, and what that overrides
    Explain(ConfigKeyArgs),
    /// Print the path of the file, which need not exist
    Path,
    /// Print a JSON schema of the file
    Schema,
}

/// `config list`.
#[derive(Debug, Args)]
pub struct ConfigListArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `config get` and `config explain`.
#[derive(Debug, Args)]
pub struct ConfigKeyArgs {
    /// The setting, for example memory.max_seq
    pub key: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `config set`.
#[derive(Debug, Args)]
pub struct ConfigSetArgs {
    /// The setting, for example memory.max_seq
    pub key: String,
    /// The value
    #[arg(allow_hyphen_values = true)]
    pub value: String,
}

/// `config unset`.
#[derive(Debug, Args)]
pub struct ConfigUnsetArgs {
    /// The setting, or any other key of the file
    pub key: String,
}

/// `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: Shell,
}
