//! Weight matrices in the layout the kernels read: tiles of 16 rows, lanes = rows.
//!
//! A tile holds [`TILE_ROWS`] rows over all columns, as one contiguous run of packed blocks. In a quantised block four
//! consecutive codes of each of the 16 rows make one 64-byte *line*, so that one 8-bit dot-product instruction
//! advances 16 rows by four columns and no sum across lanes is ever needed. Lines narrower than a byte per code
//! share bytes: see [`BlockLayout`]. Floating-point tiles hold, per column, one element of each row.
//!
//! A packed matrix takes about the bytes it takes in the file: 6-bit scales widen to bytes, which costs at most 4 %;
//! the last tile is padded with rows of zeros. The memory is anonymous, so the file's pages can be dropped.

mod layout;

use crate::formats::{Coding, Float, Format, FormatError, MAX_BLOCK, Quant, Unpacked};
use crate::pool::ThreadPool;
pub(crate) use layout::{BlockLayout, LINE_BYTES, PackedBlock};
use memmap2::{Advice, MmapMut};
use std::sync::{Mutex, PoisonError};
use thiserror::Error;

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;

/// Smallest mapping worth huge pages.
const HUGE_PAGE_MIN: usize = 4 << 20;
/// File bytes a thread packs at a time.
const PACK_CHUNK_BYTES: usize = 1 << 20;

/// Why a matrix could not be packed.
#[derive(Debug, Error)]
pub enum PackError {
    /// The shape or the bytes do not fit the format.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The system refused the memory.
    #[error("cannot get {bytes} bytes for a weight matrix: {source}; free memory or run fewer layers here")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl PackError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            PackError::Format(error) => error.code(),
            PackError::Memory { .. } => "weight_memory",
        }
    }
}

/// Bytes and columns of a format's packed blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileShape {
    /// Packed blocks of a tile.
    pub(crate) blocks: usize,
    /// Bytes of one.
    pub(crate) block_bytes: usize,
}

impl TileShape {
    /// Shape of the tiles of a matrix with `cols` columns, which must suit the format.
    fn new(format: Format, cols: usize) -> Self {
        let block_bytes = match &format.row().coding {
            Coding::Float(float) => TILE_ROWS * float.bytes(),
            Coding::Quant(quant) => BlockLayout::new(quant, format.block_len()).bytes,
        };
        Self { blocks: cols / format.block_len(), block_bytes }
    }

    fn bytes(self) -> Option<usize> {
        self.blocks.checked_mul(self.block_bytes)
    }
}

/// A weight matrix `[rows, cols]` in packed form.
#[derive(Debug)]
pub struct PackedMatrix {
    format: Format,
    rows: usize,
    cols: usize,
    tile_bytes: usize,
    data: MmapMut,
}

impl PackedMatrix {
    /// A matrix of zeros, to be filled through [`PackedMatrix::chunks`] or [`PackedMatrix::pack`].
    ///
    /// The memory is mapped, not touched.
    ///
    /// # Errors
    /// When the columns do not suit the format, or the memory is refused.
    pub fn new(format: Format, rows: usize, cols: usize) -> Result<Self, PackError> {
        let bytes = Self::packed_bytes(format, rows, cols)?;
        let data = MmapMut::map_anon(bytes.max(1)).map_err(|source| PackError::Memory { bytes, source })?;
        if bytes >= HUGE_PAGE_MIN {
            // A refusal only costs speed.
            let _ = data.advise(Advice::HugePage);
        }
        let tiles = rows.div_ceil(TILE_ROWS);
        Ok(Self { format, rows, cols, tile_bytes: bytes.checked_div(tiles).unwrap_or(0), data })
    }

    /// Bytes of memory that [`PackedMatrix::new`] of this shape takes.
    ///
    /// # Errors
    /// As [`PackedMatrix::new`], without taking memory.
    pub fn packed_bytes(format: Format, rows: usize, cols: usize) -> Result<usize, FormatError> {
        format.row_bytes(cols)?;
        let tile = TileShape::new(format, cols).bytes();
        tile.and_then(|tile| tile.checked_mul(rows.div_ceil(TILE_ROWS))).ok_or(FormatError::TooLarge {
            format,
            rows,
            cols,
        })
    }

    /// Format of the elements.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows (outputs of a product).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (inputs of a product).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of memory the matrix takes.
    pub fn bytes(&self) -> usize {
        self.tile_bytes * self.tiles()
    }

    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    pub(crate) fn tile(&self, tile: usize) -> &[u8] {
        &self.data[tile * self.tile_bytes..][..self.tile_bytes]
    }

