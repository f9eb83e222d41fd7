//! What a model takes in memory once a worker holds it: matrices packed for the kernels, everything else as f32.

use super::{OpenError, WeightRefusal};
use crate::planner::{GpuSizes, LayerSizes, ModelSummary};
use spillway_kernels::device_layout::DeviceLayout;
use spillway_kernels::formats::Format;
use spillway_kernels::pack::PackedMatrix;
use spillway_model::file::ModelFile;
use spillway_model::program::{Layer, Step, WeightRef};
use spillway_protocol::plan::PlannedModel;
use spillway_worker::states::AreaSize;
use spillway_worker_gpu::band::{LayerNeeds, ModelWidths, largest_group};
use std::path::Path;

/// A file whose weights are being sized.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizer<'a> {
    pub file: &'a ModelFile,
    pub path: &'a Path,
}

/// A matrix as the kernels hold it.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    bytes: u64,
    gpu_bytes: u64,
    format: Format,
}

impl Sizer<'_> {
    pub(super) fn summary(self) -> Result<ModelSummary, OpenError> {
        let (config, program) = (self.file.config(), self.file.program());
        let layers: Result<Vec<LayerSizes>, OpenError> =
            program.layers.iter().map(|layer| self.layer(layer)).collect();
        let head = self.matrix(&program.head.output)?;
        Ok(ModelSummary {
            model: PlannedModel {
                path: self.path.into(),
                file_bytes: self.file.gguf().file_len() as u64,
                architecture: config.architecture.clone(),
                layers: program.layers.len(),
                d_model: program.d_model,
                vocab: program.vocab,
                context_length: config.context_length,
            },
            layers: layers?,
            embedding_bytes: self.file.weight(&program.embed)?.info.range.len() as u64,
            head_bytes: head.bytes + vector_bytes(&program.head.norm),
            head_format: head.format,
            gpu_head_bytes: head.gpu_bytes + vector_bytes(&program.head.norm),
            gpu_widths: ModelWidths::of(program),
        })
    }

    fn layer(self, layer: &Layer) -> Result<LayerSizes, OpenError> {
        let mut weights = 0;
        let mut gpu = GpuSizes { needs: LayerNeeds::of(layer), ..GpuSizes::default() };
        for bytes in layer.steps.iter().flat_map(vectors).map(vector_bytes) {
            weights += bytes;
            gpu.add(bytes);
        }
        gpu.largest_group =
            largest_group(layer, |weight| Ok::<_, OpenError>(self.matrix(weight)?.gpu_bytes))?;
        let (mut elements, mut formats) = (0, Vec::new());
        for weight in matrices(layer) {
            let matrix = self.matrix(weight)?;
            weights += matrix.bytes;
            gpu.add(matrix.gpu_bytes);
            elements += (weight.rows * weight.cols) as u64;
            if !formats.contains(&matrix.format) {
                formats.push(matrix.format);
            }
        }
        let recurrent = layer.recurrent.map_or(0, |shape| shape.conv_len() + shape.matrix_len());
        let kv = layer.kv.map_or(0, |shape| shape.kv_heads * (shape.key_dim + shape.value_dim));
        Ok(LayerSizes {
            weights,
            elements,
            kv_elements: kv as u64,
            state_values: recurrent as u64,
            states: AreaSize::of_layer(layer),
            buffers: layer.buffers.clone(),
            hidden: layer.steps.iter().map(hidden).max().unwrap_or(0),
            widest_input: matrices(layer).map(|weight| weight.cols).max().unwrap_or(0),
            formats,
            gpu,
        })
    }

    fn matrix(self, weight: &WeightRef) -> Result<Matrix, OpenError> {
        let refused =
            |reason| OpenError::Weight { path: self.path.into(), tensor: weight.name.clone(), reason };
        let ggml_type = self.file.weight(weight)?.info.ggml_type;
        let format = Format::from_ggml(ggml_type.0)
            .ok_or_else(|| refused(WeightRefusal::NoKernel(ggml_type.to_string())))?;
        let bytes = PackedMatrix::packed_bytes(format, weight.rows, weight.cols)
            .map_err(|error| refused(WeightRefusal::Shape(error)))?;
        let gpu_bytes = DeviceLayout::new(format, weight.cols)
            .and_then(|layout| layout.matrix_bytes(weight.rows))
            .map_err(|error| refused(WeightRefusal::Shape(error)))?;
        Ok(Matrix { bytes: bytes as u64, gpu_bytes: gpu_bytes as u64, format })
    }
}

/// Bytes of a weight that a worker decodes to f32.
fn vector_bytes(weight: &WeightRef) -> u64 {
    (weight.rows * weight.cols * size_of::<f32>()) as u64
}

/// f32 values per token that a step computes between its matrices.
fn hidden(step: &Step) -> usize {
    match step {
        Step::GatedMlp { gate, up, .. } => gate.rows + up.rows,
        _ => 0,
    }
}

fn matrices(layer: &Layer) -> impl Iterator<Item = &WeightRef> {
    layer.steps.iter().flat_map(|step| match step {
        Step::Linear { weight, .. } => vec![weight],
        Step::GatedMlp { gate, up, down, .. } => vec![gate, up, down],
        _ => vec![],
    })
}

/// Weights of a step that a worker decodes to f32.
fn vectors(step: &Step) -> Vec<&WeightRef> {
    match step {
        Step::Linear { bias, .. } => bias.iter().collect(),
        Step::GatedMlp { .. } => vec![],
        step => step.weights(),
    }
}
