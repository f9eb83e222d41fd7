// Products with many rows of inputs at once, on the matrix units, for the quantised formats.
//
// Codes are multiplied as bytes with exact integer sums per cell, and these scaled and added in the order of matmul.h: the
// same bits. Scaling is what takes the time, so it is made of as few instructions as there are factors: an integer sum that
// begins at the bits of WHOLE is, read as a float, WHOLE plus the sum; scale * (WHOLE + sum) - scale * WHOLE is rounded once
// in a fused multiply-add, since scale * WHOLE is exact (a scale has 19 significant bits at most), and is scale * sum rounded.
#pragma once

#include "few.h"
#include "gated.h"

static constexpr float WHOLE = 12582912.0f;  // 3 * 2^22: below, whole numbers of up to 2^22 in size are bits apart
static constexpr i32 WHOLE_BITS = 0x4b400000;
static_assert(CELL * 127 * 128 < 1 << 22, "a cell's sum fits");

static constexpr u32 FAR = 3;  // cells ahead of the next that are asked for from the device's memory

// How a block works. A team of waves multiplies a tile of rows and tokens, CELLS cells at a time through shared memory. Either
// the block is one team, or its waves are teams which multiply the same tile and take the slices of the columns in turns.
template <u32 WAVE_ROW_TILES, u32 WAVE_TOKEN_TILES, u32 WAVES_OF_ROWS, u32 WAVES_OF_TOKENS, u32 TEAMS_OF_BLOCK, u32 STAGE>
struct Shape {
  static constexpr u32 ROW_TILES = WAVE_ROW_TILES, TOKEN_TILES = WAVE_TOKEN_TILES;  // of a wave, 16 x 16 each
  static constexpr u32 ROW_WAVES = WAVES_OF_ROWS, TOKEN_WAVES = WAVES_OF_TOKENS, TEAMS = TEAMS_OF_BLOCK;
  static constexpr u32 CELLS = STAGE, PIECES = CELLS * 2;  // pieces are 16 codes
  static constexpr u32 ROWS = ROW_WAVES * ROW_TILES * MMA_SIDE, TOKENS = TOKEN_WAVES * TOKEN_TILES * MMA_SIDE;
  static constexpr u32 TEAM_THREADS = ROW_WAVES * TOKEN_WAVES * WAVE, THREADS = TEAM_THREADS * TEAMS;
  static constexpr u32 BUFFERS = TEAMS == 1 ? 2 : 1;
  static_assert(TEAMS == 1 || TEAM_THREADS == WAVE, "a team can wait for its threads");
};

// What scales the sums of a row in one cell.
template <u32 N>
struct alignas(4 * N) Facts {
  float of[N];
};

// A stage of a team in shared memory: rows of pieces as mma.h loads them.
template <class F, class S>
struct alignas(32) Stage {
  typedef Facts<F::RUNS*(F::HAS_MINS ? 2 : 1)> Row;             // scales of the runs, then their mins
  static constexpr u32 TOKEN_FACTS = F::HAS_MINS ? 1 + F::RUNS : 1;  // the scale; for mins, minus the sums of the runs
  i32x4 weights[S::ROWS * S::PIECES];
  i32x4 inputs[S::TOKENS * S::PIECES];
  Row rows[S::CELLS][S::ROWS];
  float tokens[S::CELLS][TOKEN_FACTS][S::TOKENS];
};

// A thread's share of the next stage, on its way from global memory: every TEAM_THREADS-th row of a cell, piece, and cell of
// a token. The last thread's may be one too many.
template <class F, class S>
struct Ahead {
  static constexpr u32 ALL_ROWS = S::ROWS * S::CELLS, ALL_PIECES = S::TOKENS * S::PIECES, ALL_TOKENS = S::TOKENS * S::CELLS;
  static constexpr u32 ROWS = (ALL_ROWS + S::TEAM_THREADS - 1) / S::TEAM_THREADS;
  static constexpr u32 PIECES = (ALL_PIECES + S::TEAM_THREADS - 1) / S::TEAM_THREADS;
  static constexpr u32 TOKENS = (ALL_TOKENS + S::TEAM_THREADS - 1) / S::TEAM_THREADS;
  RawCell<F> weights[ROWS];
  i32x4 pieces[PIECES];
  InputCell inputs[TOKENS];
};

