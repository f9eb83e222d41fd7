// Products of a weight matrix with rows of inputs, and decoding of single rows, for every format of formats.h.
//
// An output is computed in one order, whatever the batch: the columns are cut into SLICES runs of whole cells; each run is
// summed cell after cell as the CPU does (kernels/src/matmul.rs); then the runs are added in order.
#pragma once

#include "formats.h"

static constexpr u32 SLICES = 16;

// Scale and sums of a cell of 8-bit inputs.
struct alignas(8) InputCell {
  float scale;
  u32 sums;  // of the first 16 codes, of the second 16: i16 each
};

struct Product {
  const u8* weights;
  const void* x;            // codes (i8) for quantised weights, else values (f32): [tokens][columns]
  const InputCell* scales;  // [tokens][cells], for quantised weights
  float* out;               // [tokens][rows]
  const float* bias;        // [rows], or null
  u32 rows, columns, tokens;
  u32 add;  // 1 to add to what is in out
};

DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

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

template <class F, u32 COLUMNS>
DEVICE void sum_quantised(const Product& p, const u8* tile, u32 row, u32 first, u32 last, const u32* token, float* sum) {
  u32 cells = p.columns / CELL;
  for (u32 cell = first; cell < last; cell++) {
    QuantCell<F> weight = load_cell<F>(tile, cells, cell, row);
    UNROLL(COLUMNS)
    for (u32 c = 0; c < COLUMNS; c++) {
      u64 at = (u64)token[c] * cells + cell;
      const i32x4* codes = static_cast<const i32x4*>(p.x) + at * 2;
      i32x4 low = codes[0], high = codes[1];
      i32 x[8] = {low.v[0], low.v[1], low.v[2], low.v[3], high.v[0], high.v[1], high.v[2], high.v[3]};
      sum[c] = add_cell<F>(weight, x, p.scales[at], sum[c]);
    }
  }
}

// Four inputs of a token from column `k` on, zeros beyond the last column.
DEVICE void load_inputs(const float* row, u32 k, u32 columns, float* x) {
  if (columns % 4 == 0) {
    f32x4 values = k < columns ? *reinterpret_cast<const f32x4*>(row + k) : f32x4{{0.0f, 0.0f, 0.0f, 0.0f}};
    for (u32 i = 0; i < 4; i++) x[i] = values.v[i];
  } else {
    for (u32 i = 0; i < 4; i++) x[i] = k + i < columns ? row[k + i] : 0.0f;
  }
}

template <class F, u32 COLUMNS>
DEVICE void sum_floats(const Product& p, const u8* tile, u32 row, u32 first, u32 last, const u32* token, float* sum) {
  for (u32 cell = first; cell < last; cell++) {
    float t[COLUMNS] = {};
    UNROLL(1)  // unrolled, uniform inputs would fill the scalar registers of AMD
    for (u32 k = 0; k < CELL; k += 4) {
      float weight[4];
      load_floats<F>(tile, cell, row, k, weight);
      UNROLL(COLUMNS)
      for (u32 c = 0; c < COLUMNS; c++) {
        float x[4];
        load_inputs(static_cast<const float*>(p.x) + (u64)token[c] * p.columns, cell * CELL + k, p.columns, x);
        for (u32 i = 0; i < 4; i++) t[c] = fused_multiply_add(weight[i], x[i], t[c]);
      }
    }
    UNROLL(COLUMNS)
    for (u32 c = 0; c < COLUMNS; c++) sum[c] += t[c];
  }
}

DEVICE void write_output(const Product& p, u32 token, u32 row, float value) {
  float* out = p.out + (u64)token * p.rows + row;
  if (p.bias != nullptr) value += p.bias[row];
  *out = p.add ? *out + value : value;
}

// A block of TILE_ROWS * SLICES threads multiplies one tile with COLUMNS tokens: 16 lanes side by side read the rows of a
// cell, each group of 16 has a slice of the columns.
template <class F, u32 COLUMNS>
DEVICE void matvec(const Product& p) {
  u32 row = thread_index() % TILE_ROWS, slice = thread_index() / TILE_ROWS;
  u32 cells = (p.columns + CELL - 1) / CELL;
  u32 per_slice = (cells + SLICES - 1) / SLICES;
  u32 first = smaller(slice * per_slice, cells), last = smaller(first + per_slice, cells);
  const u8* tile = p.weights + block_index_x() * tile_bytes<F>(cells);
  u32 token[COLUMNS];  // the last one again where there are no more
  UNROLL(COLUMNS)
  for (u32 c = 0; c < COLUMNS; c++) token[c] = smaller(block_index_y() * COLUMNS + c, p.tokens - 1);
  float sum[COLUMNS] = {};
  if constexpr (F::QUANTISED) {
    sum_quantised<F, COLUMNS>(p, tile, row, first, last, token, sum);
  } else {
    sum_floats<F, COLUMNS>(p, tile, row, first, last, token, sum);
  }
  SHARED_ARRAY(float, part, SLICES * COLUMNS * TILE_ROWS);
  UNROLL(COLUMNS)
  for (u32 c = 0; c < COLUMNS; c++) part[(slice * COLUMNS + c) * TILE_ROWS + row] = sum[c];
  block_barrier();
  u32 column = thread_index() / TILE_ROWS;
  u32 out_row = block_index_x() * TILE_ROWS + row, out_token = block_index_y() * COLUMNS + column;
  if (column >= COLUMNS || out_row >= p.rows || out_token >= p.tokens) return;
  float total = 0.0f;
  for (u32 s = 0; s < SLICES; s++) total += part[(s * COLUMNS + column) * TILE_ROWS + row];
  write_output(p, out_token, out_row, total);
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
    for (u32 k = 0; k < CELL; k += 4) {
      float values[4];
      load_floats<F>(tile, cell, row, k, values);
      for (u32 i = 0; i < 4; i++) {
        if (cell * CELL + k + i < columns) to[k + i] = values[i];
      }
    }
  }
}

#define MATVEC_KERNEL(name, Format, COLUMNS)                                                                             \
  KERNEL(name, TILE_ROWS* SLICES, const u8* weights, const void* x, const InputCell* scales, float* out,                  \
         const float* bias, u32 rows, u32 columns, u32 tokens, u32 add) {                                                 \
    matvec<Format, COLUMNS>(Product{weights, x, scales, out, bias, rows, columns, tokens, add});                          \
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
