//! The buffers of a step: allocated once for the largest step, shared by all layers of the band.
//!
//! A layer's scratch lives for that layer only, so buffer `i` of every layer is the same memory, as wide as the widest.

use spillway_model::program::{Buf, Layer, RESIDUAL};

#[derive(Debug)]
pub(super) struct Buffers {
    /// By [`Buf`] number, each as long as the largest step needs; the residual is number 0.
    storage: Vec<Vec<f32>>,
}

impl Buffers {
    /// Buffers for steps of up to `tokens` tokens through any of `layers`.
    pub(super) fn new(layers: &[Layer], d_model: usize, tokens: usize) -> Self {
        let count = layers.iter().map(|layer| layer.buffers.len()).max().unwrap_or(1).max(1);
        let width = |buf: usize| layers.iter().filter_map(|layer| layer.buffers.get(buf)).copied().max();
        let mut storage: Vec<_> = (0..count).map(|buf| vec![0.0; width(buf).unwrap_or(0) * tokens]).collect();
        storage[usize::from(RESIDUAL.0)].resize(d_model * tokens, 0.0);
        Self { storage }
    }

    /// Private bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.storage.iter().map(|buffer| size_of_val(buffer.as_slice())).sum()
    }

    /// The first `len` values of a buffer; none while it is taken.
    pub(super) fn get(&self, buf: Buf, len: usize) -> &[f32] {
        self.storage[usize::from(buf.0)].get(..len).unwrap_or(&[])
    }

    /// The first `len` values of a buffer, to write.
    pub(super) fn get_mut(&mut self, buf: Buf, len: usize) -> &mut [f32] {
        &mut self.storage[usize::from(buf.0)][..len]
    }

    /// Takes a buffer out, so that it can be written while others are read. Goes back with [`Buffers::put`].
    pub(super) fn take(&mut self, buf: Buf) -> Vec<f32> {
        std::mem::take(&mut self.storage[usize::from(buf.0)])
    }

    /// Puts a taken buffer back.
    pub(super) fn put(&mut self, buf: Buf, taken: Vec<f32>) {
        self.storage[usize::from(buf.0)] = taken;
    }

    /// Lends a buffer to be written while the others are read. A source that is also the target is empty meanwhile, which
    /// the operation refuses as a wrong shape.
    pub(super) fn write<R>(&mut self, buf: Buf, with: impl FnOnce(&mut Self, &mut [f32]) -> R) -> R {
        let mut taken = self.take(buf);
        let result = with(self, &mut taken);
        self.put(buf, taken);
        result
    }
}
