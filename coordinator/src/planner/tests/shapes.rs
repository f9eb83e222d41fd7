//! Plans for the shapes of real hybrid models on real sizes of cards, against bytes worked out by hand.
//!
//! Layers are Q4_K (144 bytes for 256 elements), the head Q6_K (210 bytes for 256), keys and values f16, states f32. Vectors are
//! left out: they are a few kilobytes a layer.

use super::gpus::{gpu, on};
use super::*;

/// A model's shape. Every fourth layer attends; the others keep a state.
struct Shape {
    layers: usize,
    /// Elements of the matrices of a layer that attends, and of one that keeps a state.
    attends: u64,
    keeps_state: u64,
    /// Bytes of keys and values of one token in a layer that attends.
    kv: u64,
    /// Values of the convolution and of the matrix states of one sequence in a layer that keeps a state.
    state: u64,
    d_model: usize,
}

const VOCAB: u64 = 248_320;

/// Width 1024, MLP 3584, 8 query and 2 key heads of 256, 16 key and 16 value heads of 128.
/// - MLP: 3 · 3584 · 1024 = 11,010,048
/// - attends: query and gate 2·8·256 · 1024 = 4,194,304; keys and values 2 · 2·256 · 1024 = 1,048,576; output 2048 · 1024 =
///   2,097,152
/// - keeps a state: (2·16 + 16)·128 · 1024 = 6,291,456; gate 2048 · 1024 = 2,097,152; two of 16 · 1024 = 32,768; output 2,097,152
const SMALL: Shape = Shape {
    layers: 24,
    attends: 11_010_048 + 4_194_304 + 1_048_576 + 2_097_152,
    keeps_state: 11_010_048 + 6_291_456 + 2_097_152 + 32_768 + 2_097_152,
    kv: 2 * 2 * 256 * 2,
    state: 3 * 6144 + 16 * 128 * 128,
    d_model: 1024,
};

/// Width 2560, MLP 9216, 16 query and 4 key heads of 256, 16 key and 32 value heads of 128.
/// - MLP: 3 · 9216 · 2560 = 70,778,880
/// - attends: 2·16·256 · 2560 = 20,971,520; 2 · 4·256 · 2560 = 5,242,880; 4096 · 2560 = 10,485,760
/// - keeps a state: (2·16 + 32)·128 · 2560 = 20,971,520; 4096 · 2560 = 10,485,760; 2 · 32 · 2560 = 163,840; 10,485,760
const FOUR: Shape = Shape {
    layers: 32,
    attends: 70_778_880 + 20_971_520 + 5_242_880 + 10_485_760,
    keeps_state: 70_778_880 + 20_971_520 + 10_485_760 + 163_840 + 10_485_760,
    kv: 2 * 4 * 256 * 2,
    state: 3 * 8192 + 32 * 128 * 128,
    d_model: 2560,
};

/// Width 4096, MLP 12288, 16 query and 4 key heads of 256, 16 key and 32 value heads of 128.
/// - MLP: 3 · 12288 · 4096 = 150,994,944
/// - attends: 2·16·256 · 4096 = 33,554,432; 2 · 4·256 · 4096 = 8,388,608; 4096 · 4096 = 16,777,216
/// - keeps a state: (2·16 + 32)·128 · 4096 = 33,554,432; 4096 · 4096 = 16,777,216; 2 · 32 · 4096 = 262,144; 16,777,216
const MIDDLE: Shape = Shape {
    layers: 32,
    attends: 150_994_944 + 33_554_432 + 8_388_608 + 16_777_216,
    keeps_state: 150_994_944 + 33_554_432 + 16_777_216 + 262_144 + 16_777_216,
    kv: 2 * 4 * 256 * 2,
    state: 3 * 8192 + 32 * 128 * 128,
    d_model: 4096,
};

/// Width 5120, MLP 17408, 24 query and 4 key heads of 256, 16 key and 48 value heads of 128.
/// - MLP: 3 · 17408 · 5120 = 267,386,880
/// - attends: 2·24·256 · 5120 = 62,914,560; 2 · 4·256 · 5120 = 10,485,760; 6144 · 5120 = 31,457,280
/// - keeps a state: (2·16 + 48)·128 · 5120 = 52,428,800; 6144 · 5120 = 31,457,280; 2 · 48 · 5120 = 491,520; 31,457,280
const LARGE: Shape = Shape {
    layers: 64,
    attends: 267_386_880 + 62_914_560 + 10_485_760 + 31_457_280,
    keeps_state: 267_386_880 + 52_428_800 + 31_457_280 + 491_520 + 31_457_280,
    kv: 2 * 4 * 256 * 2,
    state: 3 * 10_240 + 48 * 128 * 128,
    d_model: 5120,
};

