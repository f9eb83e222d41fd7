// Paged causal grouped-query attention on matrix units, for keys and values in f16: see worker-gpu/src/launch/attention.rs.
//
// The query heads of a kv head in consecutive tokens form rows. A block takes 16 or more rows of one sequence, and one
// partition after the other (or a single one). In a partition each wave takes its own positions, multiplies the queries
// with their keys, and leaves weights in shared memory; then each wave takes its own dimensions and multiplies the weights
// with their values. So a block reads keys and values once, straight into the operands of the matrix units. What a row gets
// does not depend on the rows beside it: matrix units work row by row, and what lies beyond a row's context has weight zero.
#include "attention.h"
#include "mma.h"

static constexpr u32 PARTITION = 128;
static constexpr u32 THREADS = 256;
static constexpr u32 WAVES = THREADS / WAVE;
static constexpr u32 POSITION_TILES = PARTITION / MMA_SIDE / WAVES;  // of a wave
static constexpr u32 BLOCKS = PARTITION / KV_BLOCK;
static constexpr u32 KEY_PIECE = 8;  // f16 of 16 bytes

// Whether registers hold a whole partition's keys and values on their way while others are multiplied; and how many tiles
// of rows a block of a prompt takes at most, which the host knows.
#if defined(SPILLWAY_NVIDIA)
static constexpr bool MANY_REGISTERS = true;
static constexpr u32 MOST_TILES = 3;
#else
static constexpr bool MANY_REGISTERS = false;
static constexpr u32 MOST_TILES = 2;
#endif

// A block's shape: heads of DIM, TILES * 16 rows.
template <u32 DIM, u32 TILES>
struct Shape {
  static constexpr u32 ROWS = TILES * MMA_SIDE;
  static constexpr u32 DEPTH = DIM / MmaDeepF16::DEPTH;
  // Values on their way while keys are multiplied, and the next keys while values are: one block then fills a unit's time. A
  // block of few rows does with less: there are others beside it.
  static constexpr bool PIPELINED = MANY_REGISTERS && TILES > 1;
  // Operands of keys, and KV blocks of values, that are loaded at once. Those of RDNA 3 take twice the registers.
  static constexpr u32 AHEAD = PIPELINED ? DEPTH : MMA_F16_WORDS == 8 ? 1 : MANY_REGISTERS ? 4 : 2;
  static constexpr u32 KEYS = DEPTH < AHEAD ? DEPTH : AHEAD;
  static constexpr u32 VALUES = PIPELINED ? BLOCKS : MANY_REGISTERS ? 2 : 1;
  static constexpr u32 DIM_TILES = DIM / MMA_SIDE < WAVES ? 1 : DIM / MMA_SIDE / WAVES;  // of a wave

  u32* queries;    // [TILES][DEPTH] operands, scaled
  u32* weights;    // [TILES][BLOCKS] operands
  float* largest;  // [ROWS][WAVES]: of the positions of each wave
  float* sums;     // [ROWS][WAVES]
  float* tops;     // [ROWS]
  float* factors;  // [ROWS][2]: of a fold
  u32* contexts;   // [ROWS]: positions that each row sees
  u32* places;     // [ROWS]: row of the step times heads, plus the head
};

// Places a block's working memory in its dynamic shared memory, whose size the host computes alike.
template <class S>
DEVICE S place(u8* memory) {
  S s;
  s.queries = reinterpret_cast<u32*>(memory);
  s.weights = s.queries + S::ROWS / MMA_SIDE * S::DEPTH * MMA_IMAGE_WORDS;
  s.largest = reinterpret_cast<float*>(s.weights + S::ROWS / MMA_SIDE * BLOCKS * MMA_IMAGE_WORDS);
  s.sums = s.largest + S::ROWS * WAVES;
  s.tops = s.sums + S::ROWS * WAVES;
  s.factors = s.tops + S::ROWS;
  s.contexts = reinterpret_cast<u32*>(s.factors + S::ROWS * 2);
  s.places = s.contexts + S::ROWS;
  return s;
}

