//! `plan`: show a placement without loading anything; keep it in a file, check that it still holds, compare two.

use super::args::PlanArgs;
use super::failure::Failure;
use super::output;
use crate::config::Config;
use crate::devices::THIS_PROGRAM;
use crate::open::{TextNeed, open_model_with};
use crate::placement::{self, Placement};
use crate::planner::{diff, differences, table};
use spillway_protocol::plan::Plan;
use std::path::Path;

/// Prints the plan, or the differences of two.
pub fn plan(args: &PlanArgs, config: &Config) -> Result<(), Failure> {
    if let Some([first, second]) = args.diff.as_deref() {
        let found = diff(&placement::read(first)?, &placement::read(second)?);
        return if args.json { output::json(&found) } else { output::text(&differences(&found)) };
    }
    let plan = place(args, config)?;
    if let Some(file) = &args.save {
        placement::write(file, &plan)?;
    }
    if args.json { output::json(&plan) } else { output::text(&table(&plan)) }
}

/// What is checked or made.
fn place(args: &PlanArgs, config: &Config) -> Result<Plan, Failure> {
    let path = match (&args.model, &args.load) {
        (model, Some(file)) => {
            let saved = || placement::read(file).map(|plan| plan.model.path);
            model.clone().map_or_else(saved, Ok)?
        }
        (model, None) => model.clone().unwrap_or_default(),
    };
    let placement = Placement::of(args.load.clone(), args.placement.to_request(config));
    let model = open_model_with(&path, TextNeed::Optional, &args.tokenizer.options())?;
    Ok(placement.place(model.summary(), Path::new(THIS_PROGRAM), None)?)
}
