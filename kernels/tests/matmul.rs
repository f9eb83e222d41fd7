//! Matrix products: every kernel set of this CPU, every format.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use spillway_kernels::activations::{Activations, Codes, Forms};
use spillway_kernels::formats::Format;
use spillway_kernels::isa::KernelSet;
use spillway_kernels::matmul::{Kernels, MatmulJob};
use spillway_kernels::pack::PackedMatrix;
use spillway_kernels::pool::ThreadPool;

/// Inputs for every weight format.
fn forms(codes: Codes) -> Forms {
    Forms { codes: Some(codes), float: true }
}

/// A small random generator (xorshift64*), so that a failure names its seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }
    /// About normal, mean 0, deviation 1.
    fn normal(&mut self) -> f32 {
        (0..6).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum::<f32>() * 1.414
    }
    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Where a block has f16 factors.
fn factors(format: Format) -> &'static [usize] {
    match format {
        Format::F32 | Format::F16 | Format::BF16 => &[],
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::IQ4_NL | Format::IQ4_XS => &[0],
        Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[0, 2],
        Format::Q2_K => &[80, 82],
        Format::Q3_K => &[108],
        Format::Q6_K => &[208],
    }
}

/// File bytes of a random matrix: any codes and integer scales, factors of ordinary size.
fn random_weights(random: &mut Random, format: Format, rows: usize, cols: usize) -> Vec<u8> {
    let n = rows * cols;
    match format {
        Format::F32 => random.values(n).into_iter().flat_map(f32::to_le_bytes).collect(),
        Format::F16 => {
            random.values(n).into_iter().flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect()
        }
        Format::BF16 => {
            random.values(n).into_iter().flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect()
        }
        _ => {
            let mut bytes: Vec<u8> =
                (0..rows * format.row_bytes(cols).unwrap()).map(|_| random.byte()).collect();
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                for &at in factors(format) {
                    block[at..at + 2]
                        .copy_from_slice(&half::f16::from_f32(random.normal() * 0.01).to_le_bytes());
                }
            }
            bytes
        }
    }
}

fn packed(format: Format, rows: usize, cols: usize, bytes: &[u8]) -> PackedMatrix {
    let mut matrix = PackedMatrix::new(format, rows, cols).unwrap();
    matrix.pack(&ThreadPool::new(1).unwrap(), bytes).unwrap();
    matrix
}

