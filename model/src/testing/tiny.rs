//! Tiny complete models with seeded random weights: small enough to run in a test, whole enough for every process.

use super::writer::{GgufWriter, MetaValue};
use crate::arch::Architecture;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::gguf::{GgmlType, Gguf};
use crate::program::{Step, WeightRef};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

/// Tokens of every tiny model: 256 bytes, some merges, three control tokens, padding.
pub const TINY_VOCAB: usize = 288;

/// The vocabulary is padded to a multiple of this.
const PADDING: usize = 32;

/// Pairs merged in this order; the byte-level spelling of a space is `Ġ`.
const MERGES: &[&str] = &[
    "Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "o r", "Ġ w", "l l", "i s",
    "in g", "Ġ c", "a n", "an d", "Ġa nd", "e n", "n d",
];
const CONTROL: &[&str] = &["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}\
     <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Sizes of a tiny model.
#[derive(Debug, Clone, Copy)]
struct Shape {
    d_model: u32,
    ffn: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Rotated dimensions in architectures that rotate a part of the head.
    partial_rotary: u32,
    key_heads: u32,
    value_heads: u32,
    /// Dimensions of these heads.
    linear_dim: u32,
    /// Tokens at least.
    vocab: usize,
    /// Every how many layers of a hybrid attend.
    interval: u32,
}

/// Whole Q8_0 blocks in every row.
const TINY: Shape = Shape {
    d_model: 64,
    ffn: 128,
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    partial_rotary: 16,
    key_heads: 2,
    value_heads: 4,
    linear_dim: 32,
    vocab: TINY_VOCAB,
    interval: 4,
};

/// As small as a model can be while every size differs from one.
const SEEDLING: Shape = Shape {
    d_model: 4,
    ffn: 6,
    heads: 2,
    kv_heads: 2,
    head_dim: 4,
    partial_rotary: 2,
    key_heads: 2,
    value_heads: 2,
    linear_dim: 4,
    vocab: 0,
    interval: 2,
};

/// A hybrid model of 27 thousand million weights.
const LARGE: Shape = Shape {
    d_model: 5120,
    ffn: 17_408,
    heads: 24,
    kv_heads: 4,
    head_dim: 256,
    partial_rotary: 64,
    key_heads: 16,
    value_heads: 48,
    linear_dim: 128,
    vocab: 248_320,
    interval: 4,
};

/// A tiny model to be written: the architecture's real shape at a small size.
#[derive(Debug, Clone)]
pub struct TinyModel {
    architecture: &'static str,
    shape: Shape,
    layers: u32,
    weights: GgmlType,
    tied: bool,
    seed: u64,
    context_length: u32,
}

impl TinyModel {
    /// A model of `architecture` (a supported name): 4 layers, F32, tied, seed 1, context 512.
    pub fn new(architecture: &'static str) -> Self {
        let weights = GgmlType::F32;
        TinyModel { architecture, shape: TINY, layers: 4, weights, tied: true, seed: 1, context_length: 512 }
    }

    /// The smallest model of `architecture`, with a vocabulary of six tokens and padding: a file of a few kilobytes to mutate.
    pub fn seedling(architecture: &'static str) -> Self {
        TinyModel { shape: SEEDLING, layers: 2, ..TinyModel::new(architecture) }
    }

    /// A hybrid model of the real shape of 27B, with 64 layers: only to be outlined.
    pub fn large() -> Self {
        TinyModel { shape: LARGE, layers: 64, context_length: 262_144, ..TinyModel::new("qwen35") }.untied()
    }

    /// Number of layers.
    pub fn layers(mut self, layers: u32) -> Self {
        self.layers = layers;
        self
    }

    /// Stores matrices as Q8_0 instead of F32 (vectors and convolutions stay F32).
    pub fn q8_0(mut self) -> Self {
        self.weights = GgmlType::Q8_0;
        self
    }

    /// Gives the model an output projection of its own.
    pub fn untied(mut self) -> Self {
        self.tied = false;
        self
    }

    /// Seed of the weights.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Longest sequence, in tokens.
    pub fn context_length(mut self, tokens: u32) -> Self {
        self.context_length = tokens;
        self
    }

    /// The file, open to changes.
    ///
    /// # Errors
    /// An architecture that is not supported.
    pub fn writer(&self) -> Result<GgufWriter, ModelError> {
        let mut file = GgufWriter::new();
        self.metadata(&mut file);
        for (weight, kind) in self.program_weights(&file)? {
            let mut values = Values::new(self.seed, &weight.name);
            let values: Vec<f32> =
                (0..weight.rows * weight.cols).map(|_| kind.draw(&mut values, weight.cols)).collect();
            let (stored, bytes) = match (kind, self.weights) {
                (Kind::Matrix | Kind::Embedding, GgmlType::Q8_0) => (GgmlType::Q8_0, q8_0(&values)),
                _ => (GgmlType::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            };
            let dims: &[u64] = if weight.rows == 1 {
                &[weight.cols as u64]
            } else {
                &[weight.cols as u64, weight.rows as u64]
            };
            file.tensor(&weight.name, dims, stored, bytes);
        }
        Ok(file)
    }

    /// The file as bytes.
    ///
    /// # Errors
    /// An architecture that is not supported.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ModelError> {
        Ok(self.writer()?.to_bytes())
    }

    /// Writes the file to `path`.
    ///
    /// # Errors
    /// An architecture that is not supported, or a path that cannot be written.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.to_bytes().map_err(std::io::Error::other)?)
    }

    /// Writes a file that has everything but the weights: a header, and the length of all of it. Matrices count as Q4_K, so their rows
    /// must be whole blocks.
    ///
    /// # Errors
    /// An architecture that is not supported, or a path that cannot be written.
    pub fn write_outline(&self, path: &Path) -> std::io::Result<()> {
        let mut file = GgufWriter::new();
        self.metadata(&mut file);
        let mut end = 0u64;
        for (weight, kind) in self.program_weights(&file).map_err(std::io::Error::other)? {
            let (rows, cols) = (weight.rows as u64, weight.cols as u64);
            let (stored, bytes) = match kind {
                Kind::Matrix | Kind::Embedding => (GgmlType::Q4_K, rows * cols / 256 * 144),
                _ => (GgmlType::F32, rows * cols * 4),
            };
            let dims: &[u64] = if rows == 1 { &[cols] } else { &[cols, rows] };
            file.tensor(&weight.name, dims, stored, Vec::new()).at_offset(end);
            end += bytes.next_multiple_of(32);
        }
        let header = file.to_bytes();
        let mut out = std::fs::File::create(path)?;
        out.write_all(&header)?;
        out.set_len(header.len() as u64 + end)
    }

    fn metadata(&self, file: &mut GgufWriter) {
        let (arch, shape) = (self.architecture, self.shape);
        let numbers: &[(&str, u32)] = &[
            ("block_count", self.layers),
            ("context_length", self.context_length),
            ("embedding_length", shape.d_model),
            ("feed_forward_length", shape.ffn),
            ("attention.head_count", shape.heads),
            ("attention.head_count_kv", shape.kv_heads),
            ("attention.key_length", shape.head_dim),
            ("attention.value_length", shape.head_dim),
            ("rope.dimension_count", if arch == "qwen35" { shape.partial_rotary } else { shape.head_dim }),
        ];
        let recurrent: &[(&str, u32)] = &[
            ("ssm.conv_kernel", 4),
            ("ssm.state_size", shape.linear_dim),
            ("ssm.group_count", shape.key_heads),
            ("ssm.time_step_rank", shape.value_heads),
            ("ssm.inner_size", shape.value_heads * shape.linear_dim),
            ("full_attention_interval", shape.interval),
        ];
        file.key("general.architecture", arch).key("general.name", format!("tiny {arch}"));
        for (name, value) in numbers.iter().chain(if arch == "qwen35" { recurrent } else { &[] }) {
            file.key(&format!("{arch}.{name}"), *value);
        }
        file.key(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6f32);
        file.key(&format!("{arch}.rope.freq_base"), 10_000.0f32);
        if self.shape.d_model < TINY.d_model {
            tokenizer(file, &["a", "b", "ab"].map(str::to_owned), &["a b"], shape.vocab);
        } else {
            tokenizer(file, &byte_tokens(), MERGES, shape.vocab);
        }
    }

    /// The weights of the program that the metadata implies, and what each is.
    fn program_weights(&self, file: &GgufWriter) -> Result<Vec<(WeightRef, Kind)>, ModelError> {
        let gguf = Gguf::parse(file.to_bytes())?;
        let architecture = Architecture::find(self.architecture)?;
        let config = ModelConfig::from_metadata(gguf.metadata(), architecture.name, architecture.hybrid)?;
        let untied = !self.tied;
        let program = architecture.program(&config, &|name| untied && name == "output.weight", None)?;
        let mut kinds: BTreeMap<&str, Kind> =
            BTreeMap::from([(program.embed.name.as_str(), Kind::Embedding)]);
        for step in program.layers.iter().flat_map(|layer| &layer.steps) {
            match step {
                Step::Norm { weight, .. } | Step::HeadNorm { weight, .. } => {
                    kinds.insert(&weight.name, Kind::Norm);
                }
                Step::Linear { bias: Some(bias), .. } => {
                    kinds.insert(&bias.name, Kind::Small);
                }
                Step::DeltaNet { spec, .. } => {
                    kinds.insert(&spec.norm.name, Kind::Norm);
                    kinds.insert(&spec.decay.name, Kind::Decay);
                    kinds.insert(&spec.dt_bias.name, Kind::Small);
                    kinds.insert(&spec.conv.name, Kind::Taps);
                }
                _ => {}
            }
        }
        kinds.insert(&program.head.norm.name, Kind::Norm);
        let mut weights: Vec<(WeightRef, Kind)> = program
            .weights()
            .map(|w| (w.clone(), kinds.get(w.name.as_str()).copied().unwrap_or(Kind::Matrix)))
            .collect();
        if self.tied {
            weights.pop();
        }
        Ok(weights)
    }
}

