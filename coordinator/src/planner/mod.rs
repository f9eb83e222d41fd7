//! Placement: a pure function from sizes and wishes to a [`Plan`] or a [`Refusal`].

mod machine;
mod refusal;
mod request;
mod summary;

pub use machine::{Machine, NumaNode};
pub use refusal::Refusal;
pub use request::PlacementRequest;
use spillway_protocol::plan::Plan;
pub use summary::{LayerSizes, ModelSummary};

/// Decides which process runs which layers.
pub fn plan(_model: &ModelSummary, _machine: &Machine, _request: &PlacementRequest) -> Result<Plan, Refusal> {
    Err(Refusal::new("planner_missing", "the planner is being written"))
}
