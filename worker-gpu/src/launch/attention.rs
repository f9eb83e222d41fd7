//! Paged causal grouped-query attention.
//!
//! A query's context is cut at absolute positions into partitions of [`PARTITION`] tokens; each is reduced on its own and
//! they are folded in order of position. Few queries with a long context take one block per partition and fold in a
//! second kernel; many queries fold on the way. Both do the same operations on the same numbers.

use super::{Check, Kernels, LaunchError, RowMeta, entries, optional, queue};
use crate::hip::{DeviceSlice, Function, Launch, Stream};

/// Tokens of a KV block.
const KV_BLOCK: usize = 32;
/// Positions that are reduced together, by as many threads; part of the definition of the result.
pub const PARTITION: usize = 256;
/// Query heads that a block takes at most; they share the keys and values it reads.
const GROUPS: [usize; 4] = [1, 2, 4, 8];
/// Blocks per compute unit below which partitions get blocks of their own.
const BUSY_BLOCKS: usize = 2;

entries!(Entries: "attention" {
    kv_append_f32, kv_append_f16,
    attend_split_f32_1, attend_split_f32_2, attend_split_f32_4, attend_split_f32_8,
    attend_split_f16_1, attend_split_f16_2, attend_split_f16_4, attend_split_f16_8,
    attend_whole_f32_1, attend_whole_f32_2, attend_whole_f32_4, attend_whole_f32_8,
    attend_whole_f16_1, attend_whole_f16_2, attend_whole_f16_4, attend_whole_f16_8,
    attend_fold,
});

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
/// A block holds, per kv head, its keys in pieces of 16 bytes, `[piece][token][16 bytes]`, then its values, `[token][value_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct KvCache {
    element: KvElement,
    kv_heads: usize,
    key_dim: usize,
    value_dim: usize,
    data: DeviceSlice,
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
            check.rule(dim > 0 && dim <= PARTITION && dim.is_multiple_of(8), what, dim, widths)?;
        }
        check.rule(kv_heads > 0, "kv heads", kv_heads, "at least 1")?;
        Ok(Self { element, kv_heads, key_dim, value_dim, data })
    }
}

/// An attention layer.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Query heads, a multiple of the kv heads; head `j` reads kv head `j / (heads / kv_heads)`.
    pub heads: usize,
    /// Factor on `q · k`.
    pub scale: f32,
}

/// The memory of an attention step; one row per token.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBuffers {
    /// Queries, `[rows, heads * key_dim]`, rotated.
    pub q: DeviceSlice,
    /// Keys, `[rows, kv_heads * key_dim]`, rotated.
    pub k: DeviceSlice,
    /// Values, `[rows, kv_heads * value_dim]`.
    pub v: DeviceSlice,
    /// When present, `[rows, heads * value_dim]`: outputs are multiplied by its sigmoid.
    pub gate: Option<DeviceSlice>,
    /// Outputs, `[rows, heads * value_dim]`.
    pub out: DeviceSlice,
    /// One [`RowMeta`] per row.
    pub row_meta: DeviceSlice,
    /// Block numbers (u32) of all sequences; [`RowMeta::table`] says where each starts.
    pub tables: DeviceSlice,
    /// Results of partitions: see [`Attention::scratch_bytes`]. Smaller memory makes steps with few rows slower, no more.
    pub scratch: DeviceSlice,
}

impl Attention {
    /// Bytes of scratch with which steps of `rows` rows, the longest context `partitions` partitions, use the whole device.
    pub fn scratch_bytes(heads: usize, value_dim: usize, rows: usize, partitions: usize) -> usize {
        rows * heads * partitions * (value_dim + 2) * size_of::<f32>()
    }
}

/// Shape of one attention step.
struct Step<'a> {
    check: Check,
    layer: &'a Attention,
    cache: &'a KvCache,
    buffers: &'a AttentionBuffers,
    rows: usize,
    /// Query heads per kv head, how many of them a block takes, and how many blocks that makes.
    group: usize,
    taken: usize,
    blocks: usize,
}

impl Kernels {
    /// Stores the step's keys and values, then attends with its queries. `context` is the largest number of tokens that any
    /// row sees, itself included, or any larger number (a captured graph is captured with the most it will see).
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn attention(
        &self,
        stream: &Stream,
        layer: &Attention,
        cache: &KvCache,
        buffers: &AttentionBuffers,
        rows: usize,
        context: usize,
    ) -> Result<(), LaunchError> {
        let check = Check("attention");
        let group = layer.heads / cache.kv_heads;
        let whole = layer.heads > 0 && layer.heads.is_multiple_of(cache.kv_heads);
        check.rule(whole, "query heads", layer.heads, "a multiple of the kv heads")?;
        if rows == 0 {
            return Ok(());
        }
        let taken = GROUPS.into_iter().find(|taken| *taken >= group).unwrap_or(GROUPS[GROUPS.len() - 1]);
        let step = Step { check, layer, cache, buffers, rows, group, taken, blocks: group.div_ceil(taken) };
        self.kv_append(stream, &step)?;
        let partitions = context.div_ceil(PARTITION).max(1);
        let scratch = Attention::scratch_bytes(layer.heads, cache.value_dim, rows, partitions);
        let busy = rows * cache.kv_heads * step.blocks >= BUSY_BLOCKS * self.compute_units;
        if partitions == 1 || busy || scratch > buffers.scratch.len() {
            self.attend(stream, &step, None)
        } else {
            self.attend(stream, &step, Some(partitions))?;
            self.fold(stream, &step)
        }
    }

