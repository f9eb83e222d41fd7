//! The programs compute what transformers computes: interpreted step by step, with no kernel of ours, they give its
//! logits, its residual stream after every layer, and its greedy tokens.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a test that fails should say where"
)]

mod interpreter;

use interpreter::Interpreter;
use serde_json::Value;
use spillway_model::file::ModelFile;
use spillway_model::testing::oracles;
use std::path::Path;

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

fn tokens(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect()
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

fn assert_near(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance, "{what}, value {i}: {f} instead of {e}");
    }
}

/// One prompt: logits and argmax at every position, the residual stream at the last, then the greedy continuation.
fn check(file: &ModelFile, golden: &Value, what: &str) {
    let prompt = tokens(&golden["ids"]);
    let argmaxes = tokens(&golden["argmax_all"]);
    let means = floats(&golden["mean_all"]);
    let mut model = Interpreter::new(file);
    let mut last = None;
    for (position, &token) in prompt.iter().enumerate() {
        let trace = model.step(token);
        assert_eq!(argmax(&trace.logits), argmaxes[position], "{what}, position {position}");
        let mean = trace.logits.iter().sum::<f32>() / trace.logits.len() as f32;
        assert!((mean - means[position]).abs() < 1e-3, "{what}, position {position}: mean logit {mean}");
        last = Some(trace);
    }
    let mut trace = last.unwrap();
    assert_near(&trace.logits, &floats(&golden["logits_last"]), 1e-3, what);
    for (layer, residual) in trace.layers.iter().enumerate() {
        if let Some(expected) = golden["hidden_last_pos_first8"].get(format!("l{layer}.out")) {
            assert_near(residual, &floats(expected), 1e-4, &format!("{what}, layer {layer}"));
        }
    }
    for (i, &expected) in tokens(&golden["greedy"]).iter().enumerate() {
        let token = argmax(&trace.logits);
        assert_eq!(token, expected, "{what}, greedy token {i}");
        trace = model.step(token);
    }
}

fn check_model(dir: &Path, name: &str) {
    let file = ModelFile::open(&dir.join(name).join(format!("{name}-bf16.gguf"))).unwrap();
    let golden = std::fs::read(dir.join(name).join("compact.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    for (length, sequence) in golden["seqs"].as_object().unwrap() {
        check(&file, sequence, &format!("{name}, {length} tokens"));
    }
}

macro_rules! models {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            if let Some(dir) = oracles() {
                check_model(&dir, stringify!($name));
            }
        })*
    };
}

models! { llama qwen2 qwen3 qwen35 qwen35_r1mtp }
