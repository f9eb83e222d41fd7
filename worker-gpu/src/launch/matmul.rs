//! Products of weight matrices with the rows of a step, and embedding rows.

use super::{Check, Kernels, LaunchError, Loader, optional, queue};
use crate::hip::{Arg, DeviceSlice, Function, Launch, Module, Stream};
use spillway_kernels::device_layout::{CELL_COLS, DeviceLayout, TILE_ROWS};
use spillway_kernels::formats::{Format, FormatError};

/// Matrices of one launch: the parameters of the kernels in `kernels/hip/matmul.h`.
const MAX_PARTS: usize = 4;
/// Launch shapes of the row-by-row kernels: tokens and tiles of a block.
const GROUPS: [(usize, usize); 4] = [(1, 1), (2, 1), (4, 2), (8, 2)];
/// Threads of a block of theirs: [`TILE_ROWS`] rows by 16 slices of the columns, or by half as many groups of slices.
pub(super) const BLOCKS: [u32; 2] = [256, 128];
/// Launch shapes of the kernels for few tokens on matrix units (few.h).
const FEW: [(usize, usize); 2] = [(8, 2), (16, 2)];
/// Rows and tokens of a block of the kernels for many tokens: `Few` and `Many` of gemm.h; the latter of gemm_floats.h too.
const SMALL: (usize, usize) = (32, 16);
const LARGE: (usize, usize) = (128, 64);
/// Tokens from which matrix units beat row-by-row products of quantised weights, and from which they go through shared memory.
const FEW_MIN: usize = 5;
const SMALL_MIN: usize = 17;
/// Tokens from which large blocks can be worth it.
const LARGE_MIN: usize = 49;
/// Tokens from which blocks can be worth it for floating-point weights, and are if there is a block for each unit; and from
/// which they always are.
const FLOATS_MIN: usize = 24;
const FLOATS_ALWAYS: usize = 96;
/// Cells that a thread of the embedding kernel decodes, one each.
const EMBED_BLOCK: usize = 64;

/// Which kernels multiply; all give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Those that suit the device, the matrices and the number of tokens.
    Fitting,
    /// Row by row, in passes over the weights.
    RowByRow,
    /// On matrix units straight from memory, 8 or 16 tokens a pass; floating-point weights row by row.
    FewTokens,
    /// In small blocks on matrix units; floating-point weights row by row.
    SmallBlocks,
    /// In large blocks; quantised weights on matrix units.
    LargeBlocks,
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

    /// The same matrix in another place, which holds a copy of it (or will).
    ///
    /// # Errors
    /// [`LaunchError::Size`] when the place is too small.
    pub fn moved_to(self, data: DeviceSlice) -> Result<Self, LaunchError> {
        Self::new(self.layout, self.rows, data)
    }

    /// Where it lies.
    pub fn memory(&self) -> DeviceSlice {
        self.data
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
    by_group: [Kernel; GROUPS.len()],
    embed: Function,
    /// In blocks of [`LARGE`].
    large: Function,
    /// For quantised formats.
    pub quantised: Option<QuantisedEntries>,
}

/// The kernels that quantised formats alone have.
#[derive(Debug)]
pub(super) struct QuantisedEntries {
    /// On matrix units straight from memory, for each of [`FEW`].
    few: [Function; FEW.len()],
    /// In blocks of [`SMALL`].
    small: Function,
    /// The first half of a gated MLP.
    pub gated: Kernel,
}

/// A kernel that runs in blocks of any of [`BLOCKS`].
#[derive(Debug)]
pub(super) struct Kernel {
    pub function: Function,
    /// Of a thread.
    registers: usize,
}

/// Registers of a compute unit: of NVIDIA's since Kepler and AMD's before RDNA 3, which has more.
const REGISTERS: usize = 65536;

impl Kernel {
    fn load(module: &Module, name: &str) -> Result<Self, LaunchError> {
        let function = module.function(name)?;
        let registers = function.resources()?.registers as usize;
        Ok(Self { function, registers })
    }

