//! AVX-512, with and without the 8-bit dot product instruction.

use super::{Simd, TILE_ROWS, TileTable, kernel};
use std::arch::x86_64::*;

/// 16 lanes. `VNNI`: the CPU has the dot product instruction.
struct Avx512<const VNNI: bool>;

macro_rules! tiles {
    ($(#[$doc:meta])* $name:ident, $kernel:ident, $vnni:literal, $features:literal) => {
        /// See [`TileKernel`](crate::matmul::TileKernel).
        #[target_feature(enable = $features)]
        unsafe fn $kernel<const FORMAT: usize, const P: usize>(
            tile: &[u8],
            panel: &[i32],
            out: &mut [[f32; TILE_ROWS]],
        ) {
            // SAFETY: the caller's promise, and the features of this function.
            unsafe { kernel::tile::<Avx512<$vnni>, FORMAT, P>(tile, panel, out) }
        }

        $(#[$doc])*
        pub(in super::super) static $name: TileTable = tile_table!($kernel);
    };
}

tiles!(
    /// Kernels for AVX-512 F, BW, VL, DQ.
    TILES, tile, false, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"
);
tiles!(
    /// Kernels for the same and VNNI.
    VNNI_TILES, tile_vnni, true, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
);

#[inline(always)]
fn count(shift: u32) -> __m128i {
    // SAFETY: SSE2 is part of every x86-64 CPU.
    unsafe { _mm_cvtsi32_si128(shift.cast_signed()) }
}

/// Adds pairs of 16-bit numbers to `acc`.
#[inline(always)]
unsafe fn widen(acc: __m512i, pairs: __m512i) -> __m512i {
    // SAFETY: the caller has the instructions.
    unsafe { _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))) }
}

/// Four lines without the dot product instruction: pairs of products in 16 bits, added there as long as they fit.
#[inline(always)]
unsafe fn dot4_pairs(acc: __m512i, codes: [__m512i; 4], x: [*const i32; 4], bits: usize) -> __m512i {
    // SAFETY: the caller has the instructions, and words to point to.
    unsafe {
        let mut p = [_mm512_setzero_si512(); 4];
        for (j, p) in p.iter_mut().enumerate() {
            let x = _mm512_set1_epi32(*x[j]);
            *p = if bits == 8 {
                // Sign trick: |code| · (x with the code's sign); 128 · 127 · 2 fits.
                let negative = _mm512_movepi8_mask(codes[j]);
                let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
                _mm512_maddubs_epi16(_mm512_abs_epi8(codes[j]), x)
            } else {
                _mm512_maddubs_epi16(codes[j], x)
            };
        }
        let [a, b, c, d] = p;
        match bits {
            // 31 · 127 · 2 · 4 fits in 16 bits,
            ..=5 => widen(acc, _mm512_add_epi16(_mm512_add_epi16(a, b), _mm512_add_epi16(c, d))),
            // 63 · 127 · 2 · 2 does,
            6 => widen(widen(acc, _mm512_add_epi16(a, b)), _mm512_add_epi16(c, d)),
            // and of larger ones only one pair.
            _ => widen(widen(widen(widen(acc, a), b), c), d),
        }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the trait's contract: the caller has the instructions and valid pointers"
)]
impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type I = __m512i;
    type F = __m512;
    const LANES: usize = 16;
    const SIGNED_BYTES: bool = !VNNI;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn field(v: __m512i, shift: i32, mask: u8) -> __m512i {
        unsafe {
            let distance = count(shift.unsigned_abs());
            let moved = match shift {
                0 => v,
                1.. => _mm512_srl_epi16(v, distance),
                _ => _mm512_sll_epi16(v, distance),
            };
            _mm512_and_si512(moved, _mm512_set1_epi8(mask.cast_signed()))
        }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn xor_bytes(v: __m512i, byte: u8) -> __m512i {
        unsafe { _mm512_xor_si512(v, _mm512_set1_epi8(byte.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u8; 16], v: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v) }
    }
    #[inline(always)]
    unsafe fn splat_shifted(p: *const i32, shift: u32) -> __m512i {
        unsafe { _mm512_sll_epi32(_mm512_set1_epi32(*p), count(shift)) }
    }
    #[inline(always)]
    unsafe fn shift_add<const SHIFT: u32>(high: __m512i, low: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(_mm512_slli_epi32::<SHIFT>(high), low) }
    }
    #[inline(always)]
    unsafe fn zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m512i {
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn nibble(v: __m512i, shift: u32) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srl_epi32(v, count(shift)), _mm512_set1_epi32(15)) }
    }
    #[inline(always)]
    unsafe fn dot4(acc: __m512i, codes: [__m512i; 4], x: [*const i32; 4], bits: usize) -> __m512i {
        unsafe {
            if VNNI {
                let mut acc = acc;
                for (codes, x) in codes.into_iter().zip(x) {
                    acc = _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(*x));
                }
                acc
            } else {
                dot4_pairs(acc, codes, x, bits)
            }
        }
    }

    #[inline(always)]
    unsafe fn to_f32(v: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> __m512 {
        unsafe { _mm512_loadu_ps(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn splat_f32(p: *const i32) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_set1_epi32(*p)) }
    }
    #[inline(always)]
    unsafe fn zero_f32() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
}
