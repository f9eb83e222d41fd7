//! The layout against its description, and the sizes that are refused.

use super::*;
use crate::formats::Unpacked;

/// What a device holds is what the plan charges: the file's size within 4 %, for whole tiles.
#[test]
fn a_matrix_takes_about_the_bytes_of_the_file() {
    for format in Format::ALL {
        let (rows, cols) = (64, 1024);
        let file = rows * format.row_bytes(cols).unwrap();
        let device = DeviceLayout::new(format, cols).unwrap().matrix_bytes(rows).unwrap();
        assert!(device >= file && device * 25 <= file * 26, "{}: {device} for {file}", format.name());
    }
}

/// `len` bytes of noise.
fn noise(len: usize) -> Vec<u8> {
    let mut seed = 1u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed.to_le_bytes()[7]
    };
    (0..len).map(|_| next()).collect()
}

/// A tile that is written element by element, from what [`Unpacked`] and the table of planes say.
struct Reference<'a> {
    layout: &'a DeviceLayout,
    quant: &'a Quant,
    tile: Vec<u8>,
}

impl<'a> Reference<'a> {
    fn new(layout: &'a DeviceLayout, quant: &'a Quant, rows: &[u8]) -> Self {
        let mut reference = Self { layout, quant, tile: vec![0; layout.tile_bytes] };
        let (format, mut block) = (layout.format, Unpacked::default());
        for (row, bytes) in rows.chunks(format.row_bytes(layout.cols).unwrap()).enumerate() {
            for (number, bytes) in bytes.chunks(format.block_bytes()).enumerate() {
                (quant.unpack)(bytes, &mut block);
                for element in 0..format.block_len() {
                    let column = number * format.block_len() + element;
                    reference.code(row, column, block.codes[element]);
                    let run = element / quant.sub;
                    reference.scale(row, column, block.scales[run], block.mins[run]);
                }
                reference.factors(row, number, block.d, block.dmin);
            }
        }
        reference
    }

    /// Where the plane after those with `before` bytes per row and cell begins.
    fn plane(&self, before: usize) -> usize {
        self.layout.cells * TILE_ROWS * before
    }

    fn code(&mut self, row: usize, column: usize, code: u8) {
        let Planes { low, high, .. } = self.layout.planes;
        let Quant { low_bits, high_bits, .. } = *self.quant;
        let (cell, i) = (column / CELL_COLS, column % CELL_COLS);
        let byte = i % low;
        let at = if low == 2 * PIECE {
            ((2 * cell + byte / PIECE) * TILE_ROWS + row) * PIECE + byte % PIECE
        } else {
            (cell * TILE_ROWS + row) * low + byte
        };
        let bits = code & u8::MAX >> (8 - low_bits);
        self.tile[at] |= if low_bits == 8 { bits ^ 0x80 } else { bits << (low_bits * (i / low)) };
        for bit in 0..high_bits {
            let (j, per_word) = (i / 4, 8 / high_bits);
            let place = 8 * (i % 4) + high_bits * (j % per_word) + bit;
            let at = self.plane(low) + (cell * TILE_ROWS + row) * high + 4 * (j / per_word) + place / 8;
            self.tile[at] |= (code >> (low_bits + bit) & 1) << (place % 8);
        }
    }

    fn scale(&mut self, row: usize, column: usize, scale: i8, min: i8) {
        let Planes { low, high, scales, .. } = self.layout.planes;
        let (scale, min) = (scale.cast_unsigned(), min.cast_unsigned());
        let numbers: &[u8] = match (self.quant.sub_scales, self.quant.min) {
            (SubScales::None, _) => &[],
            (SubScales::Nibbles, _) => &[scale | min << 4],
            (SubScales::Bytes, true) => &[scale, min],
            (SubScales::Bytes, false) => &[scale],
        };
        let (cell, run) = (column / CELL_COLS, column % CELL_COLS / self.quant.sub);
        let at = self.plane(low + high) + (cell * TILE_ROWS + row) * scales + run * numbers.len();
        self.tile[at..at + numbers.len()].copy_from_slice(numbers);
    }

