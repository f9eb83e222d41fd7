//! What the user asked for, as written: the planner parses it, so that the command line, JSON lines and configuration
//! files share one set of refusals.

/// Placement options. Every field left out takes the planner's default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementRequest {
    /// GPU list, or `none`.
    pub devices: Option<String>,
    /// CPU workers, one band each; default 1, or `pp` when given.
    pub cpu_workers: Option<usize>,
    /// Pipeline stages.
    pub pp: Option<usize>,
    /// Layers of each stage, comma separated.
    pub pp_layers: Option<String>,
    /// Layers on GPUs: a number or `auto`.
    pub gpu_layer_budget: Option<String>,
    /// Who executes spilled layers: `pcie` or `cpu`.
    pub offload_exec: Option<String>,
    /// Longest sequence in tokens, prompt and answer.
    pub max_seq: Option<usize>,
    /// Compute threads of each worker.
    pub threads: Option<usize>,
    /// Sequences that may be live at once.
    pub parallel: Option<usize>,
    /// KV cache element: `auto`, `f32` or `f16`.
    pub kv_type: Option<String>,
    /// Tokens of the largest step.
    pub chunk: Option<usize>,
}
