//! Inputs of matrix products, in the forms the kernels read.
//!
//! Inputs are prepared once and shared by every matrix that reads them. For quantised weights each run of
//! [`X_BLOCK`] values becomes integer codes `round(x / scale)` with `scale = max|x| / largest code`, of one kind
//! ([`Codes`]) for every weight format. Floating-point weights read the f32 values.
//!
//! Codes are kept as *planes* of signed bytes, because that is what products multiply. With one plane the largest code is
//! 127. With two it is 127 · 128, and a code is `128 · high + low` with `low` in -64..=63: both planes stay clear of -128,
//! which vector instructions cannot negate, and 16-bit sums hold as many products as with one plane.
//!
//! Tokens are grouped in *panels* of [`PANEL`] tokens, the last one padded with zeros; a single token that is left over
//! makes a panel of one. In a panel `w` tokens wide, a block of 32 columns is `12 · w` words of 32 bits, and `8 · w` more
//! with a second plane, each `[..][w]` with the token innermost:
//!
//! | words | content |
//! |---|---|
//! | `[8][w]` | four codes of consecutive columns, first plane |
//! | `[w]` | the scale, f32 |
//! | `[w]` | minus the sum of the 32 codes |
//! | `[2][w]` | minus the sums of the first and the second 16 codes |
//! | `[8][w]` | as the first, second plane |
//!
//! The f32 form of a panel is `[cols][w]`.

mod forms;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;

use crate::disjoint::Disjoint;
use crate::formats::Format;
use crate::isa::KernelSet;
use crate::pool::{ChunkQueue, ThreadPool};
pub use forms::{Codes, Forms};
pub(crate) use forms::{PLANE_BITS, PLANE_MAX, PLANE_WORDS, X_BLOCK, block_words};
use thiserror::Error;

/// Tokens of a wide panel: their sums fit the registers of every kernel set, and share the work of unpacking weights.
pub(crate) const PANEL: usize = 4;
/// Values below which a second thread costs more than it helps.
const PARALLEL_MIN: usize = 16 << 10;
/// A block whose largest value is smaller than this is taken for zeros: its scale could not be inverted in f32.
pub(crate) const TINY: f32 = f32::from_bits(0x0d80_0000); // 2^-100

/// A block of 32 values as codes in `P` planes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct QuantizedBlock<const P: usize> {
    /// Planes, the heaviest first: bytes, four to a word, first in the lowest byte.
    planes: [[i32; PLANE_WORDS]; P],
    /// Value of one step. NaN when a value is infinite or no number: the outputs say so too.
    scale: f32,
    /// Sums of the codes of each half.
    sums: [i32; 2],
}

impl<const P: usize> QuantizedBlock<P> {
    /// A block with an infinite or undefined value.
    const UNDEFINED: Self = Self { planes: [[0; PLANE_WORDS]; P], scale: f32::NAN, sums: [0; 2] };
}

/// Quantises the tokens of one panel: rows of `cols` values in, words in the panel's layout out.
///
/// # Safety
/// The CPU has the instructions of the kernel set that the function belongs to.
type QuantizePanel = unsafe fn(rows: &[f32], cols: usize, out: &mut [i32]);

/// The table: one function per kernel set and kind of codes.
fn quantize_panel(set: KernelSet, codes: Codes) -> QuantizePanel {
    let by_codes: [QuantizePanel; Codes::ALL.len()] = match set {
        KernelSet::Scalar => [scalar::panel::<1>, scalar::panel::<2>],
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx2 => [simd::panel_avx2::<1>, simd::panel_avx2::<2>],
        #[cfg(target_arch = "x86_64")]
        KernelSet::Avx512 | KernelSet::Avx512Vnni => [simd::panel_avx512::<1>, simd::panel_avx512::<2>],
        #[cfg(not(target_arch = "x86_64"))]
        _ => [scalar::panel::<1>, scalar::panel::<2>],
    };
    by_codes[codes as usize]
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
    forms: Forms,
    codes: Vec<i32>,
    float: Vec<f32>,
}

impl Activations {
    /// A buffer that will not allocate for up to `tokens` × `cols` values in the given forms.
    pub fn with_capacity(tokens: usize, cols: usize, forms: Forms) -> Self {
        let mut new = Self::default();
        let tokens = tokens.next_multiple_of(PANEL);
        let (codes, floats) = forms.token_words(cols);
        new.codes.reserve_exact(tokens * codes);
        new.float.reserve_exact(tokens * floats);
        new
    }

