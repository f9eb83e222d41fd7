//! Paged causal grouped-query attention.
//!
//! One launch prepares a step: norms and rotations of query and key heads, and keys and values into the cache. Then a
//! query's context is cut at absolute positions into partitions; each is reduced on its own, and they are folded in order
//! of position. Few rows take one block per partition and fold in a further launch; prompts fold on the way. Both do the same
//! operations on the same numbers.
//!
//! **Two ways to attend.** [`Way::Tiles`] multiplies on matrix units and reads f16 keys and values: queries and weights are
//! rounded to f16, sums are f32. [`Way::Threads`] computes in f32 throughout, for f32 caches, devices without matrix
//! units, and head widths without a tile kernel. A layer on a device always goes one of them.

use super::kv_cache::{KvCache, KvElement};
use super::rows::Pairing;
use super::{Check, Kernels, LaunchError, Loader, Rope, RowMeta, SpanMeta, entries, optional, queue};
use crate::compile::Arch;
use crate::hip::{Arg, DeviceSlice, Function, Launch, Stream};

/// Positions of the smallest partition: contexts that need as many of these take launches of one shape.
pub const PARTITION: usize = 128;
/// Steps of at most this many rows give every row blocks of its own, whatever its sequence. Captured steps are as small,
/// so that the spans of a replay may be others.
pub const MAX_ALONE: usize = 16;
/// Query heads that a block of [`Way::Threads`] takes at most; they share the keys and values it reads.
const GROUPS: [usize; 4] = [1, 2, 4, 8];
/// Heads that a block prepares at once.
const PREPARED: usize = 4;
/// Rows of the smallest block of [`Way::Tiles`]: a side of the matrices that units multiply.
const TILE_ROWS: usize = 16;
/// Threads of every block that attends.
const THREADS: u32 = 256;
/// Threads of a block that folds.
const FOLD_THREADS: u32 = 256;
/// Dimensions that it folds.
const FOLD_DIMS: usize = 64;

entries!(Entries: "attention" {
    attention_prepare_f32, attention_prepare_f16,
    attend_f32_1, attend_f32_2, attend_f32_4, attend_f32_8,
    attend_f16_1, attend_f16_2, attend_f16_4, attend_f16_8,
    attend_fold,
});
entries!(TileEntries: "attention_tiles" {
    attend_tiles_64, attend_tiles_128, attend_tiles_256,
    attend_prompt_64, attend_prompt_128, attend_prompt_256,
});

/// An attention layer.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Query heads, a multiple of the kv heads; head `j` reads kv head `j / (heads / kv_heads)`.
    pub heads: usize,
    /// Factor on `q · k`.
    pub scale: f32,
}

/// What happens to every query head, or key head, before attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadSteps {
    /// RMS norm: its weight, one head wide, and its epsilon.
    pub norm: Option<(DeviceSlice, f32)>,
    /// Rotation, after the norm.
    pub rope: Option<Rope>,
}

/// Heads in memory, `stride` values from one to the next, those of a row after those of the row before.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// The first head starts where this does.
    pub memory: DeviceSlice,
    /// At least the heads' width.
    pub stride: usize,
}

/// The memory of an attention step; one row per token.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBuffers {
    /// Queries.
    pub q: Heads,
    /// Where prepared queries go, `[rows, heads * key_dim]`. May be those of `q`, if they are as close.
    pub prepared: DeviceSlice,
    /// Keys, `[rows, kv_heads * key_dim]`.
    pub k: DeviceSlice,
    /// Values, `[rows, kv_heads * value_dim]`.
    pub v: DeviceSlice,
    /// When present, heads of `value_dim`: outputs are multiplied by their sigmoid.
    pub gate: Option<Heads>,
    /// Outputs, `[rows, heads * value_dim]`.
    pub out: DeviceSlice,
    /// One [`RowMeta`] per row.
    pub row_meta: DeviceSlice,
    /// One [`SpanMeta`] per span.
    pub span_meta: DeviceSlice,
    /// Block numbers (u32) of all sequences; [`RowMeta::table`] says where each starts.
    pub tables: DeviceSlice,
    /// Results of partitions: see [`Attention::scratch_bytes`]. Smaller memory makes steps with few rows slower, no more.
    pub scratch: DeviceSlice,
}

