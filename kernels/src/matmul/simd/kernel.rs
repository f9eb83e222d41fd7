//! The tile kernel over any [`Simd`]: the arithmetic of the [module description](crate::matmul), a vector of rows at
//! a time. Everything is inlined into one function per format and instruction set, in which the format's row of the
//! table is constant. That takes `inline(always)` and plain loops throughout: a closure would be compiled for the
//! baseline CPU and not be inlined.

#![expect(clippy::cast_possible_truncation, reason = "the only casts are of shifts, which are below 8")]

use super::Simd;
use crate::activations::{PANEL, PLANE_BITS, PLANE_WORDS, X_BLOCK, block_words};
use crate::formats::{Coding, Float, Format, Quant, SubScales};
use crate::pack::{BlockLayout, LINE_BYTES, TILE_ROWS};
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// How far ahead weights are fetched into the cache: further than the largest packed block is long, since the parts of
/// a block are read side by side.
const PREFETCH_BYTES: usize = 4096;
/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

/// See [`TileKernel`](crate::matmul::TileKernel).
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const FORMAT: usize, const P: usize>(
    tile: &[u8],
    panel: &[i32],
    out: &mut [[f32; TILE_ROWS]],
) {
    // SAFETY: the caller's promise; a panel has one token or `PANEL`.
    unsafe {
        match out.len() {
            1 => tokens::<S, FORMAT, P, 1>(tile, panel, out),
            _ => tokens::<S, FORMAT, P, PANEL>(tile, panel, out),
        }
    }
}

/// The sums of `C` tokens for each half of the tile; sets whose vectors cover the tile use the first half alone.
type Sums<S, const C: usize> = [[<S as Simd>::F; C]; 2];

/// The dot products of `C` tokens with each of `P` planes of codes.
type Dots<S, const P: usize, const C: usize> = [[<S as Simd>::I; C]; P];

/// A panel of `C` tokens, whose codes have `P` planes.
#[inline(always)]
unsafe fn tokens<S: Simd, const FORMAT: usize, const P: usize, const C: usize>(
    tile: &[u8],
    panel: &[i32],
    out: &mut [[f32; TILE_ROWS]],
) {
    let row = const { Format::ALL[FORMAT].row() };
    // SAFETY: the caller's promise.
    unsafe {
        let sums: Sums<S, C> = match &row.coding {
            Coding::Float(float) => float_sums::<S, C>(*float, tile, panel),
            Coding::Quant(quant) => {
                let layout = BlockLayout::new(quant, row.block_len);
                quant_sums::<S, P, C>(quant, layout, tile, panel)
            }
        };
        for (half, sums) in sums[..TILE_ROWS / S::LANES].iter().enumerate() {
            for (out, &sum) in out.iter_mut().zip(sums) {
                S::store(out.as_mut_ptr().add(half * S::LANES), sum);
            }
        }
    }
}

/// Fetches the `len` bytes that stand [`PREFETCH_BYTES`] behind `p`, which need not exist.
#[inline(always)]
fn prefetch(p: *const u8, len: usize) {
    for line in 0..len.div_ceil(CACHE_LINE) {
        // SAFETY: a hint that never faults; SSE is part of every x86-64 CPU.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(PREFETCH_BYTES + line * CACHE_LINE).cast()) };
    }
}

/// Sums of a floating-point tile.
#[inline(always)]
unsafe fn float_sums<S: Simd, const C: usize>(float: Float, tile: &[u8], panel: &[i32]) -> Sums<S, C> {
    let column_bytes = TILE_ROWS * float.bytes();
    // SAFETY: the slices hold the columns they are cut in; the caller has the instructions.
    unsafe {
        let mut sums = [[S::zero_f32(); C]; 2];
        for (tile, panel) in tile.chunks(X_BLOCK * column_bytes).zip(panel.chunks(X_BLOCK * C)) {
            prefetch(tile.as_ptr(), tile.len());
            for (half, sums) in sums[..TILE_ROWS / S::LANES].iter_mut().enumerate() {
                let offset = half * S::LANES * float.bytes();
                let mut t = [S::zero_f32(); C];
                for (column, x) in tile.chunks_exact(column_bytes).zip(panel.as_chunks::<C>().0) {
                    let p = column.as_ptr().wrapping_add(offset);
                    let w = match float {
                        Float::F32 => S::load_f32(p),
                        Float::F16 => S::load_f16(p),
                        Float::BF16 => S::load_bf16(p),
                    };
                    for (c, t) in t.iter_mut().enumerate() {
                        *t = S::fma(w, S::splat_f32(&raw const x[c]), *t);
                    }
                }
                for (sum, t) in sums.iter_mut().zip(t) {
                    *sum = S::add(*sum, t);
                }
            }
        }
        sums
    }
}

