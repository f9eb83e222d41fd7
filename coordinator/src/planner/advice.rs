//! What would fit where a request does not. Everything that is said here was tried, as a request that a user may make.

use super::auto::resident_counts;
use super::request::{Budget, Division, Offload, Wishes};
use super::{Machine, ModelSummary, PlacementRequest, Refusal, Shortage, place_as};
use spillway_protocol::plan::KV_BLOCK_TOKENS;

/// What a user could ask for instead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Advice {
    /// The largest number of layers in GPUs' memory that would fit.
    pub budget: Option<usize>,
    /// Whether it would only with the others on the CPU.
    pub on_cpu: bool,
    /// Whether a budget of `auto` would fit where no number of layers does: it may leave the GPUs out.
    pub auto: bool,
    /// Layers may spill, but no number of resident ones fits, and `auto` does not.
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
            let spilled = if layers == 0 { "all layers" } else { "the other layers" };
            write!(f, "; gpu_layer_budget {layers}{how} would fit, {spilled} spill")?;
        }
        if self.auto {
            f.write_str("; gpu_layer_budget `auto` would fit")?;
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
    request: &PlacementRequest,
    wishes: &Wishes,
) -> Refusal {
    let Refusal::Memory(shortage) = refusal else { return refusal };
    let search = Search { model, machine, request };
    let may_spill = !wishes.seats.is_empty() && !matches!(wishes.division, Division::Explicit(_));
    // `auto` has tried every budget, and where the request leaves it open, the CPU too.
    let all_tried = wishes.budget == Budget::Auto;
    let as_asked = if may_spill && !all_tried { search.largest_budget(None) } else { None };
    let cpu_tried = all_tried && wishes.offload_is_open;
    let try_cpu = may_spill && as_asked.is_none() && wishes.offload == Offload::Pcie && !cpu_tried;
    let moved = if try_cpu { search.largest_budget(Some("cpu")) } else { None };
    let budget = as_asked.or(moved);
    let auto = may_spill && budget.is_none() && !all_tried && search.auto_fits();
    // A GPU that shares the host's memory may have no budget; then none is spoken of.
    let integrated = wishes.seats.iter().any(|seat| machine.gpus.gpus[seat.gpu].integrated);
    let asked = search.with_fewest(wishes);
    let advice = Advice {
        budget,
        on_cpu: moved.is_some(),
        auto,
        no_budget: may_spill && !integrated && budget.is_none() && !auto,
        split: may_spill
            && wishes.division == Division::Uniform
            && wishes.seats.len() > 1
            && search.accepts(&PlacementRequest { split: Some("auto".into()), ..asked.clone() }),
        context: search.longest_that_fits(&asked, wishes.max_seq),
    };
    Refusal::Memory(Box::new(Shortage { advice, ..*shortage }))
}

#[derive(Clone, Copy)]
struct Search<'a> {
    model: &'a ModelSummary,
    machine: &'a Machine,
    request: &'a PlacementRequest,
}

impl Search<'_> {
    fn accepts(self, request: &PlacementRequest) -> bool {
        let wishes = request.read(self.model, &self.machine.gpus);
        wishes.is_ok_and(|wishes| place_as(self.model, self.machine, request, &wishes).is_ok())
    }

    /// The request, with the fewest resident layers where it leaves the number open: what fits so, fits `auto`.
    fn with_fewest(self, wishes: &Wishes) -> PlacementRequest {
        let fewest = || resident_counts(self.model, wishes).next_back().unwrap_or_default().to_string();
        let gpu_layer_budget = match wishes.budget {
            Budget::Auto => Some(fewest()),
            Budget::All | Budget::Layers(_) => self.request.gpu_layer_budget.clone(),
        };
        PlacementRequest { gpu_layer_budget, ..self.request.clone() }
    }

    /// The largest number of resident layers that fits, if any, with the others where the request says or `offload` does.
    fn largest_budget(self, offload: Option<&str>) -> Option<usize> {
        let offload_exec = offload.map(str::to_owned).or_else(|| self.request.offload_exec.clone());
        let with = |budget: usize| PlacementRequest {
            gpu_layer_budget: Some(budget.to_string()),
            offload_exec: offload_exec.clone(),
            ..self.request.clone()
        };
        (0..=self.model.layers.len()).rev().find(|&budget| self.accepts(&with(budget)))
    }

    fn auto_fits(self) -> bool {
        self.accepts(&PlacementRequest { gpu_layer_budget: Some("auto".into()), ..self.request.clone() })
    }

    /// The longest context that fits with everything else as it was asked for, if any: whole KV blocks.
    fn longest_that_fits(self, asked: &PlacementRequest, max_seq: usize) -> Option<usize> {
        let fits = |blocks: usize| {
            self.accepts(&PlacementRequest { max_seq: Some(blocks * KV_BLOCK_TOKENS), ..asked.clone() })
        };
        // More context never takes less memory, so the answer is found by halving.
        let (mut fitting, mut failing) = (0, max_seq.div_ceil(KV_BLOCK_TOKENS));
        while failing - fitting > 1 {
            let middle = fitting + (failing - fitting) / 2;
            if fits(middle) { fitting = middle } else { failing = middle }
        }
        (fitting > 0).then_some(fitting * KV_BLOCK_TOKENS)
    }
}