/// How large a step is.
#[derive(Debug, Clone, Copy)]
pub struct StepSize {
    /// Tokens.
    pub rows: usize,
    /// Sequences that they belong to.
    pub spans: usize,
    /// The largest number of tokens that any row sees, itself included, or any larger number (a captured graph is captured
    /// with the most it will see).
    pub context: usize,
}

impl Attention {
    /// Bytes of scratch with which steps of `rows` rows, the longest context `partitions` partitions of [`PARTITION`], need
    /// one pass.
    pub fn scratch_bytes(heads: usize, value_dim: usize, rows: usize, partitions: usize) -> usize {
        rows * heads * partitions * (value_dim + 2) * size_of::<f32>()
    }
}

/// How a layer attends on a device.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// `attend_tiles_*` and `attend_prompt_*`.
    Tiles,
    /// `attend_f32_*` and `attend_f16_*`; so many heads a block.
    Threads { taken: usize },
}

impl Way {
    /// Positions that are reduced together: part of the definition of the result.
    fn partition(self) -> usize {
        match self {
            Way::Tiles => PARTITION,
            Way::Threads { .. } => 256,
        }
    }
}

/// Which rows share a block.
#[derive(Debug, Clone, Copy)]
enum Grid {
    /// None: every row has blocks of its own, for each partition or for all.
    Alone { split: bool },
    /// Neighbours in a span.
    Spans,
}

/// An attention step whose sizes fit together.
#[derive(Clone, Copy)]
struct Step<'a> {
    check: Check,
    layer: &'a Attention,
    cache: &'a KvCache,
    buffers: AttentionBuffers,
    size: StepSize,
    /// Query heads per kv head.
    group: usize,
    way: Way,
}

impl Step<'_> {
    fn partitions(&self) -> usize {
        self.size.context.div_ceil(self.way.partition()).max(1)
    }

    /// Rows whose partitions the scratch memory holds.
    fn rows_of_a_pass(&self) -> usize {
        let of_row = Attention::scratch_bytes(self.layer.heads, self.cache.value_dim, 1, self.partitions());
        self.buffers.scratch.len() / of_row
    }

    /// The step of `rows` rows from `first` on.
    fn pass(mut self, first: usize, rows: usize) -> Result<Self, LaunchError> {
        let from = |memory: DeviceSlice, of_row: usize| {
            let skipped = first * of_row;
            memory.part(skipped, memory.len().saturating_sub(skipped))
        };
        let float = size_of::<f32>();
        let KvCache { key_dim, value_dim, .. } = *self.cache;
        let heads = self.layer.heads;
        let AttentionBuffers { prepared, out, row_meta, gate, .. } = &mut self.buffers;
        *prepared = from(*prepared, heads * key_dim * float)?;
        *out = from(*out, heads * value_dim * float)?;
        *row_meta = from(*row_meta, size_of::<RowMeta>())?;
        if let Some(gate) = gate {
            gate.memory = from(gate.memory, heads * gate.stride * float)?;
        }
        self.size.rows = rows;
        Ok(self)
    }

    /// The gate and the distance of its heads.
    fn gate(&self) -> Result<[Arg; 2], LaunchError> {
        let Some(gate) = self.buffers.gate else { return Ok([optional(None), 0u32.into()]) };
        heads(self.check, "gate", gate, self.size.rows * self.layer.heads, self.cache.value_dim)
    }

    fn out(&self) -> Result<Arg, LaunchError> {
        let outputs = self.size.rows * self.layer.heads * self.cache.value_dim;
        self.check.holds::<f32>("out", self.buffers.out, outputs)
    }

    /// The largest number of blocks that the rows of one span may need, `of_block` rows of its heads each.
    fn tiles(&self, rows: usize, of_block: usize) -> Result<u32, LaunchError> {
        self.check.number("rows", (rows * self.group).div_ceil(of_block))
    }
}

/// Heads as kernels take them: their memory, and the distance between two.
fn heads(
    check: Check,
    what: &'static str,
    heads: Heads,
    count: usize,
    dim: usize,
) -> Result<[Arg; 2], LaunchError> {
    check.rule(heads.stride >= dim, what, heads.stride, "heads that do not overlap")?;
    let values = count.saturating_sub(1) * heads.stride + dim;
    Ok([check.holds::<f32>(what, heads.memory, values)?, check.number(what, heads.stride)?.into()])
}

