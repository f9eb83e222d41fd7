//! Which part of a model a band is, and for which sizes.

use super::error::BandError;
use spillway_protocol::plan::{Limits, Residency};
use std::ops::Range;

/// Most sequences of one step.
pub const MAX_SEQUENCES: usize = 256;

/// Which part of a model a band is, and for which sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandSpec {
    /// Contiguous layers, 0-based, end exclusive.
    pub layers: Range<usize>,
    /// Layers right before them that it runs for spans for which they are lifted, out of page-locked host memory; empty for none.
    pub lifted: Range<usize>,
    /// Whether it turns token ids into residual rows.
    pub embed: bool,
    /// Whether it applies the final norm and the output projection.
    pub head: bool,
    /// Where the weights of each layer live, in order.
    pub residency: Vec<Residency>,
    /// Sizes to allocate for.
    pub limits: Limits,
}

impl BandSpec {
    /// The layers it runs, lifted ones first.
    pub(super) fn all_layers(&self) -> Range<usize> {
        self.layers.start - self.lifted.len()..self.layers.end
    }

    /// Where the weights of [`BandSpec::all_layers`] live.
    pub(super) fn all_residency(&self) -> Vec<Residency> {
        self.lifted.clone().map(|_| Residency::HostMapped).chain(self.residency.iter().copied()).collect()
    }

    /// Whether a model of `available` layers has such a band.
    pub(super) fn check(&self, available: usize) -> Result<(), BandError> {
        let Limits { max_sequences, max_step_tokens, max_logit_rows, .. } = self.limits;
        let rules = [
            (self.layers.is_empty() || self.layers.end > available, "the file does not have these layers"),
            (self.residency.len() != self.layers.len(), "every layer's weights live in one place"),
            (
                self.residency.contains(&Residency::Host),
                "a GPU reads device memory and mapped host memory only",
            ),
            (
                !self.lifted.is_empty() && self.lifted.end != self.layers.start,
                "layers are lifted from the stage right before",
            ),
            (
                !self.lifted.is_empty() && self.residency.contains(&Residency::HostMapped),
                "where layers are lifted, all others are in the device's memory",
            ),
            (self.embed && self.layers.start != 0, "only the first band embeds"),
            (self.head && self.layers.end != available, "only the last band has the head"),
            (max_sequences == 0 || max_sequences > MAX_SEQUENCES, "a GPU worker serves 1 to 256 sequences"),
            (max_step_tokens == 0, "a step has at least one token"),
            (self.head && max_logit_rows == 0, "a logits frame has at least one row"),
        ];
        match rules.into_iter().find(|(broken, _)| *broken) {
            Some((_, reason)) => Err(BandError::Spec { layers: self.layers.clone(), available, reason }),
            None => Ok(()),
        }
    }
}
