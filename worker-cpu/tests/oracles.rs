//! Against goldens of implementations that are not ours: transformers for exact files, exactly dequantised weights for
//! quantised ones (shared/oracles/README.md).

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "numbers of small test models"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "the program is a test")]

mod support;

use serde_json::Value;
use spillway_kernels::formats::Format;
use spillway_model::file::ModelFile;
use spillway_model::gguf::{Array, GgmlType, Gguf, Value as Meta};
use spillway_model::testing::{GgufWriter, MetaValue, oracles};
use spillway_protocol::frame::LogitRows;
use spillway_worker_cpu::band::Observer;
use std::path::Path;
use std::sync::Arc;
use support::{Piece, Pipeline, Rounding, argmax, open};

/// Folder and unquantised files.
const EXACT: [(&str, &[&str]); 5] = [
    ("llama", &["llama-bf16"]),
    ("qwen2", &["qwen2-bf16"]),
    ("qwen3", &["qwen3-bf16"]),
    ("qwen35", &["qwen35-bf16", "qwen35-f16"]),
    ("qwen35_r1mtp", &["qwen35_r1mtp-bf16"]),
];
/// Largest distance of a logit from transformers.
const TOLERANCE: f64 = 1e-3;
/// Largest distance of a value of a recurrent state from the reference.
const STATE_TOLERANCE: f64 = 1e-4;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

