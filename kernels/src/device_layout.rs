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

#[cfg(test)]
mod tests;

use crate::formats::{Cells, Coding, Format, FormatError, Quant, SPAN_COLS, SubScales};
pub use crate::pack::TILE_ROWS;
use crate::pool::ThreadPool;
use std::sync::{Mutex, PoisonError};

/// Columns of a cell.
pub const CELL_COLS: usize = 32;
/// Widest load of a lane.
const PIECE: usize = 16;
/// What a thread repacks at a time: little enough that all are done at about the same time.
const TURN_BYTES: usize = 64 << 10;

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
            return Err(self.length_error(1, rows.len())?);
        }
        if rows.len() < TILE_ROWS * row_bytes || !self.cols.is_multiple_of(CELL_COLS) {
            tile.fill(0);
        }
        if row_bytes > 0 {
            match &self.format.row().coding {
                Coding::Float(_) => repack_floats(rows, row_bytes, tile),
                Coding::Quant(quant) => self.repack_blocks(quant, rows, row_bytes, tile),
            }
        }
        Ok(())
    }

    /// Repacks consecutive tiles with every thread of the pool. `rows` are all their rows, the last tile's as many as the
    /// matrix has.
    ///
    /// # Errors
    /// [`FormatError::Length`] when the sizes do not fit.
    pub fn repack(&self, pool: &ThreadPool, rows: &[u8], tiles: &mut [u8]) -> Result<(), FormatError> {
        let tile_rows_bytes = (TILE_ROWS * self.format.row_bytes(self.cols)?).max(1);
        let (tile_bytes, count) = (self.tile_bytes.max(1), rows.len().div_ceil(tile_rows_bytes));
        if tiles.len() != count * tile_bytes {
            return Err(self.length_error(tiles.len() / tile_bytes, rows.len())?);
        }
        let per_turn = (TURN_BYTES / tile_bytes).max(1);
        let turns = rows.chunks(per_turn * tile_rows_bytes).zip(tiles.chunks_mut(per_turn * tile_bytes));
        let (turns, failed) = (Mutex::new(turns), Mutex::new(None));
        pool.run(&|_| {
            loop {
                let next = turns.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((rows, tiles)) = next else { break };
                let mut pairs = rows.chunks(tile_rows_bytes).zip(tiles.chunks_exact_mut(tile_bytes));
                if let Err(error) = pairs.try_for_each(|(rows, tile)| self.repack_tile(rows, tile)) {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// That `bytes` bytes are not the rows of so many tiles.
    fn length_error(&self, tiles: usize, bytes: usize) -> Result<FormatError, FormatError> {
        let rows = tiles * TILE_ROWS;
        let (elements, expected) = (rows * self.cols, rows * self.format.row_bytes(self.cols)?);
        Ok(FormatError::Length { format: self.format, elements, expected, bytes })
    }

    /// Goes through the rows side by side, so that what it writes makes runs.
    fn repack_blocks(&self, quant: &Quant, rows: &[u8], row_bytes: usize, tile: &mut [u8]) {
        let Planes { low, high, scales, factors } = self.planes;
        let (low_plane, rest) = tile.split_at_mut(self.cells * TILE_ROWS * low);
        let (high_plane, rest) = rest.split_at_mut(self.cells * TILE_ROWS * high);
        let (scale_plane, factor_plane) = rest.split_at_mut(self.cells * TILE_ROWS * scales);
        let (block_len, block_bytes) = (self.format.block_len(), self.format.block_bytes());
        let span_bytes = SPAN_COLS / block_len * block_bytes;
        let mut sorted = Cells::default();
        for span in 0..row_bytes.div_ceil(span_bytes) {
            let bytes = span * span_bytes..row_bytes.min((span + 1) * span_bytes);
            let blocks = bytes.len() / block_bytes;
            let cells = blocks * block_len / CELL_COLS;
            let (cell, block) = (span * (SPAN_COLS / CELL_COLS), span * (SPAN_COLS / block_len));
            for (row, file) in rows.chunks_exact(row_bytes).enumerate() {
                (quant.cells)(&file[bytes.clone()], &mut sorted);
                spread(low_plane, low, cell, row, &sorted.low[..cells * low]);
                spread(high_plane, high, cell, row, &sorted.high[..cells * high]);
                spread(scale_plane, scales, cell, row, &sorted.numbers[..cells * scales]);
                spread(factor_plane, factors, block, row, &sorted.factors[..blocks * factors]);
            }
        }
    }
}

/// Puts cells (or blocks) of one row, of `bytes` bytes each, into a plane, from number `first` on.
fn spread(plane: &mut [u8], bytes: usize, first: usize, row: usize, cells: &[u8]) {
    match bytes {
        0 => {}
        1 => spread_pieces::<1>(plane, first, row, cells),
        2 => spread_pieces::<2>(plane, first, row, cells),
        4 => spread_pieces::<4>(plane, first, row, cells),
        8 => spread_pieces::<8>(plane, first, row, cells),
        _ => spread_pieces::<PIECE>(plane, first * (bytes / PIECE), row, cells),
    }
}

/// [`spread`] for one number of bytes, known to the compiler.
fn spread_pieces<const BYTES: usize>(plane: &mut [u8], first: usize, row: usize, pieces: &[u8]) {
    let (plane, _) = plane.as_chunks_mut::<BYTES>();
    let places = plane[first * TILE_ROWS + row..].iter_mut().step_by(TILE_ROWS);
    places.zip(pieces.as_chunks().0).for_each(|(place, piece)| *place = *piece);
}

/// Pieces that are taken of a row before the next row has its turn: four cache lines.
const FLOAT_PIECES: usize = 16;

fn repack_floats(rows: &[u8], row_bytes: usize, tile: &mut [u8]) {
    for first in (0..row_bytes).step_by(FLOAT_PIECES * PIECE) {
        let end = row_bytes.min(first + FLOAT_PIECES * PIECE);
        for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
            let bytes = &bytes[first..end];
            spread_pieces::<PIECE>(tile, first / PIECE, row, bytes);
            let (whole, rest) = bytes.as_chunks::<PIECE>();
            if !rest.is_empty() {
                tile[((first / PIECE + whole.len()) * TILE_ROWS + row) * PIECE..][..rest.len()]
                    .copy_from_slice(rest);
            }
        }
    }
}
