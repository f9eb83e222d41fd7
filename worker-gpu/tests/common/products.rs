//! Products with weights of every format, against the CPU's kernels.

use super::numbers::Numbers;
use super::{Bench, cpu};
use half::f16;
use spillway_kernels::activations::{Activations, Codes, Forms};
use spillway_kernels::device_layout::{DeviceLayout, TILE_ROWS};
use spillway_kernels::formats::Format;
use spillway_kernels::matmul::MatmulJob;
use spillway_kernels::pack::PackedMatrix;
use spillway_worker_gpu::hip::{DeviceBuffer, DeviceSlice};
use spillway_worker_gpu::launch::{GatedBuffers, Inputs, Int8Rows, Kernels, Matrix, Output, Products};

/// Where a block's f16 factors are, which random bytes must not make infinite.
fn factor_offsets(format: Format) -> &'static [usize] {
    match format {
        Format::F32 | Format::F16 | Format::BF16 => &[],
        Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[0, 2],
        Format::Q2_K => &[80, 82],
        Format::Q3_K => &[108],
        Format::Q6_K => &[208],
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 | Format::IQ4_NL | Format::IQ4_XS => &[0],
    }
}

/// A matrix of random blocks, as a file has it.
pub fn random_weights(numbers: &mut Numbers, format: Format, rows: usize, cols: usize) -> Vec<u8> {
    let values = numbers.units(rows * cols);
    match format {
        Format::F32 => bytemuck::cast_slice(&values).to_vec(),
        Format::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Format::BF16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => {
            let mut bytes: Vec<u8> =
                (0..rows * format.row_bytes(cols).unwrap()).map(|_| (numbers.bits() >> 13) as u8).collect();
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                for at in factor_offsets(format) {
                    let factor = f16::from_f32(numbers.unit() * 0.02);
                    block[*at..at + 2].copy_from_slice(&factor.to_le_bytes());
                }
            }
            bytes
        }
    }
}

/// The matrix on the device, and its memory.
pub fn upload_matrix(
    bench: &Bench<'_>,
    format: Format,
    rows: usize,
    cols: usize,
    file: &[u8],
) -> (Matrix, DeviceBuffer) {
    let layout = DeviceLayout::new(format, cols).unwrap();
    let mut repacked = vec![0; layout.matrix_bytes(rows).unwrap()];
    let tile_of_file = TILE_ROWS * format.row_bytes(cols).unwrap();
    for (rows, tile) in file.chunks(tile_of_file).zip(repacked.chunks_exact_mut(layout.tile_bytes())) {
        layout.repack_tile(rows, tile).unwrap();
    }
    let buffer = bench.upload(&repacked);
    (Matrix::new(layout, rows, buffer.slice()).unwrap(), buffer)
}

/// Inputs in the form that `format` reads, and their memory.
pub fn upload_inputs(
    bench: &Bench<'_>,
    format: Format,
    x: &[f32],
    cols: usize,
) -> (Inputs, [DeviceBuffer; 2]) {
    let values = bench.upload(x);
    let tokens = x.len() / cols;
    let rows = bench.empty::<u8>(Int8Rows::bytes_for(tokens, cols));
    let inputs = match format.is_quantised() {
        false => Inputs::F32(values.slice()),
        true => {
            let rows = Int8Rows::new(rows.slice(), tokens, cols).unwrap();
            bench.kernels().quantize_rows(&bench.stream, values.slice(), &rows).unwrap();
            Inputs::Int8(rows)
        }
    };
    (inputs, [values, rows])
}

/// The CPU's product, `[tokens, rows]`.
fn cpu_product(format: Format, rows: usize, cols: usize, file: &[u8], x: &[f32]) -> Vec<f32> {
    let (pool, kernels, _) = cpu();
    let mut matrix = PackedMatrix::new(format, rows, cols).unwrap();
    matrix.pack(pool, file).unwrap();
    let mut inputs = Activations::default();
    kernels.prepare(pool, x, cols, Forms::of([format], Codes::Int8), &mut inputs).unwrap();
    let mut out = vec![0.0; x.len() / cols * rows];
    kernels.matmul(pool, &inputs, &mut [MatmulJob::store(&matrix, &mut out)]).unwrap();
    out
}

