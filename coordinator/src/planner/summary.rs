//! The model as the planner sees it: sizes only.

use spillway_kernels::formats::Format;
use spillway_protocol::plan::PlannedModel;
use spillway_worker::states::AreaSize;
use spillway_worker_gpu::band::{LayerNeeds, ModelWidths, mapped_bytes};

/// Sizes of one layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Bytes of the weights as stored in memory.
    pub weights: u64,
    /// Elements of the matrices.
    pub elements: u64,
    /// Key and value elements per token.
    pub kv_elements: u64,
    /// f32 values of recurrent state per sequence.
    pub state_values: u64,
    /// What both together take where two workers share them.
    pub states: Vec<AreaSize>,
    /// Width of each buffer in f32 values per token, the residual first. Buffers of the same number share memory.
    pub buffers: Vec<usize>,
    /// f32 values per token between the matrices of a gated MLP.
    pub hidden: usize,
    /// Widest input of a matrix.
    pub widest_input: usize,
    /// Formats of the matrices, each once.
    pub formats: Vec<Format>,
    /// Sizes on a GPU.
    pub gpu: GpuSizes,
}

/// Sizes of one layer on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuSizes {
    /// Bytes of the weights as stored on the device.
    pub weights: u64,
    /// Bytes of the weights where they stay in host memory for the device to read.
    pub mapped: u64,
    /// Bytes of the largest group of matrices that is streamed from host memory at once.
    pub largest_group: u64,
    /// What its scratch depends on.
    pub needs: LayerNeeds,
}

impl GpuSizes {
    /// Counts a weight of so many bytes.
    pub fn add(&mut self, weight: u64) {
        self.weights += weight;
        self.mapped += mapped_bytes(weight);
    }
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
    /// Format of the output projection.
    pub head_format: Format,
    /// Bytes of final norm and output projection as stored on a GPU.
    pub gpu_head_bytes: u64,
    /// What scratch on a GPU depends on beside the layers.
    pub gpu_widths: ModelWidths,
}

impl ModelSummary {
    /// Whether any matrix is quantised.
    pub fn is_quantised(&self) -> bool {
        let mut formats = self.layers.iter().flat_map(|layer| &layer.formats).chain([&self.head_format]);
        formats.any(|format| format.is_quantised())
    }

    /// Elements of the matrices of all layers: the size that tells small models from large ones, without vocabularies,
    /// which differ much between models of one kind.
    pub fn layer_weights(&self) -> u64 {
        self.layers.iter().map(|layer| layer.elements).sum()
    }
}