/// Sums of a quantised tile.
#[inline(always)]
unsafe fn quant_sums<S: Simd, const P: usize, const C: usize>(
    quant: &'static Quant,
    layout: BlockLayout,
    tile: &[u8],
    panel: &[i32],
) -> Sums<S, C> {
    let steps = layout.len / X_BLOCK;
    let block_words = block_words(P) * C;
    // SAFETY: the slices hold the blocks they are cut in; the caller has the instructions.
    unsafe {
        let mut sums = [[S::zero_f32(); C]; 2];
        for (block, x) in tile.chunks_exact(layout.bytes).zip(panel.chunks_exact(steps * block_words)) {
            for (half, sums) in sums[..TILE_ROWS / S::LANES].iter_mut().enumerate() {
                let weights = Weights::<S>::new(quant, layout, block.as_ptr(), half * S::LANES);
                for step in 0..steps {
                    if half == 0 {
                        prefetch(
                            block.as_ptr().wrapping_add(step * layout.bytes / steps),
                            layout.bytes / steps,
                        );
                    }
                    let x = Inputs::<P, C>(x.as_ptr().wrapping_add(step * block_words));
                    weights.accumulate(step, x, sums);
                }
            }
        }
        sums
    }
}

/// A block of inputs of `C` tokens in `P` planes.
#[derive(Clone, Copy)]
struct Inputs<const P: usize, const C: usize>(*const i32);

impl<const P: usize, const C: usize> Inputs<P, C> {
    /// Row of the block that holds the scales.
    const SCALE: usize = PLANE_WORDS;
    /// Row that holds minus the sums of 32 codes; those of 16 codes follow.
    const SUMS: usize = Self::SCALE + 1;

    /// Pointers to the codes of the 16 columns from `16 · part` on, in plane `plane`.
    #[inline(always)]
    fn codes(self, plane: usize, part: usize, token: usize) -> [*const i32; 4] {
        // Scales and sums stand between the first plane and the others.
        let row = if plane == 0 { 0 } else { block_words(plane) } + 4 * part;
        [self.at(row, token), self.at(row + 1, token), self.at(row + 2, token), self.at(row + 3, token)]
    }

    /// Word of row `row` and token `token`.
    #[inline(always)]
    fn at(self, row: usize, token: usize) -> *const i32 {
        self.0.wrapping_add(row * C + token)
    }
}

/// Some rows of a packed block.
struct Weights<S: Simd> {
    quant: &'static Quant,
    layout: BlockLayout,
    /// The block.
    block: *const u8,
    /// First of the rows.
    lane: usize,
    /// Factors of scales and mins.
    d: S::F,
    dmin: S::F,
}

impl<S: Simd> Weights<S> {
    #[inline(always)]
    unsafe fn new(quant: &'static Quant, layout: BlockLayout, block: *const u8, lane: usize) -> Self {
        // SAFETY: `block` is a packed block of this layout; the caller has the instructions.
        unsafe {
            let d = S::load_f16(block.wrapping_add(layout.d + 2 * lane));
            let dmin = if quant.min { S::load_f16(block.wrapping_add(layout.dmin + 2 * lane)) } else { d };
            Self { quant, layout, block, lane, d, dmin }
        }
    }