    fn factors(&mut self, row: usize, block: usize, d: u16, dmin: u16) {
        let Planes { low, high, scales, factors } = self.layout.planes;
        let at = self.plane(low + high + scales) + (block * TILE_ROWS + row) * factors;
        let both = [d.to_le_bytes(), dmin.to_le_bytes()].concat();
        self.tile[at..at + factors].copy_from_slice(&both[..factors]);
    }
}

/// Every bit of every format lands where the table of planes says, in whole tiles and in tiles that lack rows.
#[test]
fn tiles_are_those_of_the_description() {
    for format in Format::ALL {
        let Coding::Quant(quant) = &format.row().coding else { continue };
        // A whole span, and one more block than that.
        for (rows, cols) in [(TILE_ROWS, 256), (3, 256 + format.block_len())] {
            let layout = DeviceLayout::new(format, cols).unwrap();
            let file = noise(rows * format.row_bytes(cols).unwrap());
            let mut tile = vec![7; layout.tile_bytes()];
            layout.repack_tile(&file, &mut tile).unwrap();
            assert!(tile == Reference::new(&layout, quant, &file).tile, "{} {rows} rows", format.name());
        }
    }
}

/// Several threads make the tiles that one makes, a last one that lacks rows included; other sizes are refused.
#[test]
fn threads_share_the_tiles() {
    let layout = DeviceLayout::new(Format::Q6_K, 1024).unwrap();
    let row_bytes = Format::Q6_K.row_bytes(1024).unwrap();
    let file = noise((40 * TILE_ROWS + 5) * row_bytes);
    let (mut together, mut alone) = (vec![1; 41 * layout.tile_bytes()], vec![2; 41 * layout.tile_bytes()]);
    let pool = ThreadPool::new(3).unwrap();
    layout.repack(&pool, &file, &mut together).unwrap();
    for (rows, tile) in file.chunks(TILE_ROWS * row_bytes).zip(alone.chunks_mut(layout.tile_bytes())) {
        layout.repack_tile(rows, tile).unwrap();
    }
    assert!(together == alone);
    let (few, part) = (40 * layout.tile_bytes(), file.len() - 1);
    assert_eq!(layout.repack(&pool, &file, &mut together[..few]).unwrap_err().code(), "weight_length");
    assert_eq!(layout.repack(&pool, &file[..part], &mut together).unwrap_err().code(), "weight_length");
    layout.repack(&pool, &[], &mut []).unwrap();
}

/// Floating-point rows keep their bytes, in pieces of 16; columns that do not fill a cell are padded with zeros.
#[test]
fn floating_point_rows_keep_their_bytes() {
    for (format, cols) in [(Format::F32, 300), (Format::F16, 333), (Format::BF16, 64)] {
        let layout = DeviceLayout::new(format, cols).unwrap();
        let row_bytes = format.row_bytes(cols).unwrap();
        let file = noise(5 * row_bytes);
        let mut tile = vec![7; layout.tile_bytes()];
        layout.repack_tile(&file, &mut tile).unwrap();
        for (at, byte) in tile.iter().enumerate() {
            let (row, column) = (at / PIECE % TILE_ROWS, at / (PIECE * TILE_ROWS) * PIECE + at % PIECE);
            let inside = row < 5 && column < row_bytes;
            let expected = if inside { file[row * row_bytes + column] } else { 0 };
            assert_eq!(*byte, expected, "{} row {row} byte {column}", format.name());
        }
    }
}

/// Sizes that do not fit are refused before a byte is written.
#[test]
fn wrong_sizes_are_refused() {
    let layout = DeviceLayout::new(Format::Q4_K, 256).unwrap();
    let mut tile = vec![7; layout.tile_bytes()];
    assert_eq!(layout.repack_tile(&[0; 145], &mut tile).unwrap_err().code(), "weight_length");
    assert_eq!(layout.repack_tile(&[0; 144 * 17], &mut tile).unwrap_err().code(), "weight_length");
    assert_eq!(layout.repack_tile(&[0; 144], &mut tile[1..]).unwrap_err().code(), "weight_length");
    assert!(tile.iter().all(|byte| *byte == 7));
    layout.repack_tile(&[0; 144 * 3], &mut tile).unwrap();
}
