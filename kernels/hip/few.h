// Products with up to 16 rows of inputs at once, on the matrix units, for the quantised formats.
//
// A wave multiplies one cell of a tile with all tokens at a time: codes go from memory to the matrix units without a stop in
// shared memory, and are scaled and added in the order of matmul.h: the same bits. The lanes decode the scales of as many
// cells as the wave has times 16 lanes, a row of one cell each, and hand them to each other.
#pragma once

#include "matmul.h"
#include "mma.h"

static constexpr u32 FEW_THREADS = 256;
static constexpr u32 FEW_WAVES = FEW_THREADS / WAVE;
static constexpr u32 FEW_TILES = 2;             // of a block: what a wave reads of the inputs serves both
static constexpr u32 GROUP = WAVE / TILE_ROWS;  // cells of a step of a wave

// Steps whose weights a wave asks for before it uses the first: as many as registers allow.
template <class F>
DEVICE constexpr u32 few_steps(u32 tokens) {
  return MMA_ROWS == 2 && (tokens <= 8 || F::RUNS == 2) ? 2 : 1;
}

// The weights of a step.
template <class F>
struct FewWeights {
  RawCodes<F, MMA_LANE_WORDS> codes[GROUP][MMA_LANE_ROWS];
  RawScales scales;  // of row lane % 16 of cell lane / 16
};

// A lane's words of a cell of inputs.
DEVICE void load_codes(const i32* from, i32* words) {
  if constexpr (MMA_LANE_WORDS == 2) {
    i32x2 two = *reinterpret_cast<const i32x2*>(from);
    for (u32 i = 0; i < 2; i++) words[i] = two.v[i];
  } else {
    for (u32 piece = 0; piece < MMA_LANE_WORDS; piece += 4) {
      i32x4 four = *reinterpret_cast<const i32x4*>(from + piece);
      for (u32 i = 0; i < 4; i++) words[piece + i] = four.v[i];
    }
  }
}

// What the lanes know of a step's cells, one row and one token of one cell each.
template <class F>
struct FewScales {
  float scale[F::RUNS], min[F::RUNS];
};
template <class F>
struct FewFacts {
  float scale, sum[F::RUNS];  // the sums of the runs' codes, negative
};

template <class F>
DEVICE FewFacts<F> decode_input(InputCell input) {
  FewFacts<F> out;
  out.scale = input.scale;
  i32 sums[2] = {(i32)(i16)input.sums, (i32)input.sums >> 16};
  if constexpr (F::RUNS == 1) {
    out.sum[0] = (float)-(sums[0] + sums[1]);
  } else {
    for (u32 run = 0; run < 2; run++) out.sum[run] = (float)-sums[run];
  }
  return out;
}

// Of inputs with words from `first` on, those of one run; zeros in the place of the others.
template <class F>
DEVICE MmaI8 few_inputs(const i32 (*words)[MMA_LANE_WORDS], u32 first, u32 run) {
  if constexpr (F::RUNS == 1) {
    return mma_right(words);
  } else {
    i32 of_run[MMA_LANE_ROWS][MMA_LANE_WORDS];
    for (u32 n = 0; n < MMA_LANE_ROWS; n++) {
      for (u32 i = 0; i < MMA_LANE_WORDS; i++) of_run[n][i] = (first + i) / 4 == run ? words[n][i] : 0;
    }
    return mma_right(of_run);
  }
}

