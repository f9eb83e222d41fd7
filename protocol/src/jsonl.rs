//! The JSON-lines protocol: what clients of the daemon say and hear, one JSON object per line.
//!
//! Names and defaults are those of the v1 protocol that existing clients speak (`load`, `generate`, `abort`, `reset`,
//! `unload`, `ping`, `diag`), with the error classes of its second version. Parsing is strict: a field that is unknown,
//! has the wrong type, or belongs to a feature this program does not have is refused by name, because a setting that is
//! accepted and not obeyed is worse than an error. Only shapes are checked here; ranges are checked where the values are
//! used (planner, sampler), so that command line and daemon share one set of limits.
//!
//! `docs/protocol.md` is the reference with examples.

mod error;
mod event;
mod fields;
mod foreign;
mod request;

pub use error::{Class, LineError, Rejected};
pub use event::{Diagnosis, Done, ErrorEvent, Event, Loaded, Recovery, StageReport, StageSummary};
pub use fields::{Fields, FromField, Objects, describe};
pub use foreign::{Feature, Foreign, Off, feature, row};
pub use request::{Generate, Load, PlacementParams, Request, Source, parse_line};

/// Longest line a client may send, in bytes, line feed not counted. A longer one is answered with `line_too_long` and
/// skipped.
pub const MAX_LINE_BYTES: usize = 8 << 20;

/// Longest request id in bytes.
pub const MAX_ID_BYTES: usize = 256;

#[cfg(test)]
mod tests;