/// For each output, the sum of the products' sizes: what rounding errors are measured by.
fn magnitudes(format: Format, rows: usize, cols: usize, file: &[u8], x: &[f32]) -> Vec<f64> {
    let mut weights = vec![0.0; rows * cols];
    format.decode(file, &mut weights).unwrap();
    let row_of = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from((x * w).abs())).sum();
    x.chunks(cols).flat_map(|x| weights.chunks(cols).map(move |w| row_of(x, w))).collect()
}

fn close(what: &str, got: &[f32], expected: &[f32], magnitudes: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (i, ((got, expected), magnitude)) in got.iter().zip(expected).zip(magnitudes).enumerate() {
        let error = f64::from((got - expected).abs());
        assert!(error <= 3e-6 * magnitude, "{what}, output {i}: {got} for {expected} (of {magnitude})");
    }
}

/// Every format, in every launch shape: what the CPU computes but for the order of sums; and the same bits for a token
/// whatever the tokens beside it.
pub fn matmul(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(20);
    for format in Format::ALL {
        // The last tile is cut; slices are of unequal length; one lacks columns where the format allows it.
        let (rows, cols) = (21, if format.block_len() == 1 { 1073 } else { 1280 });
        let file = random_weights(&mut numbers, format, rows, cols);
        let x = numbers.units(13 * cols);
        let (matrix, _memory) = upload_matrix(bench, format, rows, cols, &file);
        let product = |x: &[f32]| {
            let (inputs, _memory) = upload_inputs(bench, format, x, cols);
            let out = bench.empty::<f32>(x.len() / cols * rows);
            let output = Output::store(out.slice());
            bench.kernels().matmul(&bench.stream, &matrix, inputs, x.len() / cols, output).unwrap();
            bench.download::<f32>(&out)
        };
        let all = product(&x);
        let magnitudes = magnitudes(format, rows, cols, &file, &x);
        close(format.name(), &all, &cpu_product(format, rows, cols, &file, &x), &magnitudes);
        for tokens in [1, 2, 3, 5, 8] {
            assert_eq!(product(&x[..tokens * cols]), all[..tokens * rows], "{} x {tokens}", format.name());
        }
    }
}

/// Matrices of one format with the same inputs, in every launch shape: each gets what it gets alone, with bias or sum.
pub fn matmul_groups(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(25);
    for format in [Format::F16, Format::Q4_K] {
        let (cols, tokens) = (512, 26);
        // More than a launch takes, tiles cut, one matrix smaller than a tile.
        let rows = [40, 5, 16, 70, 33];
        let files = rows.map(|rows| random_weights(&mut numbers, format, rows, cols));
        let matrices: Vec<_> = rows
            .iter()
            .zip(&files)
            .map(|(rows, file)| upload_matrix(bench, format, *rows, cols, file))
            .collect();
        let (inputs, _inputs) = upload_inputs(bench, format, &numbers.units(tokens * cols), cols);
        let before = rows.map(|rows| numbers.units(tokens * rows));
        let bias = bench.upload(&numbers.units(70));
        for tokens in [1, 2, 4, 8, 16, 26] {
            let run = |group: bool| {
                let outs = before.each_ref().map(|values| bench.upload(values));
                let products: Vec<(Matrix, Output)> = matrices
                    .iter()
                    .zip(&outs)
                    .enumerate()
                    .map(|(i, ((matrix, _), out))| {
                        let output =
                            if i == 2 { Output::add(out.slice()) } else { Output::store(out.slice()) };
                        (*matrix, output.with_bias((i % 2 == 1).then(|| bias.slice())))
                    })
                    .collect();
                let kernels = bench.kernels();
                let step = if group { products.len() } else { 1 };
                products
                    .chunks(step)
                    .for_each(|part| kernels.matmuls(&bench.stream, part, inputs, tokens).unwrap());
                outs.each_ref().map(|out| bench.download::<f32>(out))
            };
            assert!(run(true) == run(false), "{} x {tokens}", format.name());
        }
        let other = Format::ALL.into_iter().find(|other| *other != format).unwrap();
        let file = random_weights(&mut numbers, other, 16, cols);
        let (stranger, _memory) = upload_matrix(bench, other, 16, cols, &file);
        let out = Output::store(bias.slice());
        let refused =
            bench.kernels().matmuls(&bench.stream, &[(matrices[1].0, out), (stranger, out)], inputs, 1);
        assert_eq!(refused.unwrap_err().code(), "gpu_operation_unsupported");
    }
}

