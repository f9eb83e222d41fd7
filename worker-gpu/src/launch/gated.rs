//! The first half of a gated MLP: two products and their gated combination, in the form that the next matrix reads.

use super::rows::{QUAD, over};
use super::{Arg, Check, Inputs, Int8Rows, Kernels, LaunchError, Matrix, Output, entries, queue};
use crate::hip::{DeviceSlice, Launch, Stream};
use spillway_kernels::device_layout::CELL_COLS;

entries!(Entries: "silu_quantize" { silu_quantize });

/// Rows of a block of the kernels that do it all at once.
const ROWS: usize = CELL_COLS;

/// Memory of a gated MLP; no part overlaps another.
#[derive(Debug, Clone, Copy)]
pub struct GatedBuffers {
    /// For the two products, each `[tokens, rows]` f32.
    pub products: [DeviceSlice; 2],
    /// For the result in 8-bit form. May hold the inputs, which are read before.
    pub int8: DeviceSlice,
}

impl Kernels {
    /// `silu(gate * x) * (up * x)` for `tokens` rows of inputs, which each matrix gets in the form that it reads: in 8-bit form
    /// if `int8`, else as f32. Says where it is.
    ///
    /// One token, whose products a block can hold, takes one launch. The bits are those of the separate operations.
    ///
    /// # Errors
    /// See [`Kernels::matmuls`].
    pub fn gated(
        &self,
        stream: &Stream,
        [(gate, gate_inputs), (up, up_inputs)]: [(&Matrix, Inputs); 2],
        tokens: usize,
        buffers: &GatedBuffers,
        int8: bool,
    ) -> Result<Inputs, LaunchError> {
        let [gated, upper] = buffers.products;
        let count = tokens * gate.rows();
        if tokens == 1 && int8 && gate.is_like(up) && gate.format().is_quantised() {
            // Where products go otherwise, since other blocks still read the inputs.
            let out = Int8Rows::new(gated, tokens, gate.rows())?;
            self.gated_at_once(stream, [gate, up], gate_inputs, &out)?;
            return Ok(Inputs::Int8(out));
        }
        if gate.is_like(up) {
            let products = [(*gate, Output::store(gated)), (*up, Output::store(upper))];
            self.matmuls(stream, &products, gate_inputs, tokens)?;
        } else {
            self.matmul(stream, gate, gate_inputs, tokens, Output::store(gated))?;
            self.matmul(stream, up, up_inputs, tokens, Output::store(upper))?;
        }
        if !int8 {
            self.silu_mul(stream, gated, upper, count)?;
            return Ok(Inputs::F32(gated));
        }
        let out = Int8Rows::new(buffers.int8, tokens, gate.rows())?;
        self.silu_quantize(stream, gated, upper, &out)?;
        Ok(Inputs::Int8(out))
    }

    fn gated_at_once(
        &self,
        stream: &Stream,
        [gate, up]: [&Matrix; 2],
        inputs: Inputs,
        out: &Int8Rows,
    ) -> Result<(), LaunchError> {
        let check = Check("gated MLP");
        let entries = self.entries(gate.format())?;
        let Some(entries) = &entries.quantised else {
            return Err(LaunchError::Form { format: gate.format().name() });
        };
        check.rule(up.rows() == gate.rows(), "rows of up", up.rows(), "those of gate")?;
        let (x, scales) = gate.check_inputs(check, inputs, 1)?;
        let args: [Arg; 8] = [
            x,
            scales,
            check.number("columns", gate.cols())?.into(),
            gate.data(),
            up.data(),
            check.number("rows", gate.rows())?.into(),
            out.codes().into(),
            out.scales().into(),
        ];
        let blocks = gate.rows().div_ceil(ROWS);
        let block = entries.gated.block(blocks, self.compute_units);
        let launch = Launch::linear(check.number("rows", blocks)?, block);
        queue(stream, &entries.gated.function, launch, &args)
    }

    /// `out = silu(gate) * up` in 8-bit form.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn silu_quantize(
        &self,
        stream: &Stream,
        gate: DeviceSlice,
        up: DeviceSlice,
        out: &Int8Rows,
    ) -> Result<(), LaunchError> {
        let check = Check("silu_quantize");
        let count = out.rows() * out.cols();
        if count == 0 {
            return Ok(());
        }
        let args = [
            check.holds::<f32>("gate", gate, count)?,
            check.holds::<f32>("up", up, count)?,
            out.codes().into(),
            out.scales().into(),
            check.number("quads", count / QUAD)?.into(),
        ];
        queue(stream, &self.gated.silu_quantize, over(check, count / QUAD)?, &args)
    }
}
