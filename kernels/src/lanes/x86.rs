//! [`Lanes`] on AVX2 (two registers) and AVX-512 (one).
//!
//! The intrinsics called here need their instruction set, which the trait's contract guarantees: values of these types
//! exist only below a `#[target_feature]` function that was reached through a table whose owner detected the set.

use super::Lanes;
use half::f16;
use std::arch::x86_64::*;

const ROUND: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
const ROUND_F16: i32 = _MM_FROUND_TO_NEAREST_INT;

/// Adds the lanes of a 256-bit vector, halves onto each other.
#[inline(always)]
fn sum8(v: __m256) -> f32 {
    // SAFETY: AVX is part of both sets (module contract).
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        let one = _mm_add_ss(two, _mm_shuffle_ps::<1>(two, two));
        _mm_cvtss_f32(one)
    }
}

/// Largest lane of a 256-bit vector.
#[inline(always)]
fn max8(v: __m256) -> f32 {
    // SAFETY: AVX is part of both sets (module contract).
    unsafe {
        let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        let one = _mm_max_ss(two, _mm_shuffle_ps::<1>(two, two));
        _mm_cvtss_f32(one)
    }
}

/// Two 256-bit registers: AVX2, FMA, F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

/// Defines a lane-wise operation of [`Avx2`] by the instruction for one half.
macro_rules! halves {
    ($name:ident($($arg:ident),*) = $instruction:ident) => {
        #[inline(always)]
        fn $name(self $(, $arg: Self)*) -> Self {
            // SAFETY: AVX2 and FMA are there (module contract).
            unsafe { Self($instruction(self.0 $(, $arg.0)*), $instruction(self.1 $(, $arg.1)*)) }
        }
    };
}

#[inline(always)]
unsafe fn abs8(v: __m256) -> __m256 {
    // SAFETY: AVX is there (module contract).
    unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), v) }
}

#[inline(always)]
unsafe fn round8(v: __m256) -> __m256 {
    // SAFETY: AVX is there (module contract).
    unsafe { _mm256_round_ps::<ROUND>(v) }
}

#[inline(always)]
unsafe fn exp2_int8(v: __m256) -> __m256 {
    // SAFETY: AVX2 is there (module contract).
    unsafe {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
}

#[inline(always)]
unsafe fn if_negative8(v: __m256, a: __m256, b: __m256) -> __m256 {
    // SAFETY: AVX is there (module contract).
    unsafe { _mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_LT_OQ>(v, _mm256_setzero_ps())) }
}

// SAFETY: per lane the same IEEE operations as `Plain`; requires AVX2, FMA and F16C, per the trait's contract.
unsafe impl Lanes for Avx2 {
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: AVX is there (module contract).
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: 16 readable values by contract.
        unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: 16 writable values by contract.
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: 16 readable values by contract; F16C is there.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: 16 writable values by contract; F16C is there.
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<ROUND_F16>(self.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<ROUND_F16>(self.1));
        }
    }
    halves!(add(b) = _mm256_add_ps);
    halves!(sub(b) = _mm256_sub_ps);
    halves!(mul(b) = _mm256_mul_ps);
    halves!(div(b) = _mm256_div_ps);
    halves!(mul_add(b, c) = _mm256_fmadd_ps);
    halves!(max(b) = _mm256_max_ps);
    halves!(min(b) = _mm256_min_ps);
    halves!(abs() = abs8);
    halves!(round() = round8);
    halves!(exp2_int() = exp2_int8);
    halves!(if_negative(a, b) = if_negative8);
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: AVX is there (module contract).
        sum8(unsafe { _mm256_add_ps(self.0, self.1) })
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        // SAFETY: AVX is there (module contract).
        max8(unsafe { _mm256_max_ps(self.0, self.1) })
    }
}

/// One 512-bit register: AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

/// Defines a lane-wise operation of [`Avx512`] by its instruction.
macro_rules! whole {
    ($name:ident($($arg:ident),*) = $instruction:ident) => {
        #[inline(always)]
        fn $name(self $(, $arg: Self)*) -> Self {
            // SAFETY: AVX-512 is there (module contract).
            unsafe { Self($instruction(self.0 $(, $arg.0)*)) }
        }
    };
}

impl Avx512 {
    #[inline(always)]
    fn split(self) -> (__m256, __m256) {
        // SAFETY: AVX-512 DQ is there (module contract).
        unsafe { (_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0)) }
    }
}

// SAFETY: per lane the same IEEE operations as `Plain`; requires AVX-512 F and DQ, per the trait's contract.
unsafe impl Lanes for Avx512 {
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: AVX-512 is there (module contract).
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: 16 readable values by contract.
        unsafe { Self(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: 16 writable values by contract.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: 16 readable values by contract.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: 16 writable values by contract.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<ROUND_F16>(self.0)) }
    }
    whole!(add(b) = _mm512_add_ps);
    whole!(sub(b) = _mm512_sub_ps);
    whole!(mul(b) = _mm512_mul_ps);
    whole!(div(b) = _mm512_div_ps);
    whole!(mul_add(b, c) = _mm512_fmadd_ps);
    whole!(max(b) = _mm512_max_ps);
    whole!(min(b) = _mm512_min_ps);
    whole!(abs() = _mm512_abs_ps);
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: AVX-512 is there (module contract).
        unsafe { Self(_mm512_roundscale_ps::<ROUND>(self.0)) }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        // SAFETY: AVX-512 is there (module contract).
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    fn if_negative(self, a: Self, b: Self) -> Self {
        // SAFETY: AVX-512 is there (module contract).
        unsafe {
            let negative = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, _mm512_setzero_ps());
            Self(_mm512_mask_blend_ps(negative, b.0, a.0))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let (low, high) = self.split();
        // SAFETY: AVX is there (module contract).
        sum8(unsafe { _mm256_add_ps(low, high) })
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let (low, high) = self.split();
        // SAFETY: AVX is there (module contract).
        max8(unsafe { _mm256_max_ps(low, high) })
    }
}
