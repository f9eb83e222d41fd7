//! Weights of a file as the kernels know them.

use spillway_kernels::formats::{Format, FormatError};
use spillway_model::error::ModelError;
use spillway_model::file::{ModelFile, Weight};
use spillway_model::program::{Layer, Step, WeightRef};

/// Why a weight cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// The model file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A weight's format has no kernels.
    #[error("weight `{name}`: no kernels for format {format}; convert the file to one of {known}")]
    NoKernels {
        /// Tensor name.
        name: String,
        /// Format of the tensor.
        format: String,
        /// Formats there are kernels for.
        known: String,
    },
    /// A weight's shape does not suit its format.
    #[error("weight `{name}`: {source}")]
    Format {
        /// Tensor name.
        name: String,
        /// What the kernels said.
        source: FormatError,
    },
}

impl WeightError {
    /// Stable name of the error.
    pub fn code(&self) -> &'static str {
        match self {
            WeightError::Model(error) => error.code(),
            WeightError::NoKernels { .. } => "format_without_kernels",
            WeightError::Format { source, .. } => source.code(),
        }
    }

    /// Names the weight in an error of the kernels.
    pub fn named(weight: &WeightRef) -> impl Fn(FormatError) -> WeightError {
        |source| WeightError::Format { name: weight.name.clone(), source }
    }
}

/// The kernels' format of a weight, found by name.
///
/// # Errors
/// There are no kernels for it.
pub fn format_of(weight: &WeightRef, source: &Weight<'_>) -> Result<Format, WeightError> {
    let format = source.info.ggml_type.to_string();
    Format::from_name(&format).ok_or_else(|| WeightError::NoKernels {
        name: weight.name.clone(),
        format,
        known: Format::ALL.map(Format::name).join(" "),
    })
}

/// A vector or a small table, decoded to f32, row by row.
///
/// # Errors
/// Its format is unknown or does not fit its size.
pub fn decode(weight: &WeightRef, source: &Weight<'_>) -> Result<Vec<f32>, WeightError> {
    let mut values = vec![0.0; weight.rows * weight.cols];
    format_of(weight, source)?.decode(source.bytes, &mut values).map_err(WeightError::named(weight))?;
    Ok(values)
}

/// Formats of the matrices of `layers`, each once, in the order in which they come.
///
/// # Errors
/// There are no kernels for one of them.
pub fn formats(model: &ModelFile, layers: &[Layer]) -> Result<Vec<Format>, WeightError> {
    let matrices = layers.iter().flat_map(|layer| &layer.steps).flat_map(|step| match step {
        Step::Linear { weight, .. } => vec![weight],
        Step::GatedMlp { gate, up, down, .. } => vec![gate, up, down],
        _ => vec![],
    });
    let mut formats = Vec::new();
    for weight in matrices {
        let format = format_of(weight, &model.weight(weight)?)?;
        if !formats.contains(&format) {
            formats.push(format);
        }
    }
    Ok(formats)
}

/// Names of [`formats`].
///
/// # Errors
/// As there.
pub fn format_names(model: &ModelFile, layers: &[Layer]) -> Result<Vec<String>, WeightError> {
    Ok(formats(model, layers)?.into_iter().map(|format| format.name().to_owned()).collect())
}
