//! Row operations against their definitions in f64, and equality of kernel sets, batches and thread counts.

use super::testing::{Noise, bits, every_set, fastest};
use super::*;
use proptest::prelude::*;

fn pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads).unwrap()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Every value is within `tolerance` of the exact one, relative to `1 + |exact|`.
fn assert_close(got: &[f32], want: impl IntoIterator<Item = f64>, tolerance: f64) {
    let mut count = 0;
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= tolerance * (1.0 + want.abs()), "{i}: {got} for {want}");
        count += 1;
    }
    assert_eq!(count, got.len());
}

/// RMS norm is what its formula says, whole rows and heads alike.
#[test]
fn rms_norm_agrees_with_the_definition() {
    for width in [1, 15, 16, 64, 100, 576, 2560] {
        let mut noise = Noise(3);
        let (src, weight) = (noise.take(5 * width), noise.take(width));
        let want = src.chunks_exact(width).flat_map(|row| {
            #[expect(clippy::cast_precision_loss, reason = "small widths")]
            let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + 1e-6).sqrt();
            row.iter()
                .zip(&weight)
                .map(move |(&x, &w)| f64::from(x) * scale * f64::from(w))
                .collect::<Vec<_>>()
        });
        let mut dst = vec![0.0; src.len()];
        fastest().rms_norm(&pool(2), &src, &weight, 1e-6, &mut dst).unwrap();
        assert_close(&dst, want, 1e-6);
        let mut in_place = src.clone();
        fastest().head_norm(&pool(2), &mut in_place, &weight, 1e-6).unwrap();
        assert_eq!(bits(&in_place), bits(&dst));
    }
}

/// An operation that changes its first buffer by its second.
type Elementwise = fn(&Ops, &ThreadPool, &mut [f32], &[f32]) -> Result<(), OpsError>;

/// Elementwise operations are what their formulas say, on the serial path and on the pool.
#[test]
fn elementwise_agrees_with_the_definition() {
    for n in [1, 17, 1000, SERIAL_BELOW + 5] {
        let mut noise = Noise(5);
        let a: Vec<f32> = noise.take(n).iter().map(|x| 10.0 * x).collect();
        let b = noise.take(n);
        let exact = |f: fn(f64, f64) -> f64| {
            a.iter().zip(&b).map(move |(&a, &b)| f(f64::from(a), f64::from(b))).collect::<Vec<_>>()
        };
        let run = |f: Elementwise| {
            let mut dst = a.clone();
            f(&fastest(), &pool(3), &mut dst, &b).unwrap();
            dst
        };
        assert_close(&run(Ops::silu_mul), exact(|a, b| silu(a) * b), 1e-6);
        assert_close(&run(Ops::sigmoid_mul), exact(|a, b| a / (1.0 + (-b).exp())), 1e-6);
        assert_close(&run(Ops::add), exact(|a, b| a + b), 1e-6);
    }
}

/// Weights are exponentials of what counts, and their sum is theirs; no set of kernels gives other bits.
#[test]
fn weights_are_exponentials_and_sum_up() {
    for n in [0, 1, 15, 16, 33, 512, 1000] {
        let values: Vec<f32> = Noise(7).take(n).iter().map(|x| 30.0 * x).collect();
        let exponents = Exponents { offset: 25.0, factor: 1.5, least: -40.0 };
        let exact = |&value: &f32| {
            let exponent = (value - 25.0) * 1.5;
            if exponent < -40.0 { 0.0 } else { f64::from(exponent).exp() }
        };
        let mut weights = values.clone();
        let sum = fastest().weigh(&mut weights, exponents);
        for (weight, exact) in weights.iter().zip(values.iter().map(exact)) {
            assert!((f64::from(*weight) - exact).abs() <= 2e-7 * exact, "{weight} for {exact}");
        }
        let whole: f64 = weights.iter().copied().map(f64::from).sum();
        assert!((f64::from(sum) - whole).abs() <= 1e-6 * whole, "{sum} for {whole}");
        for ops in every_set() {
            let mut again = values.clone();
            assert_eq!(ops.weigh(&mut again, exponents).to_bits(), sum.to_bits());
            assert_eq!(bits(&again), bits(&weights));
        }
    }
    let mut banned = [f32::NEG_INFINITY, 0.0];
    assert_eq!(fastest().weigh(&mut banned, Exponents { offset: 0.0, factor: 1.0, least: -32.0 }), 1.0);
    assert_eq!(banned, [0.0, 1.0]);
}

/// `[query | gate]` per head comes apart into queries and gates.
#[test]
fn split_heads_separates_pairs() {
    let src: Vec<f32> = (0u16..12).map(f32::from).collect();
    let (mut first, mut second) = (vec![0.0; 6], vec![0.0; 6]);
    fastest().split_heads(&pool(1), &src, 3, &mut first, &mut second).unwrap();
    assert_eq!(first, [0.0, 1.0, 2.0, 6.0, 7.0, 8.0]);
    assert_eq!(second, [3.0, 4.0, 5.0, 9.0, 10.0, 11.0]);
}

