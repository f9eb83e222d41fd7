//! `plan`: show a placement without loading anything; keep it in a file, check that it still holds, compare two.

use super::args::PlanArgs;
use super::failure::Failure;
use super::output;
use crate::config::Config;
use crate::devices::{THIS_PROGRAM, machine_for, machine_with};
use crate::open::{TextNeed, open_model_with};
use crate::planner::{diff, differences, plan as make_plan, replay, table};
use spillway_protocol::plan::Plan;
use std::path::Path;

/// Prints the plan, or the differences of two.
pub fn plan(args: &PlanArgs, config: &Config) -> Result<(), Failure> {
    if let Some([first, second]) = args.diff.as_deref() {
        let found = diff(&read(first)?, &read(second)?);
        return if args.json { output::json(&found) } else { output::text(&differences(&found)) };
    }
    let plan = match &args.load {
        Some(file) => load(args, &read(file)?)?,
        None => make(args, config)?,
    };
    if let Some(file) = &args.save {
        write(file, &plan)?;
    }
    if args.json { output::json(&plan) } else { output::text(&table(&plan)) }
}

fn make(args: &PlanArgs, config: &Config) -> Result<Plan, Failure> {
    let path = args.model.as_deref().unwrap_or(Path::new(""));
    let model = open_model_with(path, TextNeed::Optional, &args.tokenizer.options())?;
    let request = args.placement.to_request(config);
    Ok(make_plan(model.summary(), &machine_for(&request, Path::new(THIS_PROGRAM))?, &request)?)
}

/// A saved plan, if it still holds.
fn load(args: &PlanArgs, saved: &Plan) -> Result<Plan, Failure> {
    let path = args.model.as_deref().unwrap_or(&saved.model.path);
    let model = open_model_with(path, TextNeed::Optional, &args.tokenizer.options())?;
    Ok(replay(saved, model.summary(), &machine_with(saved, Path::new(THIS_PROGRAM)))?)
}

fn read(file: &Path) -> Result<Plan, Failure> {
    let unusable = |reason: String| Failure::PlanFile { path: file.into(), reason };
    let text = std::fs::read(file).map_err(|error| unusable(error.to_string()))?;
    serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))
}

fn write(file: &Path, plan: &Plan) -> Result<(), Failure> {
    let unusable = |reason: String| Failure::PlanFile { path: file.into(), reason };
    let mut text = serde_json::to_vec_pretty(plan).map_err(|error| unusable(error.to_string()))?;
    text.push(b'\n');
    std::fs::write(file, text).map_err(|error| unusable(error.to_string()))
}