impl Shape {
    fn summary(&self) -> ModelSummary {
        let layer = |index: usize| {
            let attends = index % 4 == 3;
            let elements = if attends { self.attends } else { self.keeps_state };
            let mut gpu = GpuSizes::default();
            gpu.add(elements * 144 / 256);
            LayerSizes {
                weights: gpu.weights,
                elements,
                kv_elements: if attends { self.kv / 2 } else { 0 },
                state_values: if attends { 0 } else { self.state },
                states: Vec::new(),
                buffers: vec![self.d_model; 4],
                hidden: 4 * self.d_model,
                widest_input: 4 * self.d_model,
                formats: vec![Format::Q4_K],
                gpu,
            }
        };
        let head = VOCAB * self.d_model as u64 * 210 / 256;
        let vocab = usize::try_from(VOCAB).unwrap();
        let model = PlannedModel {
            layers: self.layers,
            d_model: self.d_model,
            vocab,
            context_length: 262_144,
            ..model(1).model
        };
        ModelSummary {
            model,
            layers: (0..self.layers).map(layer).collect(),
            embedding_bytes: head,
            head_bytes: head,
            head_format: Format::Q6_K,
            gpu_head_bytes: head,
            gpu_widths: ModelWidths { d_model: self.d_model, vocab, rope_pairs: 32 },
        }
    }
}

/// So many cards of so many GiB, all free.
fn cards(count: usize, gib: u64) -> Machine {
    let gpus = (0..count).map(|index| gpu(index, gib << 30)).collect();
    Machine { gpus: GpuSurvey { gpus, looked_for: vec![] }, ..machine() }
}

fn ask(cards: usize, max_seq: usize, budget: Option<&str>) -> PlacementRequest {
    let numbers: Vec<String> = (0..cards).map(|index| index.to_string()).collect();
    PlacementRequest {
        max_seq: Some(max_seq),
        parallel: Some(1),
        gpu_layer_budget: budget.and_then(text),
        ..on(&numbers.join(","))
    }
}

#[test]
fn bytes_of_real_shapes_are_those_worked_out_by_hand() {
    // The large one, on two cards of 12 GiB, with 4096 tokens.
    // - a layer that attends: 372,244,480 · 144/256 = 209,387,520; one that keeps a state: 383,221,760 · 144/256 = 215,562,240
    // - a band of 32 layers: 8 · 209,387,520 + 24 · 215,562,240 = 6,848,593,920
    // - head: 248,320 · 5120 · 210/256 = 1,042,944,000
    // - keys and values: 8 layers · 4096 bytes · 4096 tokens = 134,217,728
    // - states: 24 layers · (30,720 + 786,432) · 4 = 78,446,592
    let plan = plan(&LARGE.summary(), &cards(2, 12), &ask(2, 4096, None)).unwrap();
    assert_eq!(counts(&plan), [32, 32]);
    let weights: Vec<u64> = plan.stages.iter().map(|stage| stage.bytes.weights).collect();
    assert_eq!(weights, [6_848_593_920, 6_848_593_920 + 1_042_944_000]);
    for stage in &plan.stages {
        assert_eq!((stage.bytes.kv, stage.bytes.state), (134_217_728, 78_446_592));
    }
}

/// Shape, cards, GiB of each, context, then: does everything fit, and layers per card; if not, layers that would be resident.
type Row = (&'static Shape, usize, u64, usize, Result<&'static [usize], std::ops::Range<usize>>);

