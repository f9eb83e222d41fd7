//! Steps that come again and again in the same shape are captured once as a graph and replayed: one call instead of a
//! thousand launches. This is the one place that decides whether a step may be captured.

use super::error::BandError;
use crate::hip::{Graph, HipError, Stream};
use crate::launch::{MAX_ALONE, PARTITION};
use std::collections::HashMap;

/// Switches capturing off when it is `0`.
const SWITCH: &str = "SPILLWAY_GPU_GRAPHS";
/// Most tokens of a step that is captured: more are prompts, whose shapes seldom come again. Attention is queued alike for
/// all steps of so many tokens, however they belong to spans.
const MAX_TOKENS: usize = MAX_ALONE;
/// Most shapes that are remembered; then all are forgotten.
const MAX_SHAPES: usize = 64;

/// What must be equal for a step to be another's replay. Everything else about a step is in the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub tokens: usize,
    pub spans: usize,
    /// Largest context of any row, rounded up: see [`captured_context`].
    pub context: usize,
}

/// The context to queue a captured step with: the partitions of the longest row, up to a power of two, so that a growing
/// sequence needs few graphs.
pub(super) fn captured_context(longest: usize) -> usize {
    captured_partitions(longest) * PARTITION
}

/// The same in partitions.
pub(super) fn captured_partitions(longest: usize) -> usize {
    longest.div_ceil(PARTITION).next_power_of_two()
}

/// Graphs by shape.
#[derive(Debug)]
pub(super) struct Replay {
    allowed: bool,
    /// `None`: the shape was seen once.
    shapes: HashMap<Shape, Option<Graph>>,
}

impl Replay {
    /// No graph yet. Whether there will be any is the environment's decision.
    pub fn from_env() -> Self {
        let allowed = std::env::var_os(SWITCH).is_none_or(|value| value != "0");
        Self { allowed, shapes: HashMap::new() }
    }

    /// Whether a step of so many tokens may be captured.
    pub fn may_capture(&self, tokens: usize) -> bool {
        self.allowed && tokens <= MAX_TOKENS
    }

    /// Queues the step: replays it if its shape was captured, captures it if the shape comes for the second time, or just
    /// calls `queue`.
    pub fn queue(
        &mut self,
        stream: &Stream,
        shape: Shape,
        mut queue: impl FnMut() -> Result<(), BandError>,
    ) -> Result<(), BandError> {
        if !self.may_capture(shape.tokens) {
            return queue();
        }
        match self.shapes.get(&shape) {
            None => {
                if self.shapes.len() >= MAX_SHAPES {
                    self.shapes.clear();
                }
                self.shapes.insert(shape, None);
                queue()
            }
            Some(None) => match stream.capture(&mut queue) {
                Ok(graph) => {
                    launch(&graph, stream)?;
                    self.shapes.insert(shape, Some(graph));
                    Ok(())
                }
                Err(BandError::Hip(error)) if error.code() != "gpu_lost" => {
                    tracing::warn!(%error, "steps are not captured as graphs on this device");
                    self.allowed = false;
                    queue()
                }
                Err(error) => Err(error),
            },
            Some(Some(graph)) => Ok(launch(graph, stream)?),
        }
    }
}

fn launch(graph: &Graph, stream: &Stream) -> Result<(), HipError> {
    // SAFETY: a graph holds only addresses of the band's own memory, which lives in the arena that the band drops last.
    unsafe { graph.launch(stream) }
}