// What lies beyond the last row, token or cell is read as the last one, and not used.
template <class F, class S>
DEVICE void fetch(const Product& p, u32 thread, u32 first, Ahead<F, S>& ahead) {
  u32 cells = p.columns / CELL, tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
  UNROLL(8)
  for (u32 i = 0; i < Ahead<F, S>::ROWS; i++) {
    u32 share = thread + i * S::TEAM_THREADS, row = share % S::ROWS;  // lanes side by side take the rows of a tile
    u32 tile = smaller(p.row_block * (S::ROWS / TILE_ROWS) + row / TILE_ROWS, tiles - 1);
    u32 cell = smaller(first + share / S::ROWS, cells - 1);
    const u8* rows = p.weights + tile * tile_bytes<F>(cells);
    ahead.weights[i] = fetch_cell<F>(rows, cells, cell, row % TILE_ROWS);
    // Waves that do little with a cell would wait for the memory.
    if constexpr (S::TEAMS > 1) prefetch_cell<F>(rows, cells, smaller(cell + FAR, cells - 1), row % TILE_ROWS);
  }
  UNROLL(8)
  for (u32 i = 0; i < Ahead<F, S>::PIECES; i++) {
    u32 share = thread + i * S::TEAM_THREADS;
    u32 token = smaller(block_index_y() * S::TOKENS + share / S::PIECES, p.tokens - 1);
    u32 piece = smaller(first * 2 + share % S::PIECES, cells * 2 - 1);
    const i32x4* of_token = static_cast<const i32x4*>(p.x) + (u64)token * cells * 2;
    ahead.pieces[i] = of_token[piece];
  }
  UNROLL(8)
  for (u32 i = 0; i < Ahead<F, S>::TOKENS; i++) {
    u32 share = thread + i * S::TEAM_THREADS;
    u32 token = smaller(block_index_y() * S::TOKENS + share / S::CELLS, p.tokens - 1);
    const InputCell* of_token = p.scales + (u64)token * cells;
    ahead.inputs[i] = of_token[smaller(first + share % S::CELLS, cells - 1)];
  }
}

// Decodes what was fetched into shared memory.
template <class F, class S>
DEVICE void store(u32 thread, const Ahead<F, S>& ahead, Stage<F, S>& stage) {
  UNROLL(8)
  for (u32 i = 0; i < Ahead<F, S>::ROWS; i++) {
    u32 share = thread + i * S::TEAM_THREADS, row = share % S::ROWS, place = share / S::ROWS;
    if (Ahead<F, S>::ALL_ROWS % S::TEAM_THREADS != 0 && share >= Ahead<F, S>::ALL_ROWS) break;
    QuantCell<F> cell = decode<F>(ahead.weights[i]);
    for (u32 half = 0; half < 2; half++) {
      i32x4 codes;
      for (u32 n = 0; n < 4; n++) codes.v[n] = signed_codes<F>(cell.code[half * 4 + n]);
      stage.weights[mma_piece_at<S::PIECES>(row, place * 2 + half)] = codes;
    }
    typename Stage<F, S>::Row facts;
    for (u32 run = 0; run < F::RUNS; run++) {
      facts.of[run] = cell.scale[run];
      if constexpr (F::HAS_MINS) facts.of[F::RUNS + run] = cell.min[run];
    }
    stage.rows[place][row] = facts;
  }
  UNROLL(8)
  for (u32 i = 0; i < Ahead<F, S>::PIECES; i++) {
    u32 share = thread + i * S::TEAM_THREADS;
    if (Ahead<F, S>::ALL_PIECES % S::TEAM_THREADS != 0 && share >= Ahead<F, S>::ALL_PIECES) break;
    stage.inputs[mma_piece_at<S::PIECES>(share / S::PIECES, share % S::PIECES)] = ahead.pieces[i];
  }
  UNROLL(8)
  for (u32 i = 0; i < Ahead<F, S>::TOKENS; i++) {
    u32 share = thread + i * S::TEAM_THREADS;
    if (Ahead<F, S>::ALL_TOKENS % S::TEAM_THREADS != 0 && share >= Ahead<F, S>::ALL_TOKENS) break;
    InputCell input = ahead.inputs[i];
    u32 place = share % S::CELLS, token = share / S::CELLS;
    stage.tokens[place][0][token] = input.scale;
    if constexpr (F::HAS_MINS) {
      i32 low = (i32)(i16)input.sums, high = (i32)input.sums >> 16;
      stage.tokens[place][1][token] = (float)-(F::RUNS == 1 ? low + high : low);
      if constexpr (F::RUNS == 2) stage.tokens[place][2][token] = (float)-high;
    }
  }
}

