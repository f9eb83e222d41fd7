//! Where keys, values and states of lifted layers lie in the memory that a CPU worker and a GPU worker share.
//!
//! One area for the keys and values of an attention step, two for a DeltaNet step (inputs of the convolution, matrices), layer after
//! layer, each on a page of its own, all in the layout of the CPU's kernels. Both workers and the planner place them by what is here.

use crate::band::Rings;
use spillway_kernels::ops::attention::KvDims;
use spillway_kernels::ops::deltanet::DeltaNetDims;
use spillway_model::file::ModelFile;
use spillway_model::program::{AttentionSpec, DeltaNetSpec, Layer, Step};
use spillway_protocol::ShmError;
use spillway_protocol::control::LoadBand;
use spillway_protocol::plan::{Lift, Limits};
use spillway_protocol::states::StateMemory;

/// Areas begin on pages.
const ALIGN: usize = 4096;

/// How large an area is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AreaSize {
    /// So many elements of keys and values in every KV block.
    Block(usize),
    /// So many f32 values in every state slot.
    Slot(usize),
}

impl AreaSize {
    /// The areas of a layer, in the order of its steps.
    pub fn of_layer(layer: &Layer) -> Vec<AreaSize> {
        let of_step = |step: &Step| match step {
            Step::Attention { spec, .. } => vec![AreaSize::Block(kv_dims(spec).block_len())],
            Step::DeltaNet { spec, .. } => {
                let dims = delta_net_dims(spec);
                vec![AreaSize::Slot(dims.conv_len()), AreaSize::Slot(dims.matrix_len())]
            }
            _ => Vec::new(),
        };
        layer.steps.iter().flat_map(of_step).collect()
    }

    fn bytes(self, limits: &Limits) -> usize {
        let element = usize::try_from(limits.kv_type.bytes()).unwrap_or(usize::MAX);
        match self {
            AreaSize::Block(elements) => limits.kv_blocks.saturating_mul(elements).saturating_mul(element),
            AreaSize::Slot(values) => {
                limits.max_sequences.saturating_mul(values).saturating_mul(size_of::<f32>())
            }
        }
    }
}

/// A part of the shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Offset of its first byte.
    pub at: usize,
    /// Bytes.
    pub bytes: usize,
}

/// Places the areas of layers; the result is the bytes of all, then the areas of each layer.
pub fn areas<'a>(layers: impl Iterator<Item = &'a [AreaSize]>, limits: &Limits) -> (usize, Vec<Vec<Area>>) {
    let mut end = 0usize;
    let mut place = |size: &AreaSize| {
        let area = Area { at: end, bytes: size.bytes(limits) };
        end = end.saturating_add(area.bytes).checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        area
    };
    let areas = layers.map(|sizes| sizes.iter().map(&mut place).collect()).collect();
    (end, areas)
}

/// The shared memory, and what of it belongs to which layer.
#[derive(Debug, Clone)]
pub struct SharedStates {
    /// The memory.
    pub memory: StateMemory,
    first: usize,
    layers: Vec<Vec<Area>>,
}

impl SharedStates {
    /// What a load says of the memory that its worker was given; none when nothing is lifted.
    ///
    /// # Errors
    /// There is no memory, or it is too small.
    pub fn of_load(model: &ModelFile, load: &LoadBand, rings: &Rings) -> Result<Option<Self>, ShmError> {
        let Some(lift) = &load.lift else { return Ok(None) };
        let missing = ShmError::Foreign("there is no memory for the states of lifted layers");
        let memory = rings.states.as_ref().ok_or(missing)?;
        let states = Self::new(memory, lift, &model.program().layers, &load.limits);
        states.map(Some).ok_or(ShmError::Foreign("the states of lifted layers do not fit their memory"))
    }

    /// What `memory` holds of the layers that are lifted, all of which the model has; none when it is too small for them.
    pub fn new(memory: &StateMemory, lift: &Lift, layers: &[Layer], limits: &Limits) -> Option<Self> {
        let lifted = layers.get(lift.layers.clone())?;
        let sizes: Vec<Vec<AreaSize>> = lifted.iter().map(AreaSize::of_layer).collect();
        let (bytes, layers) = areas(sizes.iter().map(Vec::as_slice), limits);
        let states = Self { memory: memory.clone(), first: lift.layers.start, layers };
        (bytes <= memory.len()).then_some(states)
    }

    /// The areas of a layer of the model, in the order of its steps; none of a layer that is not lifted.
    pub fn of(&self, layer: usize) -> &[Area] {
        let index = layer.checked_sub(self.first);
        index.and_then(|index| self.layers.get(index)).map_or(&[], Vec::as_slice)
    }
}

/// What the CPU's kernels call the sizes of an attention step.
pub fn kv_dims(spec: &AttentionSpec) -> KvDims {
    let &AttentionSpec { kv_heads, key_dim, value_dim, .. } = spec;
    KvDims { kv_heads, key_dim, value_dim }
}

/// What the CPU's kernels call the sizes of a DeltaNet step.
pub fn delta_net_dims(spec: &DeltaNetSpec) -> DeltaNetDims {
    let &DeltaNetSpec { key_heads, value_heads, head_dim, conv_kernel, eps, .. } = spec;
    DeltaNetDims { key_heads, value_heads, head_dim, conv_kernel, eps }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_protocol::plan::{ActivationType, KvType};

    #[test]
    fn areas_do_not_overlap_and_begin_on_pages() {
        let limits = Limits {
            max_seq: 64,
            max_sequences: 3,
            kv_blocks: 5,
            kv_type: KvType::F16,
            activations: ActivationType::Int8,
            max_step_tokens: 8,
            max_logit_rows: 1,
        };
        let layers = [vec![AreaSize::Block(100)], vec![AreaSize::Slot(2000), AreaSize::Slot(7)], vec![]];
        let (bytes, areas) = areas(layers.iter().map(Vec::as_slice), &limits);
        let area = |at, bytes| Area { at, bytes };
        assert_eq!(areas, [vec![area(0, 1000)], vec![area(4096, 24_000), area(28_672, 84)], vec![]]);
        assert_eq!(bytes, 32_768);
    }
}
