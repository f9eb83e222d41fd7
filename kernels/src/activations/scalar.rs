//! Portable quantisation: the reference.

use super::{PLANE_BITS, PLANE_MAX, PLANE_WORDS, QuantizedBlock, TINY, X_BLOCK, write_panel};

/// See [`QuantizePanel`](super::QuantizePanel). Needs no particular CPU.
pub(super) unsafe fn panel<const P: usize>(rows: &[f32], cols: usize, out: &mut [i32]) {
    write_panel(rows, cols, out, block::<P>);
}

/// Quantises one block.
pub(super) fn block<const P: usize>(x: &[f32; X_BLOCK]) -> QuantizedBlock<P> {
    let largest = x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let Some((scale, inverse)) = scale_and_inverse::<P>(largest) else { return QuantizedBlock::UNDEFINED };
    let mut planes = [[0; PLANE_WORDS]; P];
    let mut sums = [0; 2];
    for (i, &value) in x.iter().enumerate() {
        #[expect(clippy::cast_possible_truncation, reason = "no larger than the largest code")]
        let code = (value * inverse).round_ties_even() as i32;
        sums[i / 16] += code;
        let mut rest = code;
        for plane in (0..P).rev() {
            // The heaviest plane takes what is left, the others what makes the rest a multiple.
            let higher = if plane == 0 { 0 } else { (rest + HALF) >> PLANE_BITS };
            let byte = rest - (higher << PLANE_BITS);
            planes[plane][i / 4] |= (byte & 0xff) << (i % 4 * 8);
            rest = higher;
        }
    }
    QuantizedBlock { planes, scale, sums }
}

/// Half of what a plane's code weighs in the next lighter one: added before the shift that takes a code apart.
pub(super) const HALF: i32 = 1 << (PLANE_BITS - 1);

/// Scale and its inverse, from the bits of the largest absolute value; none if that is no finite number. Comparing the
/// bits as integers puts infinities and NaNs above all numbers. An inverse of 0 makes all codes 0.
#[inline(always)]
pub(super) fn scale_and_inverse<const P: usize>(largest: u32) -> Option<(f32, f32)> {
    let amax = f32::from_bits(largest);
    let max = const { (PLANE_MAX << ((P - 1) * PLANE_BITS as usize)) as f32 };
    match amax {
        _ if !amax.is_finite() => None,
        ..TINY => Some((0.0, 0.0)),
        _ => Some((amax / max, max / amax)),
    }
}