// Scales a cell's sums and adds them to `sum`.
template <class F>
DEVICE float scale_dots(const i32* dots, const float* row, float offset, const float* token, float sum) {
  float t = fused_multiply_add(row[0], bit_cast<float>(dots[0]), offset);
  if constexpr (F::RUNS == 2) t = fused_multiply_add(row[1], bit_cast<float>(dots[1]) - WHOLE, t);
  if constexpr (F::HAS_MINS) {
    for (u32 run = 0; run < F::RUNS; run++) t = fused_multiply_add(row[F::RUNS + run], token[1 + run], t);
  }
  return fused_multiply_add(token[0], t, sum);
}

// Adds one cell to a wave's sums.
template <class F, class S>
DEVICE void multiply_cell(const Stage<F, S>& stage, u32 place, MmaSource weights, MmaSource inputs, u32 offset,
                          u32 first_row, u32 first_token, float (*sum)[S::TOKEN_TILES][MMA_VALUES]) {
  constexpr u32 TILE_BYTES = MMA_SIDE * S::PIECES * 16;
  MmaI8 x[S::TOKEN_TILES];
  constexpr u32 FACTS = Stage<F, S>::TOKEN_FACTS;
  float tokens[S::TOKEN_TILES][FACTS][MMA_COLUMNS];
  UNROLL(8)
  for (u32 n = 0; n < S::TOKEN_TILES; n++) {
    x[n] = mma_load(inputs, offset + n * TILE_BYTES);
    for (u32 fact = 0; fact < FACTS; fact++) {
      mma_load_columns(stage.tokens[place][fact] + first_token + n * MMA_SIDE, tokens[n][fact]);
    }
  }
  UNROLL(8)
  for (u32 m = 0; m < S::ROW_TILES; m++) {
    MmaI8 w = mma_load(weights, offset + m * TILE_BYTES);
    typename Stage<F, S>::Row rows[MMA_ROWS];
    mma_load_rows(stage.rows[place] + first_row + m * MMA_SIDE, rows);
    UNROLL(8)
    for (u32 n = 0; n < S::TOKEN_TILES; n++) {
      MmaSumI32 dots[F::RUNS];
      if constexpr (F::RUNS == 1) {
        dots[0] = mma_dot(w, x[n], WHOLE_BITS);
      } else {
        for (u32 run = 0; run < F::RUNS; run++) dots[run] = mma_dot_half(w, x[n], run, WHOLE_BITS);
      }
      UNROLL(16)
      for (u32 i = 0; i < MMA_VALUES; i++) {
        i32 of_value[F::RUNS];
        for (u32 run = 0; run < F::RUNS; run++) of_value[run] = dots[run].value[i];
        const float* row = rows[mma_value_row(i)].of;
        float token[FACTS];
        for (u32 fact = 0; fact < FACTS; fact++) token[fact] = tokens[n][fact][mma_value_column(i)];
        sum[m][n][i] = scale_dots<F>(of_value, row, row[0] * -WHOLE, token, sum[m][n][i]);
      }
    }
  }
}