/// What is needed beside scratch, worked out by hand:
/// - small: weights 6 · 10,321,920 + 18 · 12,109,824 = 279,908,352 and head 208,588,800; 4096 tokens take 6 · 2048 · 4096 =
///   50,331,648, 262,144 tokens 3,221,225,472 bytes
/// - four: weights 8 · 60,456,960 + 24 · 63,498,240 = 2,007,613,440 and head 521,472,000; 8 · 4096 bytes a token as for middle,
///   4,294,967,296 for 131,072
/// - middle: weights 8 · 117,964,800 + 24 · 122,830,848 = 3,891,658,752 and head 834,355,200; 8 · 4096 bytes a token: 134,217,728
///   for 4096 tokens, 8,589,934,592 for 262,144
/// - large: weights 13,697,187,840 and head 1,042,944,000; 16 · 4096 bytes a token: 268,435,456 for 4096 tokens, 2,147,483,648
///   for 32,768, 8,589,934,592 for 131,072, 17,179,869,184 for 262,144
const ROWS: [Row; 29] = [
    (&SMALL, 1, 8, 4096, Ok(&[24])),
    // 0.5 + 3.2 GB
    (&SMALL, 1, 8, 262_144, Ok(&[24])),
    (&SMALL, 4, 8, 262_144, Ok(&[6, 6, 6, 6])),
    (&SMALL, 1, 24, 262_144, Ok(&[24])),
    // 2.5 + 0.1 GB
    (&FOUR, 1, 8, 4096, Ok(&[32])),
    // 2.5 + 4.3 of 8.6 GB
    (&FOUR, 1, 8, 131_072, Ok(&[32])),
    // 2.5 + 8.6 of 12.9 GB
    (&FOUR, 1, 12, 262_144, Ok(&[32])),
    (&FOUR, 2, 8, 262_144, Ok(&[16, 16])),
    (&FOUR, 3, 24, 262_144, Ok(&[11, 11, 10])),
    // 4.7 + 0.1 GB
    (&MIDDLE, 1, 8, 4096, Ok(&[32])),
    // 4.7 + 8.6 GB of 12.9: all but two or three layers' weights, while keys and values stay
    (&MIDDLE, 1, 12, 262_144, Err(21..29)),
    (&MIDDLE, 1, 16, 262_144, Ok(&[32])),
    (&MIDDLE, 2, 8, 262_144, Ok(&[16, 16])),
    // 4.7 + 8.6 of 25.8 GB
    (&MIDDLE, 1, 24, 262_144, Ok(&[32])),
    (&MIDDLE, 4, 24, 4096, Ok(&[8, 8, 8, 8])),
    // 14.7 GB + 0.3
    (&LARGE, 1, 16, 4096, Ok(&[64])),
    // 14.7 GB + 2.1 of 17.2, and scratch
    (&LARGE, 1, 16, 32_768, Err(54..64)),
    // 14.7 GB + 1.1
    (&LARGE, 1, 16, 16_384, Ok(&[64])),
    (&LARGE, 1, 24, 4096, Ok(&[64])),
    (&LARGE, 1, 24, 32_768, Ok(&[64])),
    // 14.7 GB + 8.6 of 25.4 that are not the driver's
    (&LARGE, 1, 24, 131_072, Ok(&[64])),
    // 25.4 GB less head, keys, values, states: 7.0 GB / 0.214
    (&LARGE, 1, 24, 262_144, Err(28..34)),
    // 12.9 GB less head, keys, values: 11.1 GB / 0.214
    (&LARGE, 1, 12, 4096, Err(46..54)),
    // 8.6 GB: 6.8 GB / 0.214
    (&LARGE, 1, 8, 4096, Err(26..34)),
    // 6.8 + 1.0 + 0.2 GB on the fuller card of 8.6
    (&LARGE, 2, 8, 4096, Ok(&[32, 32])),
    // 13.7 + 1.0 + 17.2 GB in 51.5
    (&LARGE, 2, 24, 262_144, Ok(&[32, 32])),
    (&LARGE, 3, 24, 262_144, Ok(&[22, 21, 21])),
    (&LARGE, 4, 24, 262_144, Ok(&[16, 16, 16, 16])),
    (&LARGE, 3, 16, 262_144, Ok(&[22, 21, 21])),
];

#[test]
fn real_shapes_fit_where_arithmetic_says_so() {
    for (shape, count, gib, context, expected) in ROWS {
        let place = |budget| plan(&shape.summary(), &cards(count, gib), &ask(count, context, budget));
        let which = format!("{} layers, {count} x {gib} GiB, {context} tokens", shape.layers);
        match (place(None), expected) {
            (Ok(plan), Ok(expected)) => {
                assert_eq!(counts(&plan), expected, "{which}");
                let total = |of: fn(&StageBytes) -> u64| sum(&plan, of);
                let attending = shape.layers as u64 / 4;
                assert_eq!(total(|bytes| bytes.kv), attending * shape.kv * context as u64, "{which}");
                assert_eq!(total(|bytes| bytes.state), 3 * attending * shape.state * 4, "{which}");
            }
            (Err(Refusal::Memory(shortage)), Err(range)) => {
                let resident = shortage.advice.budget.unwrap();
                assert!(range.contains(&resident), "{which}: {resident} of {range:?}");
                let pcie = |request| PlacementRequest { offload_exec: text("pcie"), ..request };
                let request = pcie(ask(count, context, Some("auto")));
                let auto = plan(&shape.summary(), &cards(count, gib), &request).unwrap();
                let on_device = auto.stages.iter().flat_map(|stage| &stage.residency);
                assert_eq!(on_device.filter(|home| **home == Residency::Device).count(), resident, "{which}");
            }
            (found, expected) => panic!("{which}: {found:?} instead of {expected:?}"),
        }
    }
}