/// `W · x` for all rows of `x`.
fn product(kernels: Kernels, threads: usize, matrix: &PackedMatrix, codes: Codes, x: &[f32]) -> Vec<f32> {
    let pool = ThreadPool::new(threads).unwrap();
    let mut inputs = Activations::default();
    kernels.prepare(&pool, x, matrix.cols(), forms(codes), &mut inputs).unwrap();
    let mut out = vec![f32::NAN; inputs.tokens() * matrix.rows()];
    kernels.matmul(&pool, &inputs, &mut [MatmulJob::store(matrix, &mut out)]).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn scalar() -> Kernels {
    Kernels::for_set(KernelSet::Scalar).unwrap()
}

fn vector_sets() -> Vec<Kernels> {
    Kernels::available().into_iter().filter(|kernels| kernels.set() != KernelSet::Scalar).collect()
}

/// Every set with every kind of codes.
fn with_codes(sets: Vec<Kernels>) -> Vec<(Kernels, Codes)> {
    sets.into_iter().flat_map(|kernels| Codes::ALL.map(|codes| (kernels, codes))).collect()
}

/// Packing loses nothing: every row decodes to the bits that the file decodes to, at odd row counts, packed by
/// several threads.
#[test]
fn packing_keeps_every_weight() {
    for format in Format::ALL {
        for (rows, blocks) in [(1, 1), (15, 2), (17, 1), (100, 3)] {
            let cols = blocks * format.block_len();
            let bytes = random_weights(&mut Random::new(rows as u64), format, rows, cols);
            let mut matrix = PackedMatrix::new(format, rows, cols).unwrap();
            matrix.pack(&ThreadPool::new(3).unwrap(), &bytes).unwrap();
            let (mut ours, mut exact) = (vec![0.0; cols], vec![0.0; cols]);
            for (row, bytes) in bytes.chunks_exact(format.row_bytes(cols).unwrap()).enumerate() {
                matrix.decode_row(row, &mut ours).unwrap();
                format.decode(bytes, &mut exact).unwrap();
                assert_eq!(bits(&ours), bits(&exact), "{} row {row} of {rows} x {cols}", format.name());
            }
        }
    }
}

/// A packed matrix takes at most 5 % more memory than its file.
#[test]
fn packed_matrices_are_not_much_larger_than_files() {
    for format in Format::ALL {
        let (packed, file) =
            (PackedMatrix::packed_bytes(format, 1024, 1024).unwrap(), format.row_bytes(1024).unwrap());
        assert!(packed as f64 <= 1.05 * (1024 * file) as f64, "{}: {packed} bytes", format.name());
    }
}

/// The scalar set computes the product: floating-point weights to f32 rounding, quantised weights to the exact product
/// with the rounded inputs, and that is as close to the product with the true inputs as their steps are fine.
#[test]
fn scalar_products_are_right() {
    for (format, (codes, steps)) in each(&[(Codes::Int8, 127.0f32), (Codes::Int16, 16256.0)]) {
        let mut random = Random::new(7);
        let (rows, cols) = (19, 512);
        let bytes = random_weights(&mut random, format, rows, cols);
        let matrix = packed(format, rows, cols, &bytes);
        let x = random.values(2 * cols);
        let y = product(scalar(), 1, &matrix, codes, &x);
        for (token, x) in x.chunks_exact(cols).enumerate() {
            // The rounded input, from the definition.
            let coded: Vec<f64> = x
                .chunks_exact(32)
                .flat_map(|block| {
                    let amax = block.iter().fold(0.0f32, |a, v| a.max(v.abs()));
                    let (scale, inverse) = (amax / steps, steps / amax);
                    block.iter().map(move |v| f64::from((v * inverse).round_ties_even()) * f64::from(scale))
                })
                .collect();
            let seen = |k: usize| if format.is_quantised() { coded[k] } else { f64::from(x[k]) };
            let mut w = vec![0.0; cols];
            for row in 0..rows {
                matrix.decode_row(row, &mut w).unwrap();
                let sum = |f: &dyn Fn(usize) -> f64| (0..cols).map(f).sum::<f64>();
                let y = f64::from(y[token * rows + row]);
                let exact = sum(&|k| f64::from(w[k]) * seen(k));
                let size = sum(&|k| (f64::from(w[k]) * seen(k)).abs());
                // Mins and codes cancel inside a block, so the bound is relative to the larger of the two.
                assert!(
                    (y - exact).abs() <= 1e-5 * size,
                    "{} {codes:?} row {row}: {y}, exactly {exact}",
                    format.name()
                );
                // An input is off by at most half a step of its block: the errors are random, so the sum's deviation
                // is about that / sqrt(3) times the norm of the row. Rounding to f32 comes on top.
                let step = 4.0 / f64::from(steps);
                let noise = sum(&|k| f64::from(w[k]).powi(2)).sqrt() * step / 2.0 / 3f64.sqrt();
                let truth = sum(&|k| f64::from(w[k]) * f64::from(x[k]));
                assert!(
                    (y - truth).abs() <= 5.0 * noise + 1e-6 * size,
                    "{} {codes:?} row {row}: {y}, truly {truth}",
                    format.name()
                );
            }
        }
    }
}

/// Every format with every item.
fn each<T: Copy>(items: &[T]) -> Vec<(Format, T)> {
    Format::ALL.into_iter().flat_map(|format| items.iter().map(move |&item| (format, item))).collect()
}

/// Two planes of codes bring every quantised format 64 times closer to the exact product than one. Their steps are 128 times
/// finer; beyond that the f32 arithmetic shows where large mins cancel against large codes, as these random ones do.
#[test]
fn the_second_plane_takes_the_rounding_noise_away() {
    for format in Format::ALL.into_iter().filter(|format| format.is_quantised()) {
        let mut random = Random::new(13);
        let (rows, cols, tokens) = (32, 256, 8);
        let matrix = packed(format, rows, cols, &random_weights(&mut random, format, rows, cols));
        let x = random.values(tokens * cols);
        let [coarse, fine] = Codes::ALL.map(|codes| {
            let y = product(scalar(), 1, &matrix, codes, &x);
            let mut squares = 0.0;
            let mut w = vec![0.0; cols];
            for row in 0..rows {
                matrix.decode_row(row, &mut w).unwrap();
                for (token, x) in x.chunks_exact(cols).enumerate() {
                    let exact: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                    squares += (f64::from(y[token * rows + row]) - exact).powi(2);
                }
            }
            squares.sqrt()
        });
        assert!(fine * 64.0 <= coarse, "{}: {} times closer", format.name(), coarse / fine);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every kernel set returns the bits of the scalar set, for every format, odd shapes and any number of tokens.
    #[test]
    fn every_kernel_set_returns_the_bits_of_the_scalar_set(
        seed in any::<u64>(), rows in 1usize..70, blocks in 1usize..4, tokens in 1usize..20,
    ) {
        for (format, codes) in each(&Codes::ALL) {
            let mut random = Random::new(seed);
            let cols = if format.block_len() == 1 { blocks * 37 } else { blocks * format.block_len() };
            let matrix = packed(format, rows, cols, &random_weights(&mut random, format, rows, cols));
            let x = random.values(tokens * cols);
            let expected = bits(&product(scalar(), 1, &matrix, codes, &x));
            for kernels in vector_sets() {
                let ours = bits(&product(kernels, 1, &matrix, codes, &x));
                prop_assert!(ours == expected, "{} {} {codes:?}", kernels.set(), format.name());
            }
        }
    }

    /// A token's outputs have the same bits alone, in any batch, with any number of threads.
    #[test]
    fn batches_and_threads_do_not_change_a_bit(seed in any::<u64>(), rows in 1usize..200) {
        for kernels in Kernels::available() {
            for (format, codes) in each(&Codes::ALL) {
                let mut random = Random::new(seed);
                let cols = format.block_len().max(64);
                let matrix = packed(format, rows, cols, &random_weights(&mut random, format, rows, cols));
                let x = random.values(33 * cols);
                let alone: Vec<u32> =
                    x.chunks_exact(cols).flat_map(|x| bits(&product(kernels, 1, &matrix, codes, x))).collect();
                for (tokens, threads) in [(2, 2), (3, 1), (7, 4), (8, 3), (16, 2), (33, 4)] {
                    let batch = bits(&product(kernels, threads, &matrix, codes, &x[..tokens * cols]));
                    prop_assert!(
                        batch == alone[..tokens * rows],
                        "{} {} {codes:?} {tokens} tokens, {threads} threads", kernels.set(), format.name()
                    );
                }
            }
        }
    }
}

/// Inputs that take several blocks of tokens (more than the cache holds) give the same bits.
#[test]
fn token_blocks_do_not_change_a_bit() {
    let mut random = Random::new(3);
    let (format, rows, cols) = (Format::Q4_K, 40, 4096);
    let matrix = packed(format, rows, cols, &random_weights(&mut random, format, rows, cols));
    let x = random.values(200 * cols);
    for (kernels, codes) in with_codes(vector_sets()) {
        let batch = product(kernels, 2, &matrix, codes, &x);
        for token in [0, 63, 64, 150, 199] {
            let alone = product(kernels, 1, &matrix, codes, &x[token * cols..][..cols]);
            assert_eq!(bits(&alone), bits(&batch[token * rows..][..rows]), "{} token {token}", kernels.set());
        }
    }
}

/// A group gives each job what it would get alone; `add` adds to what is there; a bias is added per row.
#[test]
fn groups_bias_and_add() {
    let pool = ThreadPool::new(3).unwrap();
    for (kernels, codes) in with_codes(Kernels::available()) {
        let mut random = Random::new(11);
        let (cols, tokens) = (256, 5);
        let shapes = [(Format::Q4_K, 40), (Format::Q6_K, 1), (Format::F16, 17), (Format::Q8_0, 64)];
        let matrices = shapes.map(|(format, rows)| {
            packed(format, rows, cols, &random_weights(&mut random, format, rows, cols))
        });
        let x = random.values(tokens * cols);
        let bias = random.values(17);
        let before = random.values(tokens * 64);

        let mut inputs = Activations::with_capacity(tokens, cols, forms(codes));
        let bytes = inputs.bytes();
        assert_eq!(bytes, Activations::bytes_for(tokens, cols, forms(codes)));
        kernels.prepare(&pool, &x, cols, forms(codes), &mut inputs).unwrap();
        assert_eq!(inputs.bytes(), bytes, "nothing is allocated within the capacity");
        let mut outs = shapes.map(|(_, rows)| vec![0.0; tokens * rows]);
        outs[3].copy_from_slice(&before);
        let [a, b, c, d] = &mut outs;
        let mut jobs = [
            MatmulJob::store(&matrices[0], a),
            MatmulJob::store(&matrices[1], b),
            MatmulJob::store(&matrices[2], c).with_bias(Some(&bias)),
            MatmulJob::add(&matrices[3], d),
        ];
        kernels.matmul(&pool, &inputs, &mut jobs).unwrap();

        let mut alone = matrices.each_ref().map(|matrix| product(kernels, 1, matrix, codes, &x));
        for (i, y) in alone[2].iter_mut().enumerate() {
            *y += bias[i % 17];
        }
        alone[3].iter_mut().zip(&before).for_each(|(y, b)| *y += b);
        for (job, (ours, alone)) in outs.iter().zip(&alone).enumerate() {
            assert_eq!(bits(ours), bits(alone), "{} {codes:?} job {job}", kernels.set());
        }
    }
}

/// The largest codes, scales and inputs: no intermediate sum overflows, in any kernel set.
#[test]
fn extreme_codes_do_not_overflow() {
    for (format, codes) in each(&Codes::ALL).into_iter().filter(|(format, _)| format.is_quantised()) {
        for (weight_byte, sign) in [(0xff, 1.0), (0x00, 1.0), (0x80, -1.0), (0x7f, -1.0), (0xff, -1.0)] {
            let (rows, cols) = (16, 256);
            let mut bytes = vec![weight_byte; rows * format.row_bytes(cols).unwrap()];
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                for &at in factors(format) {
                    block[at..at + 2].copy_from_slice(&half::f16::ONE.to_le_bytes());
                }
            }
            let matrix = packed(format, rows, cols, &bytes);
            let x = vec![sign * 127.0; 9 * cols];
            let expected = product(scalar(), 1, &matrix, codes, &x);
            let mut w = vec![0.0; cols];
            matrix.decode_row(0, &mut w).unwrap();
            let exact: f64 = w.iter().map(|w| f64::from(*w) * f64::from(sign) * 127.0).sum();
            let size: f64 = w.iter().map(|w| f64::from(w.abs()) * 127.0).sum();
            assert!((f64::from(expected[0]) - exact).abs() <= 1e-4 * size.max(1e6), "{}", format.name());
            for kernels in vector_sets() {
                assert_eq!(
                    bits(&product(kernels, 1, &matrix, codes, &x)),
                    bits(&expected),
                    "{} {} {codes:?}",
                    kernels.set(),
                    format.name()
                );
            }
        }
    }
}

/// Infinite and undefined numbers in weights or inputs come out as such and harm no other token or row; inputs of
/// zeros or of nearly nothing give zeros.
#[test]
fn strange_numbers_stay_where_they_are() {
    for (kernels, codes) in with_codes(Kernels::available()) {
        let cols = 64;
        let mut random = Random::new(5);
        let mut bytes = random_weights(&mut random, Format::Q8_0, 3, cols);
        bytes[68..70].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        let matrix = packed(Format::Q8_0, 3, cols, &bytes);
        let mut x = random.values(5 * cols);
        x[cols + 3] = f32::NAN;
        x[2 * cols + 40] = f32::NEG_INFINITY;
        x[3 * cols..4 * cols].fill(0.0);
        x[4 * cols..].fill(1e-38);
        let y = product(kernels, 2, &matrix, codes, &x);
        let finite: Vec<bool> = y.iter().map(|y| y.is_finite()).collect();
        assert!(finite[0] && !finite[1] && finite[2], "{}: {y:?}", kernels.set());
        assert!(y[3..9].iter().all(|y| y.is_nan()), "{}: {y:?}", kernels.set());
        assert!([9, 11, 12, 14].iter().all(|&i| y[i] == 0.0), "{}: {y:?}", kernels.set());
    }
}

/// Shapes that do not fit are refused before anything is written.
#[test]
fn wrong_shapes_are_refused() {
    let kernels = scalar();
    let pool = ThreadPool::new(1).unwrap();
    let matrix = PackedMatrix::new(Format::Q8_0, 4, 64).unwrap();
    let mut inputs = Activations::default();
    let mut out = [1.0; 8];
    let error = kernels.prepare(&pool, &[0.0; 65], 64, forms(Codes::Int8), &mut inputs).unwrap_err();
    assert_eq!(error.code(), "activation_rows");

    kernels.prepare(&pool, &[0.0; 64], 32, forms(Codes::Int8), &mut inputs).unwrap();
    let error = kernels.matmul(&pool, &inputs, &mut [MatmulJob::store(&matrix, &mut out)]).unwrap_err();
    assert_eq!(error.code(), "matmul_columns");

    kernels.prepare(&pool, &[0.0; 64], 64, Forms { codes: None, float: true }, &mut inputs).unwrap();
    let error = kernels.matmul(&pool, &inputs, &mut [MatmulJob::store(&matrix, &mut out)]).unwrap_err();
    assert_eq!(error.code(), "matmul_outputs");
    let error = kernels.matmul(&pool, &inputs, &mut [MatmulJob::store(&matrix, &mut out[..4])]).unwrap_err();
    assert_eq!(error.code(), "matmul_input_form");
    let job = MatmulJob::store(&matrix, &mut out[..4]).with_bias(Some(&[0.0; 3]));
    assert_eq!(kernels.matmul(&pool, &inputs, &mut [job]).unwrap_err().code(), "matmul_bias");
    assert_eq!(out, [1.0; 8]);

    assert_eq!(matrix.decode_row(4, &mut [0.0; 64]).unwrap_err().code(), "weight_row");
    assert_eq!(matrix.decode_row(0, &mut [0.0; 63]).unwrap_err().code(), "weight_length");
    assert_eq!(PackedMatrix::new(Format::Q8_0, 4, 63).unwrap_err().code(), "weight_columns");
    assert_eq!(PackedMatrix::new(Format::F32, usize::MAX, 2).unwrap_err().code(), "weight_too_large");
    let mut matrix = PackedMatrix::new(Format::Q8_0, 40, 64).unwrap();
    assert_eq!(matrix.pack(&pool, &[0; 40 * 68 - 1]).unwrap_err().code(), "weight_length");
    let mut chunks = matrix.chunks(2);
    let (mut first, mut last) = (chunks.next().unwrap(), chunks.next().unwrap());
    assert_eq!((first.first_row(), first.rows(), last.first_row(), last.rows()), (0, 32, 32, 8));
    assert_eq!(first.pack(&[0; 68]).unwrap_err().code(), "weight_length");
    last.pack(&[0; 8 * 68]).unwrap();
    assert!(chunks.next().is_none());
}
