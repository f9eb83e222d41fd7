//! Weight matrices in the layout that GPU kernels read (`hip/formats.h` is the other half of this description).
//!
//! A matrix is cut into tiles of [`TILE_ROWS`] rows, each one run of bytes, so that a loader repacks and uploads tile by
//! tile. A tile consists of planes, each `[cell][row of the tile][bytes]`, a cell being [`CELL_COLS`] columns: the 16 rows
//! of a cell are read side by side by 16 lanes, with loads of up to 16 bytes that make one run.
//!
//! | plane | bytes per row and cell |
//! |---|---|
//! | low code bits | 8, 16 or 32 (as two pieces `[piece][row][16]`); byte `i` of a 4-bit row has the elements `i` and `16 + i`, byte `i` of a 2-bit row `i`, `8 + i`, `16 + i`, `24 + i`, lowest bits first |
//! | high code bits | 4 per bit: bit `b` of element `4 j + i` is bit `8 i + bits * (j mod (8 / bits)) + b` of word `j / (8 / bits)` |
//! | scales of runs | scale then min of each run, a byte each; or both in one byte |
//! | factors | f16 `d`, then f16 `dmin`, per block of the file instead of per cell |
//!
//! Floating-point elements keep their bytes, in pieces `[cell][piece][row][16]`. Columns and rows are padded with zeros.
//! The bytes are those of the file but for 6-bit scales, which widen to bytes: at most 4 %.

use crate::formats::{Coding, Format, FormatError, Quant, SubScales, Unpacked};
pub use crate::pack::TILE_ROWS;

/// Columns of a cell.
pub const CELL_COLS: usize = 32;
/// Widest load of a lane.
const PIECE: usize = 16;

/// Where the bytes of a tile are, for one format and one number of columns.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLayout {
    format: Format,
    cols: usize,
    cells: usize,
    planes: Planes,
    tile_bytes: usize,
}

/// Bytes per row: of each plane and cell, and of the factors per block.
#[derive(Debug, Clone, Copy, Default)]
struct Planes {
    low: usize,
    high: usize,
    scales: usize,
    factors: usize,
}

impl Planes {
    fn of(format: Format) -> Self {
        match &format.row().coding {
            Coding::Float(float) => Self { low: CELL_COLS * float.bytes(), ..Self::default() },
            Coding::Quant(quant) => {
                let runs = CELL_COLS / quant.sub;
                let numbers = 1 + usize::from(quant.min);
                Self {
                    low: CELL_COLS * quant.low_bits / 8,
                    high: CELL_COLS * quant.high_bits / 8,
                    scales: match quant.sub_scales {
                        SubScales::None => 0,
                        SubScales::Bytes => runs * numbers,
                        SubScales::Nibbles => runs,
                    },
                    factors: 2 * numbers,
                }
            }
        }
    }
}

impl DeviceLayout {
    /// The layout of a matrix with `cols` columns.
    ///
    /// # Errors
    /// [`FormatError`] when `cols` does not suit the format or a tile is larger than an address space.
    pub fn new(format: Format, cols: usize) -> Result<Self, FormatError> {
        format.row_bytes(cols)?;
        let (cells, planes) = (cols.div_ceil(CELL_COLS), Planes::of(format));
        let per_cell = planes.low + planes.high + planes.scales;
        let blocks = cols.div_ceil(format.block_len());
        let tile_bytes = cells
            .checked_mul(per_cell)
            .and_then(|bytes| bytes.checked_add(blocks.checked_mul(planes.factors)?))
            .and_then(|bytes| bytes.checked_mul(TILE_ROWS))
            .ok_or(FormatError::TooLarge { format, rows: TILE_ROWS, cols })?;
        Ok(Self { format, cols, cells, planes, tile_bytes })
    }

    /// Format of the elements.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Columns of the matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Cells of a row.
    pub fn cells(&self) -> usize {
        self.cells
    }

    /// Bytes of a tile.
    pub fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// Bytes of a matrix of `rows` rows.
    ///
    /// # Errors
    /// [`FormatError::TooLarge`].
    pub fn matrix_bytes(&self, rows: usize) -> Result<usize, FormatError> {
        let too_large = FormatError::TooLarge { format: self.format, rows, cols: self.cols };
        rows.div_ceil(TILE_ROWS).checked_mul(self.tile_bytes).ok_or(too_large)
    }

