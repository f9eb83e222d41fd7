//! Portable kernels: the arithmetic of the [module description](super), element by element. They are the reference
//! for all others, and what runs on a CPU without vector instructions.

use super::TileTable;
use crate::activations::{PANEL, X_BLOCK, X_BLOCK_WORDS};
use crate::formats::{Coding, Float, Format, Quant};
use crate::pack::{BlockLayout, PackedBlock, TILE_ROWS};
use half::f16;

pub(super) static TILES: TileTable = tile_table!(tile);

/// See [`TileKernel`](super::TileKernel); needs no particular CPU. `FORMAT` indexes [`Format::ALL`].
unsafe fn tile<const FORMAT: usize>(tile: &[u8], panel: &[i32], out: &mut [[f32; TILE_ROWS]]) {
    let format = Format::ALL[FORMAT];
    match &format.row().coding {
        Coding::Float(float) => float_tile(*float, tile, bytemuck::cast_slice(panel), out),
        Coding::Quant(quant) => {
            let layout = BlockLayout::new(quant, format.block_len());
            quant_tile(quant, layout, tile, panel, out);
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

fn quant_tile(quant: &Quant, layout: BlockLayout, tile: &[u8], panel: &[i32], out: &mut [[f32; TILE_ROWS]]) {
    let width = out.len();
    let steps = layout.len / X_BLOCK;
    let mut blocks = panel.chunks_exact(X_BLOCK_WORDS * width);
    for bytes in tile.chunks_exact(layout.bytes) {
        let weights = PackedBlock::new(quant, layout, bytes);
        for (step, x) in (0..steps).zip(&mut blocks) {
            for lane in 0..TILE_ROWS {
                let row = Row::read(quant, &weights, step, lane);
                for (token, out) in out.iter_mut().enumerate() {
                    let x: [i32; X_BLOCK_WORDS] = std::array::from_fn(|word| x[word * width + token]);
                    out[lane] = row.accumulate(quant, &x, out[lane]);
                }
            }
        }
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
    fn accumulate(&self, quant: &Quant, x: &[i32; X_BLOCK_WORDS], y: f32) -> f32 {
        let runs = X_BLOCK / quant.sub;
        let negative_sums = if runs == 1 { &x[9..10] } else { &x[10..12] };
        let mut t = None;
        let mut add = |a: f32, b: i32| t = Some(t.map_or(a * b as f32, |t| a.mul_add(b as f32, t)));
        if quant.min {
            negative_sums.iter().zip(self.mins).for_each(|(&sum, min)| add(min, sum));
        }
        let codes = x[..8].iter().flat_map(|word| word.to_le_bytes()).map(|x| i32::from(x.cast_signed()));
        let mut products = self.codes.iter().zip(codes).map(|(w, x)| w * x);
        for &scale in &self.scales[..runs] {
            add(scale, products.by_ref().take(quant.sub).sum());
        }
        let t = t.unwrap_or_default();
        f32::from_bits(x[8].cast_unsigned()).mul_add(t, y)
    }
}
