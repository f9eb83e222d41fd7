//! A model file, ready to be run: container, configuration and program, checked against each other.

use crate::arch::{self, Architecture};
use crate::config::{self, ModelConfig};
use crate::error::ModelError;
use crate::gguf::{GgmlType, Gguf, TensorInfo};
use crate::program::{Program, WeightRef};
use std::collections::HashSet;
use std::path::Path;

/// Divisors of the rotary frequencies, one per pair (Llama 3).
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// An opened model: every tensor its program names exists, has the right shape and a format we compute with.
#[derive(Debug)]
pub struct ModelFile {
    gguf: Gguf,
    config: ModelConfig,
    program: Program,
    notes: Vec<String>,
}

/// The data of one weight.
#[derive(Debug, Clone, Copy)]
pub struct Weight<'a> {
    /// Where it lies in the file.
    pub info: &'a TensorInfo,
    /// Rows, each of `cols` elements.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// The rows one after the other, in the tensor's own format.
    pub bytes: &'a [u8],
}

impl ModelFile {
    /// Opens and checks the model at `path`.
    pub fn open(path: &Path) -> Result<ModelFile, ModelError> {
        let gguf = Gguf::open(path)?;
        ModelFile::from_gguf(gguf)
            .map_err(|error| ModelError::InFile { path: path.to_owned(), error: Box::new(error) })
    }

    /// The same without weights, which [`ModelFile::weight`] then has no bytes of: nothing of the file stays mapped
    /// ([`Gguf::open_header`]).
    pub fn open_header(path: &Path) -> Result<ModelFile, ModelError> {
        let gguf = Gguf::open_header(path)?;
        ModelFile::from_gguf(gguf)
            .map_err(|error| ModelError::InFile { path: path.to_owned(), error: Box::new(error) })
    }

    /// Checks the model in an opened container.
    pub fn from_gguf(gguf: Gguf) -> Result<ModelFile, ModelError> {
        let metadata = gguf.metadata();
        config::refuse_parts(metadata)?;
        let architecture = Architecture::find(config::architecture(metadata)?)?;
        // Before the configuration: a model of another kind lacks keys, which would be the less helpful refusal.
        arch::refuse_keys(metadata, architecture.name)?;
        let config = ModelConfig::from_metadata(metadata, architecture.name, architecture.hybrid)?;
        let divisors = rope_divisors(&gguf, config.rope.rotary_dim / 2)?;
        let program =
            architecture.program(&config, &|name| gguf.tensor(name).is_some(), divisors.as_deref())?;
        for weight in program.weights() {
            check(&gguf, weight)?;
        }
        let notes = unused(&gguf, &config, &program)?;
        Ok(ModelFile { gguf, config, program, notes })
    }

    /// The container.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The checked configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The model as steps over named weights.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What the file holds that a run does not use, and other oddities.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.gguf.notes().iter().chain(&self.notes).map(String::as_str)
    }

    /// The data of a weight that the program names; for any other, the refusal a file without it would get.
    pub fn weight(&self, weight: &WeightRef) -> Result<Weight<'_>, ModelError> {
        let info = check(&self.gguf, weight)?;
        Ok(Weight { info, rows: weight.rows, cols: weight.cols, bytes: self.gguf.bytes(info) })
    }
}

/// The tensor of `weight`, if it is what the program needs.
fn check<'a>(gguf: &'a Gguf, weight: &WeightRef) -> Result<&'a TensorInfo, ModelError> {
    let mut expected = vec![weight.cols as u64];
    if weight.rows != 1 {
        expected.push(weight.rows as u64);
    }
    let name = weight.name.clone();
    let Some(info) = gguf.tensor(&name) else { return Err(ModelError::MissingTensor { name, expected }) };
    if trimmed(&info.dims) != trimmed(&expected) {
        return Err(ModelError::Misshapen { name, expected, found: info.dims.clone() });
    }
    if !info.ggml_type.is_runnable() {
        return Err(ModelError::UnusableFormat {
            name,
            found: info.ggml_type,
            supported: GgmlType::runnable_names(),
        });
    }
    Ok(info)
}

/// Dimensions without the trailing ones, which mean nothing.
fn trimmed(dims: &[u64]) -> &[u64] {
    let kept = dims.iter().rposition(|&d| d != 1).map_or(0, |last| last + 1);
    &dims[..kept]
}

/// The file's own divisors of the rotary frequencies, when it has them.
fn rope_divisors(gguf: &Gguf, pairs: usize) -> Result<Option<Vec<f32>>, ModelError> {
    if gguf.tensor(ROPE_DIVISORS).is_none() {
        return Ok(None);
    }
    let info = check(gguf, &WeightRef { name: ROPE_DIVISORS.to_owned(), rows: 1, cols: pairs })?;
    let bad = |reason: String| ModelError::BadTensor { name: ROPE_DIVISORS.to_owned(), reason };
    if info.ggml_type != GgmlType::F32 {
        return Err(bad(format!("has format {}, frequency divisors are F32", info.ggml_type)));
    }
    let bytes = gguf.read(info)?;
    let (values, _) = bytes.as_chunks::<4>();
    let divisors: Vec<f32> = values.iter().map(|&v| f32::from_le_bytes(v)).collect();
    match divisors.iter().position(|d| !(1e-6..=1e6).contains(d)) {
        Some(i) => Err(bad(format!("divisor {i} is {}, not a usable positive number", divisors[i]))),
        None => Ok(Some(divisors)),
    }
}

/// Notes on keys and tensors that a run does not use; tensors it would have to use are refused.
fn unused(gguf: &Gguf, config: &ModelConfig, program: &Program) -> Result<Vec<String>, ModelError> {
    let used: HashSet<&str> = program.weights().map(|w| w.name.as_str()).chain([ROPE_DIVISORS]).collect();
    let blocks = config.layers..config.layers + config.nextn_layers;
    let unused = gguf.tensors().iter().map(|t| t.name.as_ref()).filter(|name| !used.contains(name));
    let (skipped, extra): (Vec<&str>, Vec<&str>) =
        unused.partition(|name| arch::layer_of(name).is_some_and(|layer| blocks.contains(&layer)));
    arch::refuse_tensors(&extra)?;
    let mut notes: Vec<String> = arch::note_keys(gguf.metadata(), &config.architecture).into_iter().collect();
    if !skipped.is_empty() {
        notes.push(format!(
            "tensors of multi-token prediction blocks {blocks:?}, not used: {}",
            skipped.len()
        ));
    }
    if let Some(first) = extra.first() {
        notes.push(format!("tensors without effect: {}, the first is {first:?}", extra.len()));
    }
    Ok(notes)
}
