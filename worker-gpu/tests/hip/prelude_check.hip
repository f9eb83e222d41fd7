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

// One wave: D = A * B^T + C for both operand types.
KERNEL(check_mma, WAVE, const f16* a, const f16* b, const float* c, float* d, const i8* a8, const i8* b8, const i32* c8,
       i32* d8) {
  MmaSumF32 sum;
  MmaSumI32 sum8;
  for (u32 i = 0; i < MMA_VALUES; i++) {
    u32 at = mma_row(i) * MMA_SIDE + mma_column(i);
    sum.value[i] = c[at];
    sum8.value[i] = c8[at];
  }
  mma(sum, mma_load(a, MmaF16::DEPTH), mma_load(b, MmaF16::DEPTH));
  mma(sum8, mma_load(a8, MmaI8::DEPTH), mma_load(b8, MmaI8::DEPTH));
  for (u32 i = 0; i < MMA_VALUES; i++) {
    u32 at = mma_row(i) * MMA_SIDE + mma_column(i);
    d[at] = sum.value[i];
    d8[at] = sum8.value[i];
  }
}
