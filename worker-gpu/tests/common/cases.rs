//! What every device must compute. Run on the emulated device in all its variants, and on real ones.

use super::numbers::{Numbers, ulps};
use super::{Bench, PRELUDE_CHECK, attention, delta_net, operations, products};
use crate::args;
use half::{bf16, f16};
use spillway_worker_gpu::hip::Launch;
use spillway_worker_gpu::launch::{Int8Rows, Norm, NormRows};
use std::ops::Range;

/// Computes on a device and checks the results.
pub type Case = fn(&Bench<'_>);

/// All cases by name.
pub const ALL: &[(&str, Case)] = &[
    ("residual_add", residual_add),
    ("rms_norm", rms_norm),
    ("rms_norm_is_batch_invariant", rms_norm_is_batch_invariant),
    ("rms_norm_picks_and_quantises", rms_norm_picks_and_quantises),
    ("rows", operations::rows),
    ("quantize_rows", products::quantize_rows),
    ("matmul", products::matmul),
    ("gemm", products::gemm),
    ("matmul_outputs", products::matmul_outputs),
    ("matmul_groups", products::matmul_groups),
    ("silu_quantize", products::silu_quantize),
    ("gated", products::gated),
    ("embed_rows", products::embed_rows),
    ("attention", attention::attention),
    ("attention_tiles", attention::attention_tiles),
    ("attention_is_chunk_invariant", attention::attention_is_chunk_invariant),
    ("attention_prepares_heads", attention::attention_prepares_heads),
    ("delta_net", delta_net::delta_net),
    ("delta_net_is_chunk_invariant", delta_net::delta_net_is_chunk_invariant),
    ("exp_and_log", exp_and_log),
    ("exp2_fast", exp2_fast),
    ("half_formats", half_formats),
    ("rounding_to_halves", rounding_to_halves),
    ("block_operations", block_operations),
    ("dot4", dot4),
    ("mma", mma),
    ("graph_replay", graph_replay),
];

fn residual_add(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(1);
    // Not a multiple of the block: the last block is cut.
    let (residual, update) = (numbers.units(1000), numbers.units(1000));
    let (on_device, update_on_device) = (bench.upload(&residual), bench.upload(&update));
    let kernel = bench.kernel("residual_add");
    bench.launch(&kernel, Launch::linear(4, 256), args![&on_device, &update_on_device, 1000u32]);
    let expected: Vec<f32> = residual.iter().zip(&update).map(|(a, b)| a + b).collect();
    assert_eq!(bench.download::<f32>(&on_device), expected);
}

fn rms_norm_rows(bench: &Bench<'_>, x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let (input, weights, output) = (bench.upload(x), bench.upload(weight), bench.empty::<f32>(x.len()));
    let norm = Norm { weight: weights.slice(), width: weight.len(), epsilon };
    let rows = NormRows {
        count: x.len() / weight.len(),
        x: input.slice(),
        indices: None,
        out: output.slice(),
        int8: None,
    };
    bench.kernels().rms_norm(&bench.stream, &norm, &rows).unwrap();
    bench.download(&output)
}

/// Rows of any width: of odd ones, of few and many waves, and of more than a block keeps in registers.
fn rms_norm(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(2);
    let epsilon = 1e-6f32;
    for width in [1, 31, 64, 1000, 4096, 5122, 9000] {
        let (x, weight) = (numbers.units(3 * width), numbers.units(width));
        let got = rms_norm_rows(bench, &x, &weight, epsilon);
        for (row, got) in x.chunks(width).zip(got.chunks(width)) {
            let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
            for ((v, w), got) in row.iter().zip(&weight).zip(got) {
                let exact = f64::from(*v) * scale * f64::from(*w);
                assert!((f64::from(*got) - exact).abs() <= 4e-7 * exact.abs(), "width {width}");
            }
        }
    }
}

/// A row's bits do not depend on the rows beside it.
fn rms_norm_is_batch_invariant(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(3);
    let (x, weight) = (numbers.units(5 * 777), numbers.units(777));
    let together = rms_norm_rows(bench, &x, &weight, 1e-5);
    for (row, expected) in x.chunks(777).zip(together.chunks(777)) {
        assert_eq!(rms_norm_rows(bench, row, &weight, 1e-5), expected);
    }
}

/// Picked rows, and the 8-bit form beside the values, are the bits of the separate operations.
fn rms_norm_picks_and_quantises(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(9);
    for width in [96, 9 * 1024] {
        let (x, weight) = (numbers.units(4 * width), numbers.units(width));
        let normed = rms_norm_rows(bench, &x, &weight, 1e-5);
        let picked = [&normed[2 * width..3 * width], &normed[..width]].concat();
        let (input, weights, indices) = (bench.upload(&x), bench.upload(&weight), bench.upload(&[2u32, 0]));
        let forms = [(); 2].map(|()| bench.empty::<u8>(Int8Rows::bytes_for(2, width)));
        let [int8, separate] = forms.each_ref().map(|form| Int8Rows::new(form.slice(), 2, width).unwrap());
        let output = bench.empty::<f32>(2 * width);
        let norm = Norm { weight: weights.slice(), width, epsilon: 1e-5 };
        let rows = NormRows {
            count: 2,
            x: input.slice(),
            indices: Some(indices.slice()),
            out: output.slice(),
            int8: Some(int8),
        };
        bench.kernels().rms_norm(&bench.stream, &norm, &rows).unwrap();
        assert_eq!(bench.download::<f32>(&output), picked);
        bench.kernels().quantize_rows(&bench.stream, output.slice(), &separate).unwrap();
        let [together, separate] = forms.each_ref().map(|form| bench.download::<u8>(form));
        assert!(together == separate, "width {width}");
    }
}

/// The stated bounds over the whole range, denormals and special values included.
fn exp_and_log(bench: &Bench<'_>) {
    let mut x: Vec<f32> = (0..8000).map(|i| (i - 4000) as f32 * 0.026_123).collect();
    let mut numbers = Numbers::new(5);
    x.extend((0..8000).map(|_| f32::from_bits(numbers.bits())).filter(|v| !v.is_nan()));
    x.extend([
        0.0,
        -0.0,
        1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE,
        1e-45,
        0.999_999_94,
    ]);
    let n = x.len();
    let (input, exps, logs, roots) =
        (bench.upload(&x), bench.empty::<f32>(n), bench.empty::<f32>(n), bench.empty::<f32>(n));
    let kernel = bench.function(&PRELUDE_CHECK, "check_exp_log");
    let launch = Launch::linear((n as u32).div_ceil(256), 256);
    bench.launch(&kernel, launch, args![&input, &exps, &logs, &roots, n as u32]);
    let [exps, logs, roots] = [&exps, &logs, &roots].map(|buffer| bench.download::<f32>(buffer));
    for (i, v) in x.iter().enumerate() {
        let exact = f64::from(*v).exp();
        let allowed = if exact < f64::from(f32::MIN_POSITIVE) { 2 } else { 1 };
        assert!(ulps(exps[i], exact) <= allowed, "exp({v:e}) = {:e}, not {exact:e}", exps[i]);
        let exact = f64::from(*v).ln();
        assert!(ulps(logs[i], exact) <= 2, "log({v:e}) = {:e}, not {exact:e}", logs[i]);
        let expected = 1.0 / v.sqrt();
        assert!(roots[i] == expected || (roots[i].is_nan() && expected.is_nan()), "1/sqrt({v:e})");
    }
}

fn exp2_fast(bench: &Bench<'_>) {
    let x: Vec<f32> = (0..20_000).map(|i| (i - 10_000) as f32 * 0.0126).collect();
    let n = x.len() as u32;
    let (input, output) = (bench.upload(&x), bench.empty::<f32>(x.len()));
    let kernel = bench.function(&PRELUDE_CHECK, "check_exp2_fast");
    bench.launch(&kernel, Launch::linear(n.div_ceil(256), 256), args![&input, &output, n]);
    for (v, got) in x.iter().zip(bench.download::<f32>(&output)) {
        assert!(ulps(got, f64::from(*v).exp2()) <= 2, "exp2({v}) = {got}");
    }
}

fn half_formats(bench: &Bench<'_>) {
    let n = 1 << 16;
    let (f16s, bf16s) = (bench.empty::<f32>(n), bench.empty::<f32>(n));
    let (f16_again, bf16_again) = (bench.empty::<u16>(n), bench.empty::<u16>(n));
    let kernel = bench.function(&PRELUDE_CHECK, "check_halves");
    bench.launch(&kernel, Launch::linear(256, 256), args![&f16s, &bf16s, &f16_again, &bf16_again]);
    let same =
        |got: f32, expected: f32| got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
    let (f16s, bf16s) = (bench.download::<f32>(&f16s), bench.download::<f32>(&bf16s));
    let (f16_again, bf16_again) = (bench.download::<u16>(&f16_again), bench.download::<u16>(&bf16_again));
    for bits in 0..=u16::MAX {
        let at = usize::from(bits);
        let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
        assert!(same(f16s[at], half.to_f32()), "f16 {bits:#06x}");
        assert!(same(bf16s[at], brain.to_f32()), "bf16 {bits:#06x}");
        assert!(
            f16_again[at] == bits || f16::from_bits(f16_again[at]).is_nan() && half.is_nan(),
            "f16 {bits:#06x}"
        );
        assert!(
            bf16_again[at] == bits || bf16::from_bits(bf16_again[at]).is_nan() && brain.is_nan(),
            "bf16 {bits:#06x}"
        );
    }
}

fn rounding_to_halves(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(6);
    let mut x: Vec<f32> =
        (0..20_000).map(|_| f32::from_bits(numbers.bits())).filter(|v| !v.is_nan()).collect();
    // Ties, the edge of overflow and of underflow.
    x.extend([1.000_488_3, 1.001_464_8, 65519.99, 65520.0, 2.98e-8, 2.9802322e-8, 8.94e-8, -0.0, f32::MAX]);
    let n = x.len();
    let (input, halves, brains) = (bench.upload(&x), bench.empty::<u16>(n), bench.empty::<u16>(n));
    let kernel = bench.function(&PRELUDE_CHECK, "check_rounding");
    let launch = Launch::linear((n as u32).div_ceil(256), 256);
    bench.launch(&kernel, launch, args![&input, &halves, &brains, n as u32]);
    let (halves, brains) = (bench.download::<u16>(&halves), bench.download::<u16>(&brains));
    for (i, v) in x.iter().enumerate() {
        assert_eq!(halves[i], f16::from_f32(*v).to_bits(), "f16({v:e})");
        assert_eq!(brains[i], bf16::from_f32(*v).to_bits(), "bf16({v:e})");
    }
}

/// Whole numbers, so that every order of additions gives the same sum.
fn block_operations(bench: &Bench<'_>) {
    let wave = bench.wave();
    for (grid, block) in [([2, 3, 2], wave), ([1, 1, 1], 256), ([3, 1, 1], 1024)] {
        let blocks = grid.iter().product::<u32>();
        let n = (blocks * block) as usize;
        let x: Vec<f32> = (0..n).map(|i| (i * 7 % 101) as f32 - 50.0).collect();
        let input = bench.upload(&x);
        let [sums, maxima, totals, reversed] = std::array::from_fn(|_| bench.empty::<f32>(n));
        let coordinates = bench.empty::<u32>(n);
        let kernel = bench.function(&PRELUDE_CHECK, "check_block");
        let launch = Launch { grid, block, shared_bytes: block * 4 };
        bench.launch(&kernel, launch, args![&input, &sums, &maxima, &totals, &reversed, &coordinates]);
        let [sums, maxima, totals, reversed] =
            [&sums, &maxima, &totals, &reversed].map(|buffer| bench.download::<f32>(buffer));
        let coordinates = bench.download::<u32>(&coordinates);
        for i in 0..n {
            let (of_block, of_wave) =
                (i / block as usize * block as usize, i / wave as usize * wave as usize);
            let wave_values = &x[of_wave..][..wave as usize];
            let block_values = &x[of_block..][..block as usize];
            let lane = (i - of_wave) as u32;
            assert_eq!(sums[i], wave_values.iter().sum::<f32>());
            assert_eq!(maxima[i], wave_values.iter().copied().fold(f32::MIN, f32::max));
            assert_eq!(totals[i], block_values.iter().sum::<f32>());
            assert_eq!(reversed[i], block_values[block as usize - 1 - (i - of_block)]);
            assert_eq!(coordinates[i], (lane + 1) % wave + 1000 * ((i - of_block) as u32 / wave));
        }
    }
}

fn dot4(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(7);
    let [a, b, c]: [Vec<i32>; 3] =
        std::array::from_fn(|_| (0..500).map(|_| numbers.bits() as i32 >> 4).collect());
    let buffers = [bench.upload(&a), bench.upload(&b), bench.upload(&c), bench.empty::<i32>(500)];
    let kernel = bench.function(&PRELUDE_CHECK, "check_dot4");
    bench.launch(
        &kernel,
        Launch::linear(2, 256),
        args![&buffers[0], &buffers[1], &buffers[2], &buffers[3], 500u32],
    );
    let got = bench.download::<i32>(&buffers[3]);
    for i in 0..500 {
        let products = a[i].to_le_bytes().into_iter().zip(b[i].to_le_bytes());
        let dot: i32 = products.map(|(a, b)| i32::from(a as i8) * i32::from(b as i8)).sum();
        assert_eq!(got[i], c[i].wrapping_add(dot));
    }
}

/// Small whole numbers: exact in every order of additions, and different in every element.
fn mma(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(8);
    let mut small =
        |n: usize, range: i32| -> Vec<i32> { (0..n).map(|_| numbers.bits() as i32 % range).collect() };
    let (a, b, c) = (small(256, 32), small(256, 32), small(256, 1000));
    let (a8, b8) = (small(512, 128), small(512, 128));
    let halves = |v: &[i32]| -> Vec<u16> { v.iter().map(|v| f16::from_f32(*v as f32).to_bits()).collect() };
    let bytes = |v: &[i32]| -> Vec<i8> { v.iter().map(|v| *v as i8).collect() };
    let floats: Vec<f32> = c.iter().map(|v| *v as f32).collect();
    let buffers = [
        bench.upload(&halves(&a)),
        bench.upload(&halves(&b)),
        bench.upload(&floats),
        bench.empty::<f32>(256),
        bench.upload(&bytes(&a8)),
        bench.upload(&bytes(&b8)),
        bench.empty::<i32>(3 * 256),
    ];
    let args: Vec<_> = buffers.iter().map(|buffer| buffer.slice().into()).collect();
    bench.launch(&bench.function(&PRELUDE_CHECK, "check_mma"), Launch::linear(1, bench.wave()), &args);
    let (d, d8) = (bench.download::<f32>(&buffers[3]), bench.download::<i32>(&buffers[6]));
    let product =
        |a: &[i32], b: &[i32], depth: usize, (row, column): (usize, usize), of: Range<usize>| -> i32 {
            of.map(|k| a[row * depth + k] * b[column * depth + k]).sum()
        };
    for at in 0..256 {
        let place = (at / 16, at % 16);
        assert_eq!(d[at], (product(&a, &b, 16, place, 0..16) + c[at]) as f32, "f16 {place:?}");
        for (n, (start, of)) in [(1000, 0..32), (-5, 0..16), (7, 16..32)].into_iter().enumerate() {
            let expected = start + product(&a8, &b8, 32, place, of);
            assert_eq!(d8[n * 256 + at], expected, "int8 {n} {place:?}");
        }
    }
    let (of, rows, columns) = (bench.upload(&floats[..16]), bench.empty::<f32>(256), bench.empty::<f32>(256));
    let kernel = bench.function(&PRELUDE_CHECK, "check_mma_facts");
    bench.launch(&kernel, Launch::linear(1, bench.wave()), args![&of, &rows, &columns]);
    let (rows, columns) = (bench.download::<f32>(&rows), bench.download::<f32>(&columns));
    for at in 0..256 {
        assert_eq!((rows[at], columns[at]), (floats[at / 16], floats[at % 16]), "{at}");
    }
}

/// A captured chain of kernels and copies computes on each replay what it would have computed when queued.
fn graph_replay(bench: &Bench<'_>) {
    let kernel = bench.kernel("residual_add");
    let (residual, update) = (bench.upload(&[1.0f32; 300]), bench.upload(&[0.5f32; 300]));
    let pinned = bench.device.allocate_pinned("test staging", 1200).unwrap();
    let graph = bench
        .stream
        .capture(|| {
            bench.launch(&kernel, Launch::linear(2, 256), args![&residual, &update, 300u32]);
            bench.launch(&kernel, Launch::linear(2, 256), args![&residual, &update, 300u32]);
            bench.stream.download(&pinned, 0, residual.slice())
        })
        .unwrap();
    assert_eq!(bench.download::<f32>(&residual), [1.0; 300], "capturing runs nothing");
    for replay in 1..4 {
        // SAFETY: the buffers are alive.
        unsafe { graph.launch(&bench.stream) }.unwrap();
        bench.stream.synchronize().unwrap();
        let mut bytes = [0u8; 1200];
        pinned.read(0, &mut bytes).unwrap();
        assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes), [1.0 + replay as f32; 300]);
    }
}