// The rows of a block.
struct Rows {
  u32 first_row;  // of the step: that of the first token
  u32 first;      // row of the block's first in the sequence's: token * group + head
  u32 taken;
  u32 group, heads, kv_head;
};

// Row of the step times heads, plus the head.
DEVICE u32 place_of(const Rows& rows, u32 row) {
  u32 at = rows.first + row;
  return (rows.first_row + at / rows.group) * rows.heads + rows.kv_head * rows.group + at % rows.group;
}

// The keys and values that a block reads.
struct Context {
  const f16* cache;
  const u32* table;
  u32 kv_heads, kv_head;
  u32 longest;  // context of the block's last row
};

// The first of the positions that a wave multiplies keys of in its `n`th tile.
DEVICE u32 tile_position(u32 partition, u32 n) {
  return partition * PARTITION + (wave_index() * POSITION_TILES + n) * MMA_SIDE;
}

// Numbers of the KV blocks of a partition. Beyond the context there are none: the last one takes their place, and what is
// read there has weight zero.
struct Blocks {
  u32 of_keys[POSITION_TILES];  // those of this wave's tiles
  u32 of_values[BLOCKS];
};

DEVICE u32 block_at(const Context& context, u32 position) {
  return context.table[smaller(position, context.longest - 1) / KV_BLOCK];
}
DEVICE u32 value_block(const Context& context, u32 partition, u32 block) {
  return block_at(context, partition * PARTITION + block * KV_BLOCK);
}
DEVICE Blocks load_blocks(const Context& context, u32 partition) {
  Blocks blocks;
  UNROLL(POSITION_TILES)
  for (u32 j = 0; j < POSITION_TILES; j++) blocks.of_keys[j] = block_at(context, tile_position(partition, j));
  UNROLL(BLOCKS)
  for (u32 b = 0; b < BLOCKS; b++) blocks.of_values[b] = value_block(context, partition, b);
  return blocks;
}

template <u32 DIM, u32 TILES>
DEVICE void stage_queries(const Shape<DIM, TILES>& s, const Rows& rows, const float* q, float scale, u32 start) {
  typedef Shape<DIM, TILES> S;
  // Eight rows side by side, whose words lie in different banks.
  for (u32 i = thread_index(); i < S::ROWS * (DIM / 4); i += THREADS) {
    u32 row = i / (DIM / 4 * 8) * 8 + i % 8, at = i / 8 % (DIM / 4) * 4;
    f32x4 x = {};
    if (row < rows.taken) x = *reinterpret_cast<const f32x4*>(q + (u64)place_of(rows, row) * DIM + at);
    u32* operand = s.queries + (row / MMA_SIDE * S::DEPTH + at / MmaDeepF16::DEPTH) * MMA_IMAGE_WORDS;
    for (u32 n = 0; n < 2; n++) {
      u32 low = to_f16(x.v[n * 2] * scale).bits, high = to_f16(x.v[n * 2 + 1] * scale).bits;
      operand[mma_image_word(row % MMA_SIDE, at % MmaDeepF16::DEPTH / 2 + n)] = low | high << 16;
    }
  }
  u32 row = thread_index();
  if (row >= S::ROWS) return;
  s.contexts[row] = row < rows.taken ? start + (rows.first + row) / rows.group + 1 : 0;
  s.places[row] = place_of(rows, row);
}

// The keys of the 16 positions from `position` on, `COUNT` operands from `first` on.
template <u32 DIM, u32 COUNT>
DEVICE void load_keys(const Context& context, u32 block, u32 position, u32 first, MmaDeepF16* keys) {
  const f16* from = context.cache + head_offset(block, context.kv_heads, context.kv_head, DIM, DIM);
  from += position % KV_BLOCK * KEY_PIECE + first * 4 * KV_BLOCK * KEY_PIECE;
  UNROLL(COUNT)
  for (u32 d = 0; d < COUNT; d++) {
    keys[d] = mma_load_deep(from + d * 4 * KV_BLOCK * KEY_PIECE, KEY_PIECE, KV_BLOCK * KEY_PIECE);
  }
}