/// The gated half of an MLP, at once and in steps: the bits of products, `silu_mul` and `quantize_rows`.
pub fn gated(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(26);
    let (kernels, stream) = (bench.kernels(), &bench.stream);
    let pairs = [Format::Q4_K, Format::Q6_K, Format::Q8_0, Format::F16].map(|format| [format; 2]);
    for [gate_format, up_format] in pairs.into_iter().chain([[Format::Q4_0, Format::F32]]) {
        let (rows, cols) = (96, 512);
        let [gate_file, up_file] =
            [gate_format, up_format].map(|format| random_weights(&mut numbers, format, rows, cols));
        let (gate, _gate) = upload_matrix(bench, gate_format, rows, cols, &gate_file);
        let (up, _up) = upload_matrix(bench, up_format, rows, cols, &up_file);
        for tokens in [1, 2, 5] {
            let x = numbers.units(tokens * cols);
            let [(gate_inputs, _a), (up_inputs, _b)] =
                [gate_format, up_format].map(|format| upload_inputs(bench, format, &x, cols));
            let products = [0, 1].map(|_| bench.empty::<f32>(tokens * rows));
            let [left, right] = products.each_ref().map(|memory| memory.slice());
            kernels.matmul(stream, &gate, gate_inputs, tokens, Output::store(left)).unwrap();
            kernels.matmul(stream, &up, up_inputs, tokens, Output::store(right)).unwrap();
            kernels.silu_mul(stream, left, right, tokens * rows).unwrap();
            let bytes = Int8Rows::bytes_for(tokens, rows);
            let [expected, int8] = [0, 1].map(|_| bench.empty::<u8>(bytes));
            let quantized = Int8Rows::new(expected.slice(), tokens, rows).unwrap();
            kernels.quantize_rows(stream, left, &quantized).unwrap();
            let (values, expected) = (bench.download::<f32>(&products[0]), bench.download::<u8>(&expected));

            let buffers = GatedBuffers { products: [left, right], int8: int8.slice() };
            let both = [(&gate, gate_inputs), (&up, up_inputs)];
            let what = format!("{} and {} x {tokens}", gate_format.name(), up_format.name());
            let Inputs::F32(got) = kernels.gated(stream, both, tokens, &buffers, false).unwrap() else {
                panic!("{what}: not f32")
            };
            assert_eq!(got.address(), left.address());
            assert!(bench.download::<f32>(&products[0]) == values, "{what}");
            let Inputs::Int8(_) = kernels.gated(stream, both, tokens, &buffers, true).unwrap() else {
                panic!("{what}: not 8-bit")
            };
            let at_once = tokens == 1 && gate_format == up_format && gate_format.is_quantised();
            let got = bench.download::<u8>(if at_once { &products[0] } else { &int8 });
            assert!(got[..bytes] == expected, "{what}");
        }
    }
}

