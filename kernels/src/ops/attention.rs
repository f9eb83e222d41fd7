//! Paged causal grouped-query attention.
//!
//! **Fixed structure.** A query's context is cut at absolute positions into partitions of [`PARTITION`] tokens. Each
//! partition is reduced on its own (softmax relative to its own maximum), and partitions are folded in order of
//! position. What a query row computes therefore depends on its position and the cache's contents only: any chunking of
//! a prompt, any batch and any number of threads give the same bits.
//!
//! **Work.** A prompt is cut into tiles of a few tokens by one kv head, which go through their partitions one after the
//! other. When a step has too few tiles to keep the threads busy (decoding), partitions of a tile become work items of
//! their own, and a short second pass folds their results.

mod cache;
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

pub use cache::{KvCache, KvDims, KvElement};

use super::{Ops, OpsError, check};
use crate::disjoint::Disjoint;
use crate::pool::{ChunkQueue, ThreadPool};
use cache::{Store, Writer};
use kernel::{BlockMut, Element, RowPart, RowState, Rows, Tile, TileScratch};

/// Tokens of a block.
pub const BLOCK: usize = 32;
/// Positions that are reduced together; part of the definition of the result.
pub const PARTITION: usize = 256;
/// Query rows a tile aims at: enough to use a block of keys often while it is in the first-level cache.
const TILE_ROWS: usize = 48;
/// Tiles per thread below which partitions become work items of their own.
const ITEMS_PER_THREAD: usize = 4;
/// Most f32 values that results of single partitions may take (32 MiB).
const PARTIALS_MAX: usize = 8 << 20;
/// Tokens times heads below which a single thread stores the keys and values.
const SERIAL_APPEND: usize = 64;

/// Consecutive tokens of one sequence in a step.
#[derive(Debug, Clone, Copy)]
pub struct KvSpan<'a> {
    /// Row of the first token in the step's buffers; the spans of a step come in order of their rows.
    pub first_row: usize,
    /// Tokens.
    pub tokens: usize,
    /// Position of the first token; the cache already holds everything before it.
    pub start: usize,
    /// The sequence's blocks in order of position: block `i` holds positions `i * BLOCK..`.
    pub blocks: &'a [u32],
}

impl KvSpan<'_> {
    fn end(&self) -> usize {
        self.start + self.tokens
    }
}

/// The buffers of an attention step, one row per token of the step.
#[derive(Debug)]
pub struct AttentionRows<'a> {
    /// Queries, `[rows, heads * key_dim]`, rotated.
    pub q: &'a [f32],
    /// Keys, `[rows, kv_heads * key_dim]`, rotated.
    pub k: &'a [f32],
    /// Values, `[rows, kv_heads * value_dim]`.
    pub v: &'a [f32],
    /// When present, `[rows, heads * value_dim]`: outputs are multiplied by its sigmoid.
    pub gate: Option<&'a [f32]>,
    /// Outputs, `[rows, heads * value_dim]`. Rows of no span are left alone.
    pub out: &'a mut [f32],
}

/// Query heads and scale of an attention layer; its other sizes are the cache's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDims {
    /// Query heads, a multiple of the kv heads; head `j` reads kv head `j / (heads / kv_heads)`.
    pub heads: usize,
    /// Factor on `q · k`.
    pub scale: f32,
}

/// Working memory, shared by all layers and steps; grows to the largest step seen.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    tiles: Vec<TileScratch>,
    items: Vec<Item>,
    groups: Vec<Item>,
    partials: Vec<f32>,
    written: Vec<u32>,
}

