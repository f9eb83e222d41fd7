// Products with many rows of inputs at once for floating-point weights: in f32 on the common units, for exactness.
//
// A block multiplies FLOAT_ROWS rows with FLOAT_TOKENS tokens, a cell at a time through shared memory, in which columns lie
// apart and rows and tokens side by side; a thread has eight rows and four tokens in registers. Values are multiplied and
// added in the order of matmul.h: the same bits.
#pragma once

#include "matmul.h"

static constexpr u32 FLOAT_THREADS = 256, FLOAT_ROWS = 128, FLOAT_TOKENS = 64;
static constexpr u32 THREAD_ROWS = 8, THREAD_TOKENS = 4;
static constexpr u32 ROW_THREADS = FLOAT_ROWS / THREAD_ROWS;  // side by side in the direction of the rows
static_assert(ROW_THREADS * (FLOAT_TOKENS / THREAD_TOKENS) == FLOAT_THREADS, "a thread has a tile");

// Strides in shared memory: 16-byte aligned, and other than whole rounds of the banks.
static constexpr u32 WEIGHT_STRIDE = FLOAT_ROWS + 4, INPUT_STRIDE = FLOAT_TOKENS + 4;

// A thread's share of the next cell, on its way from global memory: groups of four columns.
static constexpr u32 WEIGHT_GROUPS = FLOAT_ROWS * CELL / 4 / FLOAT_THREADS;
static constexpr u32 INPUT_GROUPS = FLOAT_TOKENS * CELL / 4 / FLOAT_THREADS;
template <class F>
struct FloatsAhead {
  RawFloats<F> weights[WEIGHT_GROUPS];
  float inputs[INPUT_GROUPS][4];
};

// Four inputs of a token from column `k` on, zeros beyond the last column.
DEVICE void load_four_inputs(const float* row, u32 k, u32 columns, float* x) {
  if (columns % 4 == 0) {
    f32x4 values = k < columns ? *reinterpret_cast<const f32x4*>(row + k) : f32x4{{0.0f, 0.0f, 0.0f, 0.0f}};
    for (u32 i = 0; i < 4; i++) x[i] = values.v[i];
  } else {
    for (u32 i = 0; i < 4; i++) x[i] = k + i < columns ? row[k + i] : 0.0f;
  }
}

// Lanes side by side take the rows of a tile; what lies beyond the last row, token or cell is read as the last one, and not
// used.
template <class F>
DEVICE void fetch_ahead(const Product& p, u32 cell, FloatsAhead<F>& ahead) {
  u32 cells = (p.columns + CELL - 1) / CELL, tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
  cell = smaller(cell, cells - 1);
  UNROLL(4)
  for (u32 i = 0; i < WEIGHT_GROUPS; i++) {
    u32 group = thread_index() + i * FLOAT_THREADS, row = group % FLOAT_ROWS;
    u32 tile = smaller(p.row_block * (FLOAT_ROWS / TILE_ROWS) + row / TILE_ROWS, tiles - 1);
    const u8* rows = p.weights + tile * tile_bytes<F>(cells);
    ahead.weights[i] = fetch_floats<F>(rows, cell, row % TILE_ROWS, group / FLOAT_ROWS * 4);
  }
  UNROLL(4)
  for (u32 i = 0; i < INPUT_GROUPS; i++) {
    u32 group = thread_index() + i * FLOAT_THREADS;
    u32 token = smaller(block_index_y() * FLOAT_TOKENS + group / (CELL / 4), p.tokens - 1);
    const float* row = static_cast<const float*>(p.x) + (u64)token * p.columns;
    load_four_inputs(row, cell * CELL + group % (CELL / 4) * 4, p.columns, ahead.inputs[i]);
  }
}

