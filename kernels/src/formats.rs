//! Weight formats: one table, one row per format.
//!
//! A row says how a block of the file format is laid out ([`unpack`]), what its numbers mean, and how the block is
//! kept in a [packed matrix](crate::pack). Everything else (decoding, packing, the dot products of every instruction
//! set) is derived from the row.
//!
//! Every quantised weight is `scale · code − min` with an unsigned integer `code`; see [`Quant`]. Sources: the GGUF
//! specification for the type numbers, the reference quantisation package for the meaning of the bits; the golden
//! vectors in `tests/data` come from the latter.

mod cells;
mod unpack;

pub(crate) use cells::{Cells, SPAN_COLS};
use half::{bf16, f16};
use thiserror::Error;
pub(crate) use unpack::{MAX_BLOCK, Unpacked};

/// A weight format of a model file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(non_camel_case_types, reason = "these are the names the formats are known by")]
#[allow(missing_docs, reason = "a format's meaning is its row in TABLE")]
pub enum Format {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
}

/// One row of the format table.
#[derive(Debug)]
pub(crate) struct Row {
    format: Format,
    name: &'static str,
    /// Type number in GGUF files.
    ggml_id: u32,
    /// Elements of one block.
    pub(crate) block_len: usize,
    /// Bytes of one block in the file.
    block_bytes: usize,
    pub(crate) coding: Coding,
}

/// How a format writes numbers.
#[derive(Debug)]
pub(crate) enum Coding {
    /// One floating-point number per element; its bytes are kept as they are.
    Float(Float),
    /// Blocks of integer codes with scales.
    Quant(Quant),
}

/// A floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    F16,
    BF16,
}

/// A block-quantised format.
///
/// A block has a factor `d` and, with `min`, a factor `dmin`; each run of `sub` elements has an integer scale `s`
/// (1 without `sub_scales`) and an integer min `m`. An element with stored code `u` is
/// `d·s·(value(u) − bias) − dmin·m`, where `value(u)` is `u` or its entry in `codebook`.
#[derive(Debug)]
pub(crate) struct Quant {
    /// Low bits of a code: 2, 4 or 8.
    pub(crate) low_bits: usize,
    /// High bits of a code, kept apart from the low ones: 0, 1 or 2.
    pub(crate) high_bits: usize,
    /// Elements that share a scale: 16 or 32.
    pub(crate) sub: usize,
    /// How the integer scales (and mins) are kept.
    pub(crate) sub_scales: SubScales,
    /// Whether blocks have mins.
    pub(crate) min: bool,
    /// log2 of the bias; formats with mins have none.
    pub(crate) bias_shift: Option<u32>,
    /// Maps a code to an unsigned value, bias included.
    pub(crate) codebook: Option<&'static [u8; 16]>,
    /// Reads one block of the file.
    pub(crate) unpack: fn(&[u8], &mut Unpacked),
    /// Sorts the blocks of up to [`SPAN_COLS`] columns for devices.
    pub(crate) cells: fn(&[u8], &mut Cells),
}

/// How a packed block keeps its integer scales and mins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SubScales {
    /// There are none: `d` and `dmin` are the scale and the min.
    None,
    /// One signed byte each.
    Bytes,
    /// Scale in the low, min in the high half of a byte.
    Nibbles,
}

/// The 16 values of the IQ4 formats, moved up by 128 to be unsigned.
pub(crate) const IQ4_VALUES: [u8; 16] =
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

const fn float(float: Float) -> Coding {
    Coding::Float(float)
}

/// How the blocks of a format are read: by [`unpack`] and by [`cells`].
type Readers = (fn(&[u8], &mut Unpacked), fn(&[u8], &mut Cells));

/// A format with one scale per block of 32.
const fn plain(low_bits: usize, high_bits: usize, (unpack, cells): Readers) -> Quant {
    Quant {
        low_bits,
        high_bits,
        sub: 32,
        sub_scales: SubScales::None,
        min: false,
        bias_shift: None,
        codebook: None,
        unpack,
        cells,
    }
}

