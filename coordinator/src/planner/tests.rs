//! Proves: every refusal has its condition, code and sentence; every plan covers each layer once and charges every byte;
//! planning is a function.

use super::*;
use proptest::prelude::*;
use spillway_kernels::formats::Format;
use spillway_protocol::plan::{ActivationType, KvType, PlannedModel, StageBytes};
use spillway_worker::states::AreaSize;
use spillway_worker_gpu::band::{LayerNeeds, ModelWidths};

mod auto;
mod gpus;
mod lift;
mod properties;
mod replay;
mod shapes;
mod steps;

const MIB: u64 = 1 << 20;

fn model(layers: usize) -> ModelSummary {
    let layer = LayerSizes {
        weights: 10 * MIB,
        elements: 20_000_000,
        kv_elements: 1024,
        state_values: 4096,
        states: vec![AreaSize::Block(32 * 1024), AreaSize::Slot(4096)],
        buffers: vec![1024, 1024, 2048],
        hidden: 4096,
        widest_input: 2048,
        formats: vec![Format::Q4_K],
        gpu: GpuSizes {
            weights: 10 * MIB,
            mapped: 10 * MIB,
            largest_group: 4 * MIB,
            needs: LayerNeeds::default(),
        },
    };
    ModelSummary {
        model: PlannedModel {
            path: "/models/some.gguf".into(),
            file_bytes: 400 * MIB,
            architecture: "llama".into(),
            layers,
            d_model: 1024,
            vocab: 32_000,
            context_length: 8192,
        },
        layers: vec![layer; layers],
        embedding_bytes: 20 * MIB,
        head_bytes: 30 * MIB,
        head_format: Format::Q6_K,
        gpu_head_bytes: 30 * MIB,
        gpu_widths: ModelWidths { d_model: 1024, vocab: 32_000, rope_pairs: 32 },
    }
}

fn machine() -> Machine {
    let nodes = vec![NumaNode { id: 0, cpus: 8 }];
    Machine {
        cpus: 8,
        nodes,
        available_bytes: 64 << 30,
        memory_bandwidth: None,
        products: None,
        gpus: GpuSurvey::default(),
    }
}

fn two_nodes() -> Machine {
    let nodes = vec![NumaNode { id: 0, cpus: 8 }, NumaNode { id: 1, cpus: 6 }];
    Machine {
        cpus: 14,
        nodes,
        available_bytes: 64 << 30,
        memory_bandwidth: None,
        products: None,
        gpus: GpuSurvey::default(),
    }
}

fn counts(plan: &Plan) -> Vec<usize> {
    plan.stages.iter().map(|stage| stage.layers.len()).collect()
}

fn text(value: &str) -> Option<String> {
    Some(value.into())
}

#[test]
fn nothing_asked_is_one_worker_with_everything() {
    let plan = plan(&model(30), &machine(), &PlacementRequest::default()).unwrap();
    assert_eq!(counts(&plan), vec![30]);
    let stage = &plan.stages[0];
    assert!(stage.embed && stage.head);
    assert_eq!(stage.execution, Execution::Cpu { threads: 8, node: None });
    assert_eq!((plan.limits.max_seq, plan.limits.max_sequences, plan.limits.max_step_tokens), (4096, 4, 512));
    assert_eq!(plan.limits.kv_type, KvType::F16, "auto on a quantised file");
    assert_eq!(plan.limits.kv_blocks, 4 * 128);
}

#[test]
fn exact_files_keep_exact_keys_and_values() {
    let mut exact = model(4);
    exact.head_format = Format::F32;
    exact.layers.iter_mut().for_each(|layer| layer.formats = vec![Format::BF16]);
    assert_eq!(plan(&exact, &machine(), &PlacementRequest::default()).unwrap().limits.kv_type, KvType::F32);
    exact.layers[3].formats.push(Format::Q8_0);
    assert_eq!(plan(&exact, &machine(), &PlacementRequest::default()).unwrap().limits.kv_type, KvType::F16);
}

#[test]
fn small_models_get_fine_inputs_and_pay_for_them() {
    let planned = |layers: usize, activations: Option<&str>| {
        let request = PlacementRequest { activations: activations.and_then(text), ..Default::default() };
        let plan = plan(&model(layers), &machine(), &request).unwrap();
        (plan.limits.activations, plan.stages[0].bytes.scratch)
    };
    // 20 million weights a layer.
    for auto in [None, Some("auto")] {
        assert_eq!(planned(49, auto).0, ActivationType::Int16);
        assert_eq!(planned(50, auto).0, ActivationType::Int8);
    }
    let (fine, coarse) = (planned(8, Some("int16")), planned(8, Some("int8")));
    assert_eq!((fine.0, coarse.0), (ActivationType::Int16, ActivationType::Int8));
    // 512 rows of 2048 values in the layers and 131 of 1024 at the head: one byte a value more.
    assert_eq!(fine.1 - coarse.1, 512 * 2048 + 132 * 1024);
}

