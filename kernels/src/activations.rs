//! Inputs of matrix products, in the forms the kernels read.
//!
//! Inputs are prepared once and shared by every matrix that reads them. For quantised weights each run of
//! [`X_BLOCK`] values becomes 8-bit codes `round(x / scale)` with `scale = max|x| / 127`, one form for every weight
//! format. Floating-point weights read the f32 values.
//!
//! Tokens are grouped in *panels* of [`PANEL`] tokens, the last one padded with zeros; a single token that is left over
//! makes a panel of one. In a panel `w` tokens wide, a block of 32 columns is `12 · w` words of 32 bits, each `[..][w]`
//! with the token innermost:
//!
//! | words | content |
//! |---|---|
//! | `[8][w]` | four codes of consecutive columns |
//! | `[w]` | the scale, f32 |
//! | `[w]` | minus the sum of the 32 codes |
//! | `[2][w]` | minus the sums of the first and the second 16 codes |
//!
//! The f32 form of a panel is `[cols][w]`.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;

use crate::disjoint::Disjoint;
use crate::formats::InputForm;
use crate::isa::KernelSet;
use crate::pool::{ChunkQueue, ThreadPool};
use thiserror::Error;

/// Tokens of a wide panel: their sums fit the registers of every kernel set, and share the work of unpacking weights.
pub(crate) const PANEL: usize = 4;
/// Columns that share a scale.
pub(crate) const X_BLOCK: usize = 32;
/// 32-bit words of a block, per token.
pub(crate) const X_BLOCK_WORDS: usize = 12;
/// Values below which a second thread costs more than it helps.
const PARALLEL_MIN: usize = 16 << 10;
/// A block whose largest value is smaller than this is taken for zeros: its scale could not be inverted in f32.
pub(crate) const TINY: f32 = f32::from_bits(0x0d80_0000); // 2^-100

/// A block of 32 values as 8-bit codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct QuantizedBlock {
    /// Codes, four to a word, first in the lowest byte.
    pub(crate) words: [i32; X_BLOCK / 4],
    /// Value of one step. NaN when a value is infinite or no number: the outputs say so too.
    pub(crate) scale: f32,
    /// Sums of the codes of each half.
    pub(crate) sums: [i32; 2],
}

impl QuantizedBlock {
    /// A block with an infinite or undefined value.
    const UNDEFINED: Self = Self { words: [0; X_BLOCK / 4], scale: f32::NAN, sums: [0; 2] };
}

/// Quantises the tokens of one panel: rows of `cols` values in, words in the panel's layout out.
///
/// # Safety
/// The CPU has the instructions of the kernel set that the function belongs to.
type QuantizePanel = unsafe fn(rows: &[f32], cols: usize, out: &mut [i32]);

/// The table: one function per kernel set.
fn quantize_panel(set: KernelSet) -> QuantizePanel {
    match set {
        KernelSet::Scalar => scalar::panel,
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx2 => simd::panel_avx2,
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx512 | KernelSet::Avx512Vnni => simd::panel_avx512,
        #[cfg(not(target_arch = "x86_64"))]
        _ => scalar::panel,
    }
}

/// Why inputs could not be prepared.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ActivationError {
    /// The values are no whole number of rows.
    #[error("{values} values are no whole number of rows of {cols}; pass [tokens, cols]")]
    Rows {
        /// Values passed.
        values: usize,
        /// Columns of a row.
        cols: usize,
    },
}

impl ActivationError {
    /// Stable name of the error for programs.
    pub fn code(&self) -> &'static str {
        match self {
            ActivationError::Rows { .. } => "activation_rows",
        }
    }
}

/// Prepared inputs `[tokens, cols]`; a buffer to be used again and again.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    int8: Vec<i32>,
    float: Vec<f32>,
}

impl Activations {
    /// A buffer that will not allocate for up to `tokens` × `cols` values in the given forms.
    pub fn with_capacity(tokens: usize, cols: usize, forms: &[InputForm]) -> Self {
        let mut new = Self::default();
        let tokens = tokens.next_multiple_of(PANEL);
        if forms.contains(&InputForm::Int8) {
            new.int8.reserve_exact(tokens * token_words(cols));
        }
        if forms.contains(&InputForm::F32) {
            new.float.reserve_exact(tokens * cols);
        }
        new
    }

    /// Bytes that [`Activations::with_capacity`] takes for this shape, for a plan that charges them.
    pub fn bytes_for(tokens: usize, cols: usize, forms: &[InputForm]) -> usize {
        let words = |form, words| if forms.contains(&form) { words } else { 0 };
        let per_token = words(InputForm::Int8, token_words(cols)) + words(InputForm::F32, cols);
        tokens.next_multiple_of(PANEL) * per_token * size_of::<i32>()
    }

    /// Bytes of memory the buffer takes.
    pub fn bytes(&self) -> usize {
        size_of::<i32>() * self.int8.capacity() + size_of::<f32>() * self.float.capacity()
    }

    /// Tokens prepared.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values of a token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether the inputs were prepared in that form.
    pub fn has(&self, form: InputForm) -> bool {
        self.tokens == 0
            || match form {
                InputForm::Int8 => !self.int8.is_empty(),
                InputForm::F32 => !self.float.is_empty(),
            }
    }

