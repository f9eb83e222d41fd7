//! Portable quantisation: the reference.

use super::{QuantizedBlock, TINY, X_BLOCK, write_panel};

/// See [`QuantizePanel`](super::QuantizePanel). Needs no particular CPU.
pub(super) unsafe fn panel(rows: &[f32], cols: usize, out: &mut [i32]) {
    write_panel(rows, cols, out, block);
}

/// Quantises one block.
pub(super) fn block(x: &[f32; X_BLOCK]) -> QuantizedBlock {
    let largest = x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let Some((scale, inverse)) = scale_and_inverse(largest) else { return QuantizedBlock::UNDEFINED };
    let mut words = [0; X_BLOCK / 4];
    let mut sums = [0; 2];
    for (i, &value) in x.iter().enumerate() {
        #[expect(clippy::cast_possible_truncation, reason = "at most 127 in size")]
        let code = (value * inverse).round_ties_even() as i8;
        words[i / 4] |= i32::from(code.cast_unsigned()) << (i % 4 * 8);
        sums[i / 16] += i32::from(code);
    }
    QuantizedBlock { words, scale, sums }
}

/// Scale and its inverse, from the bits of the largest absolute value; none if that is no finite number. Comparing the
/// bits as integers puts infinities and NaNs above all numbers. An inverse of 0 makes all codes 0.
#[inline(always)]
pub(super) fn scale_and_inverse(largest: u32) -> Option<(f32, f32)> {
    let amax = f32::from_bits(largest);
    match amax {
        _ if !amax.is_finite() => None,
        ..TINY => Some((0.0, 0.0)),
        _ => Some((amax / 127.0, 127.0 / amax)),
    }
}
