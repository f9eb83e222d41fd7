//! AVX2 with FMA and F16C.

use super::{Simd, TILE_ROWS, TileTable, kernel};
use std::arch::x86_64::*;

/// 8 lanes.
struct Avx2;

/// See [`TileKernel`](crate::matmul::TileKernel).
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const FORMAT: usize, const P: usize>(
    tile: &[u8],
    panel: &[i32],
    out: &mut [[f32; TILE_ROWS]],
) {
    // SAFETY: the caller's promise, and the features of this function.
    unsafe { kernel::tile::<Avx2, FORMAT, P>(tile, panel, out) }
}

/// Kernels for AVX2.
pub(in super::super) static TILES: TileTable = tile_table!(tile);

#[inline(always)]
fn count(shift: u32) -> __m128i {
    // SAFETY: SSE2 is part of every x86-64 CPU.
    unsafe { _mm_cvtsi32_si128(shift.cast_signed()) }
}

/// Adds pairs of 16-bit numbers to `acc`.
#[inline(always)]
unsafe fn widen(acc: __m256i, pairs: __m256i) -> __m256i {
    // SAFETY: the caller has the instructions.
    unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))) }
}

/// Four lines: pairs of products in 16 bits, added there as long as they fit.
#[inline(always)]
unsafe fn dot4_pairs(acc: __m256i, codes: [__m256i; 4], x: [*const i32; 4], bits: usize) -> __m256i {
    // SAFETY: the caller has the instructions, and words to point to.
    unsafe {
        let mut p = [_mm256_setzero_si256(); 4];
        for (j, p) in p.iter_mut().enumerate() {
            let x = _mm256_set1_epi32(*x[j]);
            *p = if bits == 8 {
                // Sign trick: |code| · (x with the code's sign); 128 · 127 · 2 fits.
                _mm256_maddubs_epi16(_mm256_abs_epi8(codes[j]), _mm256_sign_epi8(x, codes[j]))
            } else {
                _mm256_maddubs_epi16(codes[j], x)
            };
        }
        let [a, b, c, d] = p;
        match bits {
            // 31 · 127 · 2 · 4 fits in 16 bits,
            ..=5 => widen(acc, _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d))),
            // 63 · 127 · 2 · 2 does,
            6 => widen(widen(acc, _mm256_add_epi16(a, b)), _mm256_add_epi16(c, d)),
            // and of larger ones only one pair.
            _ => widen(widen(widen(widen(acc, a), b), c), d),
        }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the trait's contract: the caller has the instructions and valid pointers"
)]
impl Simd for Avx2 {
    type I = __m256i;
    type F = __m256;
    const LANES: usize = 8;
    const SIGNED_BYTES: bool = true;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn field(v: __m256i, shift: i32, mask: u8) -> __m256i {
        unsafe {
            let distance = count(shift.unsigned_abs());
            let moved = match shift {
                0 => v,
                1.. => _mm256_srl_epi16(v, distance),
                _ => _mm256_sll_epi16(v, distance),
            };
            _mm256_and_si256(moved, _mm256_set1_epi8(mask.cast_signed()))
        }
    }
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn xor_bytes(v: __m256i, byte: u8) -> __m256i {
        unsafe { _mm256_xor_si256(v, _mm256_set1_epi8(byte.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], v: __m256i) -> __m256i {
        unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), v) }
    }
    #[inline(always)]
    unsafe fn splat_shifted(p: *const i32, shift: u32) -> __m256i {
        unsafe { _mm256_sll_epi32(_mm256_set1_epi32(*p), count(shift)) }
    }
    #[inline(always)]
    unsafe fn shift_add<const SHIFT: u32>(high: __m256i, low: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(_mm256_sll_epi32(high, count(SHIFT)), low) }
    }
    #[inline(always)]
    unsafe fn zero() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m256i {
        unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())) }
    }
    #[inline(always)]
    unsafe fn nibble(v: __m256i, shift: u32) -> __m256i {
        unsafe { _mm256_and_si256(_mm256_srl_epi32(v, count(shift)), _mm256_set1_epi32(15)) }
    }
    #[inline(always)]
    unsafe fn dot4(acc: __m256i, codes: [__m256i; 4], x: [*const i32; 4], bits: usize) -> __m256i {
        unsafe { dot4_pairs(acc, codes, x, bits) }
    }

    #[inline(always)]
    unsafe fn to_f32(v: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> __m256 {
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m256 {
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn splat_f32(p: *const i32) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_set1_epi32(*p)) }
    }
    #[inline(always)]
    unsafe fn zero_f32() -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(p, v) }
    }
}