    /// Repacks one tile: `rows` are up to [`TILE_ROWS`] rows of the file, `tile` takes [`DeviceLayout::tile_bytes`].
    ///
    /// # Errors
    /// [`FormatError::Length`] when the sizes do not fit.
    pub fn repack_tile(&self, rows: &[u8], tile: &mut [u8]) -> Result<(), FormatError> {
        let row_bytes = self.format.row_bytes(self.cols)?;
        let fits = rows.len().is_multiple_of(row_bytes.max(1))
            && rows.len() <= TILE_ROWS * row_bytes
            && tile.len() == self.tile_bytes;
        if !fits {
            let (elements, expected) = (TILE_ROWS * self.cols, TILE_ROWS * row_bytes);
            return Err(FormatError::Length { format: self.format, elements, expected, bytes: rows.len() });
        }
        tile.fill(0);
        for (row, bytes) in rows.chunks_exact(row_bytes.max(1)).enumerate() {
            match &self.format.row().coding {
                Coding::Float(_) => {
                    for (i, piece) in bytes.chunks(PIECE).enumerate() {
                        tile[(i * TILE_ROWS + row) * PIECE..][..piece.len()].copy_from_slice(piece);
                    }
                }
                Coding::Quant(quant) => self.repack_row(quant, bytes, row, tile),
            }
        }
        Ok(())
    }

    fn repack_row(&self, quant: &Quant, bytes: &[u8], row: usize, tile: &mut [u8]) {
        let Planes { low, high, scales, factors } = self.planes;
        let (low_plane, rest) = tile.split_at_mut(self.cells * TILE_ROWS * low);
        let (high_plane, rest) = rest.split_at_mut(self.cells * TILE_ROWS * high);
        let (scale_plane, factor_plane) = rest.split_at_mut(self.cells * TILE_ROWS * scales);
        let cells_of_block = self.format.block_len() / CELL_COLS;
        let (runs, mut block) = (CELL_COLS / quant.sub, Unpacked::default());
        for (b, bytes) in bytes.chunks_exact(self.format.block_bytes()).enumerate() {
            (quant.unpack)(bytes, &mut block);
            for c in 0..cells_of_block {
                let cell = b * cells_of_block + c;
                let codes: [u8; CELL_COLS] = std::array::from_fn(|i| block.codes[c * CELL_COLS + i]);
                let piece = low.min(PIECE);
                for (p, part) in low_codes(quant, &codes)[..low].chunks_exact(piece).enumerate() {
                    low_plane[((cell * (low / piece) + p) * TILE_ROWS + row) * piece..][..piece]
                        .copy_from_slice(part);
                }
                let at = |bytes: usize| (cell * TILE_ROWS + row) * bytes;
                high_plane[at(high)..][..high].copy_from_slice(&high_codes(quant, &codes)[..high]);
                let run = c * runs..(c + 1) * runs;
                let numbers = run_numbers(quant, &block.scales[run.clone()], &block.mins[run]);
                scale_plane[at(scales)..][..scales].copy_from_slice(&numbers[..scales]);
            }
            let [d, dmin] = [block.d, block.dmin].map(u16::to_le_bytes);
            let both = [d[0], d[1], dmin[0], dmin[1]];
            factor_plane[(b * TILE_ROWS + row) * factors..][..factors].copy_from_slice(&both[..factors]);
        }
    }
}

/// The low bits of a cell's codes; codes of eight bits as signed numbers, their bias taken off.
fn low_codes(quant: &Quant, codes: &[u8; CELL_COLS]) -> [u8; CELL_COLS] {
    match quant.low_bits {
        8 => codes.map(|code| code ^ 0x80),
        4 => low_bits::<4>(codes),
        _ => low_bits::<2>(codes),
    }
}

/// [`low_codes`] for one number of bits: known to the compiler, the loop becomes a few vector instructions. Loads are bound by it.
fn low_bits<const BITS: usize>(codes: &[u8; CELL_COLS]) -> [u8; CELL_COLS] {
    let stride = CELL_COLS * BITS / 8;
    let mut out = [0; CELL_COLS];
    for (i, code) in codes.iter().enumerate() {
        out[i % stride] |= (code & ((1 << BITS) - 1)) << (i / stride * BITS);
    }
    out
}

/// The high bits of a cell's codes.
fn high_codes(quant: &Quant, codes: &[u8; CELL_COLS]) -> [u8; 8] {
    match quant.high_bits {
        0 => [0; 8],
        1 => high_bits::<1>(codes, quant.low_bits),
        _ => high_bits::<2>(codes, quant.low_bits),
    }
}

/// [`high_codes`] for one number of bits above `low`.
fn high_bits<const BITS: usize>(codes: &[u8; CELL_COLS], low: usize) -> [u8; 8] {
    let (mut out, per_word) = ([0; 8], 8 / BITS);
    for (i, code) in codes.iter().enumerate() {
        let (j, byte) = (i / 4, i % 4);
        out[j / per_word * 4 + byte] |= (code >> low) << (j % per_word * BITS);
    }
    out
}

/// Scales and mins of a cell's runs.
fn run_numbers(quant: &Quant, scales: &[i8], mins: &[i8]) -> [u8; 4] {
    let mut out = [0; 4];
    for (run, (scale, min)) in scales.iter().zip(mins).enumerate() {
        let (scale, min) = (scale.cast_unsigned(), min.cast_unsigned());
        match (quant.sub_scales, quant.min) {
            (SubScales::Nibbles, _) => out[run] = scale | min << 4,
            (_, true) => out[2 * run..2 * run + 2].copy_from_slice(&[scale, min]),
            (_, false) => out[run] = scale,
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
