//! Proves: each filter keeps what its definition says, compared with a plain sort; seeds repeat; broken rows are errors.

use super::*;
use proptest::prelude::*;
use spillway_kernels::ops::{Exponents, Ops};

fn sampler(params: SamplingParams) -> Sampler {
    Sampler::new(params, &[])
}

fn hot() -> SamplingParams {
    SamplingParams { temperature: 1.0, ..Default::default() }
}

/// Ids that a sampler can ever choose from `logits`, found by drawing often.
fn support(params: SamplingParams, logits: &[f32]) -> Vec<u32> {
    let mut sampler = sampler(params);
    let mut seen: Vec<u32> = (0..2000).map(|_| sampler.sample(&mut logits.to_vec()).unwrap()).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

#[test]
fn greedy_takes_the_largest_and_the_lower_id_on_a_tie() {
    let mut greedy = sampler(SamplingParams::default());
    assert_eq!(greedy.sample(&mut [1.0, 3.0, 3.0, 2.0]), Ok(1));
}

#[test]
fn draws_follow_the_probabilities() {
    // softmax of [0, ln 3] is 1/4, 3/4.
    let mut sampler = sampler(hot());
    let ones: u32 = (0..40_000).map(|_| sampler.sample(&mut [0.0, 3f32.ln()]).unwrap()).sum();
    assert!((29_500..30_500).contains(&ones), "{ones}");
}

#[test]
fn temperature_sharpens() {
    let cold = SamplingParams { temperature: 0.02, ..hot() };
    assert_eq!(support(cold, &[0.0, 1.0, 0.5]), vec![1]);
}

#[test]
fn filters_keep_what_they_say() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits: Vec<f32> = [4f32, 2.0, 1.0, 1.0].iter().map(|weight| weight.ln()).collect();
    assert_eq!(support(SamplingParams { top_k: 2, ..hot() }, &logits), vec![0, 1]);
    assert_eq!(support(SamplingParams { top_k: 3, ..hot() }, &logits), vec![0, 1, 2], "ties by id");
    assert_eq!(support(SamplingParams { top_p: 0.5, ..hot() }, &logits), vec![0]);
    assert_eq!(support(SamplingParams { top_p: 0.6, ..hot() }, &logits), vec![0, 1]);
    assert_eq!(support(SamplingParams { top_p: 0.99, ..hot() }, &logits), vec![0, 1, 2, 3]);
    assert_eq!(support(SamplingParams { min_p: 0.4, ..hot() }, &logits), vec![0, 1]);
    let both = SamplingParams { top_k: 3, top_p: 0.7, ..hot() };
    assert_eq!(support(both, &logits), vec![0, 1], "top-p among the three: 4/7, 2/7, 1/7");
}

#[test]
fn penalties_use_the_window_and_the_prompt() {
    let logits = [2.0, 1.9, -1.0];
    let choose = |params: SamplingParams, prompt: &[u32]| {
        Sampler::new(params, prompt).sample(&mut logits.to_vec()).unwrap()
    };
    let repeat = SamplingParams { repeat_penalty: 2.0, ..Default::default() };
    assert_eq!(choose(repeat.clone(), &[]), 0);
    assert_eq!(choose(repeat.clone(), &[0]), 1, "2.0 / 2 < 1.9");
    let short = SamplingParams { repeat_window: 1, ..repeat };
    assert_eq!(choose(short, &[0, 2]), 0, "token 0 has left the window");
    let presence = SamplingParams { presence_penalty: 0.5, ..Default::default() };
    assert_eq!(choose(presence, &[0, 0]), 1);
    let frequency = SamplingParams { frequency_penalty: 0.08, ..Default::default() };
    assert_eq!(choose(frequency.clone(), &[0]), 0, "2.0 - 0.08 > 1.9");
    assert_eq!(choose(frequency, &[0, 0]), 1, "2.0 - 0.16 < 1.9");
}

#[test]
fn chosen_tokens_enter_the_window() {
    let params = SamplingParams { presence_penalty: 5.0, ..Default::default() };
    let mut sampler = sampler(params);
    let picks: Vec<u32> = (0..3).map(|_| sampler.sample(&mut [3.0, 2.0, 1.0]).unwrap()).collect();
    assert_eq!(picks, vec![0, 1, 2]);
}

#[test]
fn bias_moves_and_bans() {
    let with = |logit_bias| SamplingParams { logit_bias, ..Default::default() };
    assert_eq!(sampler(with(vec![(2, 5.0)])).sample(&mut [3.0, 2.0, 1.0]), Ok(2));
    assert_eq!(sampler(with(vec![(0, f32::NEG_INFINITY)])).sample(&mut [3.0, 2.0, 1.0]), Ok(1));
    let all = with((0..3).map(|id| (id, f32::NEG_INFINITY)).collect());
    assert_eq!(sampler(all).sample(&mut [3.0, 2.0, 1.0]), Err(SampleError::NothingLeft));
}

#[test]
fn broken_rows_are_errors_not_garbage() {
    for bad in [f32::NAN, f32::INFINITY] {
        for params in [SamplingParams::default(), hot()] {
            assert_eq!(sampler(params).sample(&mut [0.0, bad, 1.0]), Err(SampleError::NonFinite));
        }
    }
    assert_eq!(sampler(hot()).sample(&mut []), Err(SampleError::NonFinite));
}

