//! Vector kernels, written once over [`Simd`] and compiled for each instruction set.

mod avx2;
mod avx512;
mod kernel;

use super::TileTable;
use crate::pack::TILE_ROWS;

pub(super) use avx2::TILES as AVX2;
pub(super) use avx512::{TILES as AVX512, VNNI_TILES as AVX512_VNNI};

/// Vector operations of one instruction set. A vector has [`Simd::LANES`] lanes of 32 bits, one per row of the tile;
/// an integer vector is also four 8-bit codes per lane.
///
/// # Safety
/// All functions need a CPU with the set's instructions and pointers that are valid for what they read.
trait Simd {
    /// Integers.
    type I: Copy;
    /// f32 values.
    type F: Copy;
    /// Rows a vector covers: a divisor of [`TILE_ROWS`].
    const LANES: usize;
    /// Whether [`Simd::dot4`] wants 8-bit codes as signed numbers, their bias of 128 taken off.
    const SIGNED_BYTES: bool;

    /// 4 · LANES bytes.
    unsafe fn load(p: *const u8) -> Self::I;
    /// Bits of `v` moved right by `shift` (left if negative), and those of `mask` kept in each byte.
    unsafe fn field(v: Self::I, shift: i32, mask: u8) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn xor_bytes(v: Self::I, byte: u8) -> Self::I;
    /// `table[byte]` for bytes below 16.
    unsafe fn lookup(table: &[u8; 16], v: Self::I) -> Self::I;
    /// The word at `p` in all lanes, moved left by `shift`.
    unsafe fn splat_shifted(p: *const i32, shift: u32) -> Self::I;
    /// `(high << SHIFT) + low` in each lane.
    unsafe fn shift_add<const SHIFT: u32>(high: Self::I, low: Self::I) -> Self::I;
    /// All zeros.
    unsafe fn zero() -> Self::I;
    /// LANES signed bytes as integers.
    unsafe fn load_bytes(p: *const u8) -> Self::I;
    /// `v >> shift & 15` in each lane.
    unsafe fn nibble(v: Self::I, shift: u32) -> Self::I;
    /// `acc` plus the products of four lines of `bits`-bit codes with the four signed bytes that each of `x[j]` points
    /// to. Exact.
    unsafe fn dot4(acc: Self::I, codes: [Self::I; 4], x: [*const i32; 4], bits: usize) -> Self::I;

    unsafe fn to_f32(v: Self::I) -> Self::F;
    /// LANES f32, f16, bf16 values.
    unsafe fn load_f32(p: *const u8) -> Self::F;
    unsafe fn load_f16(p: *const u8) -> Self::F;
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    unsafe fn splat_f32(p: *const i32) -> Self::F;
    unsafe fn zero_f32() -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
}