impl AttentionScratch {
    /// Empty working memory.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Some tokens of a span by one kv head, over all their partitions or over one.
#[derive(Debug, Clone, Copy)]
struct Item {
    span: usize,
    /// First token inside the span.
    token: usize,
    tokens: usize,
    kv_head: usize,
    /// First partition and how many.
    partition: usize,
    partitions: usize,
    /// Where the item's results start in `partials`, when partitions are separate items.
    partial: usize,
}

impl Ops {
    /// Stores the step's keys and values in the cache, then attends with its queries.
    ///
    /// # Errors
    /// [`OpsError`] when buffers, spans and block tables do not fit each other or the cache, and when two spans would
    /// write the same block. Nothing was written then.
    pub fn attention(
        &self,
        pool: &ThreadPool,
        cache: &mut KvCache,
        dims: AttentionDims,
        spans: &[KvSpan<'_>],
        rows: AttentionRows<'_>,
        scratch: &mut AttentionScratch,
    ) -> Result<(), OpsError> {
        validate(cache, dims, spans, &rows, scratch)?;
        let call = Call { ops: self, pool, kv: cache.dims(), dims, spans };
        match &mut cache.store {
            Store::F32(store) => {
                let (append, attend) = (self.table.append_f32, self.table.attend_f32);
                call.append(store.values_mut(), &rows, append);
                call.attend(store.values(), rows, scratch, attend);
            }
            Store::F16(store) => {
                let (append, attend) = (self.table.append_f16, self.table.attend_f16);
                call.append(store.values_mut(), &rows, append);
                call.attend(store.values(), rows, scratch, attend);
            }
        }
        Ok(())
    }
}

/// Checks everything that the kernels rely on.
fn validate(
    cache: &KvCache,
    dims: AttentionDims,
    spans: &[KvSpan<'_>],
    rows: &AttentionRows<'_>,
    scratch: &mut AttentionScratch,
) -> Result<(), OpsError> {
    let kv = cache.dims();
    if dims.heads == 0 || !dims.heads.is_multiple_of(kv.kv_heads) {
        let rule = "a multiple of the kv heads";
        return Err(OpsError::Unsupported { what: "query heads", got: dims.heads, rule });
    }
    let n = rows.q.len() / (dims.heads * kv.key_dim);
    check("queries", rows.q.len(), n * dims.heads * kv.key_dim)?;
    check("keys", rows.k.len(), n * kv.kv_heads * kv.key_dim)?;
    check("values", rows.v.len(), n * kv.kv_heads * kv.value_dim)?;
    check("attention output", rows.out.len(), n * dims.heads * kv.value_dim)?;
    if let Some(gate) = rows.gate {
        check("attention gate", gate.len(), rows.out.len())?;
    }
    let mut next_row = 0;
    scratch.written.clear();
    for span in spans {
        // Spans come in order of their rows, so they cannot overlap.
        if span.first_row < next_row || span.tokens > n.saturating_sub(span.first_row) {
            return Err(OpsError::Shape { what: "span rows", got: span.first_row, want: next_row });
        }
        next_row = span.first_row + span.tokens;
        let want = span.end().div_ceil(BLOCK);
        if span.blocks.len() < want {
            return Err(OpsError::KvTable { end: span.end(), got: span.blocks.len(), want });
        }
        if let Some(&block) = span.blocks[..want].iter().find(|&&block| block as usize >= cache.blocks()) {
            return Err(OpsError::KvBlock { block, blocks: cache.blocks() });
        }
        if span.tokens > 0 {
            scratch.written.extend_from_slice(&span.blocks[span.start / BLOCK..want]);
        }
    }
    scratch.written.sort_unstable();
    match scratch.written.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(OpsError::KvBlockShared { block: pair[0] }),
        None => Ok(()),
    }
}

/// A validated attention step.
struct Call<'a> {
    ops: &'a Ops,
    pool: &'a ThreadPool,
    kv: KvDims,
    dims: AttentionDims,
    spans: &'a [KvSpan<'a>],
}