/// Norm and rotation as the kernel takes them.
fn head_steps(check: Check, steps: &HeadSteps, rows: usize, dim: usize) -> Result<[Arg; 6], LaunchError> {
    let (norm, epsilon) = match steps.norm {
        Some((weight, epsilon)) => (Some(check.holds::<f32>("norm weight", weight, dim)?), epsilon),
        None => (None, 0.0),
    };
    let Some(Rope { pairing, pairs, cos, sin }) = steps.rope else {
        return Ok([
            optional(norm),
            epsilon.into(),
            optional(None),
            optional(None),
            0u32.into(),
            0u32.into(),
        ]);
    };
    check.rule(dim >= 2 * pairs, "head width", dim, "as wide as the rotated part")?;
    Ok([
        optional(norm),
        epsilon.into(),
        check.holds::<f32>("cosines", cos, rows * pairs)?,
        check.holds::<f32>("sines", sin, rows * pairs)?,
        check.number("pairs", pairs)?.into(),
        u32::from(pairing == Pairing::Adjacent).into(),
    ])
}

impl Kernels {
    /// Prepares the heads of a step as `q_steps` and `k_steps` say, stores its keys and values, then attends with its queries.
    ///
    /// # Errors
    /// See [`Kernels::rms_norm`].
    pub fn attention(
        &self,
        stream: &Stream,
        layer: &Attention,
        cache: &KvCache,
        buffers: &AttentionBuffers,
        [q_steps, k_steps]: [&HeadSteps; 2],
        size: StepSize,
    ) -> Result<(), LaunchError> {
        let check = Check("attention");
        let group = layer.heads / cache.kv_heads;
        let whole = layer.heads > 0 && layer.heads.is_multiple_of(cache.kv_heads);
        check.rule(whole, "query heads", layer.heads, "a multiple of the kv heads")?;
        let StepSize { rows, spans, .. } = size;
        if rows == 0 {
            return Ok(());
        }
        let step = Step { check, layer, cache, buffers: *buffers, size, group, way: self.way(cache, group) };
        self.prepare(stream, &step, [q_steps, k_steps])?;
        if rows > MAX_ALONE && rows > spans {
            return self.attend(stream, &step, Grid::Spans);
        }
        let at_once = step.rows_of_a_pass();
        if step.partitions() == 1 || at_once == 0 {
            return self.attend(stream, &step, Grid::Alone { split: false });
        }
        (0..rows).step_by(at_once).try_for_each(|first| {
            let pass = step.pass(first, at_once.min(rows - first))?;
            self.attend(stream, &pass, Grid::Alone { split: true })?;
            self.fold(stream, &pass)
        })
    }

    fn way(&self, cache: &KvCache, group: usize) -> Way {
        let KvCache { element, key_dim, value_dim, .. } = *cache;
        let tiles = self.matrix_units && element == KvElement::F16 && key_dim == value_dim;
        match self.attention_tiles.attend(key_dim) {
            Some(_) if tiles => Way::Tiles,
            _ => {
                let fits = GROUPS.into_iter().find(|taken| *taken >= group);
                Way::Threads { taken: fits.unwrap_or(GROUPS[GROUPS.len() - 1]) }
            }
        }
    }

