//! Vector quantisation. Comparing absolute values as integers and summing integers is exact in any order, and scaling
//! and rounding are the reference's operations, so the results have the reference's bits.

use super::scalar::{HALF, scale_and_inverse};
use super::{PLANE_BITS, PLANE_WORDS, QuantizedBlock, X_BLOCK, write_panel};
use std::arch::x86_64::*;

const SHIFT: i32 = PLANE_BITS.cast_signed();

/// See [`QuantizePanel`](super::QuantizePanel).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel_avx2<const P: usize>(rows: &[f32], cols: usize, out: &mut [i32]) {
    write_panel(rows, cols, out, |x| block_avx2::<P>(x));
}

/// See [`QuantizePanel`](super::QuantizePanel).
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn panel_avx512<const P: usize>(rows: &[f32], cols: usize, out: &mut [i32]) {
    write_panel(rows, cols, out, |x| block_avx512::<P>(x));
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn block_avx2<const P: usize>(x: &[f32; X_BLOCK]) -> QuantizedBlock<P> {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let mut parts = [_mm256_setzero_ps(); 4];
    let mut largest = _mm256_setzero_si256();
    for (part, x) in parts.iter_mut().zip(x.as_chunks::<8>().0) {
        // SAFETY: eight values.
        *part = unsafe { _mm256_loadu_ps(x.as_ptr()) };
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(*part), magnitude));
    }
    let Some((scale, inverse)) = scale_and_inverse::<P>(largest_lane(largest)) else {
        return QuantizedBlock::UNDEFINED;
    };
    let inverse = _mm256_set1_ps(inverse);
    let mut codes = [_mm256_setzero_si256(); 4];
    for (code, part) in codes.iter_mut().zip(parts) {
        *code = _mm256_cvtps_epi32(_mm256_mul_ps(part, inverse));
    }
    let sums = [sum(_mm256_add_epi32(codes[0], codes[1])), sum(_mm256_add_epi32(codes[2], codes[3]))];
    let mut planes = [[0; PLANE_WORDS]; P];
    for plane in (0..P).rev() {
        let bytes = if plane == 0 { codes } else { codes.each_mut().map(|rest| split_avx2(rest)) };
        // Packing works on each half of a vector; the permutation puts the words in order.
        let bytes = _mm256_packs_epi16(
            _mm256_packs_epi32(bytes[0], bytes[1]),
            _mm256_packs_epi32(bytes[2], bytes[3]),
        );
        planes[plane] = words(_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
    QuantizedBlock { planes, scale, sums }
}

/// Takes the code of the lightest plane off `rest`, which keeps the heavier ones.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn split_avx2(rest: &mut __m256i) -> __m256i {
    let higher = _mm256_srai_epi32::<SHIFT>(_mm256_add_epi32(*rest, _mm256_set1_epi32(HALF)));
    let code = _mm256_sub_epi32(*rest, _mm256_slli_epi32::<SHIFT>(higher));
    *rest = higher;
    code
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn block_avx512<const P: usize>(x: &[f32; X_BLOCK]) -> QuantizedBlock<P> {
    // SAFETY: twice sixteen values.
    let parts = unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] };
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let largest = _mm512_max_epi32(
        _mm512_and_si512(_mm512_castps_si512(parts[0]), magnitude),
        _mm512_and_si512(_mm512_castps_si512(parts[1]), magnitude),
    );
    let largest = _mm256_max_epi32(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64::<1>(largest));
    let Some((scale, inverse)) = scale_and_inverse::<P>(largest_lane(largest)) else {
        return QuantizedBlock::UNDEFINED;
    };
    let inverse = _mm512_set1_ps(inverse);
    let mut codes = parts.map(|part| _mm512_cvtps_epi32(_mm512_mul_ps(part, inverse)));
    let sums =
        codes.map(|v| sum(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64::<1>(v))));
    let mut planes = [[0; PLANE_WORDS]; P];
    for plane in (0..P).rev() {
        let bytes = if plane == 0 { codes } else { codes.each_mut().map(|rest| split_avx512(rest)) };
        planes[plane] =
            words(_mm256_set_m128i(_mm512_cvtsepi32_epi8(bytes[1]), _mm512_cvtsepi32_epi8(bytes[0])));
    }
    QuantizedBlock { planes, scale, sums }
}

