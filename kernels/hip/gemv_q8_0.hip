// out[row] = sum over k of weight[row, k] * x[k], one wave a row.
//
// Weights: Q8_0, split into quants (int8, rows of `blocks` * 32 bytes) and scales (f16, one per 32 weights).
// x: quantised likewise, its scales in f32. A lane takes every WAVE-th block; lanes are added by a butterfly.
#include "prelude.h"

KERNEL(gemv_q8_0, 256, const i8* quants, const f16* scales, const i8* x_quants, const float* x_scales, float* out,
       u32 rows, u32 blocks) {
  u32 row = block_index_x() * (block_threads() / WAVE) + wave_index();
  if (row >= rows) return;  // the whole wave
  float sum = 0.0f;
  for (u32 b = lane_index(); b < blocks; b += WAVE) {
    const i32x4* w = reinterpret_cast<const i32x4*>(quants + ((u64)row * blocks + b) * 32);
    const i32x4* x = reinterpret_cast<const i32x4*>(x_quants + (u64)b * 32);
    i32 dot = 0;
    for (u32 part = 0; part < 2; part++) {
      i32x4 weight = w[part], activation = x[part];
      for (u32 i = 0; i < 4; i++) dot = dot4(weight.v[i], activation.v[i], dot);
    }
    sum = fused_multiply_add((float)dot, to_f32(scales[(u64)row * blocks + b]) * x_scales[b], sum);
  }
  sum = wave_sum(sum);
  if (lane_index() == 0) out[row] = sum;
}
