//! Where everything stands in a packed block of a quantised format.
//!
//! A block of `len` columns × 16 rows, in this order:
//! `low codes · high codes · scales [sub][16] · mins [sub][16] · d [16] · dmin [16]`.
//!
//! Line `j` holds columns `4j..4j+4`: byte `4·row + i` is the code of column `4j + i`. A field of `bits` bits packs
//! `8 / bits` consecutive lines into one 64-byte line, the first in the lowest bits; low and high bits of a code are
//! separate fields.

use super::TILE_ROWS;
use crate::formats::{MAX_BLOCK, Quant, SubScales, Unpacked};

/// Bytes of a line: four codes of each row of a tile.
pub(crate) const LINE_BYTES: usize = 4 * TILE_ROWS;

/// Byte offsets inside a packed block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockLayout {
    /// Columns.
    pub(crate) len: usize,
    pub(crate) high: usize,
    pub(crate) scales: usize,
    pub(crate) mins: usize,
    pub(crate) d: usize,
    pub(crate) dmin: usize,
    /// Bytes of the block.
    pub(crate) bytes: usize,
}

impl BlockLayout {
    /// Layout of a format with `len` columns to a block.
    pub(crate) const fn new(quant: &Quant, len: usize) -> Self {
        let subs = len / quant.sub * TILE_ROWS;
        let high = len * TILE_ROWS * quant.low_bits / 8;
        let scales = high + len * TILE_ROWS * quant.high_bits / 8;
        let (scale_bytes, min_bytes) = match (quant.sub_scales, quant.min) {
            (SubScales::None, _) => (0, 0),
            (SubScales::Bytes, true) => (subs, subs),
            (SubScales::Bytes, false) | (SubScales::Nibbles, _) => (subs, 0),
        };
        let mins = scales + scale_bytes;
        let d = mins + min_bytes;
        let dmin = d + 2 * TILE_ROWS;
        let bytes = if quant.min { dmin + 2 * TILE_ROWS } else { dmin };
        Self { len, high, scales, mins, d, dmin, bytes }
    }

    /// Writes the scales and mins of one row.
    pub(super) fn write_scales(&self, quant: &Quant, from: &Unpacked, lane: usize, block: &mut [u8]) {
        for j in 0..self.len / quant.sub {
            let at = j * TILE_ROWS + lane;
            let (scale, min) = (from.scales[j].cast_unsigned(), from.mins[j].cast_unsigned());
            match quant.sub_scales {
                SubScales::None => {}
                SubScales::Bytes => {
                    block[self.scales + at] = scale;
                    if quant.min {
                        block[self.mins + at] = min;
                    }
                }
                SubScales::Nibbles => block[self.scales + at] = scale | min << 4,
            }
        }
        block[self.d + 2 * lane..][..2].copy_from_slice(&from.d.to_le_bytes());
        if quant.min {
            block[self.dmin + 2 * lane..][..2].copy_from_slice(&from.dmin.to_le_bytes());
        }
    }

    /// Writes the codes of all rows.
    pub(super) fn write_codes(&self, quant: &Quant, codes: &[[u8; MAX_BLOCK]; TILE_ROWS], block: &mut [u8]) {
        let (low, rest) = block.split_at_mut(self.high);
        let high = &mut rest[..self.scales - self.high];
        match quant.low_bits {
            2 => write_field::<2>(codes, 0, low),
            4 => write_field::<4>(codes, 0, low),
            _ => write_field::<8>(codes, 0, low),
        }
        match quant.high_bits {
            0 => {}
            1 => write_field::<1>(codes, quant.low_bits, high),
            _ => write_field::<2>(codes, quant.low_bits, high),
        }
    }
}

/// Packs bits `shift..shift + BITS` of all codes; `out` says how many lines there are.
fn write_field<const BITS: usize>(codes: &[[u8; MAX_BLOCK]; TILE_ROWS], shift: usize, out: &mut [u8]) {
    let mask = u32::from_ne_bytes([u8::MAX >> (8 - BITS); 4]);
    for (group, out) in out.as_chunks_mut::<LINE_BYTES>().0.iter_mut().enumerate() {
        let mut words = [0u32; TILE_ROWS];
        for part in 0..8 / BITS {
            let line = group * (8 / BITS) + part;
            for (word, row) in words.iter_mut().zip(codes) {
                let four = row.as_chunks::<4>().0[line];
                *word |= (u32::from_ne_bytes(four) >> shift & mask) << (part * BITS);
            }
        }
        for (out, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *out = word.to_ne_bytes();
        }
    }
}

/// Reads a packed block element by element: the reference the vector kernels are compared with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedBlock<'a> {
    quant: &'a Quant,
    layout: BlockLayout,
    bytes: &'a [u8],
}

impl<'a> PackedBlock<'a> {
    pub(crate) fn new(quant: &'a Quant, layout: BlockLayout, bytes: &'a [u8]) -> Self {
        Self { quant, layout, bytes }
    }

    fn field(&self, base: usize, bits: usize, col: usize, lane: usize) -> u8 {
        let (line, per_byte) = (col / 4, 8 / bits);
        let byte = self.bytes[base + line / per_byte * LINE_BYTES + 4 * lane + col % 4];
        byte >> (line % per_byte * bits) & u8::MAX >> (8 - bits)
    }

    /// Stored code of an element.
    pub(crate) fn code(&self, col: usize, lane: usize) -> u8 {
        let low = self.field(0, self.quant.low_bits, col, lane);
        match self.quant.high_bits {
            0 => low,
            bits => low | self.field(self.layout.high, bits, col, lane) << self.quant.low_bits,
        }
    }

    /// Integer scale and min of run `sub`.
    pub(crate) fn scale_and_min(&self, sub: usize, lane: usize) -> (i8, i8) {
        let at = sub * TILE_ROWS + lane;
        match self.quant.sub_scales {
            SubScales::None => (1, 1),
            SubScales::Bytes => {
                let min = if self.quant.min { self.bytes[self.layout.mins + at].cast_signed() } else { 0 };
                (self.bytes[self.layout.scales + at].cast_signed(), min)
            }
            SubScales::Nibbles => {
                let both = self.bytes[self.layout.scales + at];
                ((both & 15).cast_signed(), (both >> 4).cast_signed())
            }
        }
    }

    /// Bits of the factors of scales and mins.
    pub(crate) fn factors(&self, lane: usize) -> (u16, u16) {
        let at =
            |base: usize| u16::from_le_bytes([self.bytes[base + 2 * lane], self.bytes[base + 2 * lane + 1]]);
        (at(self.layout.d), if self.quant.min { at(self.layout.dmin) } else { 0 })
    }

    /// The block of one row, as the file's block would unpack.
    pub(super) fn unpack_row(&self, lane: usize, out: &mut Unpacked) {
        for (col, code) in out.codes[..self.layout.len].iter_mut().enumerate() {
            *code = self.code(col, lane);
        }
        for sub in 0..self.layout.len / self.quant.sub {
            (out.scales[sub], out.mins[sub]) = self.scale_and_min(sub, lane);
        }
        (out.d, out.dmin) = self.factors(lane);
    }
}