/// `[[id, value], …]`.
fn pairs(value: &Value) -> Vec<(usize, f64)> {
    let pair = |pair: &Value| (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
    value.as_array().unwrap().iter().map(pair).collect()
}

fn mean_and_std(logits: &[f32]) -> (f64, f64) {
    let n = logits.len() as f64;
    let mean = logits.iter().map(|&value| f64::from(value)).sum::<f64>() / n;
    let variance = logits.iter().map(|&value| (f64::from(value) - mean).powi(2)).sum::<f64>() / n;
    (mean, variance.sqrt())
}

fn near(what: &str, found: f64, golden: f64, tolerance: f64) {
    assert!((found - golden).abs() <= tolerance, "{what}: {found} instead of {golden}");
}

/// Every position's logits are within 1e-3 of transformers', the largest is the same, and so are 32 greedy tokens.
#[test]
fn exact_files_agree_with_transformers() {
    let Some(dir) = oracles() else { return };
    for (folder, files) in EXACT {
        let golden = json(&dir.join(folder).join("compact.json"));
        for file in files {
            let model = open(&dir.join(folder).join(format!("{file}.gguf")));
            let mut pipeline = Pipeline::whole(&model, Rounding::LEAST);
            for (length, sequence) in golden["seqs"].as_object().unwrap() {
                check_logits(&format!("{file}/{length}"), &mut pipeline, sequence);
            }
        }
    }
}

fn check_logits(name: &str, pipeline: &mut Pipeline, golden: &Value) {
    let prompt = ids(&golden["ids"]);
    let rows = pipeline.score(&prompt, prompt.len());
    let (argmaxes, means, stds) =
        (ids(&golden["argmax_all"]), floats(&golden["mean_all"]), floats(&golden["std_all"]));
    for (position, logits) in rows.iter().enumerate() {
        let at = format!("{name} position {position}");
        assert_eq!(argmax(logits), argmaxes[position], "{at}");
        for (id, value) in pairs(&golden["top5_all"][position]) {
            near(&format!("{at} logit {id}"), f64::from(logits[id]), value, TOLERANCE);
        }
        let (mean, std) = mean_and_std(logits);
        near(&format!("{at} mean"), mean, means[position], TOLERANCE);
        // Whether the golden is the sample's or the population's deviation is below the tolerance.
        near(&format!("{at} deviation"), std, stds[position], 2.0 * TOLERANCE);
    }
    for (id, value) in floats(&golden["logits_last"]).into_iter().enumerate() {
        near(&format!("{name} last logit {id}"), f64::from(rows[rows.len() - 1][id]), value, TOLERANCE);
    }
    assert_eq!(pipeline.greedy(&prompt, 32), ids(&golden["greedy"]), "{name} greedy");
}

/// The residual of the last token after every layer.
#[derive(Default)]
struct LastRows {
    d_model: usize,
    rows: Vec<Vec<f32>>,
}

impl Observer for LastRows {
    fn layer_done(&mut self, layer: usize, residual: &[f32]) {
        assert_eq!(layer, self.rows.len());
        self.rows.push(residual[residual.len() - self.d_model..].to_vec());
    }
}

/// The residual stream after every layer is transformers'.
#[test]
fn layer_outputs_agree_with_transformers() {
    let Some(dir) = oracles() else { return };
    for (folder, files) in EXACT {
        let golden = json(&dir.join(folder).join("compact.json"));
        let model = open(&dir.join(folder).join(format!("{}.gguf", files[0])));
        let mut pipeline = Pipeline::whole(&model, Rounding::LEAST);
        for length in ["1", "37"] {
            let sequence = &golden["seqs"][length];
            let mut seen = LastRows { d_model: model.program().d_model, ..LastRows::default() };
            let prompt = ids(&sequence["ids"]);
            pipeline.step(&[Piece { slot: 1, start: 0, ids: &prompt, logits: LogitRows::None }], &mut seen);
            assert_eq!(seen.rows.len(), model.program().layers.len());
            for (layer, row) in seen.rows.iter().enumerate() {
                let (at, key) = (format!("{folder}/{length} layer {layer}"), format!("l{layer}.out"));
                for (i, value) in floats(&sequence["hidden_last_pos_first8"][&key]).into_iter().enumerate() {
                    near(&at, f64::from(row[i]), value, 2e-4);
                }
                let rms = (row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64).sqrt();
                near(&at, rms, sequence["hidden_last_pos_rms"][&key].as_f64().unwrap(), 2e-4);
            }
        }
    }
}

/// Convolution and matrix states after the last token are those of the executable reference in f64
/// (tests/data/recurrent_states.py).
#[test]
fn recurrent_states_agree_with_the_reference() {
    let Some(dir) = oracles() else { return };
    let golden: Value = serde_json::from_str(include_str!("data/recurrent_states.json")).unwrap();
    for (folder, layers) in golden.as_object().unwrap() {
        let model = open(&dir.join(folder).join(format!("{folder}-bf16.gguf")));
        let prompt = ids(&json(&dir.join(folder).join("compact.json"))["seqs"]["37"]["ids"]);
        let mut pipeline = Pipeline::whole(&model, Rounding::LEAST);
        pipeline.score(&prompt, 10);
        for (layer, states) in layers.as_object().unwrap() {
            let (conv, matrix) = pipeline.bands[0].recurrent_state(layer.parse().unwrap(), 0).unwrap();
            for (name, state) in [("conv", conv), ("matrix", matrix)] {
                let (at, golden) = (format!("{folder} layer {layer} {name}"), &states[name]);
                let rms =
                    (state.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / state.len() as f64).sqrt();
                near(&at, rms, golden["rms"].as_f64().unwrap(), STATE_TOLERANCE);
                let kept = state.iter().step_by(golden["stride"].as_u64().unwrap() as usize);
                for (found, value) in kept.zip(floats(&golden["values"])) {
                    near(&at, f64::from(*found), value, STATE_TOLERANCE);
                }
            }
        }
    }
}

/// Folder, llama.cpp's rms noise for formats with blocks of 32 and for super-blocks of 256 (README of the oracles).
const NOISE: [(&str, f64, f64); 5] = [
    ("llama", 0.085, 0.12),
    ("qwen2", 0.048, 0.068),
    ("qwen3", 0.13, 0.18),
    ("qwen35", 0.24, 0.37),
    ("qwen35_r1mtp", 0.17, 0.22),
];
/// How much of llama.cpp's noise is allowed.
const NOISE_SHARE: f64 = 1.3;

/// How much of it is allowed with 16-bit activations. What is left comes from the f16 KV cache.
const FINE_SHARE: f64 = 0.1;

/// Rounding activations to 8 bits makes no more noise than allowed and to 16 bits next to none, measured against our
/// own exact run of the dequantised weights, which itself is checked against the golden one.
#[test]
fn quantised_files_stay_within_the_noise_floor() {
    let Some(dir) = oracles() else { return };
    for (folder, small, large) in NOISE {
        let golden = json(&dir.join(folder).join("quant.json"));
        for (file, sequences) in golden.as_object().unwrap() {
            let path = dir.join(folder).join(format!("{file}.gguf"));
            if !path.exists() {
                continue;
            }
            let blocks_of_32 = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"];
            let floor = if blocks_of_32.iter().any(|format| file.ends_with(format)) { small } else { large };
            let model = open(&path);
            let sequence = ids(&json(&dir.join(folder).join("compact.json"))["seqs"]["300"]["ids"]);
            let exact = Pipeline::whole(&dequantised(&model), Rounding::LEAST).score(&sequence, 64);
            check_exact(file, &exact, &sequences["300"]);
            let [noise, fine] = [Rounding::COARSE, Rounding::FINE].map(|rounding| {
                let ours = Pipeline::whole(&model, rounding).score(&sequence, 64);
                rms_of_top_20(&exact, &ours)
            });
            println!("{file}: rms {noise:.4}, with 16 bits {fine:.4}; llama.cpp's floor {floor}");
            assert!(noise <= NOISE_SHARE * floor, "{file}: rms {noise} > {NOISE_SHARE} x {floor}");
            assert!(fine <= FINE_SHARE * floor, "{file}: with 16 bits rms {fine} > {FINE_SHARE} x {floor}");
        }
    }
}

fn check_exact(file: &str, exact: &[Vec<f32>], golden: &Value) {
    for (id, value) in pairs(&golden["exact_last_top20"]) {
        near(&format!("{file} exact logit {id}"), f64::from(exact[exact.len() - 1][id]), value, TOLERANCE);
    }
    let margins = floats(&golden["exact_margin_all"]);
    for (position, id) in ids(&golden["exact_argmax_all"]).into_iter().enumerate() {
        let clear = margins[position] > 2.0 * TOLERANCE;
        assert!(!clear || argmax(&exact[position]) == id, "{file} position {position}");
    }
}

/// Root mean square of the difference over the 20 largest exact logits of every position.
fn rms_of_top_20(exact: &[Vec<f32>], ours: &[Vec<f32>]) -> f64 {
    let mut sum = 0.0;
    for (exact, ours) in exact.iter().zip(ours) {
        let mut order: Vec<usize> = (0..exact.len()).collect();
        order.sort_by(|&a, &b| exact[b].total_cmp(&exact[a]));
        sum += order[..20].iter().map(|&id| f64::from(exact[id] - ours[id]).powi(2)).sum::<f64>();
    }
    (sum / (20 * exact.len()) as f64).sqrt()
}

/// The same model with every weight decoded to F32.
fn dequantised(model: &ModelFile) -> Arc<ModelFile> {
    let gguf = model.gguf();
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.metadata().iter() {
        if let Some(value) = copied(value) {
            writer.key(key, value);
        }
    }
    for tensor in gguf.tensors() {
        let mut values = vec![0.0f32; tensor.elems() as usize];
        let format = Format::from_name(&tensor.ggml_type.to_string()).unwrap();
        format.decode(gguf.bytes(tensor), &mut values).unwrap();
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.tensor(&tensor.name, &tensor.dims, GgmlType(Format::F32.ggml_id()), bytes);
    }
    Arc::new(ModelFile::from_gguf(Gguf::parse(writer.to_bytes()).unwrap()).unwrap())
}

fn copied(value: Meta<'_>) -> Option<MetaValue> {
    Some(match value {
        Meta::U32(value) => value.into(),
        Meta::F32(value) => value.into(),
        Meta::Bool(value) => value.into(),
        Meta::Str(value) => value.into(),
        Meta::Array(array) => copied_array(array)?,
        _ => return None,
    })
}

fn copied_array(array: Array<'_>) -> Option<MetaValue> {
    let values: Vec<Meta<'_>> = array.iter().collect::<Option<_>>()?;
    Some(match values.first()? {
        Meta::Str(_) => values
            .iter()
            .map(|v| if let Meta::Str(s) = v { (*s).to_owned() } else { String::new() })
            .collect::<Vec<String>>()
            .into(),
        Meta::Bool(_) => values.iter().map(|v| matches!(v, Meta::Bool(true))).collect::<Vec<bool>>().into(),
        Meta::F32(_) => values.iter().map(|v| v.as_f64().unwrap_or(0.0) as f32).collect::<Vec<f32>>().into(),
        _ => values.iter().map(|v| v.as_u64().unwrap_or(0) as i32).collect::<Vec<i32>>().into(),
    })
}