    /// Splits the matrix into runs of `tiles` tiles (at least 1; the last run may be shorter), which different
    /// threads may pack at the same time.
    pub fn chunks(&mut self, tiles: usize) -> impl Iterator<Item = PackedChunk<'_>> {
        let (format, rows, cols, tile_bytes) = (self.format, self.rows, self.cols, self.tile_bytes);
        let (tiles, bytes) = (tiles.max(1), self.bytes());
        let chunk_rows = tiles * TILE_ROWS;
        self.data[..bytes].chunks_mut((tiles * tile_bytes).max(1)).enumerate().map(move |(i, data)| {
            let first_row = i * chunk_rows;
            PackedChunk { format, first_row, rows: chunk_rows.min(rows - first_row), cols, tile_bytes, data }
        })
    }

    /// Packs all rows, given as the file holds them, with every thread of the pool.
    ///
    /// # Errors
    /// [`FormatError::Length`] when `bytes` is not the matrix.
    pub fn pack(&mut self, pool: &ThreadPool, bytes: &[u8]) -> Result<(), FormatError> {
        let (format, rows, cols) = (self.format, self.rows, self.cols);
        let row_bytes = format.row_bytes(cols)?;
        let too_large = FormatError::TooLarge { format, rows, cols };
        let expected = rows.checked_mul(row_bytes).ok_or(too_large)?;
        if bytes.len() != expected {
            return Err(FormatError::Length { format, elements: rows * cols, expected, bytes: bytes.len() });
        }
        let tiles = PACK_CHUNK_BYTES / (TILE_ROWS * row_bytes).max(1);
        let chunks = Mutex::new(self.chunks(tiles));
        let failed = Mutex::new(None);
        pool.run(&|_| {
            loop {
                let next = chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(mut chunk) = next else { break };
                let raw = &bytes[chunk.first_row * row_bytes..][..chunk.rows * row_bytes];
                if let Err(error) = chunk.pack(raw) {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Decodes one row to the exact values it stands for; `out` holds [`PackedMatrix::cols`] values.
    ///
    /// # Errors
    /// [`FormatError::Row`] when there is no such row, [`FormatError::Length`] when `out` has another length.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) -> Result<(), FormatError> {
        if row >= self.rows {
            return Err(FormatError::Row { row, rows: self.rows });
        }
        if out.len() != self.cols {
            let expected = self.format.row_bytes(self.cols)?;
            return Err(FormatError::Length {
                format: self.format,
                elements: out.len(),
                expected,
                bytes: expected,
            });
        }
        let shape = TileShape::new(self.format, self.cols);
        let blocks = self.tile(row / TILE_ROWS).chunks_exact(shape.block_bytes);
        let lane = row % TILE_ROWS;
        match &self.format.row().coding {
            Coding::Float(float) => {
                for (value, column) in out.iter_mut().zip(blocks) {
                    let element = &column[lane * float.bytes()..][..float.bytes()];
                    float.decode(element, std::slice::from_mut(value));
                }
            }
            Coding::Quant(quant) => {
                let layout = BlockLayout::new(quant, self.format.block_len());
                let mut unpacked = Unpacked::default();
                for (out, bytes) in out.chunks_exact_mut(self.format.block_len()).zip(blocks) {
                    PackedBlock::new(quant, layout, bytes).unpack_row(lane, &mut unpacked);
                    quant.decode(&unpacked, out);
                }
            }
        }
        Ok(())
    }
}

/// A run of whole tiles of a matrix that is being packed.
#[derive(Debug)]
pub struct PackedChunk<'a> {
    format: Format,
    first_row: usize,
    rows: usize,
    cols: usize,
    tile_bytes: usize,
    data: &'a mut [u8],
}

impl PackedChunk<'_> {
    /// First row of the run.
    pub fn first_row(&self) -> usize {
        self.first_row
    }

    /// Rows of the run.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Packs the rows of the run, given as the file holds them.
    ///
    /// # Errors
    /// [`FormatError::Length`] when `bytes` is not exactly these rows.
    pub fn pack(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        let row_bytes = self.format.row_bytes(self.cols)?;
        let expected = self.rows * row_bytes;
        if bytes.len() != expected {
            let elements = self.rows * self.cols;
            return Err(FormatError::Length { format: self.format, elements, expected, bytes: bytes.len() });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let shape = TileShape::new(self.format, self.cols);
        for (tile, rows) in
            self.data.chunks_exact_mut(self.tile_bytes).zip(bytes.chunks(TILE_ROWS * row_bytes))
        {
            match &self.format.row().coding {
                Coding::Float(float) => pack_float_tile(*float, rows, row_bytes, tile),
                Coding::Quant(quant) => {
                    let layout = BlockLayout::new(quant, self.format.block_len());
                    pack_quant_tile(quant, layout, rows, row_bytes, self.format.block_bytes(), shape, tile);
                }
            }
        }
        Ok(())
    }
}

/// Writes column after column; the elements keep their bytes.
fn pack_float_tile(float: Float, rows: &[u8], row_bytes: usize, tile: &mut [u8]) {
    match float {
        Float::F32 => pack_elements::<4>(rows, row_bytes, tile),
        Float::F16 | Float::BF16 => pack_elements::<2>(rows, row_bytes, tile),
    }
}

fn pack_elements<const BYTES: usize>(rows: &[u8], row_bytes: usize, tile: &mut [u8]) {
    let tile = tile.as_chunks_mut::<BYTES>().0;
    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
        for (k, element) in row.as_chunks::<BYTES>().0.iter().enumerate() {
            tile[k * TILE_ROWS + lane] = *element;
        }
    }
}

fn pack_quant_tile(
    quant: &Quant,
    layout: BlockLayout,
    rows: &[u8],
    row_bytes: usize,
    file_block_bytes: usize,
    shape: TileShape,
    tile: &mut [u8],
) {
    let mut codes = [[0u8; MAX_BLOCK]; TILE_ROWS];
    let mut unpacked = Unpacked::default();
    for (b, block) in tile.chunks_exact_mut(shape.block_bytes).enumerate() {
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            (quant.unpack)(&row[b * file_block_bytes..][..file_block_bytes], &mut unpacked);
            codes[lane][..layout.len].copy_from_slice(&unpacked.codes[..layout.len]);
            layout.write_scales(quant, &unpacked, lane, block);
        }
        layout.write_codes(quant, &codes, block);
    }
}
