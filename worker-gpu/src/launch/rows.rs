//! Operations on rows and elements: no matrices, no state.

use super::{Check, Int8Rows, Kernels, LaunchError, entries, queue};
use crate::hip::{DeviceSlice, Launch, Stream};
use spillway_kernels::device_layout::CELL_COLS;

entries!(Entries: "rows" { silu_mul, sigmoid_mul, split_heads, gather_rows, rope_halves, rope_adjacent });
entries!(QuantizeEntries: "quantize_rows" { quantize_rows });
entries!(NormEntries: "rms_norm" { rms_norm });
entries!(ResidualEntries: "residual_add" { residual_add });
entries!(ArgmaxEntries: "argmax" { argmax });

/// Threads of a block that works on elements.
const BLOCK: usize = 256;
/// Width from which a norm takes a full block per row; below, one wave or two. Part of the order of its sum.
const WIDE: usize = 512;

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
fn over(check: Check, count: usize) -> Result<Launch, LaunchError> {
    Ok(Launch::linear(check.number("elements", count.div_ceil(BLOCK))?, BLOCK as u32))
}

/// Blocks of [`BLOCK`] threads over `width` elements for each of `rows` rows.
fn over_rows(check: Check, width: usize, rows: usize) -> Result<Launch, LaunchError> {
    let grid = [check.number("rows", rows)?, check.number("width", width.div_ceil(BLOCK))?, 1];
    Ok(Launch { grid, block: BLOCK as u32, shared_bytes: 0 })
}

impl Kernels {
    /// `out[row] = x[row] / sqrt(mean(x[row]^2) + epsilon) * weight`; `out` may be `x`. Rows may be heads: the norm of query
    /// and key heads is this one with `width` = head width and `rows` = tokens times heads.
    ///
    /// # Errors
    /// [`LaunchError`]: memory smaller than the dimensions say, or a launch that fails. So for all operations.
    #[expect(clippy::too_many_arguments, reason = "operands and dimensions of one formula")]
    pub fn rms_norm(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        weight: DeviceSlice,
        out: DeviceSlice,
        rows: usize,
        width: usize,
        epsilon: f32,
    ) -> Result<(), LaunchError> {
        let check = Check("rms_norm");
        if rows == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("x", x, rows * width)?,
            check.holds::<f32>("weight", weight, width)?,
            check.holds::<f32>("out", out, rows * width)?,
            check.number("width", width)?.into(),
            epsilon.into(),
        ];
        let block = if width >= WIDE { 256 } else { 64 };
        queue(stream, &self.norm.rms_norm, Launch::linear(check.number("rows", rows)?, block), &args)
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
        queue(stream, function, over(check, count)?, &args)
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

    /// `out[i] = src[indices[i]]`, rows of `width` f32; `indices` are u32 on the device.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn gather_rows(
        &self,
        stream: &Stream,
        src: DeviceSlice,
        indices: DeviceSlice,
        out: DeviceSlice,
        rows: usize,
        width: usize,
    ) -> Result<(), LaunchError> {
        let check = Check("gather_rows");
        if rows == 0 {
            return Ok(());
        }
        let args = [
            src.into(),
            check.holds::<u32>("row numbers", indices, rows)?,
            check.holds::<f32>("out", out, rows * width)?,
            check.number("width", width)?.into(),
        ];
        queue(stream, &self.rows.gather_rows, over_rows(check, width, rows)?, &args)
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
        let cells = out.rows() * out.cols() / CELL_COLS;
        if cells == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("x", x, out.rows() * out.cols())?,
            out.codes().into(),
            out.scales().into(),
            check.number("cells", cells)?.into(),
        ];
        queue(stream, &self.quantize.quantize_rows, over(check, cells * CELL_COLS)?, &args)
    }

    /// `out[row]` (u32) is where `x[row]`, `width` f32, is largest; the first such place.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn argmax(
        &self,
        stream: &Stream,
        x: DeviceSlice,
        out: DeviceSlice,
        rows: usize,
        width: usize,
    ) -> Result<(), LaunchError> {
        let check = Check("argmax");
        if rows == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("x", x, rows * width)?,
            check.holds::<u32>("out", out, rows)?,
            check.number("width", width)?.into(),
        ];
        queue(stream, &self.argmax.argmax, Launch::linear(check.number("rows", rows)?, 1024), &args)
    }
}