/// What a weight is for, which decides the distribution of its values.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Matrix,
    Embedding,
    Norm,
    Small,
    Decay,
    Taps,
}

impl Kind {
    /// A value of a weight with rows of `cols`.
    fn draw(self, values: &mut Values, cols: usize) -> f32 {
        let unit = values.next();
        match self {
            // Keeps the variance of what it multiplies.
            Kind::Matrix => unit * (3.0 / cols as f32).sqrt(),
            Kind::Embedding => unit * 1.7,
            Kind::Norm => 1.0 + 0.1 * unit,
            Kind::Small => 0.1 * unit,
            Kind::Decay => -0.5 - 0.45 * unit,
            Kind::Taps => 0.5 * unit,
        }
    }
}

/// Pseudo-random numbers in [-1, 1), reproducible by seed and tensor name (SplitMix64).
struct Values(u64);

impl Values {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a, so that a tensor's values do not depend on which other tensors exist.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Values(hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Q8_0 blocks of 32: an f16 scale, here always a power of two, and 32 signed bytes.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(values.len() / 32 * 34);
    for block in values.chunks_exact(32) {
        let largest = block.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let exponent = (largest / 127.0).log2().ceil().clamp(-14.0, 15.0);
        let half = ((exponent as i16 + 15) as u16) << 10;
        out.extend(half.to_le_bytes());
        let scale = exponent.exp2();
        out.extend(block.iter().map(|v| (v / scale).round() as i8 as u8));
    }
    out
}