// The values of one KV block in the dimensions of a wave.
template <u32 DIM, u32 COUNT>
DEVICE void load_values(const Context& context, u32 block, MmaDeepF16* values) {
  const f16* from = context.cache + head_offset(block, context.kv_heads, context.kv_head, DIM, DIM) + KV_BLOCK * DIM;
  UNROLL(COUNT)
  for (u32 n = 0; n < COUNT; n++) {
    u32 dimension = (wave_index() + n * WAVES) * MMA_SIDE;
    if (dimension < DIM) values[n] = mma_load_deep(from + dimension * KV_BLOCK, KV_BLOCK, KEY_PIECE);
  }
}

// What of a partition's keys and values is loaded ahead.
template <u32 DIM, u32 COUNT>
DEVICE void load_first_keys(const Context& context, const Blocks& blocks, u32 partition, MmaDeepF16 (*keys)[COUNT]) {
  UNROLL(POSITION_TILES)
  for (u32 j = 0; j < POSITION_TILES; j++) {
    load_keys<DIM, COUNT>(context, blocks.of_keys[j], tile_position(partition, j), 0, keys[j]);
  }
}
template <u32 DIM, u32 VALUES, u32 COUNT>
DEVICE void load_first_values(const Context& context, const Blocks& blocks, MmaDeepF16 (&values)[VALUES][COUNT]) {
  UNROLL(VALUES)
  for (u32 b = 0; b < VALUES; b++) load_values<DIM, COUNT>(context, blocks.of_values[b], values[b]);
}

// Clears the values of a KV block from its token `count` on: what lies beyond a context may be anything.
template <u32 COUNT>
DEVICE void clear_values(u32 count, MmaDeepF16* values) {
  UNROLL(COUNT)
  for (u32 n = 0; n < COUNT; n++) {
    UNROLL(MMA_PIECES)
    for (u32 i = 0; i < MMA_PIECES; i++) {
      UNROLL(4)
      for (u32 word = 0; word < 4; word++) {
        u32 token = mma_piece_column(i) * 8 + word * 2;
        u32 mask = token + 1 < count ? 0xffffffffu : token < count ? 0xffffu : 0u;
        values[n].piece[i].v[word] &= (i32)mask;
      }
    }
  }
}

// Scores of a wave's positions for all rows, and the largest of each row. The first of the keys are in `keys`.
template <u32 DIM, u32 TILES>
DEVICE void score(const Shape<DIM, TILES>& s, const Context& context, const Blocks& blocks, u32 partition, u32 shortest,
                  MmaDeepF16 (*keys)[Shape<DIM, TILES>::KEYS], MmaSumF32 (*scores)[POSITION_TILES]) {
  typedef Shape<DIM, TILES> S;
  constexpr u32 KEYS = S::KEYS;
  UNROLL(POSITION_TILES)
  for (u32 j = 0; j < POSITION_TILES; j++) {
    u32 position = tile_position(partition, j);
    UNROLL(TILES)
    for (u32 t = 0; t < TILES; t++) scores[t][j] = MmaSumF32{};
    UNROLL(MANY_REGISTERS ? S::DEPTH / KEYS : 1)
    for (u32 first = 0; first < S::DEPTH; first += KEYS) {
      if (first != 0) load_keys<DIM, KEYS>(context, blocks.of_keys[j], position, first, keys[j]);
      UNROLL(KEYS)
      for (u32 d = 0; d < KEYS; d++) {
        UNROLL(TILES)
        for (u32 t = 0; t < TILES; t++) {
          const u32* queries = s.queries + (t * S::DEPTH + first + d) * MMA_IMAGE_WORDS;
          mma(scores[t][j], mma_load_image(queries), keys[j][d]);
        }
      }
    }
    if (position + MMA_SIDE <= shortest) continue;
    UNROLL(TILES)
    for (u32 t = 0; t < TILES; t++) {
      UNROLL(MMA_VALUES)
      for (u32 i = 0; i < MMA_VALUES; i++) {
        bool seen = position + mma_column(i) < s.contexts[t * MMA_SIDE + mma_row(i)];
        if (!seen) scores[t][j].value[i] = -infinity();
      }
    }
  }
  UNROLL(TILES)
  for (u32 t = 0; t < TILES; t++) {
    UNROLL(MMA_ROWS)
    for (u32 r = 0; r < MMA_ROWS; r++) {
      float largest = -infinity();
      UNROLL(POSITION_TILES)
      for (u32 j = 0; j < POSITION_TILES; j++) {
        UNROLL(MMA_VALUES)
        for (u32 i = 0; i < MMA_VALUES; i++) {
          if (mma_value_row(i) == r) largest = larger(largest, scores[t][j].value[i]);
        }
      }
      largest = mma_row_max(largest);
      u32 row = t * MMA_SIDE + mma_row(mma_with_row(r));
      if (lane_index() % MMA_ROW_LANES == 0) s.largest[row * WAVES + wave_index()] = largest;
    }
  }
}