/// The bits of `silu_mul` and `quantize_rows`, in cells of ordinary, zero and undefined values.
pub fn silu_quantize(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(27);
    let (kernels, stream) = (bench.kernels(), &bench.stream);
    let (rows, cols) = (3, 96);
    let mut gate = numbers.units(rows * cols);
    gate[32..64].fill(0.0);
    gate[70] = f32::NAN;
    let up = numbers.units(rows * cols);
    let [gate, up] = [&gate, &up].map(|values| bench.upload(values));
    let [got, expected] = [0, 1].map(|_| bench.empty::<u8>(Int8Rows::bytes_for(rows, cols)));
    let of = |memory: &DeviceBuffer| Int8Rows::new(memory.slice(), rows, cols).unwrap();
    kernels.silu_quantize(stream, gate.slice(), up.slice(), &of(&got)).unwrap();
    kernels.silu_mul(stream, gate.slice(), up.slice(), rows * cols).unwrap();
    kernels.quantize_rows(stream, gate.slice(), &of(&expected)).unwrap();
    assert!(bench.download::<u8>(&got) == bench.download::<u8>(&expected));
}

/// Few and many tokens at once, with the kernels for tiles and blocks of them (on matrix units, elsewhere emulated) and row by
/// row: the same bits.
pub fn gemm(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(24);
    let formats = [
        Format::F32,
        Format::F16,
        Format::Q4_0,
        Format::Q8_0,
        Format::Q2_K,
        Format::Q3_K,
        Format::Q4_K,
        Format::Q6_K,
        Format::IQ4_XS,
    ];
    let load = |of| Kernels::load(&bench.device, bench.compiler, &formats).unwrap().with_products(of);
    let row_by_row = load(Products::RowByRow);
    let others = [Products::FewTokens, Products::SmallBlocks, Products::LargeBlocks].map(|of| (load(of), of));
    for format in formats {
        // Blocks and stages are cut; slices end inside stages, and some are empty.
        let (wide, narrow) = match format.block_len() {
            1 => (1073, 5),
            32 => (37 * 32, 32),
            block => (5 * block, block),
        };
        for (rows, cols, tokens) in [(150, wide, 70), (70, wide, 18), (70, wide, 7), (33, narrow, 3)] {
            let file = random_weights(&mut numbers, format, rows, cols);
            let (matrix, _memory) = upload_matrix(bench, format, rows, cols, &file);
            let (inputs, _inputs) = upload_inputs(bench, format, &numbers.units(tokens * cols), cols);
            let bias = bench.upload(&numbers.units(rows));
            let product = |kernels: &Kernels| {
                let out = bench.empty::<f32>(tokens * rows);
                let output = Output::store(out.slice()).with_bias(Some(bias.slice()));
                kernels.matmul(&bench.stream, &matrix, inputs, tokens, output).unwrap();
                bench.download::<f32>(&out)
            };
            let row_by_row = product(&row_by_row);
            for (kernels, of) in &others {
                assert!(
                    product(kernels) == row_by_row,
                    "{} of {cols} columns x {tokens}, {of:?}",
                    format.name()
                );
            }
        }
    }
}

/// A few columns, a bias, and sums into what is there.
pub fn matmul_outputs(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(21);
    for format in [Format::F16, Format::Q8_0] {
        let (rows, cols, tokens) = (16, 64, 2);
        let file = random_weights(&mut numbers, format, rows, cols);
        let (matrix, _memory) = upload_matrix(bench, format, rows, cols, &file);
        let x = numbers.units(tokens * cols);
        let (inputs, _inputs) = upload_inputs(bench, format, &x, cols);
        let (bias, before) = (numbers.units(rows), numbers.units(tokens * rows));
        let (bias_memory, out) = (bench.upload(&bias), bench.upload(&before));
        let run = |to: DeviceSlice, add: bool, bias: Option<DeviceSlice>| {
            let output = if add { Output::add(to) } else { Output::store(to) }.with_bias(bias);
            bench.kernels().matmul(&bench.stream, &matrix, inputs, tokens, output).unwrap();
        };
        run(out.slice(), true, Some(bias_memory.slice()));
        let added = bench.download::<f32>(&out);
        run(out.slice(), false, None);
        let product = bench.download::<f32>(&out);
        for (i, got) in added.iter().enumerate() {
            assert_eq!(*got, before[i] + (product[i] + bias[i % rows]));
        }
        // The last row of inputs is missing.
        let short = bench.empty::<f32>(tokens * rows - 1);
        let refused =
            bench.kernels().matmul(&bench.stream, &matrix, inputs, tokens, Output::store(short.slice()));
        assert_eq!(refused.unwrap_err().code(), "gpu_operation_size");
    }
}

