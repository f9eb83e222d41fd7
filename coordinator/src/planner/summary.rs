//! The model as the planner sees it: sizes only.

use spillway_protocol::plan::PlannedModel;

/// Sizes of one layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Bytes of the weights as stored in memory.
    pub weights: u64,
    /// Key and value elements per token.
    pub kv_elements: u64,
    /// f32 values of recurrent state per sequence.
    pub state_values: u64,
    /// f32 values of activations per token, the residual included.
    pub scratch_values: u64,
    /// Widest input of a matrix, quantised once per step.
    pub widest_input: u64,
}

/// Everything placement depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSummary {
    /// Identity and dimensions.
    pub model: PlannedModel,
    /// Sizes per layer.
    pub layers: Vec<LayerSizes>,
    /// Bytes of the embedding in the file (mapped, page cache).
    pub embedding_bytes: u64,
    /// Bytes of final norm and output projection as stored in memory.
    pub head_bytes: u64,
    /// Whether any matrix is quantised.
    pub quantised: bool,
}