    /// The threads of a block for so many blocks. Large blocks have the most loads on their way; but when only small ones
    /// are all on the device at once, they are done sooner than large ones in turns.
    pub fn block(&self, blocks: usize, compute_units: usize) -> u32 {
        let fits = |block: u32| {
            let resident = REGISTERS / (self.registers.max(1) * block as usize);
            blocks <= resident * compute_units
        };
        BLOCKS.into_iter().find(|block| fits(*block)).unwrap_or(BLOCKS[0])
    }
}

impl Entries {
    pub(super) fn load(loader: &Loader<'_>, format: Format) -> Result<Self, LaunchError> {
        let name = format.name().to_lowercase();
        let module = loader.module(&format!("matmul_{name}"))?;
        let group = |(tokens, _): (usize, usize)| Kernel::load(&module, &format!("matvec_{name}_{tokens}"));
        let few = |(tokens, _): (usize, usize)| module.function(&format!("few_{name}_{tokens}"));
        let quantised = || -> Result<QuantisedEntries, LaunchError> {
            Ok(QuantisedEntries {
                few: [few(FEW[0])?, few(FEW[1])?],
                small: module.function(&format!("gemm_few_{name}"))?,
                gated: Kernel::load(&module, &format!("gated_{name}"))?,
            })
        };
        Ok(Self {
            by_group: [group(GROUPS[0])?, group(GROUPS[1])?, group(GROUPS[2])?, group(GROUPS[3])?],
            embed: module.function(&format!("embed_{name}"))?,
            large: module.function(&format!("gemm_many_{name}"))?,
            quantised: format.is_quantised().then(quantised).transpose()?,
        })
    }

    /// The kernel of a kind for a number of tokens.
    fn choose(&self, products: Products, tokens: usize) -> Choice<'_> {
        let fitting = |shapes: &[(usize, usize)]| {
            shapes.iter().position(|(most, _)| *most >= tokens).unwrap_or(shapes.len() - 1)
        };
        let fixed = |function, (rows, tokens)| Choice { function, threads: Threads::Most, rows, tokens };
        match (products, &self.quantised) {
            (Products::LargeBlocks, _) => fixed(&self.large, LARGE),
            (Products::SmallBlocks, Some(entries)) => fixed(&entries.small, SMALL),
            (Products::FewTokens, Some(entries)) => {
                let shape = fitting(&FEW);
                let (tokens, tiles) = FEW[shape];
                fixed(&entries.few[shape], (tiles * TILE_ROWS, tokens))
            }
            _ => {
                let shape = fitting(&GROUPS);
                let (kernel, (tokens, tiles)) = (&self.by_group[shape], GROUPS[shape]);
                let threads = Threads::Of(kernel);
                Choice { function: &kernel.function, threads, rows: tiles * TILE_ROWS, tokens }
            }
        }
    }
}

/// How many threads a block has.
enum Threads<'e> {
    /// As many as the kernel allows.
    Most,
    /// As many as [`Kernel::block`] says.
    Of(&'e Kernel),
}

/// A kernel, its threads, and the rows and tokens of a block.
struct Choice<'e> {
    function: &'e Function,
    threads: Threads<'e>,
    rows: usize,
    tokens: usize,
}

impl Kernels {
    pub(super) fn entries(&self, format: Format) -> Result<&Entries, LaunchError> {
        self.matmul.get(&format).ok_or(LaunchError::Format { format: format.name() })
    }

