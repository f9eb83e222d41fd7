// Products of weight matrices with rows of inputs, and decoding of single rows, for every format of formats.h.
//
// An output is computed in one order, whatever the batch: the columns are cut into SLICES runs of whole cells; each run is
// summed cell after cell as the CPU does (kernels/src/matmul.rs); then the runs are added in order.
#pragma once

#include "formats.h"

static constexpr u32 SLICES = 16;
static constexpr u32 MATVEC_THREADS = TILE_ROWS * SLICES;

// Scale and sums of a cell of 8-bit inputs.
struct alignas(8) InputCell {
  float scale;
  u32 sums;  // of the first 16 codes, of the second 16: i16 each
};

// One matrix of a launch and where its product goes: `Output::part` of worker-gpu/src/launch/matmul.rs.
struct MatrixPart {
  const u8* weights;
  float* out;         // [tokens][rows]
  const float* bias;  // [rows], or null
  u32 rows;           // 0: there is no such part
  u32 add;            // 1 to add to what is in out
};

struct Product {
  const u8* weights;
  const void* x;            // codes (i8) for quantised weights, else values (f32): [tokens][columns]
  const InputCell* scales;  // [tokens][cells], for quantised weights
  float* out;
  const float* bias;
  u32 rows, columns, tokens, add;
  u32 row_block;  // which rows this block computes
};

DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// The parameters of a kernel that multiplies up to four matrices of one format with the same inputs.
#define PRODUCT_PARAMETERS \
  const void *x, const InputCell *scales, u32 columns, u32 tokens, MatrixPart part0, MatrixPart part1, \
      MatrixPart part2, MatrixPart part3
#define PRODUCT_OF_BLOCK(block_rows) \
  product_of_block(block_rows, x, scales, columns, tokens, part0, part1, part2, part3)

// The part that this block works on: blocks of `block_rows` rows, those of the first part first.
DEVICE Product product_of_block(u32 block_rows, const void* x, const InputCell* scales, u32 columns, u32 tokens,
                                const MatrixPart& part0, const MatrixPart& part1, const MatrixPart& part2,
                                const MatrixPart& part3) {
  u32 block = block_index_x();
  MatrixPart part = part0;
  auto pass = [&](const MatrixPart& next) {
    u32 blocks = (part.rows + block_rows - 1) / block_rows;
    if (block < blocks || next.rows == 0) return false;
    block -= blocks;
    part = next;
    return true;
  };
  if (pass(part1) && pass(part2)) pass(part3);
  return Product{part.weights, x, scales, part.out, part.bias, part.rows, columns, tokens, part.add, block};
}

// y plus the product of a cell with one token's inputs.
template <class F>
DEVICE float add_cell(const QuantCell<F>& weight, const i32* x, InputCell input, float y) {
  i32 sums[2] = {(i32)(i16)input.sums, (i32)input.sums >> 16};
  float t = 0.0f;
  if constexpr (F::RUNS == 1) sums[0] += sums[1];
  for (u32 run = 0; run < F::RUNS; run++) {
    i32 dot = -F::BIAS * sums[run];
    for (u32 i = 0; i < 8 / F::RUNS; i++) dot = dot4(weight.code[run * 4 + i], x[run * 4 + i], dot);
    t = run == 0 ? weight.scale[run] * (float)dot : fused_multiply_add(weight.scale[run], (float)dot, t);
  }
  if constexpr (F::HAS_MINS) {
    UNROLL(2)
    for (u32 run = 0; run < F::RUNS; run++) t = fused_multiply_add(weight.min[run], (float)-sums[run], t);
  }
  return fused_multiply_add(input.scale, t, y);
}

// Cells that a thread asks for before it uses the first of them: what keeps the memory of a large device busy with the
// threads that the small matrices of a model give it.
static constexpr u32 CELLS_AHEAD = 4;