    fn prepare(&self, stream: &Stream, step: &Step<'_>, [q, k]: [&HeadSteps; 2]) -> Result<(), LaunchError> {
        let Step { check, layer, cache, buffers, size: StepSize { rows, .. }, .. } = *step;
        let KvCache { kv_heads, key_dim, value_dim, .. } = *cache;
        let mut args: Vec<Arg> = Vec::with_capacity(24);
        args.extend(heads(check, "queries", buffers.q, rows * layer.heads, key_dim)?);
        args.push(check.holds::<f32>("prepared queries", buffers.prepared, rows * layer.heads * key_dim)?);
        args.extend(head_steps(check, q, rows, key_dim)?);
        args.push(check.holds::<f32>("keys", buffers.k, rows * kv_heads * key_dim)?);
        args.extend(head_steps(check, k, rows, key_dim)?);
        args.extend([
            check.holds::<f32>("values", buffers.v, rows * kv_heads * value_dim)?,
            check.holds::<RowMeta>("row facts", buffers.row_meta, rows)?,
            buffers.tables.into(),
            cache.data.into(),
            check.number("query heads", layer.heads)?.into(),
            check.number("kv heads", kv_heads)?.into(),
            check.number("key width", key_dim)?.into(),
            check.number("value width", value_dim)?.into(),
        ]);
        let function = match cache.element {
            KvElement::F32 => &self.attention.attention_prepare_f32,
            KvElement::F16 => &self.attention.attention_prepare_f16,
        };
        let blocks = (layer.heads + 2 * kv_heads).div_ceil(PREPARED);
        let grid = [check.number("rows", rows)?, check.number("heads", blocks)?, 1];
        queue(stream, function, Launch { grid, block: 128, shared_bytes: 0 }, &args)
    }

    fn attend(&self, stream: &Stream, step: &Step<'_>, grid: Grid) -> Result<(), LaunchError> {
        match step.way {
            Way::Tiles => self.attend_tiles(stream, step, grid),
            Way::Threads { taken } => self.attend_threads(stream, step, grid, taken),
        }
    }

    fn attend_tiles(&self, stream: &Stream, step: &Step<'_>, grid: Grid) -> Result<(), LaunchError> {
        let Step { check, layer, cache, buffers, size: StepSize { rows, spans, .. }, group, .. } = *step;
        let KvCache { kv_heads, key_dim, .. } = *cache;
        let Some([alone, wide]) = self.attention_tiles.attend(key_dim) else {
            return Err(check.unsupported("key width", key_dim, "64, 128 or 256"));
        };
        let (kernel, x, z, span_meta, partials) = match grid {
            Grid::Alone { split } => {
                let z = if split { step.partitions() } else { 1 };
                let x = step.tiles(1, alone.rows)?.saturating_mul(check.number("rows", rows)?);
                (alone, x, z, None, split.then_some(buffers.scratch))
            }
            Grid::Spans => {
                check.holds::<SpanMeta>("span facts", buffers.span_meta, spans)?;
                let wide_blocks = (rows * group).div_ceil(wide.rows) * kv_heads;
                let kernel = if wide_blocks < self.compute_units { alone } else { wide };
                (kernel, step.tiles(rows, kernel.rows)?, spans, Some(buffers.span_meta), None)
            }
        };
        let [gate, gate_stride] = step.gate()?;
        let args = [
            check.holds::<f32>("prepared queries", buffers.prepared, rows * layer.heads * key_dim)?,
            cache.data.into(),
            buffers.row_meta.into(),
            optional(span_meta.map(Into::into)),
            buffers.tables.into(),
            gate,
            gate_stride,
            step.out()?,
            optional(partials.map(Into::into)),
            check.number("query heads", layer.heads)?.into(),
            check.number("kv heads", kv_heads)?.into(),
            check.number("group", group)?.into(),
            layer.scale.into(),
        ];
        let grid = [x, check.number("kv heads", kv_heads)?, check.number("partitions", z)?];
        let shared_bytes = check.number("shared memory", kernel.shared_bytes(key_dim))?;
        queue(stream, kernel.function, Launch { grid, block: THREADS, shared_bytes }, &args)
    }

    fn attend_threads(
        &self,
        stream: &Stream,
        step: &Step<'_>,
        grid: Grid,
        taken: usize,
    ) -> Result<(), LaunchError> {
        let Step { check, layer, cache, buffers, size: StepSize { rows, .. }, group, .. } = *step;
        let KvCache { element, kv_heads, key_dim, value_dim, .. } = *cache;
        let split = matches!(grid, Grid::Alone { split: true });
        let [gate, gate_stride] = step.gate()?;
        let args = [
            check.holds::<f32>("prepared queries", buffers.prepared, rows * layer.heads * key_dim)?,
            cache.data.into(),
            buffers.row_meta.into(),
            buffers.tables.into(),
            gate,
            gate_stride,
            step.out()?,
            optional(split.then_some(buffers.scratch).map(Into::into)),
            check.number("query heads", layer.heads)?.into(),
            check.number("kv heads", kv_heads)?.into(),
            check.number("group", group)?.into(),
            check.number("key width", key_dim)?.into(),
            check.number("value width", value_dim)?.into(),
            layer.scale.into(),
        ];
        let grid = [
            check.number("rows", rows)?,
            check.number("kv heads", kv_heads * group.div_ceil(taken))?,
            check.number("partitions", if split { step.partitions() } else { 1 })?,
        ];
        let function = self.attention.attend(element, taken);
        queue(stream, function, Launch { grid, block: THREADS, shared_bytes: 0 }, &args)
    }

