//! Operations on rows and elements: no matrices, no state.

use super::{Check, Int8Rows, Kernels, LaunchError, entries, optional, queue};
use crate::hip::{DeviceSlice, Launch, Stream};

entries!(Entries: "rows" { silu_mul, sigmoid_mul, split_heads, rope_halves, rope_adjacent });
entries!(QuantizeEntries: "quantize_rows" { quantize_rows });
entries!(NormEntries: "rms_norm" { rms_norm });
entries!(ResidualEntries: "residual_add" { residual_add });

/// Threads of a block that works on elements.
const BLOCK: usize = 256;
/// Neighbouring values that a thread takes together.
pub(super) const QUAD: usize = 4;
/// Values that a thread of a norm keeps in registers, and the fewest and most threads of its block. Parts of the order of its
/// sum.
const NORM_KEPT: usize = 2 * QUAD;
const NORM_BLOCKS: [usize; 2] = [64, 1024];

/// Which dimensions of the rotated part form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `(i, i + pairs)`.
    Halves,
    /// `(2 i, 2 i + 1)`.
    Adjacent,
}

/// A rotary embedding of a step.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// Which dimensions form a pair.
    pub pairing: Pairing,
    /// Pairs of each head; the rest of the head stays.
    pub pairs: usize,
    /// Cosines, `[rows, pairs]` f32.
    pub cos: DeviceSlice,
    /// Sines, `[rows, pairs]` f32.
    pub sin: DeviceSlice,
}

/// Blocks of [`BLOCK`] threads over `count` elements.
pub(super) fn over(check: Check, count: usize) -> Result<Launch, LaunchError> {
    Ok(Launch::linear(check.number("elements", count.div_ceil(BLOCK))?, BLOCK as u32))
}

/// Blocks of [`BLOCK`] threads over `width` elements for each of `rows` rows.
fn over_rows(check: Check, width: usize, rows: usize) -> Result<Launch, LaunchError> {
    let grid = [check.number("rows", rows)?, check.number("width", width.div_ceil(BLOCK))?, 1];
    Ok(Launch { grid, block: BLOCK as u32, shared_bytes: 0 })
}

/// A norm of rows: `out[row] = x[row] / sqrt(mean(x[row]^2) + epsilon) * weight`.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// One f32 per column.
    pub weight: DeviceSlice,
    /// Columns.
    pub width: usize,
    /// Added to the mean.
    pub epsilon: f32,
}

/// Where a norm's rows come from and go to.
#[derive(Debug, Clone, Copy)]
pub struct NormRows {
    /// Number of rows that are written. Rows may be heads: tokens times heads of them.
    pub count: usize,
    /// Source, f32.
    pub x: DeviceSlice,
    /// Which row of `x` each row is (u32 on the device); all of them in order without.
    pub indices: Option<DeviceSlice>,
    /// Destination, f32; may be `x` when there are no indices.
    pub out: DeviceSlice,
    /// Where to write the 8-bit form of the result as well.
    pub int8: Option<Int8Rows>,
}

impl Kernels {
    /// Norms rows.
    ///
    /// # Errors
    /// [`LaunchError`]: memory smaller than the dimensions say, or a launch that fails. So for all operations.
    pub fn rms_norm(&self, stream: &Stream, norm: &Norm, rows: &NormRows) -> Result<(), LaunchError> {
        let check = Check("rms_norm");
        let &Norm { weight, width, epsilon } = norm;
        if rows.count == 0 {
            return Ok(());
        }
        let values = rows.count * width;
        let (x, indices) = match rows.indices {
            Some(indices) => (rows.x.into(), Some(check.holds::<u32>("row numbers", indices, rows.count)?)),
            None => (check.holds::<f32>("x", rows.x, values)?, None),
        };
        let [codes, scales] = check.int8(rows.int8.as_ref(), rows.count, width)?;
        let args = [
            x,
            optional(indices),
            check.holds::<f32>("weight", weight, width)?,
            check.holds::<f32>("out", rows.out, values)?,
            codes,
            scales,
            check.number("width", width)?.into(),
            epsilon.into(),
        ];
        let [least, most] = NORM_BLOCKS;
        let block = width.div_ceil(NORM_KEPT).next_multiple_of(least).min(most) as u32;
        queue(stream, &self.norm.rms_norm, Launch::linear(check.number("rows", rows.count)?, block), &args)
    }