/// Pairs turn by position times frequency, in both orders; dimensions beyond the rotated part pass through.
#[test]
fn rope_turns_pairs() {
    let (head_dim, heads) = (10, 2);
    let inv_freq = [1.0f32, 0.1, 0.01];
    let positions = [0u32, 1, 77, 40_000];
    let src = Noise(9).take(positions.len() * heads * head_dim);
    for pairing in [RopePairing::Halves, RopePairing::Adjacent] {
        let mut table = RopeTable::new(pairing, &inv_freq, 1.5);
        table.prepare(&positions);
        let mut got = src.clone();
        fastest().rope(&pool(1), &mut got, head_dim, &table).unwrap();
        let mut want: Vec<f64> = src.iter().map(|&x| f64::from(x)).collect();
        for (head, values) in want.chunks_exact_mut(head_dim).enumerate() {
            for (i, &frequency) in inv_freq.iter().enumerate() {
                let (first, second) = match pairing {
                    RopePairing::Halves => (i, i + 3),
                    RopePairing::Adjacent => (2 * i, 2 * i + 1),
                };
                #[expect(clippy::cast_precision_loss, reason = "the definition rounds the angle to f32")]
                let (sin, cos) = f64::from(positions[head / heads] as f32 * frequency).sin_cos();
                let (a, b) = (values[first], values[second]);
                values[first] = 1.5 * (a * cos - b * sin);
                values[second] = 1.5 * (b * cos + a * sin);
            }
        }
        assert_close(&got, want, 1e-6);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Every kernel set of this CPU gives the bits of the scalar one, for any width and any number of rows and threads.
    #[test]
    fn kernel_sets_agree(rows in 1usize..40, width in 1usize..2000, threads in 1usize..4, seed in any::<u64>()) {
        let mut noise = Noise(seed);
        let a: Vec<f32> = noise.take(rows * width).iter().map(|x| 100.0 * x).collect();
        let (b, weight) = (noise.take(rows * width), noise.take(width));
        let head_dim = 2 * width.div_ceil(2);
        let mut table = RopeTable::new(RopePairing::Halves, &noise.take(width / 2), 1.0);
        table.prepare(&(0..u32::try_from(rows).unwrap()).collect::<Vec<_>>());
        let all = |ops: &Ops, pool: &ThreadPool| {
            let mut results = [(); 4].map(|()| a.clone());
            let mut heads = vec![0.5; rows * head_dim];
            ops.silu_mul(pool, &mut results[0], &b).unwrap();
            ops.sigmoid_mul(pool, &mut results[1], &b).unwrap();
            ops.add(pool, &mut results[2], &b).unwrap();
            ops.rms_norm(pool, &a, &weight, 1e-5, &mut results[3]).unwrap();
            ops.rope(pool, &mut heads, head_dim, &table).unwrap();
            (results.map(|values| bits(&values)), bits(&heads))
        };
        let want = all(&Ops::new(KernelSet::Scalar).unwrap(), &pool(1));
        for ops in every_set() {
            prop_assert!(all(&ops, &pool(threads)) == want, "{}", ops.set());
        }
    }
}

/// Every f32 class goes through the vector functions of every kernel set alike: infinities, NaN, subnormals.
#[test]
fn special_values_agree() {
    let special =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, -1e-40, f32::MAX, f32::MIN, 88.8];
    let ones = vec![1.0; special.len()];
    let run = |ops: &Ops| {
        let (mut silu, mut sigmoid) = (special.to_vec(), ones.clone());
        ops.silu_mul(&pool(1), &mut silu, &ones).unwrap();
        ops.sigmoid_mul(&pool(1), &mut sigmoid, &special).unwrap();
        let class = |x: &f32| if x.is_nan() { None } else { Some(x.to_bits()) };
        silu.iter().chain(&sigmoid).map(class).collect::<Vec<_>>()
    };
    let want = run(&Ops::new(KernelSet::Scalar).unwrap());
    for ops in every_set() {
        assert_eq!(run(&ops), want, "{}", ops.set());
    }
}

/// Buffers that do not fit are refused.
#[test]
fn refuses_wrong_lengths() {
    let (ops, pool) = (fastest(), pool(1));
    let mut buf = [0.0; 8];
    let mut table = RopeTable::new(RopePairing::Halves, &[1.0; 3], 1.0);
    table.prepare(&[0, 1]);
    let results = [
        ops.add(&pool, &mut buf, &[0.0; 7]),
        ops.silu_mul(&pool, &mut buf, &[0.0; 9]),
        ops.sigmoid_mul(&pool, &mut buf, &[]),
        ops.head_norm(&pool, &mut buf, &[1.0; 3], 1e-6),
        ops.rms_norm(&pool, &[0.0; 4], &[1.0; 4], 1e-6, &mut buf),
        ops.split_heads(&pool, &[0.0; 8], 2, &mut [0.0; 4], &mut buf),
        ops.rope(&pool, &mut buf, 4, &table),
        ops.rope(&pool, &mut buf, 3, &table),
    ];
    for (i, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().code(), "op_shape", "case {i}");
    }
}