/// As [`split_avx2`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn split_avx512(rest: &mut __m512i) -> __m512i {
    let higher = _mm512_srai_epi32::<PLANE_BITS>(_mm512_add_epi32(*rest, _mm512_set1_epi32(HALF)));
    let code = _mm512_sub_epi32(*rest, _mm512_slli_epi32::<PLANE_BITS>(higher));
    *rest = higher;
    code
}

/// The largest of eight integers that are not negative.
#[target_feature(enable = "avx2")]
#[inline]
fn largest_lane(v: __m256i) -> u32 {
    let v = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_max_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
    let v = _mm_max_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v));
    _mm_cvtsi128_si32(v).cast_unsigned()
}

/// The sum of eight integers.
#[target_feature(enable = "avx2")]
#[inline]
fn sum(v: __m256i) -> i32 {
    let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
    let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v));
    _mm_cvtsi128_si32(v)
}

/// The eight words of a vector.
#[target_feature(enable = "avx2")]
#[inline]
fn words(v: __m256i) -> [i32; X_BLOCK / 4] {
    let mut words = [0; X_BLOCK / 4];
    // SAFETY: room for eight words.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), v) };
    words
}

#[cfg(test)]
mod tests {
    use super::super::scalar;
    use super::*;
    use crate::isa::KernelSet;
    use proptest::prelude::*;

    /// Checks the block functions this CPU can run against the scalar one.
    fn agrees(x: &[f32; X_BLOCK]) {
        agrees_in::<1>(x);
        agrees_in::<2>(x);
    }

    fn agrees_in<const P: usize>(x: &[f32; X_BLOCK]) {
        let expected = format!("{:?}", scalar::block::<P>(x));
        if KernelSet::Avx2.is_supported() {
            // SAFETY: just checked.
            assert_eq!(format!("{:?}", unsafe { block_avx2::<P>(x) }), expected);
        }
        if KernelSet::Avx512.is_supported() {
            // SAFETY: just checked.
            assert_eq!(format!("{:?}", unsafe { block_avx512::<P>(x) }), expected);
        }
    }

    /// Two planes say the same as a code with 7 more bits, and neither holds a byte that cannot be negated.
    #[test]
    fn planes_make_up_the_code() {
        let x: [f32; X_BLOCK] = std::array::from_fn(|i| (i as f32 - 15.5) * 1.37);
        let block = scalar::block::<2>(&x);
        let byte =
            |plane: usize, i: usize| i32::from(block.planes[plane][i / 4].to_le_bytes()[i % 4].cast_signed());
        for (i, x) in x.into_iter().enumerate() {
            let (high, low) = (byte(0, i), byte(1, i));
            assert!((-127..=127).contains(&high) && (-64..=63).contains(&low));
            assert_eq!((128 * high + low) as f32, (x * (16256.0 / (15.5 * 1.37))).round_ties_even());
        }
        let sum =
            |half: usize| (half * 16..half * 16 + 16).map(|i| 128 * byte(0, i) + byte(1, i)).sum::<i32>();
        assert_eq!(block.sums, [sum(0), sum(1)]);
    }

    proptest! {
        /// Every block of numbers, of whatever bits, gets the codes, scale and sums of the reference.
        #[test]
        fn vector_quantisation_agrees_with_scalar(bits in prop::array::uniform32(any::<u32>()), shift in 0u32..24) {
            agrees(&bits.map(f32::from_bits));
            // Values of one magnitude, so that all codes are exercised.
            agrees(&bits.map(|bits| (bits.cast_signed() >> shift) as f32));
        }
    }

    /// Ties, zeros of both signs, the smallest and the largest numbers.
    #[test]
    fn edges_agree_with_scalar() {
        let mut ties: [f32; X_BLOCK] = std::array::from_fn(|i| i as f32 - 15.5);
        ties[0] = 127.0;
        for x in [ties, [0.0; X_BLOCK], [-0.0; X_BLOCK], [f32::MIN_POSITIVE; X_BLOCK], [f32::MAX; X_BLOCK]] {
            agrees(&x);
        }
    }
}