/// The table. Rows stand in the order of [`Format`]'s variants (a test checks it).
#[rustfmt::skip]
const TABLE: [Row; 15] = [
    Row { format: Format::F32, name: "F32", ggml_id: 0, block_len: 1, block_bytes: 4, coding: float(Float::F32) },
    Row { format: Format::F16, name: "F16", ggml_id: 1, block_len: 1, block_bytes: 2, coding: float(Float::F16) },
    Row { format: Format::BF16, name: "BF16", ggml_id: 30, block_len: 1, block_bytes: 2, coding: float(Float::BF16) },
    Row { format: Format::Q4_0, name: "Q4_0", ggml_id: 2, block_len: 32, block_bytes: 18,
        coding: Coding::Quant(Quant { bias_shift: Some(3), ..plain(4, 0, (unpack::q4_0, cells::q4_0)) }) },
    Row { format: Format::Q4_1, name: "Q4_1", ggml_id: 3, block_len: 32, block_bytes: 20,
        coding: Coding::Quant(Quant { min: true, ..plain(4, 0, (unpack::q4_1, cells::q4_1)) }) },
    Row { format: Format::Q5_0, name: "Q5_0", ggml_id: 6, block_len: 32, block_bytes: 22,
        coding: Coding::Quant(Quant { bias_shift: Some(4), ..plain(4, 1, (unpack::q5_0, cells::q5_0)) }) },
    Row { format: Format::Q5_1, name: "Q5_1", ggml_id: 7, block_len: 32, block_bytes: 24,
        coding: Coding::Quant(Quant { min: true, ..plain(4, 1, (unpack::q5_1, cells::q5_1)) }) },
    Row { format: Format::Q8_0, name: "Q8_0", ggml_id: 8, block_len: 32, block_bytes: 34,
        coding: Coding::Quant(Quant { bias_shift: Some(7), ..plain(8, 0, (unpack::q8_0, cells::q8_0)) }) },
    Row { format: Format::Q2_K, name: "Q2_K", ggml_id: 10, block_len: 256, block_bytes: 84,
        coding: Coding::Quant(Quant { sub: 16, sub_scales: SubScales::Nibbles, min: true, ..plain(2, 0, (unpack::q2_k, cells::q2_k)) }) },
    Row { format: Format::Q3_K, name: "Q3_K", ggml_id: 11, block_len: 256, block_bytes: 110,
        coding: Coding::Quant(Quant { sub: 16, sub_scales: SubScales::Bytes, bias_shift: Some(2), ..plain(2, 1, (unpack::q3_k, cells::q3_k)) }) },
    Row { format: Format::Q4_K, name: "Q4_K", ggml_id: 12, block_len: 256, block_bytes: 144,
        coding: Coding::Quant(Quant { sub_scales: SubScales::Bytes, min: true, ..plain(4, 0, (unpack::q4_k, cells::q4_k)) }) },
    Row { format: Format::Q5_K, name: "Q5_K", ggml_id: 13, block_len: 256, block_bytes: 176,
        coding: Coding::Quant(Quant { sub_scales: SubScales::Bytes, min: true, ..plain(4, 1, (unpack::q5_k, cells::q5_k)) }) },
    Row { format: Format::Q6_K, name: "Q6_K", ggml_id: 14, block_len: 256, block_bytes: 210,
        coding: Coding::Quant(Quant { sub: 16, sub_scales: SubScales::Bytes, bias_shift: Some(5), ..plain(4, 2, (unpack::q6_k, cells::q6_k)) }) },
    Row { format: Format::IQ4_NL, name: "IQ4_NL", ggml_id: 20, block_len: 32, block_bytes: 18,
        coding: Coding::Quant(Quant { bias_shift: Some(7), codebook: Some(&IQ4_VALUES), ..plain(4, 0, (unpack::q4_0, cells::q4_0)) }) },
    Row { format: Format::IQ4_XS, name: "IQ4_XS", ggml_id: 23, block_len: 256, block_bytes: 136,
        coding: Coding::Quant(Quant { sub_scales: SubScales::Bytes, bias_shift: Some(7), codebook: Some(&IQ4_VALUES),
            ..plain(4, 0, (unpack::iq4_xs, cells::iq4_xs)) }) },
];

/// Why bytes could not be read as weights.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FormatError {
    /// A row length that the format cannot have.
    #[error("{format} rows hold whole blocks of {block_len} elements, {cols} columns do not; the tensor's shape or type is wrong", format = format.name())]
    Columns {
        /// The format.
        format: Format,
        /// Elements of one block.
        block_len: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The byte count does not belong to the element count.
    #[error("{elements} {format} elements take {expected} bytes, not {bytes}; pass whole rows", format = format.name())]
    Length {
        /// The format.
        format: Format,
        /// Elements to read.
        elements: usize,
        /// Bytes they take.
        expected: usize,
        /// Bytes there are.
        bytes: usize,
    },
    /// There is no such row.
    #[error("a matrix of {rows} rows has no row {row}")]
    Row {
        /// Row asked for.
        row: usize,
        /// Rows of the matrix.
        rows: usize,
    },
    /// The matrix is larger than an address space.
    #[error("a {format} matrix of {rows} x {cols} is larger than this machine can address", format = format.name())]
    TooLarge {
        /// The format.
        format: Format,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
}

impl FormatError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            FormatError::Columns { .. } => "weight_columns",
            FormatError::Length { .. } => "weight_length",
            FormatError::Row { .. } => "weight_row",
            FormatError::TooLarge { .. } => "weight_too_large",
        }
    }
}