/// The character that byte-level BPE vocabularies write for a byte.
fn byte_char(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap_or('\u{fffd}'),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte) - 0x7f).unwrap_or('\u{fffd}'),
        0xad => '\u{143}',
    }
}

/// A token for every byte and for every merge.
fn byte_tokens() -> Vec<String> {
    let bytes = (0..=255).map(|byte| byte_char(byte).to_string());
    bytes.chain(MERGES.iter().map(|pair| pair.replace(' ', ""))).collect()
}

/// Writes a byte-level BPE vocabulary of `text` tokens, followed by control tokens and padding to at least `vocab`.
fn tokenizer(file: &mut GgufWriter, text: &[String], merges: &[&str], vocab: usize) {
    const NORMAL: i32 = 1;
    const CONTROL_TYPE: i32 = 3;
    const UNUSED: i32 = 5;
    let mut tokens = text.to_vec();
    let mut types = vec![NORMAL; tokens.len()];
    let first_control = tokens.len() as u32;
    tokens.extend(CONTROL.iter().map(|&t| t.to_owned()));
    types.resize(tokens.len(), CONTROL_TYPE);
    let padded = tokens.len().next_multiple_of(PADDING).max(vocab);
    tokens.extend((tokens.len()..padded).map(|i| format!("[PAD{i}]")));
    types.resize(padded, UNUSED);
    file.key("tokenizer.ggml.model", "gpt2")
        .key("tokenizer.ggml.pre", "qwen2")
        .key("tokenizer.ggml.tokens", tokens)
        .key("tokenizer.ggml.token_type", MetaValue::I32s(types))
        .key("tokenizer.ggml.merges", merges.iter().map(|&m| m.to_owned()).collect::<Vec<_>>())
        .key("tokenizer.ggml.eos_token_id", first_control + 2)
        .key("tokenizer.ggml.padding_token_id", first_control)
        .key("tokenizer.ggml.add_bos_token", false)
        .key("tokenizer.chat_template", CHAT_TEMPLATE);
}
