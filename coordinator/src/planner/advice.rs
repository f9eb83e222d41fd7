//! What would fit where a request does not. Everything that is said here was tried.

use super::auto::resident_counts;
use super::request::{Budget, Division, Offload, Wishes};
use super::{Machine, ModelSummary, Refusal, Shortage, place};
use spillway_protocol::plan::KV_BLOCK_TOKENS;

/// What a user could ask for instead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Advice {
    /// The largest number of layers in GPUs' memory that would fit.
    pub budget: Option<usize>,
    /// Whether it would only with the others on the CPU.
    pub on_cpu: bool,
    /// Layers may spill, but no number of resident ones fits.
    pub no_budget: bool,
    /// Whether shares by memory would fit where equal ones do not.
    pub split: bool,
    /// The longest context that would fit.
    pub context: Option<usize>,
}

impl std::fmt::Display for Advice {
    /// Clauses that follow a sentence, nothing without advice.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.split {
            f.write_str("; split `auto` would fit")?;
        }
        if let Some(layers) = self.budget {
            let how = if self.on_cpu { " with offload_exec `cpu`" } else { "" };
            write!(f, "; gpu_layer_budget {layers}{how} would fit, the other layers spill")?;
        }
        if self.no_budget {
            f.write_str("; no gpu_layer_budget would fit, `auto` neither")?;
        }
        match self.context {
            Some(tokens) => write!(f, "; max_seq {tokens} would fit"),
            None => Ok(()),
        }
    }
}

/// Tells what would fit where the request does not.
pub(super) fn with_advice(
    refusal: Refusal,
    model: &ModelSummary,
    machine: &Machine,
    wishes: &Wishes,
) -> Refusal {
    let Refusal::Memory(shortage) = refusal else { return refusal };
    let search = Search { model, machine };
    let resident = search.asked(wishes);
    let may_spill = !wishes.seats.is_empty() && !matches!(wishes.division, Division::Explicit(_));
    let as_asked = if may_spill { search.most_that_fits(wishes) } else { None };
    let on_cpu = Wishes { offload: Offload::Cpu, ..wishes.clone() };
    let moved = if may_spill && as_asked.is_none() { search.most_that_fits(&on_cpu) } else { None };
    let weighted = Wishes { division: Division::Weighted, ..wishes.clone() };
    let advice = Advice {
        budget: as_asked.or(moved),
        on_cpu: moved.is_some(),
        no_budget: may_spill && as_asked.or(moved).is_none(),
        split: may_spill
            && wishes.division == Division::Uniform
            && wishes.seats.len() > 1
            && search.fits(&weighted, resident),
        context: search.longest_that_fits(wishes, resident),
    };
    Refusal::Memory(Box::new(Shortage { advice, ..*shortage }))
}

#[derive(Clone, Copy)]
struct Search<'a> {
    model: &'a ModelSummary,
    machine: &'a Machine,
}

impl Search<'_> {
    fn fits(self, wishes: &Wishes, resident: usize) -> bool {
        place(self.model, self.machine, wishes, resident).is_ok()
    }

    /// Resident layers that the request asks for: the fewest, if it leaves the number open.
    fn asked(self, wishes: &Wishes) -> usize {
        match wishes.budget {
            Budget::All => self.model.layers.len(),
            Budget::Layers(count) => count,
            Budget::Auto => resident_counts(self.model, wishes).next_back().unwrap_or_default(),
        }
    }

    /// The largest number of resident layers that fits, if any.
    fn most_that_fits(self, wishes: &Wishes) -> Option<usize> {
        resident_counts(self.model, wishes).find(|&resident| self.fits(wishes, resident))
    }

    /// The longest context that fits with everything else as it was asked for, if any: whole KV blocks.
    fn longest_that_fits(self, wishes: &Wishes, resident: usize) -> Option<usize> {
        let fits = |blocks: usize| {
            let shorter = Wishes { max_seq: blocks * KV_BLOCK_TOKENS, ..wishes.clone() };
            self.fits(&shorter, resident)
        };
        // More context never takes less memory, so the answer is found by halving.
        let (mut fitting, mut failing) = (0, wishes.max_seq.div_ceil(KV_BLOCK_TOKENS));
        while failing - fitting > 1 {
            let middle = fitting + (failing - fitting) / 2;
            if fits(middle) { fitting = middle } else { failing = middle }
        }
        (fitting > 0).then_some(fitting * KV_BLOCK_TOKENS)
    }
}
