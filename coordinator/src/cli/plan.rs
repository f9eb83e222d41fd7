//! `plan`: show a placement without loading anything.

use super::args::PlanArgs;
use super::failure::Failure;
use super::output;
use super::session::Prepared;
use crate::open::TextNeed;
use crate::planner::table;

/// Prints the plan.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let prepared = Prepared::new(&args.model, TextNeed::Optional, &args.placement.to_request())?;
    if args.json { output::json(&prepared.plan) } else { output::text(&table(&prepared.plan)) }
}
