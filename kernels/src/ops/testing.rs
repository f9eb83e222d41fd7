//! What the tests of the operations share.

use super::Ops;
use crate::isa::KernelSet;

/// A small deterministic source of values in -1..1.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    #[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32) / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// The operations of the most capable kernel set.
pub(crate) fn fastest() -> Ops {
    Ops::new(KernelSet::detect()).unwrap()
}

/// The operations of every kernel set this CPU has.
pub(crate) fn every_set() -> impl Iterator<Item = Ops> {
    KernelSet::available().into_iter().map(|set| Ops::new(set).unwrap())
}

/// Values as bits: equality that tells -0 from 0 and NaN from NaN.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