#[test]
fn buffers_of_a_band_are_as_wide_as_its_widest_layer_needs_each() {
    let mut mixed = model(2);
    mixed.layers[0].buffers = vec![1024, 5000, 10];
    mixed.layers[1].buffers = vec![1024, 20, 3000];
    let scratch = |model: &ModelSummary| {
        let request = PlacementRequest { chunk: Some(256), ..Default::default() };
        plan(model, &machine(), &request).unwrap().stages[0].bytes.scratch
    };
    let narrow = scratch(&ModelSummary {
        layers: vec![LayerSizes { buffers: vec![], ..model(1).layers[0].clone() }; 2],
        ..model(2)
    });
    assert_eq!(scratch(&mixed) - narrow, 256 * (1024 + 5000 + 3000) * 4);
}

#[test]
fn uniform_bands_give_the_remainder_to_the_first() {
    for (layers, stages, expected) in [
        (25, 2, vec![13, 12]),
        (64, 3, vec![22, 21, 21]),
        (7, 4, vec![2, 2, 2, 1]),
        (3, 3, vec![1, 1, 1]),
        (5, 1, vec![5]),
    ] {
        let request = PlacementRequest { cpu_workers: Some(stages), ..Default::default() };
        assert_eq!(counts(&plan(&model(layers), &machine(), &request).unwrap()), expected);
    }
}

#[test]
fn stages_come_from_whichever_option_names_them() {
    let by = |request: PlacementRequest| counts(&plan(&model(8), &machine(), &request).unwrap());
    assert_eq!(by(PlacementRequest { pp: Some(2), ..Default::default() }), vec![4, 4]);
    assert_eq!(by(PlacementRequest { cpu_workers: Some(2), pp: Some(2), ..Default::default() }), vec![4, 4]);
    assert_eq!(by(PlacementRequest { pp_layers: text("1, 7"), ..Default::default() }), vec![1, 7]);
    assert_eq!(
        by(PlacementRequest { pp: Some(2), pp_layers: text("5,3"), ..Default::default() }),
        vec![5, 3]
    );
}

#[test]
fn options_that_say_what_happens_anyway_are_accepted() {
    let request = PlacementRequest {
        devices: text("none"),
        gpu_layer_budget: text("0"),
        offload_exec: text("cpu"),
        kv_type: text("auto"),
        activations: text("auto"),
        ..Default::default()
    };
    assert!(plan(&model(4), &machine(), &request).is_ok());
}