// The lane's share of one product of 16 x 16.
DEVICE void write_tile(const Product& p, u32 row, u32 token, const float* values) {
  UNROLL(16)
  for (u32 i = 0; i < MMA_VALUES; i++) {
    u32 out_row = row + mma_row(i), out_token = token + mma_column(i);
    if (out_row < p.rows && out_token < p.tokens) write_output(p, out_token, out_row, values[i]);
  }
}

// Adds the slices of the block's teams to `total` in the order of the teams.
template <class S>
DEVICE void add_in_turns(u32 team, bool is_first, const float (*sum)[S::TOKEN_TILES][MMA_VALUES], f32x4* total) {
  for (u32 turn = 0; turn < S::TEAMS; turn++) {
    if (turn == team) {
      UNROLL(8)
      for (u32 m = 0; m < S::ROW_TILES; m++) {
        UNROLL(8)
        for (u32 n = 0; n < S::TOKEN_TILES; n++) {
          UNROLL(4)
          for (u32 i = 0; i < MMA_VALUES; i += 4) {
            u32 at = ((m * S::TOKEN_TILES + n) * MMA_VALUES + i) / 4 * WAVE + lane_index();
            f32x4 values = is_first && turn == 0 ? f32x4{{0.0f, 0.0f, 0.0f, 0.0f}} : total[at];
            for (u32 v = 0; v < 4; v++) values.v[v] += sum[m][n][i + v];
            total[at] = values;
          }
        }
      }
    }
    block_barrier();
  }
}

// Writes a wave's tiles: from its own total, or, where teams share one, each team some of them.
template <class S>
DEVICE void write_tiles(const Product& p, u32 first_row, u32 first_token, u32 team,
                        const float (*total)[S::TOKEN_TILES][MMA_VALUES], const f32x4* shared_total) {
  UNROLL(8)
  for (u32 m = 0; m < S::ROW_TILES; m++) {
    UNROLL(8)
    for (u32 n = 0; n < S::TOKEN_TILES; n++) {
      u32 row = first_row + m * MMA_SIDE, token = first_token + n * MMA_SIDE, tile = m * S::TOKEN_TILES + n;
      if constexpr (S::TEAMS == 1) {
        write_tile(p, row, token, total[m][n]);
      } else if (tile % S::TEAMS == team) {
        float values[MMA_VALUES];
        UNROLL(16)
        for (u32 i = 0; i < MMA_VALUES; i++) {
          values[i] = shared_total[(tile * MMA_VALUES + i) / 4 * WAVE + lane_index()].v[i % 4];
        }
        write_tile(p, row, token, values);
      }
    }
  }
}

