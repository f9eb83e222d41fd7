//! Products of weight matrices with the rows of a step, and embedding rows.

use super::{Check, Kernels, LaunchError, Loader, optional, queue};
use crate::hip::{Arg, DeviceSlice, Function, Launch, Stream};
use spillway_kernels::device_layout::{CELL_COLS, DeviceLayout, TILE_ROWS};
use spillway_kernels::formats::{Format, FormatError};

/// Rows of inputs that one launch shape of the row-by-row kernels takes.
const GROUPS: [usize; 4] = [1, 2, 4, 8];
/// Threads of a row-by-row product: [`TILE_ROWS`] rows by 16 slices of the columns.
const BLOCK: u32 = 256;
/// Rows and tokens of a block of the kernels for many tokens: `Many` and `Few` of gemm.h, and those of gemm_floats.h.
const MANY: (usize, usize) = (128, 64);
const FEW: (usize, usize) = (32, 16);
/// Tokens from which matrix units beat passes over quantised weights.
const FEW_MIN: usize = 9;
/// Tokens from which large blocks can be worth it.
const MANY_MIN: usize = 49;
/// Tokens from which blocks can be worth it for floating-point weights, and are if there is a block for each unit; and from
/// which they always are.
const FLOATS_MIN: usize = 24;
const FLOATS_ALWAYS: usize = 96;
/// Cells that a thread of the embedding kernel decodes, one each.
const EMBED_BLOCK: usize = 64;

/// Which kernels multiply; all give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Those that suit the device, the matrix and the number of tokens.
    Fitting,
    /// Those of few tokens, in passes over the weights.
    RowByRow,
    /// In small blocks on matrix units; floating-point weights row by row.
    FewTokens,
    /// In large blocks; quantised weights on matrix units.
    ManyTokens,
}

/// A weight matrix on the device, in the layout of [`DeviceLayout`].
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    layout: DeviceLayout,
    rows: usize,
    data: DeviceSlice,
}

impl Matrix {
    /// The matrix of `rows` rows whose repacked tiles `data` holds (or will hold).
    ///
    /// # Errors
    /// [`LaunchError::Size`] when `data` is too small, [`LaunchError::Unsupported`] for impossible sizes.
    pub fn new(layout: DeviceLayout, rows: usize, data: DeviceSlice) -> Result<Self, LaunchError> {
        let check = Check("matrix");
        let bytes = layout
            .matrix_bytes(rows)
            .map_err(|_: FormatError| check.unsupported("rows", rows, "addressable"))?;
        check.holds::<u8>("weights", data, bytes)?;
        Ok(Self { layout, rows, data })
    }

    /// Rows: outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: inputs of a product.
    pub fn cols(&self) -> usize {
        self.layout.cols()
    }

    /// Format of the elements.
    pub fn format(&self) -> Format {
        self.layout.format()
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS) * self.layout.tile_bytes()
    }
}

/// Rows in 8-bit form: codes `[rows, cols]`, then per cell of 32 columns a scale (f32) and the sums of its first and
/// second 16 codes (two i16). The numbers are those of the CPU worker.
#[derive(Debug, Clone, Copy)]
pub struct Int8Rows {
    rows: usize,
    cols: usize,
    codes: DeviceSlice,
    scales: DeviceSlice,
}

/// Bytes per cell beside its codes.
const CELL_SCALE_BYTES: usize = 8;

impl Int8Rows {
    /// Bytes of `rows` rows.
    pub fn bytes_for(rows: usize, cols: usize) -> usize {
        rows * cols.div_ceil(CELL_COLS) * (CELL_COLS + CELL_SCALE_BYTES)
    }

    /// Rows in `memory`.
    ///
    /// # Errors
    /// Memory that is too small, or columns that are no multiple of 32.
    pub fn new(memory: DeviceSlice, rows: usize, cols: usize) -> Result<Self, LaunchError> {
        let check = Check("8-bit rows");
        check.rule(cols.is_multiple_of(CELL_COLS), "columns", cols, "a multiple of 32")?;
        check.holds::<u8>("rows", memory, Self::bytes_for(rows, cols))?;
        let codes = memory.part(0, rows * cols)?;
        let scales = memory.part(rows * cols, rows * cols / CELL_COLS * CELL_SCALE_BYTES)?;
        Ok(Self { rows, cols, codes, scales })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn codes(&self) -> DeviceSlice {
        self.codes
    }

    pub(super) fn scales(&self) -> DeviceSlice {
        self.scales
    }
}

/// Inputs of a product, in the form that the format reads ([`Format::is_quantised`]).
#[derive(Debug, Clone, Copy)]
pub enum Inputs {
    /// For quantised weights.
    Int8(Int8Rows),
    /// For floating-point weights: `[rows, cols]` f32.
    F32(DeviceSlice),
}

/// Where a product goes: `[rows of inputs, rows of the matrix]` f32.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// The memory.
    pub to: DeviceSlice,
    /// One f32 per row of the matrix, added to the product.
    pub bias: Option<DeviceSlice>,
    /// Add to what is there instead of replacing it, as for a projection back into the residual stream.
    pub add: bool,
}

impl Output {
    /// `to = product`.
    pub fn store(to: DeviceSlice) -> Self {
        Self { to, bias: None, add: false }
    }

    /// `to += product`.
    pub fn add(to: DeviceSlice) -> Self {
        Self { to, bias: None, add: true }
    }

    /// The same with a bias.
    #[must_use]
    pub fn with_bias(self, bias: Option<DeviceSlice>) -> Self {
        Self { bias, ..self }
    }
}

/// The kernels of one format.
#[derive(Debug)]
pub(super) struct Entries {
    /// Row by row, for each of [`GROUPS`].
    by_group: [Function; GROUPS.len()],
    embed: Function,
    /// In blocks of [`MANY`].
    many: Function,
    /// In blocks of [`FEW`], for quantised formats.
    few: Option<Function>,
}

