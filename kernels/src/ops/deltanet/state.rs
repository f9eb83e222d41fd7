//! Recurrent state of one DeltaNet layer, in numbered slots.

use super::DeltaNetDims;
use super::kernel::TILE_COLUMNS;
use crate::lanes::LANES;
use crate::ops::OpsError;
use crate::ops::memory::{Lazy, SharedPart};

/// The state of one layer for `slots` sequences: per slot the last inputs of the convolution and one matrix per value
/// head. A slot's memory is taken when it is first used.
#[derive(Debug)]
pub struct RecurrentState {
    dims: DeltaNetDims,
    slots: usize,
    /// `[slot][taps - 1][channels]`, oldest input first.
    pub(super) conv: Lazy<f32>,
    /// `[slot][head][tile][key][column]`: a tile is some value columns for all keys.
    pub(super) matrix: Lazy<f32>,
}

impl RecurrentState {
    /// All slots zero.
    ///
    /// # Errors
    /// [`OpsError::Unsupported`] for dimensions that the kernels cannot handle, [`OpsError::Memory`] when the address
    /// space is refused.
    pub fn new(dims: DeltaNetDims, slots: usize) -> Result<Self, OpsError> {
        Self::make(dims, slots, [None, None])
    }

    /// States in memory that another process reaches, too: convolutions' inputs and matrices, slot after slot, f32.
    ///
    /// # Errors
    /// As for [`RecurrentState::new`]; [`OpsError::Shape`] when the memory is too small or not aligned.
    pub fn shared(
        dims: DeltaNetDims,
        slots: usize,
        conv: SharedPart,
        matrix: SharedPart,
    ) -> Result<Self, OpsError> {
        Self::make(dims, slots, [Some(conv), Some(matrix)])
    }

    fn make(dims: DeltaNetDims, slots: usize, memory: [Option<SharedPart>; 2]) -> Result<Self, OpsError> {
        dims.validate()?;
        let [conv, matrix] = memory;
        Ok(Self {
            dims,
            slots,
            conv: Lazy::new("convolution states", slots.saturating_mul(dims.conv_len()), conv)?,
            matrix: Lazy::new("matrix states", slots.saturating_mul(dims.matrix_len()), matrix)?,
        })
    }

    /// Slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The layer's dimensions.
    pub fn dims(&self) -> DeltaNetDims {
        self.dims
    }

    /// Makes a slot's state that of an empty sequence.
    ///
    /// # Errors
    /// [`OpsError::StateSlot`] when there is no such slot.
    pub fn reset(&mut self, slot: usize) -> Result<(), OpsError> {
        self.check(slot)?;
        let (conv, matrix) = (self.dims.conv_len(), self.dims.matrix_len());
        self.conv.values_mut()[slot * conv..(slot + 1) * conv].fill(0.0);
        self.matrix.values_mut()[slot * matrix..(slot + 1) * matrix].fill(0.0);
        Ok(())
    }

    /// A slot's past inputs as `[channel][past]`, oldest first: the order of reference implementations.
    ///
    /// # Errors
    /// [`OpsError::StateSlot`] when there is no such slot.
    pub fn conv_state(&self, slot: usize) -> Result<Vec<f32>, OpsError> {
        self.check(slot)?;
        let (len, channels) = (self.dims.conv_len(), self.dims.channels());
        let state = &self.conv.values()[slot * len..(slot + 1) * len];
        let past = self.dims.conv_kernel - 1;
        Ok((0..len).map(|i| state[(i % past) * channels + i / past]).collect())
    }

    /// A slot's matrix states as `[head][value][key]`: the order of reference implementations.
    ///
    /// # Errors
    /// [`OpsError::StateSlot`] when there is no such slot.
    pub fn matrix_state(&self, slot: usize) -> Result<Vec<f32>, OpsError> {
        self.check(slot)?;
        let (len, dim) = (self.dims.matrix_len(), self.dims.head_dim);
        let state = &self.matrix.values()[slot * len..(slot + 1) * len];
        let mut out = Vec::with_capacity(len);
        for head in 0..self.dims.value_heads {
            for value in 0..dim {
                out.extend((0..dim).map(|key| state[self.dims.matrix_at(head, value, key)]));
            }
        }
        Ok(out)
    }

    /// `Ok` when the slot exists.
    pub(super) fn check(&self, slot: usize) -> Result<(), OpsError> {
        if slot < self.slots { Ok(()) } else { Err(OpsError::StateSlot { slot, slots: self.slots }) }
    }
}

impl DeltaNetDims {
    /// Where an element of a head's matrix is among a slot's [`DeltaNetDims::matrix_len`] values.
    pub fn matrix_at(self, head: usize, value: usize, key: usize) -> usize {
        let (dim, columns) = (self.head_dim, tile_columns(self.head_dim));
        head * dim * dim + value / columns * columns * dim + key * columns + value % columns
    }
}

/// Value columns of a state tile.
fn tile_columns(head_dim: usize) -> usize {
    if head_dim.is_multiple_of(TILE_COLUMNS) { TILE_COLUMNS } else { LANES }
}
