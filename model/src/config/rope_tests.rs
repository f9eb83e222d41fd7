//! Frequencies against those that `modeling_rope_utils.py` of transformers 5.24.0 computes (in f32), every fourth pair.

use super::{RopeConfig, RopeScaling, Yarn};

fn rope(base: f32, rotary_dim: usize, scaling: RopeScaling) -> RopeConfig {
    RopeConfig { base, rotary_dim, scaling, attention_factor: 1.0 }
}

fn assert_every_fourth(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len() * 4);
    for (i, &e) in expected.iter().enumerate() {
        let f = found[4 * i];
        assert!((f - e).abs() <= 1e-6 * e, "pair {}: {f} instead of {e}", 4 * i);
    }
}

#[test]
fn linear() {
    let rope = rope(10_000.0, 64, RopeScaling::Linear(4.0));
    let expected = [2.5e-1, 7.905_694e-2, 2.5e-2, 7.905_695e-3, 2.5e-3, 7.905_695e-4, 2.5e-4, 7.905_695e-5];
    assert_every_fourth(&rope.inv_freq(None), &expected);
    assert_eq!(rope.magnitude(), 1.0);
}

#[test]
fn llama3_divisors() {
    let rope = rope(500_000.0, 64, RopeScaling::None);
    // What the converter stores for factor 32, low 1, high 4, original context 8192.
    let divisors: Vec<f32> = rope
        .inv_freq(None)
        .iter()
        .map(|freq| {
            let turns = 8192.0 * freq / (2.0 * std::f32::consts::PI);
            let smooth = ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0);
            1.0 / ((1.0 - smooth) / 32.0 + smooth)
        })
        .collect();
    let expected = [
        1.0,
        1.939_227_6e-1,
        3.760_603e-2,
        7.292_665e-3,
        4.295_567e-4,
        8.570_256e-6,
        1.661_967_6e-6,
        3.222_933e-7,
    ];
    assert_every_fourth(&rope.inv_freq(Some(&divisors)), &expected);
}

#[test]
fn yarn_with_its_defaults_as_qwen_uses_it() {
    let yarn =
        Yarn { factor: 4.0, original_context: 32_768, ext_factor: 1.0, beta_fast: 32.0, beta_slow: 1.0 };
    let rope = rope(1_000_000.0, 128, RopeScaling::Yarn(yarn));
    let expected = [
        1.0,
        4.216_965e-1,
        1.778_279_4e-1,
        7.498_942e-2,
        3.162_278e-2,
        1.333_521_5e-2,
        5.375_321_5e-3,
        1.848_276_6e-3,
        6.029_411_5e-4,
        1.798_411_8e-4,
        4.445_698_5e-5,
        1.874_735_6e-5,
        7.905_694e-6,
        3.333_804e-6,
        1.405_853_4e-6,
        5.928_434_4e-7,
    ];
    assert_every_fourth(&rope.inv_freq(None), &expected);
    assert!((rope.magnitude() - 1.138_629_4).abs() < 1e-6);
}

#[test]
fn yarn_with_betas() {
    let yarn = Yarn { factor: 16.0, original_context: 4096, ext_factor: 1.0, beta_fast: 8.0, beta_slow: 2.0 };
    let rope = rope(10_000.0, 64, RopeScaling::Yarn(yarn));
    let expected =
        [1.0, 3.162_277_6e-1, 1e-1, 3.162_278e-2, 8.437_499e-3, 6.917_483_4e-4, 6.25e-5, 1.976_423_7e-5];
    assert_every_fourth(&rope.inv_freq(None), &expected);
    assert!((rope.magnitude() - 1.277_258_9).abs() < 1e-6);
}

#[test]
fn yarn_without_extrapolation_is_linear() {
    let yarn = Yarn { factor: 4.0, original_context: 4096, ext_factor: 0.0, beta_fast: 32.0, beta_slow: 1.0 };
    let yarn = rope(10_000.0, 64, RopeScaling::Yarn(yarn));
    let linear = rope(10_000.0, 64, RopeScaling::Linear(4.0));
    assert_eq!(yarn.inv_freq(None), linear.inv_freq(None));
    assert_eq!(yarn.magnitude(), 1.0);
}
