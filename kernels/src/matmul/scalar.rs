//! Portable kernels: the arithmetic of the [module description](super), element by element. They are the reference
//! for all others, and what runs on a CPU without vector instructions.

use super::TileTable;
use crate::activations::{PANEL, PLANE_BITS, PLANE_WORDS, X_BLOCK, block_words};
use crate::formats::{Coding, Float, Format, Quant};
use crate::pack::{BlockLayout, PackedBlock, TILE_ROWS};
use half::f16;

pub(super) static TILES: TileTable = tile_table!(tile);

/// See [`TileKernel`](super::TileKernel); needs no particular CPU. `FORMAT` indexes [`Format::ALL`].
unsafe fn tile<const FORMAT: usize, const P: usize>(
    tile: &[u8],
    panel: &[i32],
    out: &mut [[f32; TILE_ROWS]],
) {
    let format = Format::ALL[FORMAT];
    match &format.row().coding {
        Coding::Float(float) => float_tile(*float, tile, bytemuck::cast_slice(panel), out),
        Coding::Quant(quant) => {
            let layout = BlockLayout::new(quant, format.block_len());
            quant_tile::<P>(quant, layout, tile, panel, out);
        }
    }
}

fn float_tile(float: Float, tile: &[u8], panel: &[f32], out: &mut [[f32; TILE_ROWS]]) {
    let width = out.len();
    let columns = X_BLOCK * TILE_ROWS * float.bytes();
    for (tile, panel) in tile.chunks(columns).zip(panel.chunks(X_BLOCK * width)) {
        let mut sums = [[0.0f32; TILE_ROWS]; PANEL];
        for (column, x) in tile.chunks_exact(TILE_ROWS * float.bytes()).zip(panel.chunks_exact(width)) {
            let mut weights = [0.0; TILE_ROWS];
            float.decode(column, &mut weights);
            for (sums, &x) in sums.iter_mut().zip(x) {
                sums.iter_mut().zip(weights).for_each(|(sum, w)| *sum = w.mul_add(x, *sum));
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
        }
    }
}

fn quant_tile<const P: usize>(
    quant: &Quant,
    layout: BlockLayout,
    tile: &[u8],
    panel: &[i32],
    out: &mut [[f32; TILE_ROWS]],
) {
    let width = out.len();
    let steps = layout.len / X_BLOCK;
    let mut blocks = panel.chunks_exact(block_words(P) * width);
    for bytes in tile.chunks_exact(layout.bytes) {
        let weights = PackedBlock::new(quant, layout, bytes);
        for (step, x) in (0..steps).zip(&mut blocks) {
            let rows: [Row; TILE_ROWS] = std::array::from_fn(|lane| Row::read(quant, &weights, step, lane));
            for (token, out) in out.iter_mut().enumerate() {
                let x = Input::read::<P>(|word| x[word * width + token]);
                for (y, row) in out.iter_mut().zip(&rows) {
                    *y = row.accumulate(quant, &x, *y);
                }
            }
        }
    }
}

/// 32 inputs of a token.
struct Input {
    codes: [i32; X_BLOCK],
    scale: f32,
    /// Minus the sums of all codes, the first 16, the second 16.
    negative_sums: [i32; 3],
}

impl Input {
    /// From its words, which stand as the [panel](crate::activations) has them.
    fn read<const P: usize>(word: impl Fn(usize) -> i32) -> Self {
        let byte = |first: usize, i: usize| i32::from(word(first + i / 4).to_le_bytes()[i % 4].cast_signed());
        let mut codes = std::array::from_fn(|i| byte(0, i));
        for plane in 1..P {
            let first = block_words(plane);
            codes = std::array::from_fn(|i| (codes[i] << PLANE_BITS) + byte(first, i));
        }
        let scale = f32::from_bits(word(PLANE_WORDS).cast_unsigned());
        Self { codes, scale, negative_sums: std::array::from_fn(|i| word(PLANE_WORDS + 1 + i)) }
    }
}

/// 32 weights of a row.
struct Row {
    /// Codes with the bias taken off.
    codes: [i32; X_BLOCK],
    /// Scales and mins of the runs (one or two).
    scales: [f32; 2],
    mins: [f32; 2],
}

impl Row {
    fn read(quant: &Quant, block: &PackedBlock<'_>, step: usize, lane: usize) -> Self {
        let codes = std::array::from_fn(|i| {
            i32::from(quant.value(block.code(step * X_BLOCK + i, lane))) - quant.bias()
        });
        let (d, dmin) = block.factors(lane);
        let (d, dmin) = (f16::from_bits(d).to_f32(), f16::from_bits(dmin).to_f32());
        let runs = X_BLOCK / quant.sub;
        let mut row = Self { codes, scales: [0.0; 2], mins: [0.0; 2] };
        for run in 0..runs {
            let (scale, min) = block.scale_and_min(step * runs + run, lane);
            row.scales[run] = d * f32::from(scale);
            row.mins[run] = dmin * f32::from(min);
        }
        row
    }

    /// `y` plus the product with one token's block of inputs.
    fn accumulate(&self, quant: &Quant, x: &Input, y: f32) -> f32 {
        let runs = X_BLOCK / quant.sub;
        let negative_sums = if runs == 1 { &x.negative_sums[..1] } else { &x.negative_sums[1..] };
        let mut t = None;
        let mut add = |a: f32, b: i32| t = Some(t.map_or(a * b as f32, |t| a.mul_add(b as f32, t)));
        if quant.min {
            negative_sums.iter().zip(self.mins).for_each(|(&sum, min)| add(min, sum));
        }
        let mut products = self.codes.iter().zip(x.codes).map(|(w, x)| w * x);
        for &scale in &self.scales[..runs] {
            add(scale, products.by_ref().take(quant.sub).sum());
        }
        let t = t.unwrap_or_default();
        x.scale.mul_add(t, y)
    }
}
