//! Where a placement comes from: made from options, or from a file in which an earlier one was kept.

use crate::devices::{machine_for, machine_with};
use crate::planner::{ModelSummary, PlacementRequest, Refusal, plan, replay};
use spillway_protocol::plan::Plan;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// What a user asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// A placement that is made by these options.
    New(Box<PlacementRequest>),
    /// The one in a file, if it still holds.
    Saved(PathBuf),
}

/// A placement that cannot be had. Nothing has been touched.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// It was refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A file with a plan cannot be read or written.
    #[error("the plan file {} cannot be used: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl PlacementError {
    /// Stable code.
    pub fn code(&self) -> &'static str {
        match self {
            PlacementError::Refused(refusal) => refusal.code(),
            PlacementError::File { .. } => "plan_file",
        }
    }
}

impl Placement {
    /// Places a model on this host as it is now. The memory of `given_back` counts as free; `exe` is this program.
    ///
    /// # Errors
    /// The placement cannot be had; a file of a plan cannot be read.
    pub fn place(
        &self,
        model: &ModelSummary,
        exe: &Path,
        given_back: Option<&Plan>,
    ) -> Result<Plan, PlacementError> {
        match self {
            Placement::New(request) => {
                let mut machine = machine_for(request, exe)?;
                given_back.into_iter().for_each(|resident| machine.give_back(resident));
                Ok(plan(model, &machine, request)?)
            }
            Placement::Saved(file) => {
                let saved = read(file)?;
                let mut machine = machine_with(&saved, exe);
                given_back.into_iter().for_each(|resident| machine.give_back(resident));
                Ok(replay(&saved, model, &machine)?)
            }
        }
    }

    /// Whether other processes may use its devices, too.
    pub fn shares_devices(&self) -> bool {
        matches!(self, Placement::New(request) if request.allow_shared_device)
    }
}

/// Reads a plan that was kept.
///
/// # Errors
/// The file cannot be read, or holds something else.
pub fn read(file: &Path) -> Result<Plan, PlacementError> {
    let text = std::fs::read(file).map_err(|error| unusable(file, &error))?;
    serde_json::from_slice(&text).map_err(|error| unusable(file, &error))
}

/// Keeps a plan.
///
/// # Errors
/// The file cannot be written.
pub fn write(file: &Path, plan: &Plan) -> Result<(), PlacementError> {
    let mut text = serde_json::to_vec_pretty(plan).map_err(|error| unusable(file, &error))?;
    text.push(b'\n');
    std::fs::write(file, text).map_err(|error| unusable(file, &error))
}

fn unusable(file: &Path, reason: &dyn std::error::Error) -> PlacementError {
    PlacementError::File { path: file.into(), reason: reason.to_string() }
}