/// The decoded values, exactly.
pub fn embed_rows(bench: &Bench<'_>) {
    let mut numbers = Numbers::new(22);
    for format in Format::ALL {
        let (rows, cols) = (40, if format.block_len() == 1 { 83 } else { 512 });
        let file = random_weights(&mut numbers, format, rows, cols);
        let (matrix, _memory) = upload_matrix(bench, format, rows, cols, &file);
        let ids = [3u32, 39, 0, 16, 3];
        let (ids_memory, out) = (bench.upload(&ids), bench.empty::<f32>(ids.len() * cols));
        let kernels = bench.kernels();
        kernels.embed_rows(&bench.stream, &matrix, ids_memory.slice(), out.slice(), ids.len()).unwrap();
        let mut expected = vec![0.0; rows * cols];
        format.decode(&file, &mut expected).unwrap();
        for (id, got) in ids.iter().zip(bench.download::<f32>(&out).chunks(cols)) {
            assert_eq!(got, &expected[*id as usize * cols..][..cols], "{} row {id}", format.name());
        }
    }
}

/// Codes, scales and sums of the CPU's rule, on rows with zeros, tiny, huge and undefined values.
pub fn quantize_rows(bench: &Bench<'_>) {
    let (rows, cols) = (3, 96);
    let mut numbers = Numbers::new(23);
    let mut x = numbers.units(rows * cols);
    x[32..64].fill(0.0);
    x[64..96].iter_mut().for_each(|v| *v *= 1e-31);
    x[128] = f32::INFINITY;
    x[160] = f32::NAN;
    x[200] = -3e38;
    let (input, memory) = (bench.upload(&x), bench.empty::<u8>(Int8Rows::bytes_for(rows, cols)));
    let out = Int8Rows::new(memory.slice(), rows, cols).unwrap();
    bench.kernels().quantize_rows(&bench.stream, input.slice(), &out).unwrap();
    let bytes = bench.download::<u8>(&memory);
    let (codes, cells) = bytes.split_at(rows * cols);
    for (cell, (x, codes)) in x.chunks(32).zip(codes.chunks(32)).enumerate() {
        let about = &cells[cell * 8..][..8];
        let scale = f32::from_le_bytes(about[..4].try_into().unwrap());
        let sums: [i16; 2] =
            std::array::from_fn(|i| i16::from_le_bytes(about[4 + 2 * i..6 + 2 * i].try_into().unwrap()));
        let codes: Vec<i32> = codes.iter().map(|code| i32::from(*code as i8)).collect();
        let amax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        if !amax.is_finite() || x.iter().any(|v| v.is_nan()) {
            assert!(scale.is_nan() && codes.iter().all(|code| *code == 0), "cell {cell}");
        } else if amax < f32::from_bits(0x0d80_0000) {
            assert!(scale == 0.0 && codes.iter().all(|code| *code == 0), "cell {cell}");
        } else {
            assert_eq!(scale, amax / 127.0);
            let expected: Vec<i32> =
                x.iter().map(|v| (v * (127.0 / amax)).round_ties_even() as i32).collect();
            assert_eq!(codes, expected, "cell {cell}");
        }
        let expected = [&codes[..16], &codes[16..]].map(|half| half.iter().sum::<i32>() as i16);
        assert_eq!(sums, expected, "cell {cell}");
    }
}