    /// Adds the products of columns `32 · step..` with `C` tokens to their sums.
    #[inline(always)]
    unsafe fn accumulate<const P: usize, const C: usize>(
        &self,
        step: usize,
        x: Inputs<P, C>,
        sums: &mut [S::F; C],
    ) {
        // SAFETY: the caller's promise: the block has the step, the inputs have `C` tokens.
        unsafe {
            let t = if self.quant.sub == X_BLOCK { self.one_run(step, x) } else { self.two_runs(step, x) };
            for (c, (sum, t)) in sums.iter_mut().zip(t).enumerate() {
                *sum = S::fma(S::splat_f32(x.at(Inputs::<P, C>::SCALE, c)), t, *sum);
            }
        }
    }

    /// `t` of the module description, for formats with one scale per 32 columns.
    #[inline(always)]
    unsafe fn one_run<const P: usize, const C: usize>(&self, step: usize, x: Inputs<P, C>) -> [S::F; C] {
        // SAFETY: as `accumulate`.
        unsafe {
            let (scale, min) = self.scale_and_min(step);
            let mut dots = self.start(x, Inputs::<P, C>::SUMS);
            for part in 0..2 {
                self.dot(step, part, x, &mut dots);
            }
            let mut t = [S::zero_f32(); C];
            for (c, (t, dot)) in t.iter_mut().zip(Self::combined(dots)).enumerate() {
                let dot = S::to_f32(dot);
                *t = if self.quant.min {
                    let sum = S::to_f32(S::splat_shifted(x.at(Inputs::<P, C>::SUMS, c), 0));
                    S::fma(scale, dot, S::mul(min, sum))
                } else {
                    S::mul(scale, dot)
                };
            }
            t
        }
    }

    /// `t` of the module description, for formats with two scales per 32 columns.
    #[inline(always)]
    unsafe fn two_runs<const P: usize, const C: usize>(&self, step: usize, x: Inputs<P, C>) -> [S::F; C] {
        // SAFETY: as `accumulate`.
        unsafe {
            let runs = [self.scale_and_min(2 * step), self.scale_and_min(2 * step + 1)];
            let mut t = [S::zero_f32(); C];
            if self.quant.min {
                for (c, t) in t.iter_mut().enumerate() {
                    let first = S::to_f32(S::splat_shifted(x.at(Inputs::<P, C>::SUMS + 1, c), 0));
                    let second = S::to_f32(S::splat_shifted(x.at(Inputs::<P, C>::SUMS + 2, c), 0));
                    *t = S::fma(runs[1].1, second, S::mul(runs[0].1, first));
                }
            }
            for (part, (scale, _)) in runs.into_iter().enumerate() {
                let mut dots = self.start(x, Inputs::<P, C>::SUMS + 1 + part);
                self.dot(step, part, x, &mut dots);
                for (t, dot) in t.iter_mut().zip(Self::combined(dots)) {
                    let dot = S::to_f32(dot);
                    *t = if part == 0 && !self.quant.min {
                        S::mul(scale, dot)
                    } else {
                        S::fma(scale, dot, *t)
                    };
                }
            }
            t
        }
    }

    /// Whether codes are used as signed numbers, without a bias.
    #[inline(always)]
    fn signed(&self) -> bool {
        S::SIGNED_BYTES && self.code_bits() == 8
    }

    /// Bits of the values that are multiplied.
    #[inline(always)]
    fn code_bits(&self) -> usize {
        if self.quant.codebook.is_some() { 8 } else { self.quant.low_bits + self.quant.high_bits }
    }

    /// Sums that dot products start from: in the lightest plane minus the bias times the sum of the inputs in row `sums`.
    #[inline(always)]
    unsafe fn start<const P: usize, const C: usize>(&self, x: Inputs<P, C>, sums: usize) -> Dots<S, P, C> {
        // SAFETY: as `accumulate`.
        unsafe {
            let mut start = [[S::zero(); C]; P];
            if let (Some(shift), false) = (self.quant.bias_shift, self.signed()) {
                for (c, start) in start[P - 1].iter_mut().enumerate() {
                    *start = S::splat_shifted(x.at(sums, c), shift);
                }
            }
            start
        }
    }