impl Format {
    /// Every format, in table order.
    pub const ALL: [Format; TABLE.len()] = {
        let mut all = [Format::F32; TABLE.len()];
        let mut i = 0;
        while i < TABLE.len() {
            all[i] = TABLE[i].format;
            i += 1;
        }
        all
    };

    pub(crate) const fn row(self) -> &'static Row {
        const ROWS: &[Row; TABLE.len()] = &TABLE;
        &ROWS[self as usize]
    }

    /// Name as model files and reports write it: `"Q4_K"`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Type number in GGUF files.
    pub fn ggml_id(self) -> u32 {
        self.row().ggml_id
    }

    /// The format of that name, exactly as [`Format::name`] writes it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The format of that GGUF type number.
    pub fn from_ggml(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.ggml_id() == id)
    }

    /// Elements of one block; a row holds whole blocks.
    pub fn block_len(self) -> usize {
        self.row().block_len
    }

    /// Bytes of one block in the file.
    pub fn block_bytes(self) -> usize {
        self.row().block_bytes
    }

    /// Whether weights are integer codes with scales, which products read with [`Codes`](crate::activations::Codes),
    /// and not floating-point numbers, which they read with f32 inputs.
    pub fn is_quantised(self) -> bool {
        matches!(self.row().coding, Coding::Quant(_))
    }

    /// Bytes of a row of `cols` elements in the file.
    ///
    /// # Errors
    /// [`FormatError::Columns`] when `cols` is no multiple of the block length, [`FormatError::TooLarge`].
    pub fn row_bytes(self, cols: usize) -> Result<usize, FormatError> {
        let block_len = self.block_len();
        if !cols.is_multiple_of(block_len) {
            return Err(FormatError::Columns { format: self, block_len, cols });
        }
        let bytes = (cols / block_len).checked_mul(self.block_bytes());
        bytes.ok_or(FormatError::TooLarge { format: self, rows: 1, cols })
    }

    /// Decodes whole blocks of file bytes to the exact values they stand for (rounded to f32 once per scale, product
    /// and difference, in the order of the reference package).
    ///
    /// # Errors
    /// When `out` is no whole number of blocks or `bytes` has not their length.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
        let expected = self.row_bytes(out.len())?;
        if bytes.len() != expected {
            return Err(FormatError::Length {
                format: self,
                elements: out.len(),
                expected,
                bytes: bytes.len(),
            });
        }
        match &self.row().coding {
            Coding::Float(float) => float.decode(bytes, out),
            Coding::Quant(quant) => {
                let mut block = Unpacked::default();
                for (bytes, out) in
                    bytes.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_len()))
                {
                    (quant.unpack)(bytes, &mut block);
                    quant.decode(&block, out);
                }
            }
        }
        Ok(())
    }
}

impl Float {
    /// Bytes of one element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::BF16 => 2,
        }
    }

    /// Decodes `out.len()` elements.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let pairs = bytes.as_chunks::<2>().0;
        match self {
            Float::F32 => {
                let quads = bytes.as_chunks::<4>().0;
                out.iter_mut().zip(quads).for_each(|(o, &b)| *o = f32::from_le_bytes(b));
            }
            Float::F16 => out.iter_mut().zip(pairs).for_each(|(o, &b)| *o = f16::from_le_bytes(b).to_f32()),
            Float::BF16 => out.iter_mut().zip(pairs).for_each(|(o, &b)| *o = bf16::from_le_bytes(b).to_f32()),
        }
    }
}

impl Quant {
    /// What is taken off a code's value.
    pub(crate) const fn bias(&self) -> i32 {
        match self.bias_shift {
            Some(shift) => 1 << shift,
            None => 0,
        }
    }

    /// The unsigned value of a stored code, bias included.
    pub(crate) fn value(&self, code: u8) -> u8 {
        match self.codebook {
            Some(values) => values[usize::from(code & 15)],
            None => code,
        }
    }

    /// Exact values of an unpacked block.
    pub(crate) fn decode(&self, block: &Unpacked, out: &mut [f32]) {
        let d = f16::from_bits(block.d).to_f32();
        let dmin = f16::from_bits(block.dmin).to_f32();
        for (j, (out, codes)) in
            out.chunks_exact_mut(self.sub).zip(block.codes.chunks_exact(self.sub)).enumerate()
        {
            let scale = d * f32::from(block.scales[j]);
            let min = dmin * f32::from(block.mins[j]);
            for (o, &code) in out.iter_mut().zip(codes) {
                let steps = i32::from(self.value(code)) - self.bias();
                *o = scale * steps as f32 - min;
            }
        }
    }
}