/// Condition → code → words that the sentence must hold.
#[test]
fn every_refusal_has_its_code_and_says_what_is_wrong() {
    let ask = PlacementRequest::default;
    let table: Vec<(PlacementRequest, &str, &[&str])> = vec![
        (PlacementRequest { devices: text("0,1"), ..ask() }, "no_gpu", &["--devices none"]),
        (PlacementRequest { devices: text("0,,1"), ..ask() }, "devices_unreadable", &["`0,,1`", "`all`"]),
        (
            PlacementRequest { gpu_layer_budget: text("4"), ..ask() },
            "gpu_layer_budget_without_gpu",
            &["`4`", "no GPU"],
        ),
        (
            PlacementRequest { gpu_layer_budget: text("auto"), ..ask() },
            "gpu_layer_budget_without_gpu",
            &["`auto`"],
        ),
        (
            PlacementRequest { gpu_layer_budget: text("-1"), ..ask() },
            "gpu_layer_budget_unreadable",
            &["`-1`"],
        ),
        (PlacementRequest { offload_exec: text("pcie"), ..ask() }, "offload_exec_without_gpu", &["pcie"]),
        (
            PlacementRequest { vram_limit: text("8GiB"), ..ask() },
            "needs_gpu",
            &["vram_limit", "devices: none"],
        ),
        (PlacementRequest { split: text("auto"), ..ask() }, "needs_gpu", &["split"]),
        (
            PlacementRequest { gpu_layer_budget: text("9"), ..ask() },
            "gpu_layer_budget_beyond_layers",
            &["9", "8 layers"],
        ),
        (PlacementRequest { kv_type: text("q4"), ..ask() }, "kv_type_unknown", &["`q4`", "`f16`"]),
        (
            PlacementRequest { activations: text("f32"), ..ask() },
            "activations_unknown",
            &["`f32`", "`int16`"],
        ),
        (PlacementRequest { max_seq: Some(0), ..ask() }, "placement_out_of_range", &["max_seq", "0", "8192"]),
        (PlacementRequest { max_seq: Some(8193), ..ask() }, "max_seq_beyond_model", &["8193", "8192"]),
        (PlacementRequest { threads: Some(0), ..ask() }, "placement_out_of_range", &["threads"]),
        (PlacementRequest { parallel: Some(0), ..ask() }, "placement_out_of_range", &["parallel"]),
        (PlacementRequest { chunk: Some(100_000), ..ask() }, "placement_out_of_range", &["chunk", "100000"]),
        (PlacementRequest { cpu_workers: Some(0), ..ask() }, "placement_out_of_range", &["cpu_workers"]),
        (PlacementRequest { pp: Some(0), ..ask() }, "placement_out_of_range", &["pp is 0"]),
        (PlacementRequest { pp: Some(2), cpu_workers: Some(3), ..ask() }, "stages_disagree", &["2", "3"]),
        (PlacementRequest { pp: Some(9), ..ask() }, "too_few_layers", &["9", "8"]),
        (PlacementRequest { pp_layers: text("4,x"), ..ask() }, "pp_layers_parse", &["`x`"]),
        (PlacementRequest { pp_layers: text("4,-4"), ..ask() }, "pp_layers_parse", &["`-4`"]),
        (
            PlacementRequest { pp: Some(3), pp_layers: text("4,4"), ..ask() },
            "pp_layers_count",
            &["2 entries", "3 stages"],
        ),
        (PlacementRequest { pp_layers: text("4,5"), ..ask() }, "pp_layers_sum", &["9", "8"]),
        (PlacementRequest { pp_layers: text("8,0"), ..ask() }, "pp_layers_empty_stage", &["stage 1"]),
    ];
    for (request, code, words) in table {
        let refusal = plan(&model(8), &machine(), &request).unwrap_err();
        assert_eq!(refusal.code(), code, "{request:?}");
        let sentence = refusal.to_string();
        for word in words {
            assert!(sentence.contains(word), "{sentence} lacks {word}");
        }
    }
}

#[test]
fn short_memory_is_refused_with_the_arithmetic() {
    let small = Machine { available_bytes: 64 * MIB, ..machine() };
    let refusal = plan(&model(8), &small, &PlacementRequest::default()).unwrap_err();
    assert_eq!(refusal.code(), "out_of_memory");
    let Refusal::Memory(shortage) = &refusal else { panic!("{refusal:?}") };
    let parts = shortage.weights + shortage.kv + shortage.state + shortage.scratch + shortage.buffers;
    assert_eq!(parts, shortage.needed);
    assert_eq!(shortage.weights, 110 * MIB);
    let sentence = refusal.to_string();
    assert!(sentence.contains("110.0 MiB") && sentence.contains("64.0 MiB"), "{sentence}");
}

#[test]
fn the_kv_pool_shrinks_to_what_fits_but_not_below_one_sequence() {
    let full = plan(&model(8), &machine(), &PlacementRequest::default()).unwrap();
    let needed = full.stages[0].bytes.private();
    let less = Machine { available_bytes: needed - full.stages[0].bytes.kv / 2, ..machine() };
    let shrunk = plan(&model(8), &less, &PlacementRequest::default()).unwrap();
    assert_eq!(shrunk.limits.kv_blocks, full.limits.kv_blocks / 2);
    assert!(shrunk.stages[0].bytes.private() <= less.available_bytes);
}

#[test]
fn workers_keep_to_numa_nodes_when_there_are_several() {
    let by = |machine: &Machine, workers| {
        let request = PlacementRequest { cpu_workers: Some(workers), ..Default::default() };
        plan(&model(8), machine, &request).unwrap()
    };
    let pair = by(&two_nodes(), 2);
    assert_eq!(pair.stages[0].execution, Execution::Cpu { threads: 8, node: Some(0) });
    assert_eq!(pair.stages[1].execution, Execution::Cpu { threads: 6, node: Some(1) });
    assert_eq!(steps_in_flight(&pair), 2, "stages with CPUs of their own overlap");
    assert_eq!(steps_in_flight(&by(&two_nodes(), 3)), 1, "two of three workers share a node");
    assert_eq!(steps_in_flight(&by(&machine(), 2)), 1, "workers share the only node");
    assert_eq!(by(&two_nodes(), 1).stages[0].execution, Execution::Cpu { threads: 14, node: None });
}

