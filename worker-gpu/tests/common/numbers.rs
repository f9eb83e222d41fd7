//! Reproducible inputs and distances between floats.

/// A generator of reproducible numbers.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed * 2 + 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    /// Uniform in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn units(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }

    pub fn bytes(&mut self, count: usize) -> Vec<i8> {
        (0..count).map(|_| self.bits() as i8).collect()
    }
}

/// How many floats lie between `got` and the exact value, counted from the exact value's rounding; 0 for two NaNs.
pub fn ulps(got: f32, exact: f64) -> u64 {
    let exact = exact as f32;
    if got.is_nan() || exact.is_nan() {
        return if got.is_nan() && exact.is_nan() { 0 } else { u64::MAX };
    }
    let ordered = |value: f32| {
        let bits = i64::from(value.to_bits() as i32);
        if bits < 0 { i64::from(i32::MIN) - bits } else { bits }
    };
    ordered(got).abs_diff(ordered(exact))
}
