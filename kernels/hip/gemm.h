// Products with many rows of inputs at once, on the matrix units, for the quantised formats.
//
// A block multiplies GEMM_ROWS rows of weights with GEMM_TOKENS tokens, STAGE cells at a time through shared memory. Codes
// are multiplied as bytes with exact integer sums, and scaled and added per cell in the order of matmul.h: the same bits.
#pragma once

#include "few.h"
#include "gated.h"

static constexpr u32 GEMM_THREADS = 256;
static constexpr u32 GEMM_ROWS = 64;
static constexpr u32 GEMM_TOKENS = 128;
static constexpr u32 STAGE = 4;  // cells
static constexpr u32 GEMM_WAVES = GEMM_THREADS / WAVE;
static constexpr u32 ROW_WAVES = GEMM_ROWS / MMA_SIDE;          // waves side by side in the direction of the rows
static constexpr u32 TOKEN_WAVES = GEMM_WAVES / ROW_WAVES;
static constexpr u32 WAVE_TILES = GEMM_TOKENS / MMA_SIDE / TOKEN_WAVES;  // products of 16 x 16 of a wave

// A stage in shared memory. Rows are 16 bytes longer than their data, so that the lanes of a load meet different banks.
// A cell of several runs is stored once per run, with zeros in the place of the others.
template <class F>
struct Stage {
  static constexpr u32 WEIGHT_STRIDE = STAGE * F::RUNS * CELL + 16;
  static constexpr u32 INPUT_STRIDE = STAGE * CELL + 16;
  static constexpr u32 SCALES = F::RUNS * (F::HAS_MINS ? 2 : 1);
  i8* weights;    // [GEMM_ROWS][WEIGHT_STRIDE]
  i8* inputs;     // [GEMM_TOKENS][INPUT_STRIDE]
  float* scales;  // [GEMM_ROWS][STAGE][SCALES]: of the runs, then their mins
  float* facts;   // [GEMM_TOKENS][STAGE][1 + RUNS]: the scale, then minus the sums of the runs
};

// A thread decodes one row of one cell: lanes side by side take the rows of a tile.
template <class F>
DEVICE void stage_weights(const Product& p, const Stage<F>& stage, u32 cells, u32 first) {
  static_assert(GEMM_ROWS * STAGE == GEMM_THREADS, "a cell's row for each thread");
  u32 row = thread_index() % TILE_ROWS, place = thread_index() / TILE_ROWS % STAGE;
  u32 tile = thread_index() / TILE_ROWS / STAGE, in_block = tile * TILE_ROWS + row;
  u32 cell = smaller(first + place, cells - 1);  // what is staged beyond the last cell is not used
  u32 tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
  u32 at = smaller(p.row_block * (GEMM_ROWS / TILE_ROWS) + tile, tiles - 1);
  QuantCell<F> weight = load_cell<F>(p.weights + at * tile_bytes<F>(cells), cells, cell, row);
  i32x4* to = reinterpret_cast<i32x4*>(stage.weights + in_block * Stage<F>::WEIGHT_STRIDE + place * F::RUNS * CELL);
  for (u32 run = 0; run < F::RUNS; run++) {
    for (u32 half = 0; half < 2; half++) {
      i32x4 words;
      bool here = F::RUNS == 1 || run == half;
      for (u32 i = 0; i < 4; i++) words.v[i] = here ? weight.code[half * 4 + i] : 0;
      to[run * 2 + half] = words;
    }
    float* scales = stage.scales + (in_block * STAGE + place) * Stage<F>::SCALES;
    scales[run] = weight.scale[run];
    if constexpr (F::HAS_MINS) scales[F::RUNS + run] = weight.min[run];
  }
}

template <class F>
DEVICE void stage_inputs(const Product& p, const Stage<F>& stage, u32 cells, u32 first) {
  constexpr u32 PIECES = STAGE * CELL / 16;  // of 16 bytes, in a row
  for (u32 i = thread_index(); i < GEMM_TOKENS * PIECES; i += GEMM_THREADS) {
    u32 token = smaller(block_index_y() * GEMM_TOKENS + i / PIECES, p.tokens - 1);
    u32 piece = smaller(first * 2 + i % PIECES, cells * 2 - 1);
    i32x4 codes = static_cast<const i32x4*>(p.x)[(u64)token * cells * 2 + piece];
    *reinterpret_cast<i32x4*>(stage.inputs + i / PIECES * Stage<F>::INPUT_STRIDE + i % PIECES * 16) = codes;
  }
  for (u32 i = thread_index(); i < GEMM_TOKENS * STAGE; i += GEMM_THREADS) {
    u32 token = smaller(block_index_y() * GEMM_TOKENS + i / STAGE, p.tokens - 1);
    InputCell input = p.scales[(u64)token * cells + smaller(first + i % STAGE, cells - 1)];
    i32 sums[2] = {(i32)(i16)input.sums, (i32)input.sums >> 16};
    float* facts = stage.facts + i * (1 + F::RUNS);
    facts[0] = input.scale;
    if constexpr (F::RUNS == 1) {
      facts[1] = (float)-(sums[0] + sums[1]);
    } else {
      facts[1] = (float)-sums[0];
      facts[2] = (float)-sums[1];
    }
  }
}