#[test]
fn a_plan_survives_json() {
    let request = PlacementRequest { cpu_workers: Some(3), ..Default::default() };
    let made = plan(&model(8), &machine(), &request).unwrap();
    let json = serde_json::to_string(&made).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), made);
}

#[test]
fn the_table_names_every_stage_and_why() {
    let request = PlacementRequest { pp_layers: text("3,5"), ..Default::default() };
    let shown = table(&plan(&model(8), &machine(), &request).unwrap());
    for part in
        ["0-2 + embedding", "3-7 + head", "worker-cpu", "pp_layers asks for 3", "max_seq 4096 of 8192"]
    {
        assert!(shown.contains(part), "{shown}\nlacks {part}");
    }
}

#[test]
fn sizes_read_well() {
    for (count, shown) in [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB")] {
        assert_eq!(bytes(count), shown);
    }
}

prop_compose! {
    fn any_model()(layers in prop::collection::vec((0u64..1 << 32, 0u64..1 << 14, 0u64..1 << 22, 1usize..1 << 18), 1..80),
                   head_bytes in 0u64..1 << 32, vocab in 1usize..300_000) -> ModelSummary {
        let layers: Vec<LayerSizes> = layers.into_iter()
            .map(|(weights, kv_elements, state_values, width)| LayerSizes {
                weights, elements: weights, kv_elements, state_values, states: vec![],
                buffers: vec![width, width / 2],
                hidden: width / 3,
                widest_input: width / 4,
                formats: vec![Format::F32],
                gpu: GpuSizes::default(),
            })
            .collect();
        let mut made = model(layers.len());
        made.model.vocab = vocab;
        ModelSummary { layers, head_bytes, ..made }
    }
}

prop_compose! {
    fn any_request()(pp in prop::option::of(0usize..90), cpu_workers in prop::option::of(0usize..90),
                     pp_layers in prop::option::of("[0-9]{1,2}(,[0-9]{1,2}){0,4}"),
                     max_seq in prop::option::of(0usize..10_000), threads in prop::option::of(0usize..5),
                     parallel in prop::option::of(0usize..40), chunk in prop::option::of(0usize..9000)) -> PlacementRequest {
        PlacementRequest { pp, cpu_workers, pp_layers, max_seq, threads, parallel, chunk, ..Default::default() }
    }
}

fn sum(plan: &Plan, of: impl Fn(&StageBytes) -> u64) -> u64 {
    plan.stages.iter().map(|stage| of(&stage.bytes)).sum()
}

proptest! {
    #[test]
    fn a_plan_covers_every_layer_once_and_charges_every_byte(
        model in any_model(), request in any_request(), available in 0u64..1 << 40, nodes in 0u32..4,
    ) {
        let nodes = (0..nodes).map(|id| NumaNode { id, cpus: 3 }).collect();
        let machine = Machine { cpus: 12, nodes, available_bytes: available, ..machine() };
        let first = plan(&model, &machine, &request);
        prop_assert_eq!(&first, &plan(&model, &machine, &request), "planning is a function");
        let Ok(plan) = first else { return Ok(()) };

        let mut next = 0;
        for stage in &plan.stages {
            prop_assert_eq!(stage.layers.start, next);
            prop_assert!(!stage.layers.is_empty());
            prop_assert_eq!((stage.embed, stage.head), (next == 0, stage.layers.end == model.layers.len()));
            next = stage.layers.end;
        }
        prop_assert_eq!(next, model.layers.len());

        let limits = &plan.limits;
        let of_layers = |of: fn(&LayerSizes) -> u64| model.layers.iter().map(of).sum::<u64>();
        prop_assert_eq!(sum(&plan, |bytes| bytes.weights), of_layers(|layer| layer.weights) + model.head_bytes);
        prop_assert_eq!(sum(&plan, |bytes| bytes.embedding), model.embedding_bytes);
        let kv_tokens = (limits.kv_blocks * 32) as u64;
        prop_assert_eq!(
            sum(&plan, |bytes| bytes.kv), of_layers(|layer| layer.kv_elements) * kv_tokens * limits.kv_type.bytes());
        prop_assert_eq!(
            sum(&plan, |bytes| bytes.state), of_layers(|layer| layer.state_values) * 4 * limits.max_sequences as u64);
        prop_assert!(sum(&plan, StageBytes::private) <= available);
        prop_assert!(limits.kv_blocks * 32 >= limits.max_seq, "one full sequence always fits");
        prop_assert!(limits.max_step_tokens >= limits.max_sequences);
        prop_assert!((1..=limits.max_step_tokens).contains(&limits.max_logit_rows));
    }
}