// Adds one cell of each tile, number `place` of its step, to the sums of a wave's products.
template <class F, u32 VALUES, u32 TILES>
DEVICE void add_few(const FewWeights<F>* raw, const i32 (*x)[MMA_LANE_WORDS], const FewScales<F>* scales,
                    const FewFacts<F>& facts, u32 place, float (*sum)[VALUES]) {
  constexpr u32 COLUMNS = mma_value_column(VALUES - 1) + 1;
  FewFacts<F> input[COLUMNS];
  UNROLL(COLUMNS)
  for (u32 n = 0; n < COLUMNS; n++) {
    u32 lane = place * TILE_ROWS + mma_column(mma_with_column(n));
    input[n].scale = wave_shuffle(facts.scale, lane);
    for (u32 run = 0; run < F::RUNS; run++) {
      if constexpr (F::HAS_MINS || F::BIAS != 0) input[n].sum[run] = wave_shuffle(facts.sum[run], lane);
    }
  }
  UNROLL(TILES)
  for (u32 tile = 0; tile < TILES; tile++) {
    i32 codes[MMA_LANE_ROWS][MMA_LANE_WORDS];
    UNROLL(MMA_LANE_ROWS)
    for (u32 n = 0; n < MMA_LANE_ROWS; n++) {
      decode_codes<F, MMA_LANE_WORDS>(raw[tile].codes[place][n], mma_lane_word(), codes[n]);
    }
    MmaI8 weights = mma_left(codes);
    MmaSumI32 dots[F::RUNS];
    UNROLL(2)
    for (u32 run = 0; run < F::RUNS; run++) {
      dots[run] = mma_dot(weights, few_inputs<F>(x, mma_lane_word(), run), 0);
    }
    FewScales<F> row[MMA_ROWS];
    UNROLL(MMA_ROWS)
    for (u32 n = 0; n < MMA_ROWS; n++) {
      u32 lane = place * TILE_ROWS + mma_row(mma_with_row(n));
      for (u32 run = 0; run < F::RUNS; run++) {
        row[n].scale[run] = wave_shuffle(scales[tile].scale[run], lane);
        if constexpr (F::HAS_MINS) row[n].min[run] = wave_shuffle(scales[tile].min[run], lane);
      }
    }
    UNROLL(VALUES)
    for (u32 i = 0; i < VALUES; i++) {
      const FewScales<F>& weight = row[mma_value_row(i)];
      const FewFacts<F>& token = input[mma_value_column(i)];
      float t = 0.0f;
      for (u32 run = 0; run < F::RUNS; run++) {
        float dot = (float)dots[run].value[i];
        // Whole numbers below 2^24: exact.
        if constexpr (F::BIAS != 0) dot = fused_multiply_add((float)F::BIAS, token.sum[run], dot);
        t = run == 0 ? weight.scale[run] * dot : fused_multiply_add(weight.scale[run], dot, t);
      }
      if constexpr (F::HAS_MINS) {
        for (u32 run = 0; run < F::RUNS; run++) t = fused_multiply_add(weight.min[run], token.sum[run], t);
      }
      sum[tile][i] = fused_multiply_add(token.scale, t, sum[tile][i]);
    }
  }
}

// Where a lane finds the inputs.
struct FewInputs {
  const i32* codes[MMA_LANE_ROWS];  // its words of its tokens
  const InputCell* cells;           // of token lane % 16
};

// Adds cells of TILES tiles from `first` on: STEPS steps, all of whose weights are asked for before the first is used; or
// of one step those that are `LEFT` to the end of a slice.
template <class F, u32 VALUES, u32 TILES, u32 STEPS, u32 LEFT>
DEVICE void add_few_steps(const u8* const* tile, u32 cells, const FewInputs& inputs, u32 first, float (*sum)[VALUES]) {
  static_assert(STEPS == 1 || LEFT == GROUP, "only the last step is cut");
  u32 lane_cell = smaller(lane_index() / TILE_ROWS, LEFT - 1);
  FewWeights<F> weights[STEPS][TILES];
  UNROLL(TILES)
  for (u32 t = 0; t < TILES; t++) {
    UNROLL(MMA_LANE_ROWS)
    for (u32 n = 0; n < MMA_LANE_ROWS; n++) {
      CellCursor<F> at(tile[t], cells, first, mma_lane_row(n));
      UNROLL(STEPS * GROUP)
      for (u32 i = 0; i < STEPS * LEFT; i++) {
        weights[i / GROUP][t].codes[i % GROUP][n] = at.template codes<MMA_LANE_WORDS>(i, mma_lane_word());
      }
    }
    CellCursor<F> at(tile[t], cells, first + lane_cell, lane_index() % TILE_ROWS);
    UNROLL(STEPS)
    for (u32 step = 0; step < STEPS; step++) weights[step][t].scales = at.scales(step * GROUP);
  }
  loads_under_way();
  const InputCell* of_cells = inputs.cells + first + lane_cell;
  const i32* of_codes[MMA_LANE_ROWS];
  for (u32 n = 0; n < MMA_LANE_ROWS; n++) of_codes[n] = inputs.codes[n] + (u64)first * 8;
  UNROLL(STEPS)
  for (u32 step = 0; step < STEPS; step++) {
    i32 codes[GROUP][MMA_LANE_ROWS][MMA_LANE_WORDS];
    UNROLL(GROUP)
    for (u32 i = 0; i < LEFT; i++) {
      UNROLL(MMA_LANE_ROWS)
      for (u32 n = 0; n < MMA_LANE_ROWS; n++) load_codes(of_codes[n] + (step * GROUP + i) * 8, codes[i][n]);
    }
    FewScales<F> scales[TILES];
    FewFacts<F> facts = decode_input<F>(of_cells[step * GROUP]);
    UNROLL(TILES)
    for (u32 t = 0; t < TILES; t++) decode_scales<F>(weights[step][t].scales, scales[t].scale, scales[t].min);
    UNROLL(GROUP)
    for (u32 i = 0; i < LEFT; i++) {
      // Where lanes hold many rows, one cell's shuffles must not be mixed with the next one's: they would fill the registers.
      if constexpr (MMA_ROWS != 2) loads_under_way();
      add_few<F, VALUES, TILES>(weights[step], codes[i], scales, facts, i, sum);
    }
  }
}

