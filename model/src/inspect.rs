//! A model file at a glance: what it is, how large, and in which formats, layer by layer.

use crate::file::ModelFile;
use crate::gguf::TensorInfo;
use crate::program::WeightRef;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};

/// Tensors of one format, counted together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FormatShare {
    /// Name of the format.
    pub format: String,
    /// Number of tensors.
    pub tensors: u64,
    /// Their elements.
    pub elements: u64,
    /// Their bytes in the file.
    pub bytes: u64,
}

/// A group of tensors that belong together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Bytes in the file.
    pub bytes: u64,
    /// Elements.
    pub elements: u64,
    /// By format, the largest share first.
    pub formats: Vec<FormatShare>,
}

/// How a layer mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mixer {
    /// Attention over a KV cache.
    Attention,
    /// A recurrent state.
    Recurrent,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerSummary {
    /// Number from 0.
    pub layer: usize,
    /// How it mixes tokens.
    pub mixer: Mixer,
    /// Its tensors.
    #[serde(flatten)]
    pub part: Part,
}

/// A whole file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Container version.
    pub gguf_version: u32,
    /// Length of the file.
    pub file_bytes: u64,
    /// Architecture.
    pub architecture: String,
    /// Name the file gives itself.
    pub name: Option<String>,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Tokens the model distinguishes.
    pub vocab: usize,
    /// Longest sequence the model was made for.
    pub context_length: usize,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// All tensors that a run uses.
    pub used: Part,
    /// Tensors that a run does not use.
    pub unused: Part,
    /// The token embedding.
    pub embedding: Part,
    /// Every layer in order.
    pub layers: Vec<LayerSummary>,
    /// Final norm and output projection; without the latter when it is the embedding.
    pub head: Part,
    /// Oddities.
    pub notes: Vec<String>,
}

impl Part {
    fn of<'a>(tensors: impl Iterator<Item = &'a TensorInfo>) -> Part {
        let mut by_format: BTreeMap<_, FormatShare> = BTreeMap::new();
        for tensor in tensors {
            let share = by_format.entry(tensor.ggml_type).or_insert_with(|| FormatShare {
                format: tensor.ggml_type.to_string(),
                tensors: 0,
                elements: 0,
                bytes: 0,
            });
            share.tensors += 1;
            // The bytes lie in the file; the elements of a tensor whose format is unknown may be any number.
            share.elements = share.elements.saturating_add(tensor.elems());
            share.bytes += tensor.size();
        }
        let mut formats: Vec<FormatShare> = by_format.into_values().collect();
        formats.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.format.cmp(&b.format)));
        let elements = formats.iter().fold(0u64, |n, share| n.saturating_add(share.elements));
        Part { bytes: formats.iter().map(|share| share.bytes).sum(), elements, formats }
    }
}

impl ModelFile {
    /// The file at a glance.
    pub fn summary(&self) -> Summary {
        let (gguf, program) = (self.gguf(), self.program());
        let used: HashSet<&str> = program.weights().map(|w| w.name.as_str()).collect();
        let part = |weights: &mut dyn Iterator<Item = &WeightRef>| {
            Part::of(weights.filter_map(|w| gguf.tensor(&w.name)))
        };
        let layers = program.layers.iter().enumerate().map(|(layer, steps)| LayerSummary {
            layer,
            mixer: if steps.recurrent.is_some() { Mixer::Recurrent } else { Mixer::Attention },
            part: part(&mut steps.weights()),
        });
        let mut head = vec![&program.head.norm];
        if !program.is_tied() {
            head.push(&program.head.output);
        }
        let (used, unused) = gguf.tensors().iter().partition::<Vec<_>, _>(|t| used.contains(t.name.as_ref()));
        Summary {
            gguf_version: gguf.version(),
            file_bytes: gguf.file_len() as u64,
            architecture: self.config().architecture.clone(),
            name: gguf.metadata().str("general.name").ok().flatten().map(str::to_owned),
            d_model: program.d_model,
            vocab: program.vocab,
            context_length: self.config().context_length,
            tied: program.is_tied(),
            used: Part::of(used.into_iter()),
            unused: Part::of(unused.into_iter()),
            embedding: part(&mut std::iter::once(&program.embed)),
            layers: layers.collect(),
            head: part(&mut head.into_iter()),
            notes: self.notes().map(str::to_owned).collect(),
        }
    }
}