// Weights of a wave's positions for all rows, as they are multiplied, and their sums.
template <u32 DIM, u32 TILES>
DEVICE void weigh(const Shape<DIM, TILES>& s, const MmaSumF32 (*scores)[POSITION_TILES]) {
  UNROLL(TILES)
  for (u32 t = 0; t < TILES; t++) {
    float sums[MMA_ROWS] = {};
    UNROLL(POSITION_TILES)
    for (u32 j = 0; j < POSITION_TILES; j++) {
      f16 weights[MMA_VALUES];
      UNROLL(MMA_VALUES)
      for (u32 i = 0; i < MMA_VALUES; i++) {
        weights[i] = to_f16(exp2_fast(scores[t][j].value[i] - s.tops[t * MMA_SIDE + mma_row(i)]));
        sums[mma_value_row(i)] += to_f32(weights[i]);
      }
      u32 position = tile_position(0, j);
      mma_store(s.weights + (t * BLOCKS + position / KV_BLOCK) * MMA_IMAGE_WORDS, position % KV_BLOCK, weights);
    }
    UNROLL(MMA_ROWS)
    for (u32 r = 0; r < MMA_ROWS; r++) {
      float sum = mma_row_sum(sums[r]);
      u32 row = t * MMA_SIDE + mma_row(mma_with_row(r));
      if (lane_index() % MMA_ROW_LANES == 0) s.sums[row * WAVES + wave_index()] = sum;
    }
  }
}

// Of what the waves have left for a row.
template <class S>
DEVICE float largest_of_waves(const S& s, u32 row) {
  float largest = s.largest[row * WAVES];
  UNROLL(WAVES)
  for (u32 wave = 1; wave < WAVES; wave++) largest = larger(largest, s.largest[row * WAVES + wave]);
  return largest;
}
template <class S>
DEVICE float sum_of_waves(const S& s, u32 row) {
  float sum = s.sums[row * WAVES];
  UNROLL(WAVES)
  for (u32 wave = 1; wave < WAVES; wave++) sum += s.sums[row * WAVES + wave];
  return sum;
}

// What a block has at its end, beside the outputs.
struct Result {
  float top, sum;  // of the row that is this thread's
  u32 partition;   // the first
  u32 tiles;       // blocks that rows of the same tokens take
};

