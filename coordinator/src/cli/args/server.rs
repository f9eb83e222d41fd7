//! Flags of the commands that serve, and of those that look at what serves.

use super::{ModelArgs, PlacementArgs, ProgressArgs, SavedPlanArgs};
use crate::cli::failure::Failure;
use crate::http::{ApiKey, HttpAddress, KeyError};
use clap::{Args, ValueHint};
use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Where the key of HTTP clients is best given.
const API_KEY_VARIABLE: &str = "SPILLWAY_API_KEY";

/// What `serve` and `daemon` share.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// Also serve JSON lines on a local socket at this path
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub listen: Option<PathBuf>,
    /// Answer only HTTP clients that send this key; rather set the variable SPILLWAY_API_KEY, since others see the command line
    #[arg(long, value_name = "KEY")]
    api_key: Option<GivenKey>,
    /// Seconds that requests may run on after SIGTERM before they are aborted
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_patience)]
    pub drain_limit: Duration,
}

/// A key as it was given. Whether it is usable is told later, by a message that does not show it.
#[derive(Debug, Clone)]
struct GivenKey(Result<ApiKey, KeyError>);

impl FromStr for GivenKey {
    type Err = Infallible;

    fn from_str(key: &str) -> Result<Self, Infallible> {
        Ok(GivenKey(key.parse()))
    }
}

impl ServerArgs {
    /// The key from the flag, else from the variable, whose empty value is none.
    pub fn api_key(&self) -> Result<Option<ApiKey>, Failure> {
        let variable = || std::env::var_os(API_KEY_VARIABLE).filter(|key| !key.is_empty());
        let (source, key) = match (&self.api_key, variable()) {
            (Some(GivenKey(key)), _) => ("--api-key", *key),
            (None, Some(key)) => (API_KEY_VARIABLE, key.to_str().ok_or(KeyError).and_then(str::parse)),
            (None, None) => return Ok(None),
        };
        key.map(Some).map_err(|error| Failure::Usage(format!("{source} cannot be used: {error}")))
    }
}

/// `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address to serve at; beyond this machine only with a key
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8080")]
    pub http: HttpAddress,
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub progress: ProgressArgs,
    #[command(flatten)]
    pub placement: PlacementArgs,
    #[command(flatten)]
    pub saved: SavedPlanArgs,
}

/// `daemon`.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// Also serve OpenAI clients over HTTP, for example at 127.0.0.1:8080; beyond this machine only with a key
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub http: Option<HttpAddress>,
    #[command(flatten)]
    pub server: ServerArgs,
}

/// Seconds of patience: from none to a day.
fn parse_patience(text: &str) -> Result<Duration, String> {
    parse_seconds(text, Duration::ZERO).ok_or_else(|| "expected 0 to 86400 seconds".to_owned())
}

/// `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Socket of the daemon, as given to its --listen
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub connect: PathBuf,
    /// Show it again every so many seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = parse_interval)]
    pub watch: Option<Duration>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Socket of the daemon, as given to its --listen
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub connect: PathBuf,
    /// Seconds between two frames
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub interval: Duration,
    /// End after so many frames instead of with Ctrl-C
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub frames: Option<u32>,
}

/// Seconds between two looks: from a tenth to a day.
fn parse_interval(text: &str) -> Result<Duration, String> {
    parse_seconds(text, Duration::from_millis(100)).ok_or_else(|| "expected 0.1 to 86400 seconds".to_owned())
}

/// Seconds from `least` to a day.
fn parse_seconds(text: &str, least: Duration) -> Option<Duration> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.filter(|seconds| (least..=Duration::from_secs(86_400)).contains(seconds))
}
