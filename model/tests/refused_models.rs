//! Models in sound containers that cannot be run: every refusal names the key or tensor and says why.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test that fails should say where")]

use spillway_model::arch::ARCHITECTURES;
use spillway_model::config::RopeScaling;
use spillway_model::error::ModelError;
use spillway_model::file::ModelFile;
use spillway_model::gguf::{GgmlType, Gguf};
use spillway_model::program::{RopePairing, Step};
use spillway_model::testing::{GgufWriter, MetaValue, TinyModel};

fn tiny(architecture: &'static str) -> GgufWriter {
    TinyModel::new(architecture).writer().unwrap()
}

fn open(file: &GgufWriter) -> Result<ModelFile, ModelError> {
    ModelFile::from_gguf(Gguf::parse(file.to_bytes()).unwrap())
}

fn assert_refused(file: &GgufWriter, code: &str, says: &[&str]) {
    let error = open(file).expect_err("the model must be refused");
    let message = error.to_string();
    assert_eq!(error.code(), code, "{message}");
    for part in says {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn an_unknown_architecture_lists_the_known_ones() {
    let mut file = tiny("llama");
    assert_refused(
        file.set("general.architecture", "mamba"),
        "unknown_architecture",
        &["\"mamba\"", "llama, qwen2"],
    );
    let long = "x".repeat(1 << 20);
    assert!(open(file.set("general.architecture", long)).unwrap_err().to_string().len() < 300);
    assert_refused(file.remove("general.architecture"), "metadata_missing", &["general.architecture"]);
    assert_refused(
        file.set("general.architecture", 3u32),
        "metadata_wrong_type",
        &["general.architecture", "string"],
    );
}

#[test]
fn an_adapter_is_not_a_model() {
    let mut file = tiny("llama");
    assert!(open(file.set("general.type", "model")).is_ok());
    assert_refused(
        file.set("general.type", "adapter"),
        "model_unsupported",
        &["general.type", "\"adapter\""],
    );
}

#[test]
fn every_tensor_of_the_program_is_needed_with_its_shape_and_a_known_format() {
    for architecture in ARCHITECTURES {
        let whole = tiny(architecture.name);
        let program = open(&whole).unwrap().program().clone();
        for weight in program.weights().filter(|w| !w.name.ends_with("_q.bias")) {
            let name = weight.name.as_str();
            let mut file = whole.clone();
            assert_refused(file.remove_tensor(name), "tensor_missing", &[name]);
            let elems = weight.rows * weight.cols;
            file.tensor(name, &[2, elems as u64], GgmlType::F32, vec![0; 8 * elems]);
            assert_refused(&file, "tensor_misshapen", &[name, &weight.cols.to_string()]);
            let dims = [weight.cols as u64, weight.rows as u64];
            file.remove_tensor(name).tensor(name, &dims, GgmlType::I8, vec![0; elems]);
            assert_refused(&file, "tensor_unusable_format", &[name, "I8", "Q4_K"]);
            file.remove_tensor(name).tensor(name, &dims, GgmlType(200), Vec::new());
            assert_refused(&file, "tensor_unusable_format", &[name, "type 200"]);
        }
    }
}

#[test]
fn numbers_out_of_bounds() {
    let cases: &[(&str, u32, &str)] = &[
        ("block_count", 0, "1 to 1024"),
        ("block_count", u32::MAX, "1 to 1024"),
        ("embedding_length", 0, "1 to 65536"),
        ("embedding_length", 1 << 20, "1 to 65536"),
        ("feed_forward_length", 0, "1 to 1048576"),
        ("context_length", 0, "1 to 134217728"),
        ("attention.head_count", 0, "1 to 1024"),
        ("attention.head_count_kv", 3, "does not divide"),
        ("attention.key_length", 0, "1 to 4096"),
        ("attention.value_length", 5000, "1 to 4096"),
        ("rope.dimension_count", 7, "even number up to the head width 32"),
        ("rope.dimension_count", 34, "even number up to the head width 32"),
        ("rope.dimension_count", 0, "0 is not within"),
        ("nextn_predict_layers", 4, "leave no layer"),
        ("ssm.state_size", 0, "1 to 4096"),
        ("ssm.group_count", 3, "not a multiple"),
        ("ssm.time_step_rank", 5, "not a multiple"),
        ("ssm.inner_size", 100, "not 4 value heads of 32"),
        ("ssm.conv_kernel", 1, "2 to 16"),
        ("full_attention_interval", 0, "1 to 1024"),
    ];
    for (name, value, says) in cases {
        let key = format!("qwen35.{name}");
        let mut file = tiny("qwen35");
        // The check that group_count divides comes first for both counts.
        let named = if *name == "ssm.group_count" { "qwen35.ssm.time_step_rank" } else { &key };
        assert_refused(file.set(&key, *value), "model_bad_config", &[named, says]);
    }
}

#[test]
fn floats_out_of_bounds() {
    for (name, values) in [
        ("attention.layer_norm_rms_epsilon", [0.0, -1.0, f32::NAN, f32::INFINITY]),
        ("rope.freq_base", [0.0, 1.0, f32::NAN, f32::INFINITY]),
        ("rope.scaling.factor", [0.5, -4.0, f32::NAN, f32::INFINITY]),
    ] {
        for value in values {
            let key = format!("llama.{name}");
            assert_refused(tiny("llama").set(&key, value), "model_bad_config", &[&key, "is not within"]);
        }
    }
}

#[test]
fn keys_that_are_missing_or_of_another_type() {
    for name in
        ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
    {
        let key = format!("qwen3.{name}");
        assert_refused(tiny("qwen3").remove(&key), "metadata_missing", &[&key]);
        assert_refused(tiny("qwen3").set(&key, "four"), "metadata_wrong_type", &[&key, "holds string"]);
    }
    let eps = "qwen3.attention.layer_norm_rms_epsilon";
    assert_refused(tiny("qwen3").remove(eps), "metadata_missing", &[eps]);
    assert_refused(tiny("qwen3").set(eps, 1u32), "metadata_wrong_type", &[eps, "u32"]);
}

#[test]
fn features_that_are_not_computed_are_refused_by_key() {
    let cases: &[(&str, MetaValue)] = &[
        ("expert_count", 8u32.into()),
        ("attention.sliding_window", 128u32.into()),
        ("attention.clamp_kqv", 8.0f32.into()),
        ("attention.scale", 0.5f32.into()),
        ("attention.causal", false.into()),
        ("final_logit_softcapping", 30.0f32.into()),
        ("logit_scale", 0.25f32.into()),
        ("embedding_scale", 12.0f32.into()),
        ("use_parallel_residual", true.into()),
        ("rope.scaling.yarn_log_multiplier", 0.1f32.into()),
        ("swiglu_clamp_exp", vec![7.0f32].into()),
    ];
    for (name, value) in cases {
        let key = format!("llama.{name}");
        assert_refused(tiny("llama").key(&key, value.clone()), "model_unsupported", &[&key]);
    }
}

#[test]
fn a_mixture_of_experts_is_refused_as_such_and_not_for_the_keys_it_lacks() {
    let mut file = tiny("llama");
    file.key("llama.expert_count", 8u32).remove("llama.feed_forward_length");
    assert_refused(&file, "model_unsupported", &["llama.expert_count = 8", "mixture-of-experts"]);
}

#[test]
fn features_that_are_switched_off_are_accepted() {
    let cases: &[(&str, MetaValue)] = &[
        ("expert_count", 0u32.into()),
        ("attention.sliding_window", 0u32.into()),
        // As wide as the context: never felt.
        ("attention.sliding_window", 512u32.into()),
        ("attention.causal", true.into()),
        ("logit_scale", 1.0f32.into()),
        ("rope.scaling.type", "none".into()),
        ("a_key_of_the_future", 1u32.into()),
    ];
    let plain = open(&tiny("llama")).unwrap();
    for (name, value) in cases {
        let file = open(tiny("llama").key(&format!("llama.{name}"), value.clone())).unwrap();
        assert_eq!(file.program(), plain.program(), "{name}");
    }
}

#[test]
fn tensors_that_would_change_the_result_are_refused() {
    for (architecture, name) in [
        ("qwen2", "blk.0.attn_output.bias"),
        ("qwen2", "blk.1.attn_q_norm.weight"),
        ("qwen3", "blk.0.attn_q.bias"),
        ("llama", "blk.2.ffn_gate_inp.weight"),
        ("llama", "blk.0.ffn_up.bias"),
        ("llama", "blk.3.attn_sinks.weight"),
        ("llama", "blk.0.attn_q.scale"),
        ("llama", "rope_factors_long.weight"),
        ("llama", "output.bias"),
    ] {
        let mut file = tiny(architecture);
        file.tensor(name, &[4], GgmlType::F32, vec![0; 16]);
        assert_refused(&file, "model_unsupported", &[name]);
    }
}

#[test]
fn other_keys_and_tensors_are_noted() {
    let mut file = tiny("llama");
    file.tensor("blk.0.something_new", &[4], GgmlType::F32, vec![0; 16]);
    file.key("llama.a_key_of_the_future", 1u32).key("another.key", 1u32);
    let file = open(&file).unwrap();
    let expected = [
        "unknown metadata keys without effect: 1, the first is \"llama.a_key_of_the_future\"",
        "tensors without effect: 1, the first is \"blk.0.something_new\"",
    ];
    assert_eq!(file.notes().collect::<Vec<_>>(), expected);
}

#[test]
fn a_list_per_layer_is_accepted_when_all_layers_agree() {
    let plain = open(&tiny("llama")).unwrap();
    let kv = "llama.attention.head_count_kv";
    assert_eq!(open(tiny("llama").set(kv, vec![2u32; 4])).unwrap().program(), plain.program());
    assert_refused(tiny("llama").set(kv, vec![2u32, 2, 4, 2]), "model_unsupported", &[kv, "different sizes"]);
    assert_refused(tiny("llama").set(kv, Vec::<u32>::new()), "model_bad_config", &[kv, "empty"]);
}

#[test]
fn the_list_of_recurrent_layers_wins_over_the_interval() {
    let key = "qwen35.attention.recurrent_layers";
    let plain = open(&tiny("qwen35")).unwrap();
    let same = vec![true, true, true, false];
    assert_eq!(
        open(tiny("qwen35").key(key, same.clone()).set("qwen35.full_attention_interval", 2u32))
            .unwrap()
            .program(),
        plain.program()
    );
    assert_refused(
        tiny("qwen35").key(key, vec![true; 3]),
        "model_bad_config",
        &[key, "lists 3 layers", "has 4"],
    );
    // Another pattern needs other tensors, and the first one missing is named.
    assert_refused(tiny("qwen35").key(key, vec![false; 4]), "tensor_missing", &["blk.0.attn_q.weight"]);
}

#[test]
fn head_widths_default_to_a_share_of_the_residual() {
    let mut file = tiny("llama");
    file.remove("llama.attention.key_length")
        .remove("llama.attention.value_length")
        .remove("llama.rope.dimension_count");
    // 64 values for 4 heads: 16 each instead of the 32 the tensors were made for.
    assert_refused(&file, "tensor_misshapen", &["blk.0.attn_q.weight", "[64, 64]", "[64, 128]"]);
    file.set("llama.attention.head_count", 6u32).set("llama.attention.head_count_kv", 3u32);
    assert_refused(&file, "model_bad_config", &["llama.attention.key_length", "64 values", "6 heads"]);
}

#[test]
fn llama_biases_are_used_when_present() {
    let mut file = tiny("llama");
    for (name, len) in [("attn_q", 128usize), ("attn_k", 64), ("attn_v", 64), ("attn_output", 64)] {
        for layer in 0..4 {
            let name = format!("blk.{layer}.{name}.bias");
            file.tensor(&name, &[len as u64], GgmlType::F32, vec![0; 4 * len]);
        }
    }
    let file = open(&file).unwrap();
    let linears = file.program().layers[0]
        .steps
        .iter()
        .filter(|step| matches!(step, Step::Linear { bias: Some(_), .. }));
    assert_eq!(linears.count(), 4);
}

#[test]
fn rope_settings_reach_the_program() {
    let plain = open(&tiny("llama")).unwrap().program().ropes[0].clone();
    assert_eq!(plain.pairing, RopePairing::Adjacent);
    assert_eq!((plain.rotary_dim, plain.inv_freq.len(), plain.magnitude), (32, 16, 1.0));
    for architecture in ["qwen2", "qwen3", "qwen35"] {
        assert_eq!(open(&tiny(architecture)).unwrap().program().ropes[0].pairing, RopePairing::Halves);
    }
    let mut file = tiny("llama");
    let linear = open(file.key("llama.rope.scaling.factor", 2.0f32)).unwrap();
    assert_eq!(
        linear.program().ropes[0].inv_freq[3],
        plain.inv_freq[3] / 2.0,
        "a factor without type is linear"
    );
    file.key("llama.rope.scaling.type", "yarn").key("llama.rope.scaling.original_context_length", 256u32);
    file.key("llama.rope.scaling.attn_factor", 0.5f32);
    let yarn = open(&file).unwrap();
    assert!(matches!(yarn.config().rope.scaling, RopeScaling::Yarn(yarn) if yarn.original_context == 256));
    let magnitude = 0.5 * (1.0 + 0.1 * 2.0f32.ln());
    assert!((yarn.program().ropes[0].magnitude - magnitude).abs() < 1e-6);
    assert_refused(
        file.set("llama.rope.scaling.type", "longrope"),
        "model_unsupported",
        &["longrope", "yarn"],
    );
    assert_refused(
        tiny("llama").key("llama.rope.scaling.type", "yarn"),
        "metadata_missing",
        &["rope.scaling.factor"],
    );
}

#[test]
fn llama3_frequency_divisors() {
    let divisors = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let plain = open(&tiny("llama")).unwrap().program().ropes[0].clone();
    let mut file = tiny("llama");
    file.tensor("rope_freqs.weight", &[16], GgmlType::F32, divisors(&[8.0; 16]));
    let scaled = open(&file).unwrap();
    assert_eq!(scaled.program().ropes[0].inv_freq[5], plain.inv_freq[5] / 8.0);
    assert_eq!(scaled.notes().count(), 0);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut values = [1.0; 16];
        values[7] = bad;
        file.remove_tensor("rope_freqs.weight").tensor(
            "rope_freqs.weight",
            &[16],
            GgmlType::F32,
            divisors(&values),
        );
        assert_refused(&file, "tensor_bad_values", &["rope_freqs.weight", "divisor 7"]);
    }
    file.remove_tensor("rope_freqs.weight").tensor("rope_freqs.weight", &[16], GgmlType::F16, vec![0; 32]);
    assert_refused(&file, "tensor_bad_values", &["F16"]);
    file.remove_tensor("rope_freqs.weight").tensor("rope_freqs.weight", &[8], GgmlType::F32, vec![0; 32]);
    assert_refused(&file, "tensor_misshapen", &["rope_freqs.weight"]);
}

#[test]
fn image_sections_that_leave_frequencies_out() {
    let key = "qwen35.rope.dimension_sections";
    assert!(open(tiny("qwen35").key(key, vec![3i32, 3, 2, 0])).is_ok());
    assert_refused(
        tiny("qwen35").key(key, vec![1i32, 1, 1, 0]),
        "model_bad_config",
        &[key, "add up to 3", "8 rotated"],
    );
}

#[test]
fn a_vocabulary_that_is_not_the_embedding() {
    let mut file = tiny("llama");
    file.set("tokenizer.ggml.tokens", vec!["a".to_owned(); 100]);
    assert_refused(&file, "tensor_misshapen", &["token_embd.weight", "[64, 100]", "[64, 288]"]);
    assert_refused(file.remove("tokenizer.ggml.tokens"), "metadata_missing", &["llama.vocab_size"]);
    assert!(
        open(file.key("llama.vocab_size", 288u32)).is_ok(),
        "a file without tokens can say its vocabulary's size"
    );
    assert_refused(
        file.set("tokenizer.ggml.tokens", 3u32),
        "metadata_wrong_type",
        &["tokenizer.ggml.tokens"],
    );
}

#[test]
fn a_summary_accounts_for_every_byte() {
    for architecture in ARCHITECTURES {
        let mut file = TinyModel::new(architecture.name).q8_0().untied().writer().unwrap();
        file.tensor("extra", &[4], GgmlType::F32, vec![0; 16]);
        let file = open(&file).unwrap();
        let summary = file.summary();
        let layers: u64 = summary.layers.iter().map(|layer| layer.part.bytes).sum();
        assert_eq!(summary.used.bytes, layers + summary.embedding.bytes + summary.head.bytes);
        assert_eq!(summary.unused.bytes, 16);
        let all: u64 = file.gguf().tensors().iter().map(|t| t.size()).sum();
        assert_eq!(summary.used.bytes + summary.unused.bytes, all);
        assert_eq!(summary.embedding.formats[0].format, "Q8_0");
        assert_eq!(summary.notes.len(), 1);
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["layers"][0]["layer"], 0);
    }
}