    /// The kernels for matrices with these numbers of rows in one launch: large blocks do less for the same, small ones keep
    /// more of the device busy.
    fn products_for(&self, format: Format, mut rows: impl Iterator<Item = usize>, tokens: usize) -> Products {
        if self.products != Products::Fitting {
            return self.products;
        }
        let mut fills = || {
            let blocks: usize = rows.by_ref().map(|rows| rows.div_ceil(LARGE.0)).sum();
            blocks * tokens.div_ceil(LARGE.1) >= self.compute_units
        };
        match (format.is_quantised(), tokens) {
            (true, _) if !self.matrix_units => Products::RowByRow,
            (true, ..FEW_MIN) => Products::RowByRow,
            (true, ..SMALL_MIN) => Products::FewTokens,
            (true, LARGE_MIN..) if fills() => Products::LargeBlocks,
            (true, _) => Products::SmallBlocks,
            (false, FLOATS_ALWAYS..) => Products::LargeBlocks,
            (false, FLOATS_MIN..) if fills() => Products::LargeBlocks,
            (false, _) => Products::RowByRow,
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
        self.matmuls(stream, &[(*weight, output)], inputs, tokens)
    }

    /// The products of matrices of one format with the same inputs, each to its own output: as few launches as possible,
    /// since a small matrix alone leaves most of a device idle.
    ///
    /// # Errors
    /// See [`Kernels::matmul`]; matrices of different formats.
    pub fn matmuls(
        &self,
        stream: &Stream,
        products: &[(Matrix, Output)],
        inputs: Inputs,
        tokens: usize,
    ) -> Result<(), LaunchError> {
        let Some((first, _)) = products.first() else { return Ok(()) };
        if tokens == 0 {
            return Ok(());
        }
        let entries = self.entries(first.format())?;
        let check = Check("matmul");
        for products in products.chunks(MAX_PARTS) {
            let rows_of = products.iter().map(|(weight, _)| weight.rows);
            let kind = self.products_for(first.format(), rows_of, tokens);
            let Choice { function, threads, rows, tokens: columns } = entries.choose(kind, tokens);
            let token_blocks = check.number("tokens", tokens.div_ceil(columns))?;
            let mut parts = [Arg::from([0; 4]); MAX_PARTS];
            let mut row_blocks = 0;
            for (part, (weight, output)) in parts.iter_mut().zip(products) {
                check.rule(
                    weight.is_like(first),
                    "format or columns of a group",
                    weight.cols(),
                    "the same for all",
                )?;
                *part = output.part(check, weight, tokens)?;
                row_blocks += weight.rows.div_ceil(rows);
            }
            let (x, scales) = first.check_inputs(check, inputs, tokens)?;
            let [columns, tokens] =
                [check.number("columns", first.cols())?, check.number("tokens", tokens)?].map(Arg::from);
            let [a, b, c, d] = parts;
            let block = match threads {
                Threads::Most => function.max_threads(),
                Threads::Of(kernel) => kernel.block(row_blocks * token_blocks as usize, self.compute_units),
            };
            let grid = [check.number("rows", row_blocks)?, token_blocks, 1];
            let args = [x, scales, columns, tokens, a, b, c, d];
            queue(stream, function, Launch { grid, block, shared_bytes: 0 }, &args)?;
        }
        Ok(())
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

impl Output {
    /// `struct MatrixPart` of `kernels/hip/matmul.h`.
    fn part(&self, check: Check, weight: &Matrix, tokens: usize) -> Result<Arg, LaunchError> {
        check.rule(weight.rows > 0, "rows", weight.rows, "at least one")?;
        check.holds::<f32>("out", self.to, tokens * weight.rows)?;
        if let Some(bias) = self.bias {
            check.holds::<f32>("bias", bias, weight.rows)?;
        }
        let rows = check.number("rows", weight.rows)?;
        let flags = u64::from(rows) | u64::from(self.add) << 32;
        Ok([weight.data.address(), self.to.address(), self.bias.map_or(0, DeviceSlice::address), flags]
            .into())
    }
}

impl Matrix {
    /// Whether one launch can multiply both: the same format and inputs.
    pub(super) fn is_like(&self, other: &Matrix) -> bool {
        (self.format(), self.cols()) == (other.format(), other.cols())
    }

    /// The weights as an argument.
    pub(super) fn data(&self) -> Arg {
        self.data.into()
    }

    /// The two input arguments: codes and their scales, or values and nothing.
    pub(super) fn check_inputs(
        &self,
        check: Check,
        inputs: Inputs,
        tokens: usize,
    ) -> Result<(Arg, Arg), LaunchError> {
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