// Adds BATCH cells of a row of TILES tiles, from `first` on, with the inputs of TOKENS tokens.
template <class F, u32 BATCH, u32 TOKENS, u32 TILES>
DEVICE void add_cells(const Product& p, const u8* const* tile, u32 row, u32 first, const u32* token,
                      float (*sum)[TOKENS]) {
  u32 cells = p.columns / CELL;
  RawCell<F> raw[BATCH][TILES];
  UNROLL(TILES)
  for (u32 t = 0; t < TILES; t++) {
    CellCursor<F> at(tile[t], cells, first, row);
    UNROLL(BATCH)
    for (u32 i = 0; i < BATCH; i++) raw[i][t] = RawCell<F>{at.template codes<8>(i, 0), at.scales(i)};
  }
  loads_under_way();
  const i32x4* codes[TOKENS];
  const InputCell* scales[TOKENS];
  UNROLL(TOKENS)
  for (u32 c = 0; c < TOKENS; c++) {
    u64 at = (u64)token[c] * cells + first;
    codes[c] = static_cast<const i32x4*>(p.x) + at * 2;
    scales[c] = p.scales + at;
  }
  UNROLL(BATCH)
  for (u32 i = 0; i < BATCH; i++) {
    QuantCell<F> weight[TILES];
    UNROLL(TILES)
    for (u32 t = 0; t < TILES; t++) weight[t] = decode<F>(raw[i][t]);
    UNROLL(TOKENS)
    for (u32 c = 0; c < TOKENS; c++) {
      i32x4 low = codes[c][i * 2], high = codes[c][i * 2 + 1];
      i32 x[8] = {low.v[0], low.v[1], low.v[2], low.v[3], high.v[0], high.v[1], high.v[2], high.v[3]};
      InputCell input = scales[c][i];
      UNROLL(TILES)
      for (u32 t = 0; t < TILES; t++) sum[t][c] = add_cell<F>(weight[t], x, input, sum[t][c]);
    }
  }
}

// Adds cells `first` to `last`: batches of BATCH while there are as many, then smaller ones.
template <class F, u32 BATCH, u32 TOKENS, u32 TILES>
DEVICE void sum_quantised(const Product& p, const u8* const* tile, u32 row, u32 first, u32 last, const u32* token,
                          float (*sum)[TOKENS]) {
  UNROLL(1)
  for (; first + BATCH <= last; first += BATCH) add_cells<F, BATCH, TOKENS, TILES>(p, tile, row, first, token, sum);
  if constexpr (BATCH > 1) sum_quantised<F, BATCH / 2, TOKENS, TILES>(p, tile, row, first, last, token, sum);
}

template <u32 PIECE>
DEVICE void load_inputs(const float* from, float* x) {
  UNROLL(PIECE)
  for (u32 i = 0; i < PIECE; i += 4) {
    f32x4 values = *reinterpret_cast<const f32x4*>(from + i);
    for (u32 n = 0; n < 4; n++) x[i + n] = values.v[n];
  }
}

// Whole cells of floating-point weights.
template <class F, u32 TOKENS, u32 TILES>
DEVICE void sum_floats(const Product& p, const u8* const* tile, u32 row, u32 first, u32 last, const u32* token,
                       float (*sum)[TOKENS]) {
  constexpr u32 PIECE = 16 / sizeof(typename F::Value), PIECES = CELL / PIECE;
  constexpr u32 AHEAD = 4;  // pieces that a thread asks for before it uses the first
  UNROLL(1)
  for (u32 cell = first; cell < last; cell++) {
    float t[TILES][TOKENS] = {};
    UNROLL(1)
    for (u32 start = 0; start < PIECES; start += AHEAD) {
      i32x4 raw[TILES][AHEAD];
      UNROLL(TILES)
      for (u32 n = 0; n < TILES; n++) {
        UNROLL(AHEAD)
        for (u32 i = 0; i < AHEAD; i++) raw[n][i] = load_piece(tile[n], (u64)cell * PIECES + start + i, row);
      }
      loads_under_way();
      UNROLL(AHEAD)
      for (u32 i = 0; i < AHEAD; i++) {
        float weight[TILES][PIECE];
        UNROLL(TILES)
        for (u32 n = 0; n < TILES; n++) decode_piece<F>(raw[n][i], weight[n]);
        UNROLL(TOKENS)
        for (u32 c = 0; c < TOKENS; c++) {
          const float* x = static_cast<const float*>(p.x) + (u64)token[c] * p.columns;
          float of_piece[PIECE];
          load_inputs<PIECE>(x + cell * CELL + (start + i) * PIECE, of_piece);
          UNROLL(TILES)
          for (u32 n = 0; n < TILES; n++) {
            UNROLL(PIECE)
            for (u32 k = 0; k < PIECE; k++) t[n][c] = fused_multiply_add(weight[n][k], of_piece[k], t[n][c]);
          }
        }
      }
    }
    UNROLL(TILES)
    for (u32 n = 0; n < TILES; n++) {
      UNROLL(TOKENS)
      for (u32 c = 0; c < TOKENS; c++) sum[n][c] += t[n][c];
    }
  }
}