// Adds one cell to the sums of a wave's products.
template <class F>
DEVICE void gemm_cell(const Stage<F>& stage, u32 place, float (*sum)[MMA_VALUES]) {
  u32 first_row = wave_index() % ROW_WAVES * MMA_SIDE;
  u32 first_token = wave_index() / ROW_WAVES * WAVE_TILES * MMA_SIDE;
  MmaI8 weights[F::RUNS];
  for (u32 run = 0; run < F::RUNS; run++) {
    weights[run] = mma_load(stage.weights + first_row * Stage<F>::WEIGHT_STRIDE + (place * F::RUNS + run) * CELL,
                            Stage<F>::WEIGHT_STRIDE);
  }
  float scales[MMA_VALUES][Stage<F>::SCALES];
  UNROLL(MMA_VALUES)
  for (u32 i = 0; i < MMA_VALUES; i++) {
    const float* from = stage.scales + ((first_row + mma_row(i)) * STAGE + place) * Stage<F>::SCALES;
    for (u32 n = 0; n < Stage<F>::SCALES; n++) scales[i][n] = from[n];
  }
  UNROLL(WAVE_TILES)
  for (u32 tile = 0; tile < WAVE_TILES; tile++) {
    u32 token = first_token + tile * MMA_SIDE;
    MmaI8 inputs = mma_load(stage.inputs + token * Stage<F>::INPUT_STRIDE + place * CELL, Stage<F>::INPUT_STRIDE);
    MmaSumI32 dots[F::RUNS];
    for (u32 run = 0; run < F::RUNS; run++) {
      UNROLL(MMA_VALUES)
      for (u32 i = 0; i < MMA_VALUES; i++) dots[run].value[i] = 0;
      mma(dots[run], weights[run], inputs);
    }
    UNROLL(MMA_VALUES)
    for (u32 i = 0; i < MMA_VALUES; i++) {
      const float* facts = stage.facts + ((token + mma_column(i)) * STAGE + place) * (1 + F::RUNS);
      float t = 0.0f;
      if constexpr (F::HAS_MINS) {
        t = scales[i][F::RUNS] * facts[1];
        if constexpr (F::RUNS == 2) t = fused_multiply_add(scales[i][F::RUNS + 1], facts[2], t);
      }
      for (u32 run = 0; run < F::RUNS; run++) {
        float dot = (float)dots[run].value[i];
        // Whole numbers below 2^24: exact.
        if constexpr (F::BIAS != 0) dot = fused_multiply_add((float)F::BIAS, facts[1 + run], dot);
        bool first = run == 0 && !F::HAS_MINS;
        t = first ? scales[i][run] * dot : fused_multiply_add(scales[i][run], dot, t);
      }
      sum[tile][i] = fused_multiply_add(facts[0], t, sum[tile][i]);
    }
  }
}

template <class F>
DEVICE void gemm(const Product& p) {
  SHARED_ARRAY(i32x4, weights, GEMM_ROWS * Stage<F>::WEIGHT_STRIDE / 16);
  SHARED_ARRAY(i32x4, inputs, GEMM_TOKENS * Stage<F>::INPUT_STRIDE / 16);
  SHARED_ARRAY(float, scales, GEMM_ROWS * STAGE * Stage<F>::SCALES);
  SHARED_ARRAY(float, facts, GEMM_TOKENS * STAGE * (1 + F::RUNS));
  Stage<F> stage{reinterpret_cast<i8*>(weights), reinterpret_cast<i8*>(inputs), scales, facts};
  u32 cells = p.columns / CELL, per_slice = (cells + SLICES - 1) / SLICES, left = per_slice;
  float sum[WAVE_TILES][MMA_VALUES] = {}, total[WAVE_TILES][MMA_VALUES] = {};
  for (u32 first = 0; first < cells; first += STAGE) {
    block_barrier();  // the last stage is done with
    stage_weights<F>(p, stage, cells, first);
    stage_inputs<F>(p, stage, cells, first);
    block_barrier();
    for (u32 place = 0; place < STAGE; place++) {
      if (first + place >= cells) break;
      gemm_cell<F>(stage, place, sum);
      if (--left != 0 && first + place + 1 != cells) continue;
      left = per_slice;  // the slice is complete
      UNROLL(WAVE_TILES)
      for (u32 tile = 0; tile < WAVE_TILES; tile++) {
        UNROLL(MMA_VALUES)
        for (u32 i = 0; i < MMA_VALUES; i++) total[tile][i] += sum[tile][i], sum[tile][i] = 0.0f;
      }
    }
  }
  u32 first_row = p.row_block * GEMM_ROWS + wave_index() % ROW_WAVES * MMA_SIDE;
  u32 first_token = block_index_y() * GEMM_TOKENS + wave_index() / ROW_WAVES * WAVE_TILES * MMA_SIDE;
  UNROLL(WAVE_TILES)
  for (u32 tile = 0; tile < WAVE_TILES; tile++) {
    UNROLL(MMA_VALUES)
    for (u32 i = 0; i < MMA_VALUES; i++) {
      u32 row = first_row + mma_row(i), token = first_token + tile * MMA_SIDE + mma_column(i);
      if (row < p.rows && token < p.tokens) write_output(p, token, row, total[tile][i]);
    }
  }
}

// The entry points of a quantised format: those of MATMUL_KERNELS, few_<name>_{8,16}, gated_<name> and gemm_<name>.
#define QUANT_KERNELS(name, Format)                                                                    \
  MATMUL_KERNELS(name, Format)                                                                         \
  FEW_KERNEL(few_##name##_8, Format, 8)                                                                \
  FEW_KERNEL(few_##name##_16, Format, 16)                                                              \
  GATED_KERNEL(gated_##name, Format)                                                                   \
  KERNEL(gemm_##name, GEMM_THREADS, PRODUCT_PARAMETERS) { gemm<Format>(PRODUCT_OF_BLOCK(GEMM_ROWS)); }