#[test]
fn a_seed_is_a_text() {
    let run = |seed| {
        let mut sampler = sampler(SamplingParams { seed, top_p: 0.9, ..hot() });
        (0..50).map(|_| sampler.sample(&mut [0.0, 0.1, 0.2, 0.3]).unwrap()).collect::<Vec<u32>>()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

/// Field, value outside its range.
#[test]
fn parameters_outside_their_range_are_named() {
    let default = SamplingParams::default;
    let table = [
        ("temperature", SamplingParams { temperature: -0.1, ..default() }),
        ("temperature", SamplingParams { temperature: f32::NAN, ..default() }),
        ("top_p", SamplingParams { top_p: 0.0, ..default() }),
        ("top_p", SamplingParams { top_p: 1.5, ..default() }),
        ("min_p", SamplingParams { min_p: -1.0, ..default() }),
        ("repeat_penalty", SamplingParams { repeat_penalty: 0.0, ..default() }),
        ("presence_penalty", SamplingParams { presence_penalty: f32::INFINITY, ..default() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: -200.0, ..default() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(10, 1.0)], ..default() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(1, f32::NAN)], ..default() }),
    ];
    for (field, params) in table {
        let error = params.validate(10).unwrap_err();
        assert_eq!(error.field, field);
        assert!(error.to_string().starts_with(field), "{error}");
    }
    assert_eq!(default().validate(10), Ok(()));
}

/// The choice by its definition, with full sorts of all tokens: id and weight of each.
fn defined(params: &SamplingParams, logits: &[f32]) -> Option<u32> {
    let by_weight = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let logs = (0u32..).zip(logits.iter().map(|logit| (logit - best) * (1.0 / params.temperature)));
    let mut all: Vec<(u32, f32)> = logs.filter(|(_, log)| *log >= -DEPTH).collect();
    let keep = params.top_k as usize;
    if keep > 0 && keep < all.len() {
        all.sort_by(by_weight);
        all.truncate(keep);
    }
    let weigh = |logs: &mut [f32]| {
        f64::from(Ops::fastest().weigh(logs, Exponents { offset: 0.0, factor: 1.0, least: -DEPTH }))
    };
    all.iter_mut().for_each(|(_, weight)| {
        weigh(std::slice::from_mut(weight));
    });
    let total = |all: &[(u32, f32)]| all.iter().map(|(_, weight)| f64::from(*weight)).sum::<f64>();
    let mut row: Vec<f32> = logits.iter().map(|logit| (logit - best) * (1.0 / params.temperature)).collect();
    let blocks: Vec<f64> = row.chunks_mut(512).map(weigh).collect();
    let of_row: f64 = blocks.iter().sum();
    if params.top_p < 1.0 {
        let of_all = if keep > 0 { total(&all) } else { of_row };
        let (wanted, mut sum) = (f64::from(params.top_p) * of_all, 0.0);
        all.sort_by(by_weight);
        let weights = all.iter().map(|(_, weight)| f64::from(*weight));
        let enough = weights.into_iter().position(|weight| {
            sum += weight;
            sum >= wanted
        });
        all.truncate(enough.map_or(all.len(), |index| index + 1));
    }
    all.retain(|(_, weight)| *weight >= params.min_p);
    let filtered = keep > 0 || params.top_p < 1.0 || params.min_p > 0.0;
    let mut left = Random::new(params.seed).unit() * if filtered { total(&all) } else { of_row };
    if !filtered {
        // Block by block, then within one: what is before it is taken off by its sum.
        let mut first = 0u32;
        for sum in &blocks {
            if left < *sum {
                break;
            }
            left -= sum;
            first += 512;
        }
        all.retain(|(id, _)| (first..first + 512).contains(id));
    }
    let drawn = all.iter().find(|(_, weight)| {
        left -= f64::from(*weight);
        left < 0.0
    });
    drawn.or(all.last()).map(|(id, _)| *id)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever shortcut is taken, it is the token of the definition: rows of one block and of many, with many ties, with tokens too
    /// far down to be drawn, and every combination of filters.
    #[test]
    fn shortcuts_choose_what_the_definition_says(
        steps in prop::collection::vec(0u16..400, 1..6000),
        spread in 0.001f32..0.3, temperature in 0.1f32..3.0, seed: u64,
        top_k in prop_oneof![Just(0u32), 1..20u32, 1..7000u32],
        top_p in prop_oneof![Just(1.0f32), 0.01..1.0f32],
        min_p in prop_oneof![Just(0.0f32), 0.0001..1.0f32, Just(1.0f32)],
    ) {
        let logits: Vec<f32> = steps.iter().map(|&step| f32::from(step) * spread).collect();
        let params = SamplingParams { temperature, top_k, top_p, min_p, seed, ..Default::default() };
        let chosen = sampler(params.clone()).sample(&mut logits.clone()).unwrap();
        prop_assert_eq!(Some(chosen), defined(&params, &logits));
    }
}