impl Call<'_> {
    fn group(&self) -> usize {
        self.dims.heads / self.kv.kv_heads
    }

    /// Stores keys and values of all spans.
    fn append<E: Element>(
        &self,
        store: &mut [E],
        rows: &AttentionRows<'_>,
        kernel: unsafe fn(&Rows<'_>, BlockMut<E>),
    ) {
        let writer = Writer::new(store, self.kv);
        let heads = self.kv.kv_heads;
        let store_head = |span: &KvSpan<'_>, kv_head: usize| {
            let mut token = 0;
            while token < span.tokens {
                let position = span.start + token;
                let tokens = (BLOCK - position % BLOCK).min(span.tokens - token);
                let (k_stride, v_stride) = (heads * self.kv.key_dim, heads * self.kv.value_dim);
                let row = span.first_row + token;
                let k = &rows.k[row * k_stride + kv_head * self.kv.key_dim..];
                let v = &rows.v[row * v_stride + kv_head * self.kv.value_dim..];
                // SAFETY: the block exists and no other span writes it (validated); each kv head of a span is stored
                // by one thread, token slots stay inside the block; `ops` proves the instruction set.
                unsafe {
                    let block = writer.block(span.blocks[position / BLOCK], kv_head, position % BLOCK);
                    kernel(&Rows { k, k_stride, v, v_stride, tokens }, block);
                }
                token += tokens;
            }
        };
        let tokens: usize = self.spans.iter().map(|span| span.tokens).sum();
        let n = self.spans.len() * heads;
        let store_all = |range: std::ops::Range<usize>| {
            range.for_each(|i| store_head(&self.spans[i / heads], i % heads));
        };
        if tokens * heads < SERIAL_APPEND {
            return store_all(0..n);
        }
        let queue = ChunkQueue::new(n, 1);
        self.pool.run(&|_| {
            while let Some(range) = queue.take() {
                store_all(range);
            }
        });
    }

    /// Attends with all queries.
    fn attend<E: Element>(
        &self,
        store: &[E],
        rows: AttentionRows<'_>,
        scratch: &mut AttentionScratch,
        kernel: unsafe fn(&Tile<'_, E>, &mut TileScratch),
    ) {
        self.plan(scratch);
        let AttentionScratch { tiles, items, groups, partials, .. } = scratch;
        let row_tile = self.tile_tokens() * self.group();
        tiles.resize_with(self.pool.threads().max(tiles.len()), TileScratch::default);
        tiles.iter_mut().for_each(|tile| tile.reserve(row_tile, self.kv));
        let tiles = Disjoint::new(tiles);
        let shared_out = Disjoint::new(rows.out);
        let shared_partials = Disjoint::new(partials);
        let queue = ChunkQueue::new(items.len(), 1);
        self.pool.run(&|thread| {
            // SAFETY: every thread has its own tile scratch.
            let [tile] = (unsafe { tiles.part(thread, 1) }) else { return };
            while let Some(range) = queue.take() {
                for item in &items[range] {
                    self.run_item(store, item, rows.q, tile, kernel, groups.is_empty(), &shared_partials);
                    if groups.is_empty() {
                        self.write_rows(item, tile, rows.gate, &shared_out);
                    }
                }
            }
        });
        if groups.is_empty() {
            return;
        }
        let queue = ChunkQueue::new(groups.len(), 1);
        self.pool.run(&|thread| {
            // SAFETY: every thread has its own tile scratch.
            let [tile] = (unsafe { tiles.part(thread, 1) }) else { return };
            while let Some(range) = queue.take() {
                for group in &groups[range] {
                    self.fold_partials(group, tile, &shared_partials);
                    self.write_rows(group, tile, rows.gate, &shared_out);
                }
            }
        });
    }

    /// Tokens of a tile.
    fn tile_tokens(&self) -> usize {
        (TILE_ROWS / self.group()).max(1)
    }

    /// Lists the work. `groups` stays empty unless partitions are items of their own; then it lists the tiles.
    fn plan(&self, scratch: &mut AttentionScratch) {
        let AttentionScratch { items, groups, partials, .. } = scratch;
        items.clear();
        groups.clear();
        for (i, span) in self.spans.iter().enumerate() {
            let tile = self.tile_tokens();
            // The last tiles see the most context: first come, first served works best with long items first.
            for token in (0..span.tokens).step_by(tile).rev() {
                let tokens = tile.min(span.tokens - token);
                let partitions = (span.start + token + tokens).div_ceil(PARTITION);
                let item = Item { span: i, token, tokens, kv_head: 0, partition: 0, partitions, partial: 0 };
                items.extend((0..self.kv.kv_heads).map(|kv_head| Item { kv_head, ..item }));
            }
        }
        let partial = |item: &Item| item.tokens * self.group() * self.partial_stride();
        let need: usize = items.iter().map(|item| item.partitions * partial(item)).sum();
        let threads = self.pool.threads();
        let few = threads > 1 && items.len() < ITEMS_PER_THREAD * threads;
        if !few || need > PARTIALS_MAX || items.iter().all(|item| item.partitions < 2) {
            return;
        }
        std::mem::swap(items, groups);
        let mut at = 0;
        for group in groups.iter_mut() {
            group.partial = at;
            for partition in 0..group.partitions {
                items.push(Item { partition, partitions: 1, partial: at, ..*group });
                at += partial(group);
            }
        }
        partials.resize(at.max(partials.len()), 0.0);
    }

    /// Values that one row's result over one partition takes: outputs, maximum, sum.
    fn partial_stride(&self) -> usize {
        self.kv.value_stride() + 2
    }

    /// Computes an item's partitions: folds them into the tile's state, or writes the only one to `partials`.
    #[expect(clippy::too_many_arguments, reason = "the parts of one work item, private")]
    fn run_item<E: Element>(
        &self,
        store: &[E],
        item: &Item,
        q: &[f32],
        tile: &mut TileScratch,
        kernel: unsafe fn(&Tile<'_, E>, &mut TileScratch),
        fold: bool,
        partials: &Disjoint<'_, f32>,
    ) {
        let span = &self.spans[item.span];
        let rows = item.tokens * self.group();
        let start = span.start + item.token;
        self.load_queries(item, q, tile);
        tile.clear(rows, self.kv.value_stride());
        for partition in item.partition..item.partition + item.partitions {
            let from = partition * PARTITION;
            let to = (from + PARTITION).min(start + item.tokens);
            let mut blocks = std::mem::take(&mut tile.blocks);
            blocks.clear();
            let table = &span.blocks[from / BLOCK..to.div_ceil(BLOCK)];
            blocks.extend(table.iter().map(|&block| KvCache::offset(self.kv, block, item.kv_head)));
            let job = Tile {
                cache: store,
                blocks: &blocks,
                key_dim: self.kv.key_dim,
                value_stride: self.kv.value_stride(),
                rows,
                group: self.group(),
                visible: (start + 1).cast_signed() - from.cast_signed(),
            };
            // SAFETY: block numbers were validated, so offsets are those of whole blocks; the scratch was reserved
            // for a tile of this size; the blocks reach to the last token; `ops` proves the instruction set.
            unsafe { kernel(&job, tile) };
            tile.blocks = blocks;
            if fold {
                self.fold_part(rows, tile);
            }
        }
        if !fold {
            // SAFETY: every item has its own part of `partials`.
            let out = unsafe { partials.part(item.partial, rows * self.partial_stride()) };
            let stride = self.kv.value_stride();
            for (row, out) in out.chunks_exact_mut(self.partial_stride()).enumerate() {
                out[..stride].copy_from_slice(&tile.part[row * stride..(row + 1) * stride]);
                out[stride] = tile.part_max[row];
                out[stride + 1] = tile.part_sum[row];
            }
        }
    }

    /// Copies the item's queries to the tile, times scale.
    fn load_queries(&self, item: &Item, q: &[f32], tile: &mut TileScratch) {
        let (dim, group) = (self.kv.key_dim, self.group());
        let first_row = self.spans[item.span].first_row + item.token;
        for (token, to) in tile.q.chunks_exact_mut(group * dim).take(item.tokens).enumerate() {
            let at = (first_row + token) * self.dims.heads * dim + item.kv_head * group * dim;
            for (to, from) in to.iter_mut().zip(&q[at..]) {
                *to = from * self.dims.scale;
            }
        }
    }

    /// Folds the tile's partition results into its state.
    fn fold_part(&self, rows: usize, tile: &mut TileScratch) {
        let stride = self.kv.value_stride();
        for row in 0..rows {
            let acc = &tile.part[row * stride..(row + 1) * stride];
            let part = RowPart { acc, max: tile.part_max[row], sum: tile.part_sum[row] };
            if part.sum == 0.0 {
                // The partition lies after the row's position.
                continue;
            }
            let acc = &mut tile.acc[row * stride..(row + 1) * stride];
            let into = RowState { acc, max: &mut tile.max[row], sum: &mut tile.sum[row] };
            // SAFETY: both are `stride` long, whole vectors; `ops` proves the instruction set.
            unsafe { (self.ops.table.fold)(into, part) };
        }
    }

    /// Folds a tile's partitions, computed as items of their own, in order.
    fn fold_partials(&self, group: &Item, tile: &mut TileScratch, partials: &Disjoint<'_, f32>) {
        let stride = self.kv.value_stride();
        let rows = group.tokens * self.group();
        tile.clear(rows, stride);
        let len = rows * self.partial_stride();
        for partition in 0..group.partitions {
            // SAFETY: the items that wrote are done, and every group reads its own items' parts.
            let results = unsafe { partials.part(group.partial + partition * len, len) };
            for (row, result) in results.chunks_exact(self.partial_stride()).enumerate() {
                tile.part[row * stride..(row + 1) * stride].copy_from_slice(&result[..stride]);
                tile.part_max[row] = result[stride];
                tile.part_sum[row] = result[stride + 1];
            }
            self.fold_part(rows, tile);
        }
    }

    /// Writes the outputs of an item whose state is complete.
    fn write_rows(&self, item: &Item, tile: &mut TileScratch, gate: Option<&[f32]>, out: &Disjoint<'_, f32>) {
        let (stride, dim, group) = (self.kv.value_stride(), self.kv.value_dim, self.group());
        let first_row = self.spans[item.span].first_row + item.token;
        for row in 0..item.tokens * group {
            let head = item.kv_head * group + row % group;
            let at = ((first_row + row / group) * self.dims.heads + head) * dim;
            let acc = &mut tile.acc[row * stride..(row + 1) * stride];
            let state = RowState { acc, max: &mut tile.max[row], sum: &mut tile.sum[row] };
            // SAFETY: every row and head belongs to one item; `out` and `gate` are at most as wide as the state;
            // `ops` proves the instruction set.
            unsafe {
                (self.ops.table.finish)(state, gate.map(|gate| &gate[at..at + dim]), out.part(at, dim))
            };
        }
    }
}

impl TileScratch {
    /// Makes room for `rows` rows.
    fn reserve(&mut self, rows: usize, kv: KvDims) {
        let grow = |values: &mut Vec<f32>, len: usize| values.resize(len.max(values.len()), 0.0);
        grow(&mut self.q, rows * kv.key_dim);
        grow(&mut self.scores, rows * PARTITION);
        grow(&mut self.part, rows * kv.value_stride());
        grow(&mut self.acc, rows * kv.value_stride());
        for values in [&mut self.part_max, &mut self.part_sum, &mut self.max, &mut self.sum] {
            grow(values, rows);
        }
        self.blocks.reserve(PARTITION / BLOCK);
    }

    /// The state before the first partition.
    fn clear(&mut self, rows: usize, stride: usize) {
        self.acc[..rows * stride].fill(0.0);
        self.max[..rows].fill(f32::NEG_INFINITY);
        self.sum[..rows].fill(0.0);
    }
}