    fn fold(&self, stream: &Stream, step: &Step<'_>) -> Result<(), LaunchError> {
        let Step { check, layer, cache, buffers, size: StepSize { rows, .. }, way, .. } = *step;
        let [gate, gate_stride] = step.gate()?;
        let args = [
            buffers.scratch.into(),
            buffers.row_meta.into(),
            gate,
            gate_stride,
            step.out()?,
            check.number("query heads", layer.heads)?.into(),
            check.number("value width", cache.value_dim)?.into(),
            check.number("partition", way.partition())?.into(),
        ];
        let parts = cache.value_dim.div_ceil(FOLD_DIMS);
        let grid = [
            check.number("rows", rows)?,
            check.number("query heads", layer.heads)?,
            check.number("value width", parts)?,
        ];
        let launch = Launch { grid, block: FOLD_THREADS, shared_bytes: 0 };
        queue(stream, &self.attention.attend_fold, launch, &args)
    }
}

impl Entries {
    /// The kernel for an element type and `taken` heads a block.
    fn attend(&self, element: KvElement, taken: usize) -> &Function {
        let by_group = match element {
            KvElement::F32 => {
                [&self.attend_f32_1, &self.attend_f32_2, &self.attend_f32_4, &self.attend_f32_8]
            }
            KvElement::F16 => {
                [&self.attend_f16_1, &self.attend_f16_2, &self.attend_f16_4, &self.attend_f16_8]
            }
        };
        by_group[taken.ilog2() as usize]
    }
}

/// A kernel that attends with `rows` rows of heads a block.
#[derive(Clone, Copy)]
struct TileKernel<'a> {
    function: &'a Function,
    rows: usize,
}

impl TileKernel<'_> {
    /// Dynamic shared memory, as the kernel divides it: queries and weights in operands of 16 rows and 32 values, and per row
    /// the largest score and the sum of each of up to 8 waves, a top, two factors, a context and a place.
    fn shared_bytes(&self, dim: usize) -> usize {
        const OPERAND: usize = 1280;
        const OPERAND_VALUES: usize = 32;
        const WAVES: usize = 8;
        let operands = self.rows / TILE_ROWS * (dim + PARTITION) / OPERAND_VALUES;
        operands * OPERAND + self.rows * size_of::<f32>() * (2 * WAVES + 5)
    }
}

/// Kernels of [`Way::Tiles`].
#[derive(Debug)]
pub(super) struct Tiles {
    entries: TileEntries,
    /// Rows that a block of a prompt takes at heads of 256: as many as the registers of a target hold.
    widest: usize,
}

impl Tiles {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self, LaunchError> {
        let tiles = if matches!(loader.arch, Arch::Nvidia(_)) { 3 } else { 2 };
        Ok(Self { entries: TileEntries::load(loader)?, widest: tiles * TILE_ROWS })
    }

    /// The kernels for a head width: for the heads of one row, and for prompts.
    fn attend(&self, dim: usize) -> Option<[TileKernel<'_>; 2]> {
        let Self { entries, widest } = self;
        let wide = 2 * TILE_ROWS;
        let (alone, prompt, rows) = match dim {
            64 => (&entries.attend_tiles_64, &entries.attend_prompt_64, wide),
            128 => (&entries.attend_tiles_128, &entries.attend_prompt_128, wide),
            256 => (&entries.attend_tiles_256, &entries.attend_prompt_256, *widest),
            _ => return None,
        };
        Some([TileKernel { function: alone, rows: TILE_ROWS }, TileKernel { function: prompt, rows }])
    }
}
