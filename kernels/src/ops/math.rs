//! Elementary functions on [`Lanes`], with error bounds that the tests check over the whole range of f32.
//!
//! | function | largest error |
//! |---|---|
//! | [`exp`] | 1 ulp; exact 0 at and below -104, infinity above 88.73 |
//! | [`sigmoid`] | 2.5 ulp |
//! | [`silu`] | 3 ulp, or 2^-142 where the result is that small; NaN at -infinity |
//! | [`softplus`] | 2.5 ulp |
//!
//! NaN in, NaN out. A lane's result does not depend on its position or its neighbours.

use crate::lanes::Lanes;

/// Polynomial coefficients of `(exp(r) - 1 - r) / r^2` on `|r| <= ln 2 / 2`, lowest power first: least largest relative
/// error of `exp`, 3.1e-9, fitted by us.
const EXP: [f32; 5] = [0.499_999_94, 0.166_665_2, 0.041_668_396, 0.008_368_785, 0.001_381_445_6];

/// Polynomial coefficients of `(atanh(s) / s - 1) / s^2` in `s^2 <= 1/9`, lowest power first; relative error of `atanh`
/// below 1.1e-10, fitted by us.
const ATANH: [f32; 5] = [0.333_333_34, 0.199_994_44, 0.143_083_05, 0.107_152_8, 0.121_451_47];

/// `ln 2` in two parts; the first has trailing zeros, so that a multiple of it up to 2^8 is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// Horner's scheme, lowest power first.
#[inline(always)]
fn polynomial<V: Lanes>(x: V, coefficients: &[f32; 5]) -> V {
    // No loop and no closure: vectors must not pass through functions that lack the instruction set.
    let [c0, c1, c2, c3, c4] = *coefficients;
    let sum = V::splat(c4).mul_add(x, V::splat(c3)).mul_add(x, V::splat(c2));
    sum.mul_add(x, V::splat(c1)).mul_add(x, V::splat(c0))
}

/// `e^x`.
#[inline(always)]
pub(crate) fn exp<V: Lanes>(x: V) -> V {
    // The operand order lets NaN through. Beyond the limits the result is 0 or infinity anyway.
    let x = V::splat(-104.0).max(V::splat(89.0).min(x));
    let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
    let r = n.mul_add(V::splat(-LN2_HIGH), x);
    let r = n.mul_add(V::splat(-LN2_LOW), r);
    let p = polynomial(r, &EXP).mul_add(r.mul(r), r).add(V::splat(1.0));
    // 2^n in two factors: n reaches -150, where the result is subnormal, and 128.
    let half = n.mul(V::splat(0.5)).round();
    p.mul(half.exp2_int()).mul(n.sub(half).exp2_int())
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<V: Lanes>(x: V) -> V {
    let e = exp(V::splat(0.0).sub(x.abs()));
    let one = V::splat(1.0);
    x.if_negative(e, one).div(one.add(e))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu<V: Lanes>(x: V) -> V {
    x.mul(sigmoid(x))
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub(crate) fn softplus<V: Lanes>(x: V) -> V {
    // ln(1 + e^x) = max(x, 0) + ln(1 + y) with y = e^-|x|, and ln(1 + y) = 2 atanh(y / (2 + y)).
    let y = exp(V::splat(0.0).sub(x.abs()));
    let s = y.div(V::splat(2.0).add(y));
    let z = s.mul(s);
    let atanh = polynomial(z, &ATANH).mul(z).mul_add(s, s);
    atanh.add(atanh).add(V::splat(0.0).max(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{LANES, Plain};

    /// Distance in units of the last place of `want`; subnormals count in units of the smallest subnormal.
    fn ulps(got: f32, want: f64) -> f64 {
        #[expect(clippy::cast_possible_truncation, reason = "the nearest f32 is what we want")]
        let nearest = want as f32;
        if got.is_infinite() || nearest.is_infinite() || got.is_nan() || want.is_nan() {
            return if got == nearest || (got.is_nan() && want.is_nan()) { 0.0 } else { f64::INFINITY };
        }
        let exponent = (nearest.abs().to_bits() >> 23).max(1).cast_signed();
        let unit = 2f64.powi(exponent - 127 - 23);
        (f64::from(got) - want).abs() / unit
    }

    /// Largest error of `f`, not counting errors of at most `negligible`, over every 997th f32, both signs, and the neighbourhood of the interesting points.
    fn worst(f: impl Fn(Plain) -> Plain, exact: impl Fn(f64) -> f64, negligible: f64) -> f64 {
        let all = (0..=u32::MAX).step_by(997).map(f32::from_bits);
        let near =
            [0.0f32, 1.0, -87.33, -88.0, -103.97, 88.72, 20.0, -20.0, f32::INFINITY, f32::NEG_INFINITY];
        let near = near.into_iter().flat_map(|x| {
            (0..200u32).map(move |i| f32::from_bits(x.to_bits().wrapping_add(i).wrapping_sub(100)))
        });
        let mut inputs: Vec<f32> = all.chain(near).collect();
        inputs.resize(inputs.len().next_multiple_of(LANES), 0.0);
        let mut worst = 0f64;
        for chunk in inputs.chunks_exact(LANES) {
            let mut out = [0f32; LANES];
            // SAFETY: the chunk and the array hold LANES values; `Plain` runs everywhere.
            unsafe { f(Plain::load(chunk.as_ptr())).store(out.as_mut_ptr()) };
            for (&x, &y) in chunk.iter().zip(&out) {
                let want = exact(f64::from(x));
                let error = ulps(y, want);
                assert!(error.is_finite(), "f({x:e}) = {y:e}");
                let is_negligible = (f64::from(y) - want).abs() <= negligible;
                worst = if is_negligible { worst } else { worst.max(error) };
            }
        }
        worst
    }

    /// The table at the top of this file holds. (The other instruction sets are tested to give the same bits.)
    #[test]
    fn errors_are_within_the_stated_bounds() {
        let sigmoid_exact =
            |x: f64| if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) };
        let silu_exact = |x: f64| if x == f64::NEG_INFINITY { f64::NAN } else { x * sigmoid_exact(x) };
        // `f64::max` would hide a NaN.
        let softplus_exact = |x: f64| if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() };
        let bounds = [
            ("exp", worst(exp, f64::exp, 0.0), 1.0),
            ("sigmoid", worst(sigmoid, sigmoid_exact, 0.0), 2.5),
            ("silu", worst(silu, silu_exact, 2f64.powi(-142)), 3.0),
            ("softplus", worst(softplus, softplus_exact, 0.0), 2.5),
        ];
        for (name, error, bound) in bounds {
            assert!(error <= bound, "{name}: {error} ulp, stated {bound}");
        }
    }

    /// What the attention relies on: a masked score contributes exactly nothing.
    #[test]
    fn exp_of_minus_infinity_is_zero() {
        assert_eq!(exp(Plain::splat(f32::NEG_INFINITY)).sum(), 0.0);
        assert_eq!(exp(Plain::splat(0.0)).sum(), 16.0);
    }
}