    fn kv_append(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, cache, buffers, rows, .. } = *step;
        let args = [
            check.holds::<f32>("keys", buffers.k, rows * cache.kv_heads * cache.key_dim)?,
            check.holds::<f32>("values", buffers.v, rows * cache.kv_heads * cache.value_dim)?,
            check.holds::<RowMeta>("row facts", buffers.row_meta, rows)?,
            buffers.tables.into(),
            cache.data.into(),
            check.number("kv heads", cache.kv_heads)?.into(),
            check.number("key width", cache.key_dim)?.into(),
            check.number("value width", cache.value_dim)?.into(),
        ];
        let function = match cache.element {
            KvElement::F32 => &self.attention.kv_append_f32,
            KvElement::F16 => &self.attention.kv_append_f16,
        };
        let grid = [check.number("rows", rows)?, check.number("kv heads", cache.kv_heads)?, 1];
        queue(stream, function, Launch { grid, block: 64, shared_bytes: 0 }, &args)
    }

    /// With `partitions`, one block each, whose results go to the scratch memory.
    fn attend(&self, stream: &Stream, step: &Step<'_>, partitions: Option<usize>) -> Result<(), LaunchError> {
        let Step { check, layer, cache, buffers, rows, group, taken, blocks } = *step;
        let outputs = rows * layer.heads * cache.value_dim;
        let gate = buffers.gate.map(|gate| check.holds::<f32>("gate", gate, outputs)).transpose()?;
        let args = [
            check.holds::<f32>("queries", buffers.q, rows * layer.heads * cache.key_dim)?,
            cache.data.into(),
            buffers.row_meta.into(),
            buffers.tables.into(),
            optional(gate),
            if partitions.is_some() {
                buffers.scratch.into()
            } else {
                check.holds::<f32>("out", buffers.out, outputs)?
            },
            check.number("query heads", layer.heads)?.into(),
            check.number("kv heads", cache.kv_heads)?.into(),
            check.number("group", group)?.into(),
            check.number("key width", cache.key_dim)?.into(),
            check.number("value width", cache.value_dim)?.into(),
            layer.scale.into(),
        ];
        let grid = [
            check.number("rows", rows)?,
            check.number("kv heads", cache.kv_heads * blocks)?,
            check.number("partitions", partitions.unwrap_or(1))?,
        ];
        let function = self.attention.attend(cache.element, partitions.is_some(), taken);
        queue(stream, function, Launch { grid, block: PARTITION as u32, shared_bytes: 0 }, &args)
    }

    fn fold(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, layer, cache, buffers, rows, .. } = *step;
        let outputs = rows * layer.heads * cache.value_dim;
        let args = [
            buffers.scratch.into(),
            buffers.row_meta.into(),
            optional(buffers.gate.map(Into::into)),
            check.holds::<f32>("out", buffers.out, outputs)?,
            check.number("query heads", layer.heads)?.into(),
            check.number("value width", cache.value_dim)?.into(),
        ];
        let grid = [check.number("rows", rows)?, check.number("query heads", layer.heads)?, 1];
        queue(
            stream,
            &self.attention.attend_fold,
            Launch { grid, block: PARTITION as u32, shared_bytes: 0 },
            &args,
        )
    }
}

impl Entries {
    /// The kernel for an element type, for single partitions or whole contexts, and `taken` heads a block.
    fn attend(&self, element: KvElement, split: bool, taken: usize) -> &Function {
        let by_group = match (element, split) {
            (KvElement::F32, true) => [
                &self.attend_split_f32_1,
                &self.attend_split_f32_2,
                &self.attend_split_f32_4,
                &self.attend_split_f32_8,
            ],
            (KvElement::F16, true) => [
                &self.attend_split_f16_1,
                &self.attend_split_f16_2,
                &self.attend_split_f16_4,
                &self.attend_split_f16_8,
            ],
            (KvElement::F32, false) => [
                &self.attend_whole_f32_1,
                &self.attend_whole_f32_2,
                &self.attend_whole_f32_4,
                &self.attend_whole_f32_8,
            ],
            (KvElement::F16, false) => [
                &self.attend_whole_f16_1,
                &self.attend_whole_f16_2,
                &self.attend_whole_f16_4,
                &self.attend_whole_f16_8,
            ],
        };
        by_group[taken.ilog2() as usize]
    }
}