// Adds cells `first` to `last`: STEPS steps at once while there are as many, then fewer.
template <class F, u32 VALUES, u32 TILES, u32 STEPS>
DEVICE void sum_few(const u8* const* tile, u32 cells, const FewInputs& inputs, u32 first, u32 last,
                    float (*sum)[VALUES]) {
  UNROLL(1)
  for (; first + STEPS * GROUP <= last; first += STEPS * GROUP) {
    add_few_steps<F, VALUES, TILES, STEPS, GROUP>(tile, cells, inputs, first, sum);
  }
  if constexpr (STEPS > 1) {
    sum_few<F, VALUES, TILES, STEPS / 2>(tile, cells, inputs, first, last, sum);
  } else {
    UNROLL(1)
    for (; first < last; first++) add_few_steps<F, VALUES, TILES, 1, 1>(tile, cells, inputs, first, sum);
  }
}

// A block of FEW_THREADS threads multiplies TILES tiles with TOKENS tokens; a wave has neighbouring slices.
template <class F, u32 TOKENS, u32 TILES>
DEVICE void few(const Product& p) {
  static_assert(SLICES % FEW_WAVES == 0, "slices for waves");
  constexpr u32 ROWS = TILES * TILE_ROWS;
  constexpr u32 STRIDE = ROWS + 4;  // so that the values of a wave lie in different banks
  constexpr u32 VALUES = TOKENS <= 8 ? MMA_NARROW_VALUES : MMA_VALUES;
  SHARED_ARRAY(float, part, SLICES * TOKENS * STRIDE);
  u32 cells = p.columns / CELL, per_slice = (cells + SLICES - 1) / SLICES;
  const u8* tile[TILES];
  tiles_of_block<F, TILES>(p, tile);
  u32 first_token = block_index_y() * TOKENS;
  auto token = [&](u32 i) { return (u64)smaller(first_token + i, p.tokens - 1); };  // the last again where no more are
  FewInputs inputs;
  inputs.cells = p.scales + token(lane_index() % TILE_ROWS) * cells;
  for (u32 n = 0; n < MMA_LANE_ROWS; n++) {
    inputs.codes[n] = static_cast<const i32*>(p.x) + token(mma_lane_row(n)) * cells * 8 + mma_lane_word();
  }
  UNROLL(1)
  for (u32 i = 0; i < SLICES / FEW_WAVES; i++) {
    u32 slice = wave_index() * (SLICES / FEW_WAVES) + i;
    u32 first = smaller(slice * per_slice, cells), last = smaller(first + per_slice, cells);
    float sum[TILES][VALUES] = {};
    sum_few<F, VALUES, TILES, few_steps<F>(TOKENS)>(tile, cells, inputs, first, last, sum);
    UNROLL(TILES)
    for (u32 t = 0; t < TILES; t++) {
      UNROLL(VALUES)
      for (u32 n = 0; n < VALUES; n++) {
        u32 column = mma_column(n);
        if (column < TOKENS) part[(slice * TOKENS + column) * STRIDE + t * TILE_ROWS + mma_row(n)] = sum[t][n];
      }
    }
  }
  write_outputs<TOKENS, ROWS, STRIDE>(p, part);
}

#define FEW_KERNEL(name, Format, TOKENS)                                                   \
  KERNEL(name, FEW_THREADS, PRODUCT_PARAMETERS) {                                          \
    few<Format, TOKENS, FEW_TILES>(PRODUCT_OF_BLOCK(FEW_TILES * TILE_ROWS));               \
  }
