//! Keys and values of one layer, in numbered blocks.

use super::BLOCK;
use super::kernel::{BlockMut, Element};
use crate::lanes::LANES;
use crate::ops::OpsError;
use crate::ops::memory::{Lazy, SharedPart};
use half::f16;

/// Element type of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvElement {
    /// 4 bytes; exact.
    F32,
    /// 2 bytes, rounded to nearest even when stored.
    F16,
}

/// Sizes of a layer's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvDims {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
}

impl KvDims {
    /// Width of a stored value: whole vectors.
    pub(super) fn value_stride(self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Elements of one kv head in one block.
    pub(super) fn head_len(self) -> usize {
        BLOCK * (self.key_dim + self.value_stride())
    }

    /// Elements of one block.
    pub fn block_len(self) -> usize {
        self.kv_heads * self.head_len()
    }

    /// Where an element of the key of a token of a block is, in elements from the block's first.
    pub fn key_at(self, kv_head: usize, dim: usize, token: usize) -> usize {
        kv_head * self.head_len() + dim * BLOCK + token
    }

    /// The same of its value.
    pub fn value_at(self, kv_head: usize, dim: usize, token: usize) -> usize {
        kv_head * self.head_len() + BLOCK * self.key_dim + token * self.value_stride() + dim
    }
}

/// The KV cache of one layer: `blocks` blocks of [`BLOCK`] tokens. Memory of a block is taken when it is first written.
///
/// A block holds, per kv head, its keys transposed, `[key_dim][BLOCK]`, so that scores of 16 tokens are computed side
/// by side, and then its values token by token, `[BLOCK][value_dim]`: one query reads both from front to back.
#[derive(Debug)]
pub struct KvCache {
    dims: KvDims,
    blocks: usize,
    pub(super) store: Store,
}

/// The elements.
#[derive(Debug)]
pub(super) enum Store {
    F32(Lazy<f32>),
    F16(Lazy<f16>),
}

impl KvCache {
    /// A cache of `blocks` blocks.
    ///
    /// # Errors
    /// [`OpsError::Unsupported`] for a dimension of zero, [`OpsError::Memory`] when the address space is refused.
    pub fn new(dims: KvDims, blocks: usize, element: KvElement) -> Result<Self, OpsError> {
        Self::make(dims, blocks, element, None)
    }

    /// A cache in memory that another process reaches, too: block after block, [`KvCache::bytes_for`] bytes.
    ///
    /// # Errors
    /// As for [`KvCache::new`]; [`OpsError::Shape`] when the memory is too small or not aligned.
    pub fn shared(
        dims: KvDims,
        blocks: usize,
        element: KvElement,
        memory: SharedPart,
    ) -> Result<Self, OpsError> {
        Self::make(dims, blocks, element, Some(memory))
    }

    fn make(
        dims: KvDims,
        blocks: usize,
        element: KvElement,
        memory: Option<SharedPart>,
    ) -> Result<Self, OpsError> {
        for (what, got) in
            [("kv heads", dims.kv_heads), ("key width", dims.key_dim), ("value width", dims.value_dim)]
        {
            if got == 0 {
                return Err(OpsError::Unsupported { what, got, rule: "at least 1" });
            }
        }
        let len = blocks.saturating_mul(dims.block_len());
        let store = match element {
            KvElement::F32 => Store::F32(Lazy::new("the KV cache", len, memory)?),
            KvElement::F16 => Store::F16(Lazy::new("the KV cache", len, memory)?),
        };
        Ok(Self { dims, blocks, store })
    }

    /// Bytes that a cache of this shape has when every block was written.
    pub fn bytes_for(dims: KvDims, blocks: usize, element: KvElement) -> usize {
        let size = match element {
            KvElement::F32 => size_of::<f32>(),
            KvElement::F16 => size_of::<f16>(),
        };
        blocks.saturating_mul(dims.block_len()).saturating_mul(size)
    }

    /// Sizes of keys and values.
    pub fn dims(&self) -> KvDims {
        self.dims
    }

    /// Blocks of the cache.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Where the keys of `kv_head` start in `block`.
    pub(super) fn offset(dims: KvDims, block: u32, kv_head: usize) -> usize {
        block as usize * dims.block_len() + kv_head * dims.head_len()
    }
}

/// The cache's elements, to be written by several threads at different token slots.
pub(super) struct Writer<E> {
    start: *mut E,
    dims: KvDims,
}

// SAFETY: the pointer is only used through `block`, whose callers write different token slots.
unsafe impl<E: Send> Sync for Writer<E> {}

impl<E: Element> Writer<E> {
    pub(super) fn new(store: &mut [E], dims: KvDims) -> Self {
        Self { start: store.as_mut_ptr(), dims }
    }

    /// `kv_head` of `block`, to be written from token slot `first` on.
    ///
    /// # Safety
    /// The block exists and the borrow that the writer was made from is still alive.
    pub(super) unsafe fn block(&self, block: u32, kv_head: usize, first: usize) -> BlockMut<E> {
        let dims = self.dims;
        // SAFETY: the block is inside the cache by contract; its values follow its keys.
        unsafe {
            let k = self.start.add(KvCache::offset(dims, block, kv_head));
            let v = k.add(dims.key_dim * BLOCK);
            let (key_dim, value_dim, value_stride) = (dims.key_dim, dims.value_dim, dims.value_stride());
            BlockMut { k, v, first, key_dim, value_dim, value_stride }
        }
    }
}