template <class F, class S>
DEVICE void gemm(const Product& p) {
  typedef Stage<F, S> Buffer;
  SHARED_ARRAY(Buffer, stages, S::TEAMS * S::BUFFERS);
  u32 team = thread_index() / S::TEAM_THREADS, thread = thread_index() % S::TEAM_THREADS;
  u32 first_row = wave_index() % S::ROW_WAVES * S::ROW_TILES * MMA_SIDE;
  u32 first_token = wave_index() / S::ROW_WAVES % S::TOKEN_WAVES * S::TOKEN_TILES * MMA_SIDE;
  Buffer* of_team = stages + team * S::BUFFERS;
  MmaSource weights[S::CELLS], inputs[S::CELLS];
  UNROLL(4)
  for (u32 place = 0; place < S::CELLS; place++) {
    weights[place] = mma_left_source<S::PIECES>(of_team->weights + first_row * S::PIECES, place * 2);
    inputs[place] = mma_right_source<S::PIECES>(of_team->inputs + first_token * S::PIECES, place * 2);
  }
  u32 cells = p.columns / CELL, per_slice = (cells + SLICES - 1) / SLICES, buffer = 0;
  float sum[S::ROW_TILES][S::TOKEN_TILES][MMA_VALUES] = {};  // of a slice
  constexpr u32 TOTAL_TILES = S::TEAMS == 1 ? S::ROW_TILES : 1;
  float total[TOTAL_TILES][S::TOKEN_TILES][MMA_VALUES] = {};  // of one team; several have theirs in shared memory
  f32x4* shared_total = nullptr;
  if constexpr (S::TEAMS > 1) {
    SHARED_ARRAY(f32x4, memory, S::ROWS * S::TOKENS / 4);
    shared_total = memory;
  }
  Ahead<F, S> ahead;
  fetch<F, S>(p, thread, team * per_slice, ahead);
  for (u32 slices = 0; slices < SLICES; slices += S::TEAMS) {
    u32 begin = (slices + team) * per_slice, end = smaller(begin + per_slice, cells);
    for (u32 first = begin; first < end; first += S::CELLS) {
      if constexpr (S::TEAMS > 1) wave_barrier();  // the last stage is done with
      store<F, S>(thread, ahead, of_team[buffer]);
      if constexpr (S::TEAMS > 1) wave_barrier();
      if constexpr (S::TEAMS == 1) block_barrier();
      fetch<F, S>(p, thread, first + S::CELLS < end ? first + S::CELLS : begin + S::TEAMS * per_slice, ahead);
      UNROLL(4)
      for (u32 place = 0; place < S::CELLS; place++) {
        if (first + place < end) {
          multiply_cell<F, S>(of_team[buffer], place, weights[place], inputs[place], buffer * (u32)sizeof(Buffer),
                              first_row, first_token, sum);
        }
      }
      if constexpr (S::BUFFERS == 2) buffer ^= 1;
    }
    if constexpr (S::TEAMS > 1) add_in_turns<S>(team, slices == 0, sum, shared_total);
    UNROLL(8)
    for (u32 m = 0; m < S::ROW_TILES; m++) {
      UNROLL(8)
      for (u32 n = 0; n < S::TOKEN_TILES; n++) {
        UNROLL(16)
        for (u32 i = 0; i < MMA_VALUES; i++) {
          if constexpr (S::TEAMS == 1) total[m][n][i] += sum[m][n][i];
          sum[m][n][i] = 0.0f;
        }
      }
    }
  }
  first_row += p.row_block * S::ROWS, first_token += block_index_y() * S::TOKENS;
  write_tiles<S>(p, first_row, first_token, team, total, shared_total);
}

// For many tokens, blocks of 128 rows and 64 tokens: 64 x 32 of them, or on RDNA 32 x 32, in the registers of a wave. For few
// tokens or rows, blocks of 32 rows and 16 tokens with the columns spread over the waves: more waves for the same work.
#if defined(SPILLWAY_NVIDIA)
typedef Shape<4, 2, 2, 2, 1, 2> Many;
#elif defined(SPILLWAY_AMD) && defined(SPILLWAY_MMA_BY_SHUFFLES) && WAVE == 32
typedef Shape<1, 2, 8, 2, 1, 2> Many;  // registers are spent on shuffles
#else
typedef Shape<WAVE / 16, 2, 128 / WAVE, 2, 1, 2> Many;
#endif
typedef Shape<2, 1, 1, 1, 256 / WAVE, 2> Few;

#define GEMM_KERNEL(name, Format, Shape)                             \
  KERNEL_TOGETHER(name, Shape::THREADS, 2, PRODUCT_PARAMETERS) {     \
    gemm<Format, Shape>(PRODUCT_OF_BLOCK(Shape::ROWS));              \
  }

// The entry points of a quantised format: those of MATMUL_KERNELS, few_<name>_{8,16}, gated_<name>, gemm_many_<name> and
// gemm_few_<name>.
#define QUANT_KERNELS(name, Format)           \
  MATMUL_KERNELS(name, Format)                \
  FEW_KERNEL(few_##name##_8, Format, 8)       \
  FEW_KERNEL(few_##name##_16, Format, 16)     \
  GATED_KERNEL(gated_##name, Format)          \
  GEMM_KERNEL(gemm_many_##name, Format, Many) \
  GEMM_KERNEL(gemm_few_##name, Format, Few)