    /// Bytes that [`Activations::with_capacity`] takes for this shape, for a plan that charges them.
    pub fn bytes_for(tokens: usize, cols: usize, forms: Forms) -> usize {
        let (codes, floats) = forms.token_words(cols);
        tokens.next_multiple_of(PANEL) * (codes + floats) * size_of::<i32>()
    }

    /// Bytes of memory the buffer takes.
    pub fn bytes(&self) -> usize {
        size_of::<i32>() * self.codes.capacity() + size_of::<f32>() * self.float.capacity()
    }

    /// Tokens prepared.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values of a token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Forms in which the inputs were prepared.
    pub fn forms(&self) -> Forms {
        self.forms
    }

    /// Panels the tokens are grouped in.
    pub(crate) fn panels(&self) -> usize {
        self.tokens.div_ceil(PANEL)
    }

    /// Tokens of a panel, without padding.
    pub(crate) fn panel_tokens(&self, panel: usize) -> usize {
        panel_tokens(self.tokens, panel)
    }

    /// Words of one panel, as weights of that format read it.
    pub(crate) fn panel(&self, panel: usize, format: Format) -> &[i32] {
        let width = panel_width(self.panel_tokens(panel));
        let words = self.token_words(format);
        let all = if format.is_quantised() { &self.codes } else { bytemuck::cast_slice(&self.float) };
        &all[panel * PANEL * words..][..width * words]
    }

    /// 32-bit words of one token, as weights of that format read it.
    pub(crate) fn token_words(&self, format: Format) -> usize {
        let (codes, floats) = self.forms.token_words(self.cols);
        if format.is_quantised() { codes } else { floats }
    }

    /// Prepares `rows` (`[tokens, cols]`, row by row) in the given forms, replacing what was there.
    pub(crate) fn prepare(
        &mut self,
        set: KernelSet,
        pool: &ThreadPool,
        rows: &[f32],
        cols: usize,
        forms: Forms,
    ) -> Result<(), ActivationError> {
        let tokens = rows.len().checked_div(cols).unwrap_or(0);
        if tokens * cols != rows.len() {
            return Err(ActivationError::Rows { values: rows.len(), cols });
        }
        (self.tokens, self.cols, self.forms) = (tokens, cols, forms);
        let (words, floats) = forms.token_words(cols);
        let stored = match tokens % PANEL {
            0 | 1 => tokens,
            _ => tokens.next_multiple_of(PANEL),
        };
        self.codes.resize(stored * words, 0);
        self.float.resize(stored * floats, 0.0);

        let codes = Disjoint::new(&mut self.codes);
        let float = Disjoint::new(&mut self.float);
        let quantize = forms.codes.map(|codes| quantize_panel(set, codes));
        let prepare_panel = |panel: usize| {
            let first = panel * PANEL;
            let real = panel_tokens(tokens, panel);
            let width = panel_width(real);
            let rows = &rows[first * cols..][..real * cols];
            // SAFETY: every panel is prepared once, and panels do not overlap.
            let (codes, float) = unsafe {
                (codes.part(first * words, width * words), float.part(first * floats, width * floats))
            };
            if real < width {
                codes.fill(0);
                float.fill(0.0);
            }
            if let Some(quantize) = quantize {
                // SAFETY: the caller holds `Kernels`, which exist only for sets the CPU has.
                unsafe { quantize(rows, cols, codes) };
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
fn write_panel<const P: usize>(
    rows: &[f32],
    cols: usize,
    out: &mut [i32],
    block: impl Fn(&[f32; X_BLOCK]) -> QuantizedBlock<P>,
) {
    let width = out.len() / (cols.div_ceil(X_BLOCK) * block_words(P));
    for (token, row) in rows.chunks_exact(cols).enumerate() {
        let (blocks, rest) = row.as_chunks::<X_BLOCK>();
        let mut last = [0.0; X_BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        let padded = (!rest.is_empty()).then_some(&last);
        for (x, out) in blocks.iter().chain(padded).zip(out.chunks_exact_mut(width * block_words(P))) {
            let x = block(x);
            let [first, second] = x.sums;
            let tail = [x.scale.to_bits().cast_signed(), -(first + second), -first, -second];
            let mut slots = out[token..].iter_mut().step_by(width);
            for (plane, words) in x.planes.into_iter().enumerate() {
                let tail = tail.into_iter().take(if plane == 0 { 4 } else { 0 });
                words.into_iter().chain(tail).zip(slots.by_ref()).for_each(|(word, slot)| *slot = word);
            }
        }
    }
}