// The same where the last cell is cut, column by column.
template <class F, u32 TOKENS, u32 TILES>
DEVICE void sum_cut_floats(const Product& p, const u8* const* tile, u32 row, u32 first, u32 last, const u32* token,
                           float (*sum)[TOKENS]) {
  UNROLL(1)
  for (u32 cell = first; cell < last; cell++) {
    float t[TILES][TOKENS] = {};
    UNROLL(1)
    for (u32 column = cell * CELL; column < smaller(cell * CELL + CELL, p.columns); column++) {
      float weight[TILES];
      UNROLL(TILES)
      for (u32 n = 0; n < TILES; n++) weight[n] = load_value<F>(tile[n], column, row);
      UNROLL(TOKENS)
      for (u32 c = 0; c < TOKENS; c++) {
        float x = static_cast<const float*>(p.x)[(u64)token[c] * p.columns + column];
        UNROLL(TILES)
        for (u32 n = 0; n < TILES; n++) t[n][c] = fused_multiply_add(weight[n], x, t[n][c]);
      }
    }
    UNROLL(TILES)
    for (u32 n = 0; n < TILES; n++) {
      UNROLL(TOKENS)
      for (u32 c = 0; c < TOKENS; c++) sum[n][c] += t[n][c];
    }
  }
}

DEVICE void write_output(const Product& p, u32 token, u32 row, float value) {
  float* out = p.out + (u64)token * p.rows + row;
  if (p.bias != nullptr) value += p.bias[row];
  *out = p.add ? *out + value : value;
}

// Sums of a row of each tile, slice by slice of the columns, into `part`, [SLICES][TOKENS][TILES * TILE_ROWS]. 16 lanes side
// by side read the rows of a cell; the groups of 16 of a block share the slices.
template <class F, u32 TOKENS, u32 TILES>
DEVICE void sum_slices(const Product& p, const u8* const* tile, const u32* token, float* part) {
  constexpr u32 ROWS = TILES * TILE_ROWS;
  u32 row = thread_index() % TILE_ROWS, count = SLICES / (block_threads() / TILE_ROWS);
  u32 cells = (p.columns + CELL - 1) / CELL;
  u32 per_slice = (cells + SLICES - 1) / SLICES;
  UNROLL(1)
  for (u32 i = 0; i < count; i++) {
    u32 slice = thread_index() / TILE_ROWS * count + i;
    u32 first = smaller(slice * per_slice, cells), last = smaller(first + per_slice, cells);
    float sum[TILES][TOKENS] = {};
    if constexpr (F::QUANTISED) {
      constexpr u32 BATCH = TOKENS < 8 ? CELLS_AHEAD / TILES : 1;  // with more, AMD's registers would not hold it
      sum_quantised<F, BATCH, TOKENS, TILES>(p, tile, row, first, last, token, sum);
    } else if (p.columns % CELL == 0) {
      sum_floats<F, TOKENS, TILES>(p, tile, row, first, last, token, sum);
    } else {
      sum_cut_floats<F, TOKENS, TILES>(p, tile, row, first, last, token, sum);
    }
    UNROLL(TILES)
    for (u32 t = 0; t < TILES; t++) {
      UNROLL(TOKENS)
      for (u32 c = 0; c < TOKENS; c++) part[(slice * TOKENS + c) * ROWS + t * TILE_ROWS + row] = sum[t][c];
    }
  }
}

// The sum of an output's slices, which are `stride` apart.
DEVICE float add_slices(const float* part, u32 stride, u32 output) {
  float total = 0.0f;
  UNROLL(SLICES)
  for (u32 slice = 0; slice < SLICES; slice++) total += part[slice * stride + output];
  return total;
}

// The tiles of a block; the last one again where there are no more.
template <class F, u32 TILES>
DEVICE void tiles_of_block(const Product& p, const u8** tile) {
  u32 cells = (p.columns + CELL - 1) / CELL, last = (p.rows + TILE_ROWS - 1) / TILE_ROWS - 1;
  UNROLL(TILES)
  for (u32 t = 0; t < TILES; t++) tile[t] = p.weights + smaller(p.row_block * TILES + t, last) * tile_bytes<F>(cells);
}

