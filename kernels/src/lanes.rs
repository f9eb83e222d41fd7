//! Sixteen f32 values at once, the same arithmetic on every instruction set.
//!
//! Kernels are written once, generic over [`Lanes`], and compiled once per instruction set inside a
//! `#[target_feature]` function (see `ops::table`). Every operation is either exact or correctly rounded IEEE
//! arithmetic per lane, and [`Lanes::sum`] adds in one fixed order, so a kernel gives **the same bits** with every
//! implementation: [`Plain`] is the reference, and the others are tested for equality with it.

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

use half::f16;

/// Lanes of a vector, whatever the instruction set.
pub(crate) const LANES: usize = 16;

/// A vector of [`LANES`] f32 values.
///
/// # Safety
/// Methods of an implementation may execute instructions that the CPU lacks: generic code over `Lanes` must only run
/// where the implementation's instruction set was detected. Implementations must compute exactly what [`Plain`] does.
pub(crate) unsafe trait Lanes: Copy {
    /// Vectors that fit the register file comfortably, a bound for the size of register tiles.
    const REGISTERS: usize;

    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// # Safety
    /// `p` is valid for reading 16 values; no alignment needed.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// `p` is valid for writing 16 values; no alignment needed.
    unsafe fn store(self, p: *mut f32);
    /// Widens 16 half-precision values.
    ///
    /// # Safety
    /// `p` is valid for reading 16 values; no alignment needed.
    unsafe fn load_f16(p: *const f16) -> Self;
    /// Rounds to half precision, ties to even.
    ///
    /// # Safety
    /// `p` is valid for writing 16 values; no alignment needed.
    unsafe fn store_f16(self, p: *mut f16);
    /// `self + b`.
    fn add(self, b: Self) -> Self;
    /// `self - b`.
    fn sub(self, b: Self) -> Self;
    /// `self * b`.
    fn mul(self, b: Self) -> Self;
    /// `self / b`.
    fn div(self, b: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `if self > b { self } else { b }`: `b` when either is NaN.
    fn max(self, b: Self) -> Self;
    /// `if self < b { self } else { b }`: `b` when either is NaN.
    fn min(self, b: Self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
    /// Nearest integer, ties to even.
    fn round(self) -> Self;
    /// `2^self` for integral lanes in `-126..=127`.
    fn exp2_int(self) -> Self;
    /// Per lane: `if self < 0 { a } else { b }`.
    fn if_negative(self, a: Self, b: Self) -> Self;
    /// Sum of all lanes: halves folded onto each other, 8 + 8, 4 + 4, 2 + 2, 1 + 1.
    fn sum(self) -> f32;
    /// Largest lane (NaN lanes have no defined effect).
    fn max_lane(self) -> f32;
}

/// The first `len` values at `p`, other lanes 0.
///
/// # Safety
/// `p` is valid for reading `len` values; `len <= LANES`.
#[inline(always)]
pub(crate) unsafe fn load_first<V: Lanes>(p: *const f32, len: usize) -> V {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: the source is readable by contract, the target holds LANES values and is then loaded whole.
    unsafe {
        std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), len);
        V::load(lanes.as_ptr())
    }
}

/// Writes the first `len` lanes to `p`.
///
/// # Safety
/// `p` is valid for writing `len` values; `len <= LANES`.
#[inline(always)]
pub(crate) unsafe fn store_first<V: Lanes>(v: V, p: *mut f32, len: usize) {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: `lanes` holds LANES values; the target is writable by contract.
    unsafe {
        v.store(lanes.as_mut_ptr());
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, len);
    }
}

/// The reference implementation: an array and plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

// SAFETY: portable code; it defines the arithmetic.
unsafe impl Lanes for Plain {
    const REGISTERS: usize = 4;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: 16 readable values by contract.
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: 16 writable values by contract.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: 16 readable values by contract.
        let halves = unsafe { p.cast::<[f16; LANES]>().read_unaligned() };
        Self(halves.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: 16 writable values by contract.
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(self.0.map(f16::from_f32)) }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "lanes are integral and in -126..=127 by contract")]
    fn exp2_int(self) -> Self {
        Self(self.0.map(|n| f32::from_bits((n as i32).wrapping_add(127).cast_unsigned() << 23)))
    }
    #[inline(always)]
    fn if_negative(self, a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] < 0.0 { a.0[i] } else { b.0[i] }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
}