    /// Panels the tokens are grouped in.
    pub(crate) fn panels(&self) -> usize {
        self.tokens.div_ceil(PANEL)
    }

    /// Tokens of a panel, without padding.
    pub(crate) fn panel_tokens(&self, panel: usize) -> usize {
        panel_tokens(self.tokens, panel)
    }

    /// Words of one panel in the given form.
    pub(crate) fn panel(&self, panel: usize, form: InputForm) -> &[i32] {
        let width = panel_width(self.panel_tokens(panel));
        match form {
            InputForm::Int8 => {
                let words = token_words(self.cols);
                &self.int8[panel * PANEL * words..][..width * words]
            }
            InputForm::F32 => {
                bytemuck::cast_slice(&self.float[panel * PANEL * self.cols..][..width * self.cols])
            }
        }
    }

    /// Bytes of one token in the given form.
    pub(crate) fn token_bytes(&self, form: InputForm) -> usize {
        match form {
            InputForm::Int8 => 4 * token_words(self.cols),
            InputForm::F32 => 4 * self.cols,
        }
    }

    /// Prepares `rows` (`[tokens, cols]`, row by row) in the given forms, replacing what was there.
    pub(crate) fn prepare(
        &mut self,
        set: KernelSet,
        pool: &ThreadPool,
        rows: &[f32],
        cols: usize,
        forms: &[InputForm],
    ) -> Result<(), ActivationError> {
        let tokens = rows.len().checked_div(cols).unwrap_or(0);
        if tokens * cols != rows.len() {
            return Err(ActivationError::Rows { values: rows.len(), cols });
        }
        (self.tokens, self.cols) = (tokens, cols);
        let words = if forms.contains(&InputForm::Int8) { token_words(cols) } else { 0 };
        let floats = if forms.contains(&InputForm::F32) { cols } else { 0 };
        let stored = match tokens % PANEL {
            0 | 1 => tokens,
            _ => tokens.next_multiple_of(PANEL),
        };
        self.int8.resize(stored * words, 0);
        self.float.resize(stored * floats, 0.0);

        let int8 = Disjoint::new(&mut self.int8);
        let float = Disjoint::new(&mut self.float);
        let quantize = quantize_panel(set);
        let prepare_panel = |panel: usize| {
            let first = panel * PANEL;
            let real = panel_tokens(tokens, panel);
            let width = panel_width(real);
            let rows = &rows[first * cols..][..real * cols];
            // SAFETY: every panel is prepared once, and panels do not overlap.
            let (int8, float) = unsafe {
                (int8.part(first * words, width * words), float.part(first * floats, width * floats))
            };
            if real < width {
                int8.fill(0);
                float.fill(0.0);
            }
            if !int8.is_empty() {
                // SAFETY: the caller holds `Kernels`, which exist only for sets the CPU has.
                unsafe { quantize(rows, cols, int8) };
            }
            if !float.is_empty() {
                interleave(rows, cols, float);
            }
        };
        let panels = tokens.div_ceil(PANEL);
        if panels < 2 || rows.len() < PARALLEL_MIN {
            (0..panels).for_each(prepare_panel);
        } else {
            let queue = ChunkQueue::new(panels, 1);
            pool.run(&|_| {
                while let Some(panels) = queue.take() {
                    panels.for_each(prepare_panel);
                }
            });
        }
        Ok(())
    }
}

/// Tokens of panel `panel` of `tokens`, without padding.
fn panel_tokens(tokens: usize, panel: usize) -> usize {
    PANEL.min(tokens - panel * PANEL)
}

/// Tokens stored in a panel of `tokens` real ones.
pub(crate) fn panel_width(tokens: usize) -> usize {
    if tokens == 1 { 1 } else { PANEL }
}

/// Words of one token's 8-bit form.
fn token_words(cols: usize) -> usize {
    cols.div_ceil(X_BLOCK) * X_BLOCK_WORDS
}

/// Writes rows column by column, into a panel as wide as `out` has room for.
fn interleave(rows: &[f32], cols: usize, out: &mut [f32]) {
    let width = out.len() / cols;
    if width == 1 {
        return out.copy_from_slice(rows);
    }
    for (token, row) in rows.chunks_exact(cols).enumerate() {
        for (&value, column) in row.iter().zip(out.chunks_exact_mut(width)) {
            column[token] = value;
        }
    }
}

/// Writes the panel of `rows` block by block, each quantised by `block`.
#[inline(always)]
fn write_panel(
    rows: &[f32],
    cols: usize,
    out: &mut [i32],
    block: impl Fn(&[f32; X_BLOCK]) -> QuantizedBlock,
) {
    let width = out.len() / token_words(cols);
    for (token, row) in rows.chunks_exact(cols).enumerate() {
        let (blocks, rest) = row.as_chunks::<X_BLOCK>();
        let mut last = [0.0; X_BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let padded = (!rest.is_empty()).then_some(&last);
        for (x, out) in blocks.iter().chain(padded).zip(out.chunks_exact_mut(width * X_BLOCK_WORDS)) {
            let x = block(x);
            let [first, second] = x.sums;
            let tail = [x.scale.to_bits().cast_signed(), -(first + second), -first, -second];
            for (slot, word) in out[token..].iter_mut().step_by(width).zip(x.words.into_iter().chain(tail)) {
                *slot = word;
            }
        }
    }
}