    /// The dot products with the codes, from those with their planes. Exact: 32 · 255 · 16256 is far below 2³¹.
    #[inline(always)]
    unsafe fn combined<const P: usize, const C: usize>(dots: Dots<S, P, C>) -> [S::I; C] {
        let mut sums = dots[0];
        for plane in &dots[1..] {
            for (sum, &dot) in sums.iter_mut().zip(plane) {
                // SAFETY: the caller has the instructions.
                *sum = unsafe { S::shift_add::<PLANE_BITS>(*sum, dot) };
            }
        }
        sums
    }

    /// Adds the products of the 16 columns `32 · step + 16 · part..`.
    #[inline(always)]
    unsafe fn dot<const P: usize, const C: usize>(
        &self,
        step: usize,
        part: usize,
        x: Inputs<P, C>,
        dots: &mut Dots<S, P, C>,
    ) {
        // SAFETY: as `accumulate`.
        unsafe {
            let codes = self.codes(step, part);
            for (plane, dots) in dots.iter_mut().enumerate() {
                for (c, dot) in dots.iter_mut().enumerate() {
                    *dot = S::dot4(*dot, codes, x.codes(plane, part, c), self.code_bits());
                }
            }
        }
    }

    /// Scale and min of run `run`.
    #[inline(always)]
    unsafe fn scale_and_min(&self, run: usize) -> (S::F, S::F) {
        // SAFETY: as `accumulate`.
        unsafe {
            let at = self.block.wrapping_add(run * TILE_ROWS + self.lane);
            let (scale, min) = match self.quant.sub_scales {
                SubScales::None => return (self.d, self.dmin),
                SubScales::Bytes => {
                    let scale = S::load_bytes(at.wrapping_add(self.layout.scales));
                    (
                        scale,
                        if self.quant.min { S::load_bytes(at.wrapping_add(self.layout.mins)) } else { scale },
                    )
                }
                SubScales::Nibbles => {
                    let both = S::load_bytes(at.wrapping_add(self.layout.scales));
                    (S::nibble(both, 0), S::nibble(both, 4))
                }
            };
            (S::mul(self.d, S::to_f32(scale)), S::mul(self.dmin, S::to_f32(min)))
        }
    }

    /// Lines of the 16 columns `32 · step + 16 · part..`, as what is multiplied.
    #[inline(always)]
    unsafe fn codes(&self, step: usize, part: usize) -> [S::I; 4] {
        let quant = self.quant;
        let line = 8 * step + 4 * part;
        // SAFETY: as `accumulate`.
        unsafe {
            let mut codes = self.field(0, quant.low_bits, 0, line);
            if quant.high_bits > 0 {
                let high = self.field(self.layout.high, quant.high_bits, quant.low_bits, line);
                for (code, high) in codes.iter_mut().zip(high) {
                    *code = S::or(*code, high);
                }
            }
            for code in &mut codes {
                if let Some(values) = quant.codebook {
                    *code = S::lookup(values, *code);
                }
                if self.signed() {
                    *code = S::xor_bytes(*code, 0x80);
                }
            }
            codes
        }
    }

    /// The field of `bits` bits at byte `base` of the block for four lines from `line` on, moved up to bit `to`.
    #[inline(always)]
    unsafe fn field(&self, base: usize, bits: usize, to: usize, line: usize) -> [S::I; 4] {
        // SAFETY: as `accumulate`.
        unsafe {
            let base = self.block.wrapping_add(base + 4 * self.lane);
            let mask = u8::MAX >> (8 - bits) << to;
            let per_line = 8 / bits;
            let mut lines = [S::zero(); 4];
            for (j, field) in lines.iter_mut().enumerate() {
                *field = S::load(base.wrapping_add((line + j) / per_line * LINE_BYTES));
                if bits < 8 {
                    let shift = ((line + j) % per_line * bits) as i32 - to as i32;
                    *field = S::field(*field, shift, mask);
                }
            }
            lines
        }
    }
}
