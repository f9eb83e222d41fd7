// What the prelude promises, one entry point a promise; driven by tests/kernels.rs.
#include "prelude.h"
#include "mma.h"

KERNEL(check_exp_log, 256, const float* x, float* exponentials, float* logarithms, float* roots, u32 count) {
  u32 i = block_index_x() * block_threads() + thread_index();
  if (i >= count) return;
  exponentials[i] = exp_f32(x[i]);
  logarithms[i] = log_f32(x[i]);
  roots[i] = reciprocal_square_root(x[i]);
}

KERNEL(check_exp2_fast, 256, const float* x, float* out, u32 count) {
  u32 i = block_index_x() * block_threads() + thread_index();
  if (i < count) out[i] = exp2_fast(x[i]);
}

// Every one of the 65536 bit patterns of both storage formats, and their way back.
KERNEL(check_halves, 256, float* from_f16, float* from_bf16, u16* f16_again, u16* bf16_again) {
  u32 i = block_index_x() * block_threads() + thread_index();
  from_f16[i] = to_f32(f16{(u16)i});
  from_bf16[i] = to_f32(bf16{(u16)i});
  f16_again[i] = to_f16(from_f16[i]).bits;
  bf16_again[i] = to_bf16(from_bf16[i]).bits;
}

KERNEL(check_rounding, 256, const float* x, u16* to_f16_bits, u16* to_bf16_bits, u32 count) {
  u32 i = block_index_x() * block_threads() + thread_index();
  if (i >= count) return;
  to_f16_bits[i] = to_f16(x[i]).bits;
  to_bf16_bits[i] = to_bf16(x[i]).bits;
}

// Sums and maxima over waves and the block, shuffles, dynamic shared memory and the launch's coordinates.
KERNEL(check_block, 1024, const float* x, float* sum_of_wave, float* max_of_wave, float* sum_of_block, float* reversed,
       u32* coordinates) {
  DYNAMIC_SHARED(float, staged);
  u32 block = (block_index_z() * grid_blocks_y() + block_index_y()) * grid_blocks_x() + block_index_x();
  u32 i = block * block_threads() + thread_index();
  staged[thread_index()] = x[i];
  block_barrier();
  reversed[i] = staged[block_threads() - 1 - thread_index()];
  sum_of_wave[i] = wave_sum(x[i]);
  max_of_wave[i] = wave_max(x[i]);
  sum_of_block[i] = block_sum(x[i]);
  coordinates[i] = (u32)wave_shuffle((float)lane_index(), (lane_index() + 1) % WAVE) + 1000 * wave_index();
}

KERNEL(check_dot4, 256, const i32* a, const i32* b, const i32* c, i32* out, u32 count) {
  u32 i = block_index_x() * block_threads() + thread_index();
  if (i < count) out[i] = dot4(a[i], b[i], c[i]);
}

// One wave: D = A * B^T + C of f16, and of int8 over all columns, the first half and the second half of them.
KERNEL(check_mma, WAVE, const f16* a, const f16* b, const float* c, float* d, const i32x4* a8, const i32x4* b8, i32* d8) {
  // The second tile of four pieces a row, as one that is part of a larger stage; the first is not to be read.
  constexpr u32 PIECES = 4, TILE = MMA_SIDE * PIECES;
  SHARED_ARRAY(i32x4, left, TILE * 2);
  SHARED_ARRAY(i32x4, right, TILE * 2);
  for (u32 i = lane_index(); i < MMA_SIDE * 2; i += WAVE) {
    u32 at = TILE + mma_piece_at<PIECES>(i / 2, 2 + i % 2);
    left[at] = a8[i];
    right[at] = b8[i];
  }
  wave_barrier();
  MmaI8 left8 = mma_load(mma_left_source<PIECES>(left, 2), TILE * 16);
  MmaI8 right8 = mma_load(mma_right_source<PIECES>(right, 2), TILE * 16);
  MmaSumI32 of[3] = {mma_dot(left8, right8, 1000), mma_dot_half(left8, right8, 0, -5), mma_dot_half(left8, right8, 1, 7)};
  MmaSumF32 sum;
  for (u32 i = 0; i < MMA_VALUES; i++) sum.value[i] = c[mma_row(i) * MMA_SIDE + mma_column(i)];
  mma(sum, mma_load(a, MmaF16::DEPTH), mma_load(b, MmaF16::DEPTH));
  for (u32 i = 0; i < MMA_VALUES; i++) {
    u32 at = mma_row(i) * MMA_SIDE + mma_column(i);
    d[at] = sum.value[i];
    for (u32 n = 0; n < 3; n++) d8[n * 256 + at] = of[n].value[i];
  }
}

// One wave: what a lane gets for its rows and columns is what its values stand for.
KERNEL(check_mma_facts, WAVE, const float* of, float* rows, float* columns) {
  SHARED_ARRAY(i32x4, memory, 4);  // aligned for two elements
  float* facts = reinterpret_cast<float*>(memory);
  if (lane_index() < MMA_SIDE) facts[lane_index()] = of[lane_index()];
  wave_barrier();
  float row[MMA_ROWS], column[MMA_COLUMNS];
  mma_load_rows(facts, row);
  mma_load_columns(facts, column);
  for (u32 i = 0; i < MMA_VALUES; i++) {
    u32 at = mma_row(i) * MMA_SIDE + mma_column(i);
    rows[at] = row[mma_value_row(i)];
    columns[at] = column[mma_value_column(i)];
  }
}
