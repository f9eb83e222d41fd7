//! Keys and values of a layer in a device's memory: how blocks are laid out.

use super::{Check, LaunchError};
use crate::hip::{DeviceSlice, HipError};

/// Tokens of a KV block.
const KV_BLOCK: usize = 32;
/// Widest head.
const MAX_DIM: usize = 256;

/// Element type of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvElement {
    /// 4 bytes; exact.
    F32,
    /// 2 bytes, rounded to nearest even when stored.
    F16,
}

impl KvElement {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            KvElement::F32 => 4,
            KvElement::F16 => 2,
        }
    }
}

/// Keys and values of one layer, in numbered blocks of 32 tokens.
///
/// A block holds, per kv head, its keys in pieces of 16 bytes, `[piece][token][16 bytes]`, then its values,
/// `[value_dim][token]`: both as the matrix units read them.
#[derive(Debug, Clone, Copy)]
pub struct KvCache {
    pub(super) element: KvElement,
    pub(super) kv_heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) data: DeviceSlice,
}

impl KvCache {
    /// Bytes of `blocks` blocks.
    pub fn bytes_for(
        element: KvElement,
        kv_heads: usize,
        key_dim: usize,
        value_dim: usize,
        blocks: usize,
    ) -> usize {
        blocks
            .saturating_mul(kv_heads)
            .saturating_mul(KV_BLOCK * (key_dim + value_dim))
            .saturating_mul(element.bytes())
    }

    /// The cache in `data`, as many blocks as it holds. Memory need not be set first.
    ///
    /// # Errors
    /// Head widths that the kernels cannot handle.
    pub fn new(
        element: KvElement,
        kv_heads: usize,
        key_dim: usize,
        value_dim: usize,
        data: DeviceSlice,
    ) -> Result<Self, LaunchError> {
        let check = Check("attention");
        let widths = "a multiple of 8 up to 256";
        for (what, dim) in [("key width", key_dim), ("value width", value_dim)] {
            check.rule(dim > 0 && dim <= MAX_DIM && dim.is_multiple_of(8), what, dim, widths)?;
        }
        check.rule(kv_heads > 0, "kv heads", kv_heads, "at least 1")?;
        Ok(Self { element, kv_heads, key_dim, value_dim, data })
    }

    /// How elements are stored.
    pub fn element(&self) -> KvElement {
        self.element
    }

    /// One block.
    ///
    /// # Errors
    /// There is no such block.
    pub fn block(&self, block: usize) -> Result<DeviceSlice, HipError> {
        let bytes = Self::bytes_for(self.element, self.kv_heads, self.key_dim, self.value_dim, 1);
        self.data.part(block.saturating_mul(bytes), bytes)
    }

    /// Where an element of the key of a token of a block is, in elements from the block's first.
    pub fn key_at(&self, kv_head: usize, dim: usize, token: usize) -> usize {
        let of_piece = 16 / self.element.bytes();
        self.head_at(kv_head) + (dim / of_piece * KV_BLOCK + token) * of_piece + dim % of_piece
    }

    /// The same of its value.
    pub fn value_at(&self, kv_head: usize, dim: usize, token: usize) -> usize {
        self.head_at(kv_head) + KV_BLOCK * self.key_dim + dim * KV_BLOCK + token
    }

    fn head_at(&self, kv_head: usize) -> usize {
        kv_head * KV_BLOCK * (self.key_dim + self.value_dim)
    }

    /// Width of a key.
    pub fn key_dim(&self) -> usize {
        self.key_dim
    }

    /// Width of a value.
    pub fn value_dim(&self) -> usize {
        self.value_dim
    }
}