template <class F>
DEVICE void store_ahead(const FloatsAhead<F>& ahead, float* weights, float* inputs) {
  UNROLL(4)
  for (u32 i = 0; i < WEIGHT_GROUPS; i++) {
    u32 group = thread_index() + i * FLOAT_THREADS, column = group / FLOAT_ROWS * 4;
    float* to = weights + column * WEIGHT_STRIDE + group % FLOAT_ROWS;
    for (u32 n = 0; n < 4; n++) to[n * WEIGHT_STRIDE] = decode_float<F>(ahead.weights[i], n);
  }
  UNROLL(4)
  for (u32 i = 0; i < INPUT_GROUPS; i++) {
    u32 group = thread_index() + i * FLOAT_THREADS, column = group % (CELL / 4) * 4;
    for (u32 n = 0; n < 4; n++) inputs[(column + n) * INPUT_STRIDE + group / (CELL / 4)] = ahead.inputs[i][n];
  }
}

template <class F>
DEVICE void gemm_floats(const Product& p) {
  SHARED_ARRAY(f32x4, weight_memory, CELL * WEIGHT_STRIDE / 4);
  SHARED_ARRAY(f32x4, input_memory, CELL * INPUT_STRIDE / 4);
  float* weights = reinterpret_cast<float*>(weight_memory);
  float* inputs = reinterpret_cast<float*>(input_memory);
  // A thread's rows are four, and four in the other half: lanes side by side read 16 bytes side by side.
  u32 row = thread_index() % ROW_THREADS * 4, token = thread_index() / ROW_THREADS * THREAD_TOKENS;
  u32 cells = (p.columns + CELL - 1) / CELL, per_slice = (cells + SLICES - 1) / SLICES, left = per_slice;
  float sum[THREAD_ROWS][THREAD_TOKENS] = {}, total[THREAD_ROWS][THREAD_TOKENS] = {};
  FloatsAhead<F> ahead;
  fetch_ahead<F>(p, 0, ahead);
  for (u32 cell = 0; cell < cells; cell++) {
    block_barrier();  // the last cell is done with
    store_ahead<F>(ahead, weights, inputs);
    block_barrier();
    fetch_ahead<F>(p, cell + 1, ahead);
    float t[THREAD_ROWS][THREAD_TOKENS] = {};
    UNROLL(4)
    for (u32 k = 0; k < CELL; k++) {
      f32x4 low = *reinterpret_cast<const f32x4*>(weights + k * WEIGHT_STRIDE + row);
      f32x4 high = *reinterpret_cast<const f32x4*>(weights + k * WEIGHT_STRIDE + FLOAT_ROWS / 2 + row);
      f32x4 x = *reinterpret_cast<const f32x4*>(inputs + k * INPUT_STRIDE + token);
      UNROLL(8)
      for (u32 r = 0; r < THREAD_ROWS; r++) {
        float weight = r < 4 ? low.v[r % 4] : high.v[r % 4];
        UNROLL(4)
        for (u32 n = 0; n < THREAD_TOKENS; n++) t[r][n] = fused_multiply_add(weight, x.v[n], t[r][n]);
      }
    }
    bool ends = --left == 0 || cell + 1 == cells;  // the slice is complete
    if (ends) left = per_slice;
    UNROLL(8)
    for (u32 r = 0; r < THREAD_ROWS; r++) {
      UNROLL(4)
      for (u32 n = 0; n < THREAD_TOKENS; n++) {
        sum[r][n] += t[r][n];
        if (ends) total[r][n] += sum[r][n], sum[r][n] = 0.0f;
      }
    }
  }
  UNROLL(8)
  for (u32 r = 0; r < THREAD_ROWS; r++) {
    u32 out_row = p.row_block * FLOAT_ROWS + r / 4 * (FLOAT_ROWS / 2) + row + r % 4;
    UNROLL(4)
    for (u32 n = 0; n < THREAD_TOKENS; n++) {
      u32 out_token = block_index_y() * FLOAT_TOKENS + token + n;
      if (out_row < p.rows && out_token < p.tokens) write_output(p, out_token, out_row, total[r][n]);
    }
  }
}

// The entry points of a floating-point format: those of MATMUL_KERNELS and gemm_many_<name>.
#define FLOAT_KERNELS(name, Format)                                            \
  MATMUL_KERNELS(name, Format)                                                 \
  KERNEL_TOGETHER(gemm_many_##name, FLOAT_THREADS, 2, PRODUCT_PARAMETERS) {    \
    gemm_floats<Format>(PRODUCT_OF_BLOCK(FLOAT_ROWS));                         \
  }