impl Entries {
    pub(super) fn load(loader: &Loader<'_>, format: Format) -> Result<Self, LaunchError> {
        let name = format.name().to_lowercase();
        let module = loader.module(&format!("matmul_{name}"))?;
        let group = |columns: usize| module.function(&format!("matvec_{name}_{columns}"));
        Ok(Self {
            by_group: [group(GROUPS[0])?, group(GROUPS[1])?, group(GROUPS[2])?, group(GROUPS[3])?],
            embed: module.function(&format!("embed_{name}"))?,
            many: module.function(&format!("gemm_many_{name}"))?,
            few: match format.is_quantised() {
                true => Some(module.function(&format!("gemm_few_{name}"))?),
                false => None,
            },
        })
    }
}

impl Kernels {
    fn entries(&self, format: Format) -> Result<&Entries, LaunchError> {
        self.matmul.get(&format).ok_or(LaunchError::Format { format: format.name() })
    }

    /// The kernels for a matrix of `rows` rows: large blocks do less for the same, small ones keep more of the device busy.
    fn products_for(&self, format: Format, rows: usize, tokens: usize) -> Products {
        let large_blocks = rows.div_ceil(MANY.0) * tokens.div_ceil(MANY.1);
        let fills = large_blocks >= self.compute_units;
        match (self.products, format.is_quantised()) {
            (Products::Fitting, true) if !self.matrix_units || tokens < FEW_MIN => Products::RowByRow,
            (Products::Fitting, true) if tokens >= MANY_MIN && fills => Products::ManyTokens,
            (Products::Fitting, true) => Products::FewTokens,
            (Products::Fitting, false) if tokens >= FLOATS_ALWAYS || tokens >= FLOATS_MIN && fills => {
                Products::ManyTokens
            }
            (Products::Fitting, false) => Products::RowByRow,
            (chosen, _) => chosen,
        }
    }

    /// The product of `weight` with `tokens` rows of inputs.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`]; inputs of another form or width than the matrix reads.
    pub fn matmul(
        &self,
        stream: &Stream,
        weight: &Matrix,
        inputs: Inputs,
        tokens: usize,
        output: Output,
    ) -> Result<(), LaunchError> {
        let check = Check("matmul");
        let entries = self.entries(weight.format())?;
        if tokens == 0 || weight.rows == 0 {
            return Ok(());
        }
        let (x, scales) = weight.check_inputs(check, inputs, tokens)?;
        let args = [
            weight.data.into(),
            x,
            scales,
            check.holds::<f32>("out", output.to, tokens * weight.rows)?,
            optional(output.bias.map(|bias| check.holds::<f32>("bias", bias, weight.rows)).transpose()?),
            check.number("rows", weight.rows)?.into(),
            check.number("columns", weight.cols())?.into(),
            check.number("tokens", tokens)?.into(),
            u32::from(output.add).into(),
        ];
        let products = self.products_for(weight.format(), weight.rows, tokens);
        let (function, threads, (rows, columns)) = match (products, &entries.few) {
            (Products::ManyTokens, _) => (&entries.many, entries.many.max_threads(), MANY),
            (Products::FewTokens, Some(few)) => (few, few.max_threads(), FEW),
            _ => {
                let group = GROUPS.iter().position(|group| *group >= tokens).unwrap_or(GROUPS.len() - 1);
                (&entries.by_group[group], BLOCK, (TILE_ROWS, GROUPS[group]))
            }
        };
        let row_blocks = check.number("rows", weight.rows.div_ceil(rows))?;
        let token_blocks = check.number("tokens", tokens.div_ceil(columns))?;
        let launch = Launch { grid: [row_blocks, token_blocks, 1], block: threads, shared_bytes: 0 };
        queue(stream, function, launch, &args)
    }

    /// `out[i]` = row `ids[i]` (u32) of `table`, decoded: the residual rows of tokens.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn embed_rows(
        &self,
        stream: &Stream,
        table: &Matrix,
        ids: DeviceSlice,
        out: DeviceSlice,
        tokens: usize,
    ) -> Result<(), LaunchError> {
        let check = Check("embed_rows");
        let entries = self.entries(table.format())?;
        if tokens == 0 {
            return Ok(());
        }
        let args = [
            table.data.into(),
            check.holds::<u32>("ids", ids, tokens)?,
            check.holds::<f32>("out", out, tokens * table.cols())?,
            check.number("columns", table.cols())?.into(),
        ];
        let blocks = table.layout.cells().div_ceil(EMBED_BLOCK);
        let grid = [check.number("tokens", tokens)?, check.number("columns", blocks)?, 1];
        queue(stream, &entries.embed, Launch { grid, block: EMBED_BLOCK as u32, shared_bytes: 0 }, &args)
    }
}

impl Matrix {
    /// The two input arguments: codes and their scales, or values and nothing.
    fn check_inputs(&self, check: Check, inputs: Inputs, tokens: usize) -> Result<(Arg, Arg), LaunchError> {
        match (inputs, self.format().is_quantised()) {
            (Inputs::Int8(rows), true) => {
                check.rule(
                    rows.cols == self.cols(),
                    "width of the inputs",
                    rows.cols,
                    "that of the matrix",
                )?;
                check.rule(rows.rows >= tokens, "rows of the inputs", rows.rows, "as many as tokens")?;
                Ok((rows.codes.into(), rows.scales.into()))
            }
            (Inputs::F32(x), false) => {
                Ok((check.holds::<f32>("x", x, tokens * self.cols())?, optional(None)))
            }
            _ => Err(LaunchError::Form { format: self.format().name() }),
        }
    }
}