// Leaves the rows of a block with their partition's results, or finishes them.
template <u32 DIM, u32 TILES>
DEVICE void leave_rows(const Shape<DIM, TILES>& s, const MmaSumF32 (*all)[Shape<DIM, TILES>::DIM_TILES],
                       const Result& result, const Rows& rows, const Outputs& to, float* partials) {
  constexpr u32 DIM_TILES = Shape<DIM, TILES>::DIM_TILES;
  u32 step_rows = grid_blocks_x() / result.tiles, own = thread_index();
  if (own < rows.taken) {
    // Only its own thread has read a row's sums of waves, so that of all may take their place.
    s.sums[own * WAVES] = reciprocal_fast(result.sum);
    if (partials != nullptr) {
      float* one = partials + partial_offset(result.partition, step_rows, s.places[own], rows.heads, DIM);
      one[DIM] = result.top, one[DIM + 1] = result.sum;
    }
  }
  block_barrier();
  UNROLL(TILES)
  for (u32 t = 0; t < TILES; t++) {
    UNROLL(DIM_TILES)
    for (u32 n = 0; n < DIM_TILES; n++) {
      u32 first = (wave_index() + n * WAVES) * MMA_SIDE;
      if (first >= DIM) continue;
      float gates[MMA_VALUES];
      UNROLL(MMA_VALUES)
      for (u32 i = 0; i < MMA_VALUES; i++) {
        u32 row = t * MMA_SIDE + mma_row(i);
        bool wanted = partials == nullptr && row < rows.taken;
        gates[i] = wanted ? gate_at(to, s.places[row], first + mma_column(i)) : 0.0f;
      }
      UNROLL(MMA_VALUES)
      for (u32 i = 0; i < MMA_VALUES; i++) {
        u32 row = t * MMA_SIDE + mma_row(i), dimension = first + mma_column(i);
        if (row >= rows.taken) continue;
        float output = all[t][n].value[i];
        if (partials == nullptr) {
          finish(to, s.places[row], DIM, dimension, output, s.sums[row * WAVES], gates[i]);
        } else {
          partials[partial_offset(result.partition, step_rows, s.places[row], rows.heads, DIM) + dimension] = output;
        }
      }
    }
  }
}

template <u32 DIM, u32 TILES>
DEVICE void attend(const float* q, const f16* cache, const RowMeta* meta, const SpanMeta* spans, const u32* tables,
                   const Outputs& to, float* partials, u32 heads, u32 kv_heads, u32 group, float scale) {
  typedef Shape<DIM, TILES> S;
  constexpr u32 DIM_TILES = S::DIM_TILES, VALUES = S::VALUES;
  constexpr bool PIPELINED = S::PIPELINED;
  u32 tile = block_index_x(), tiles = (group + S::ROWS - 1) / S::ROWS, first_row, tokens = 1;
  if (spans == nullptr) {
    first_row = tile / tiles;
    tile %= tiles;
  } else {
    SpanMeta span = spans[block_index_z()];
    tiles = (span.tokens * group + S::ROWS - 1) / S::ROWS;
    if (tile >= tiles) return;  // the whole block
    tile = tiles - 1 - tile;    // long contexts first
    first_row = span.first_row;
    tokens = span.tokens;
  }
  u32 start = meta[first_row].position, first = tile * S::ROWS;
  Rows rows{first_row, first, smaller(tokens * group - first, S::ROWS), group, heads, block_index_y()};
  u32 longest = start + (first + rows.taken - 1) / group + 1, shortest = start + first / group + 1;
  if (rows.taken < S::ROWS) shortest = 0;  // the others see nothing
  Context context{cache, tables + meta[first_row].table, kv_heads, block_index_y(), longest};
  u32 partitions = (longest + PARTITION - 1) / PARTITION;
  u32 begin = partials != nullptr ? block_index_z() : 0, end = partials != nullptr ? begin + 1 : partitions;
  if (begin >= partitions) return;  // the whole block

  DYNAMIC_SHARED(u8, memory);
  S s = place<S>(memory);
  Blocks blocks = load_blocks(context, begin);
  MmaDeepF16 keys[POSITION_TILES][S::KEYS];
  load_first_keys<DIM>(context, blocks, begin, keys);
  stage_queries(s, rows, q, scale * LOG2_E, start);
  block_barrier();
  MmaSumF32 all[TILES][DIM_TILES] = {};
  float top = EMPTY, sum = 0.0f;  // of the row that is this thread's
  u32 own = thread_index();
  for (u32 partition = begin; partition < end; partition++) {
    Blocks next = load_blocks(context, partition + 1);
    MmaDeepF16 values[VALUES][DIM_TILES];
    MmaSumF32 scores[TILES][POSITION_TILES];
    if constexpr (PIPELINED) load_first_values<DIM>(context, blocks, values);
    score(s, context, blocks, partition, shortest, keys, scores);
    if constexpr (!PIPELINED) load_first_values<DIM>(context, blocks, values);
    block_barrier();
    Fold fold{};
    if (own < S::ROWS) {
      float top_of_one = top_of(largest_of_waves(s, own));
      s.tops[own] = top_of_one;
      fold = fold_tops(top, top_of_one);
      top = fold.top;
      s.factors[own * 2] = fold.of_all, s.factors[own * 2 + 1] = fold.of_one;
    }
    block_barrier();
    weigh(s, scores);
    block_barrier();
    if (own < S::ROWS) sum = fold_values(fold, sum, sum_of_waves(s, own));
    if (PIPELINED && partition + 1 < end) load_first_keys<DIM>(context, next, partition + 1, keys);
    u32 left = longest - partition * PARTITION;
    MmaSumF32 outputs[TILES][DIM_TILES] = {};
    UNROLL(MANY_REGISTERS ? BLOCKS / VALUES : 1)
    for (u32 from = 0; from < BLOCKS; from += VALUES) {
      UNROLL(VALUES)
      for (u32 b = 0; b < VALUES; b++) {
        if (from == 0) continue;
        u32 block = MANY_REGISTERS ? blocks.of_values[from + b] : value_block(context, partition, from + b);
        load_values<DIM, DIM_TILES>(context, block, values[b]);
      }
      UNROLL(VALUES)
      for (u32 b = 0; b < VALUES; b++) {
        u32 tokens = left - smaller(left, (from + b) * KV_BLOCK);
        if (tokens < KV_BLOCK) clear_values<DIM_TILES>(tokens, values[b]);
        UNROLL(TILES)
        for (u32 t = 0; t < TILES; t++) {
          MmaImageF16 weights = mma_load_image(s.weights + (t * BLOCKS + from + b) * MMA_IMAGE_WORDS);
          UNROLL(DIM_TILES)
          for (u32 n = 0; n < DIM_TILES; n++) mma(outputs[t][n], weights, values[b][n]);
        }
      }
    }
    blocks = next;
    if (!PIPELINED && partition + 1 < end) load_first_keys<DIM>(context, next, partition + 1, keys);
    UNROLL(TILES)
    for (u32 t = 0; t < TILES; t++) {
      UNROLL(MMA_VALUES)
      for (u32 i = 0; i < MMA_VALUES; i++) {
        const float* factors = s.factors + (t * MMA_SIDE + mma_row(i)) * 2;
        Fold of_row{0.0f, factors[0], factors[1]};
        UNROLL(DIM_TILES)
        for (u32 n = 0; n < DIM_TILES; n++) {
          all[t][n].value[i] = fold_values(of_row, all[t][n].value[i], outputs[t][n].value[i]);
        }
      }
    }
  }
  leave_rows(s, all, Result{top, sum, begin, tiles}, rows, to, partials);
}