    /// `dst[i] += src[i]`.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn add(
        &self,
        stream: &Stream,
        dst: DeviceSlice,
        src: DeviceSlice,
        count: usize,
    ) -> Result<(), LaunchError> {
        self.elementwise("add", &self.residual.residual_add, stream, [dst, src], count)
    }

    /// `gate[i] = silu(gate[i]) * up[i]`.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn silu_mul(
        &self,
        stream: &Stream,
        gate: DeviceSlice,
        up: DeviceSlice,
        count: usize,
    ) -> Result<(), LaunchError> {
        self.elementwise("silu_mul", &self.rows.silu_mul, stream, [gate, up], count)
    }

    /// `dst[i] *= sigmoid(gate[i])`.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn sigmoid_mul(
        &self,
        stream: &Stream,
        dst: DeviceSlice,
        gate: DeviceSlice,
        count: usize,
    ) -> Result<(), LaunchError> {
        self.elementwise("sigmoid_mul", &self.rows.sigmoid_mul, stream, [dst, gate], count)
    }

    fn elementwise(
        &self,
        name: &'static str,
        function: &crate::hip::Function,
        stream: &Stream,
        [dst, src]: [DeviceSlice; 2],
        count: usize,
    ) -> Result<(), LaunchError> {
        let check = Check(name);
        if count == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("target", dst, count)?,
            check.holds::<f32>("source", src, count)?,
            check.number("elements", count)?.into(),
        ];
        queue(stream, function, over(check, count.div_ceil(QUAD))?, &args)
    }

    /// `src` holds per head `[first | second]`, each `head_dim` wide; copies them apart. `heads` counts those of all rows.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn split_heads(
        &self,
        stream: &Stream,
        src: DeviceSlice,
        first: DeviceSlice,
        second: DeviceSlice,
        heads: usize,
        head_dim: usize,
    ) -> Result<(), LaunchError> {
        let check = Check("split_heads");
        let count = heads * head_dim;
        if count == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("source", src, 2 * count)?,
            check.holds::<f32>("first half", first, count)?,
            check.holds::<f32>("second half", second, count)?,
            check.number("head width", head_dim)?.into(),
            check.number("elements", count)?.into(),
        ];
        queue(stream, &self.rows.split_heads, over(check, count)?, &args)
    }

    /// Rotates every head of `buf`, `[rows, heads * head_dim]`, in place.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`]; a head narrower than its rotated part.
    pub fn rope(
        &self,
        stream: &Stream,
        buf: DeviceSlice,
        rope: &Rope,
        rows: usize,
        heads: usize,
        head_dim: usize,
    ) -> Result<(), LaunchError> {
        let check = Check("rope");
        check.rule(head_dim >= 2 * rope.pairs, "head width", head_dim, "as wide as the rotated part")?;
        if rows * rope.pairs == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("heads", buf, rows * heads * head_dim)?,
            check.holds::<f32>("cosines", rope.cos, rows * rope.pairs)?,
            check.holds::<f32>("sines", rope.sin, rows * rope.pairs)?,
            check.number("heads", heads)?.into(),
            check.number("head width", head_dim)?.into(),
            check.number("pairs", rope.pairs)?.into(),
        ];
        let function = match rope.pairing {
            Pairing::Halves => &self.rows.rope_halves,
            Pairing::Adjacent => &self.rows.rope_adjacent,
        };
        queue(stream, function, over_rows(check, heads * rope.pairs, rows)?, &args)
    }

    /// Writes the 8-bit form of `x`, `[rows, cols]` f32, which products with quantised weights read.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`]; columns that are no multiple of 32.
    pub fn quantize_rows(&self, stream: &Stream, x: DeviceSlice, out: &Int8Rows) -> Result<(), LaunchError> {
        let check = Check("quantize_rows");
        let quads = out.rows() * out.cols() / QUAD;
        if quads == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("x", x, out.rows() * out.cols())?,
            out.codes().into(),
            out.scales().into(),
            check.number("quads", quads)?.into(),
        ];
        queue(stream, &self.quantize.quantize_rows, over(check, quads)?, &args)
    }
}