// Adds the slices in `part`, [SLICES][TOKENS][STRIDE], of which ROWS are used, that the block's threads wrote.
template <u32 TOKENS, u32 ROWS, u32 STRIDE>
DEVICE void write_outputs(const Product& p, const float* part) {
  block_barrier();
  for (u32 output = thread_index(); output < TOKENS * ROWS; output += block_threads()) {
    u32 in_block = output % ROWS, in_group = output / ROWS;
    u32 row = p.row_block * ROWS + in_block, token = block_index_y() * TOKENS + in_group;
    if (row >= p.rows || token >= p.tokens) continue;
    write_output(p, token, row, add_slices(part, TOKENS * STRIDE, in_group * STRIDE + in_block));
  }
}

// Tiles of a block that multiplies TOKENS tokens.
DEVICE constexpr u32 matvec_tiles(u32 tokens) { return tokens < 4 ? 1 : 2; }

// A block of at most MATVEC_THREADS threads multiplies TILES tiles with TOKENS tokens.
template <class F, u32 TOKENS, u32 TILES>
DEVICE void matvec(const Product& p) {
  constexpr u32 ROWS = TILES * TILE_ROWS;
  const u8* tile[TILES];
  tiles_of_block<F, TILES>(p, tile);
  u32 token[TOKENS];  // the last one again where there are no more
  UNROLL(TOKENS)
  for (u32 c = 0; c < TOKENS; c++) token[c] = smaller(block_index_y() * TOKENS + c, p.tokens - 1);
  SHARED_ARRAY(float, part, SLICES * TOKENS * ROWS);
  sum_slices<F, TOKENS, TILES>(p, tile, token, part);
  write_outputs<TOKENS, ROWS, ROWS>(p, part);
}

// out[i] = row ids[i], a cell a thread.
template <class F>
DEVICE void embed(const u8* weights, const u32* ids, float* out, u32 columns) {
  u32 cells = (columns + CELL - 1) / CELL;
  u32 cell = block_index_y() * block_threads() + thread_index();
  if (cell >= cells) return;
  u32 id = ids[block_index_x()], row = id % TILE_ROWS;
  const u8* tile = weights + id / TILE_ROWS * tile_bytes<F>(cells);
  float* to = out + (u64)block_index_x() * columns + cell * CELL;
  if constexpr (F::QUANTISED) {
    QuantCell<F> weight = load_cell<F>(tile, cells, cell, row);
    UNROLL(CELL)  // all of it, or the codes would need addresses
    for (u32 i = 0; i < CELL; i++) {
      i32 steps = (i32)(i8)(weight.code[i / 4] >> i % 4 * 8) - F::BIAS;
      u32 run = i / (CELL / F::RUNS);
      float value = weight.scale[run] * (float)steps;
      if constexpr (F::HAS_MINS) value -= weight.min[run];
      to[i] = value;
    }
  } else {
    constexpr u32 PIECE = 16 / sizeof(typename F::Value);
    for (u32 k = 0; k < CELL; k += PIECE) {
      float values[PIECE];
      decode_piece<F>(load_piece(tile, (cell * CELL + k) / PIECE, row), values);
      for (u32 i = 0; i < PIECE; i++) {
        if (cell * CELL + k + i < columns) to[k + i] = values[i];
      }
    }
  }
}

// A block takes one tile; with many tokens two, which halves what it reads of the inputs.
#define MATVEC_KERNEL(name, Format, TOKENS)                                          \
  KERNEL(name, MATVEC_THREADS, PRODUCT_PARAMETERS) {                                 \
    constexpr u32 TILES = matvec_tiles(TOKENS);                                      \
    matvec<Format, TOKENS, TILES>(PRODUCT_OF_BLOCK(TILES * TILE_ROWS));              \
  }

// The entry points of a format: matvec_<name>_{1,2,4,8} and embed_<name>.
#define MATMUL_KERNELS(name, Format)                                                      \
  MATVEC_KERNEL(matvec_##name##_1, Format, 1)                                             \
  MATVEC_KERNEL(matvec_##name##_2, Format, 2)                                             \
  MATVEC_KERNEL(matvec_##name##_4, Format, 4)                                             \
  MATVEC_KERNEL(matvec_##name##_8, Format, 8)                                             \
  KERNEL(embed_##name, 64, const u8* weights, const u32* ids, float* out, u32 columns) {  \
    embed<Format>(weights, ids, out, columns);                                            \
  }