// With `spans`, block_index_z is the span, and a block of it takes every partition. Without, every row of the step has blocks
// of its own; with `partials` they take one partition each, block_index_z, and leave their results there.
#define PARAMETERS                                                                                                     \
  const float *q, const f16 *cache, const RowMeta *meta, const SpanMeta *spans, const u32 *tables, const float *gate,  \
      u32 gate_stride, float *out, float *partials, u32 heads, u32 kv_heads, u32 group, float scale
#define ARGUMENTS                                                                                                      \
  q, cache, meta, spans, tables, Outputs{gate, gate_stride, out}, partials, heads, kv_heads, group, scale

KERNEL(attend_tiles_64, THREADS, PARAMETERS) { attend<64, 1>(ARGUMENTS); }
KERNEL(attend_tiles_128, THREADS, PARAMETERS) { attend<128, 1>(ARGUMENTS); }
KERNEL_TOGETHER(attend_tiles_256, THREADS, 2, PARAMETERS) { attend<256, 1>(ARGUMENTS); }
KERNEL(attend_prompt_64, THREADS, PARAMETERS) { attend<64, 2>(ARGUMENTS); }
KERNEL_TOGETHER(attend_prompt_128, THREADS, 2, PARAMETERS) { attend<128, 2>(ARGUMENTS); }
KERNEL(attend_prompt_256, THREADS, PARAMETERS) { attend<256, MOST_TILES>(ARGUMENTS); }
