// residual[i] += update[i]: the sum after each half of a layer, in f32, four neighbouring elements a thread.
#include "prelude.h"

KERNEL(residual_add, 256, float* residual, const float* update, u32 count) {
  u32 quad = block_index_x() * block_threads() + thread_index();
  if (quad * 4 + 4 > count) {
    for (u32 i = quad * 4; i < count; i++) residual[i] += update[i];
    return;
  }
  f32x4 values = reinterpret_cast<f32x4*>(residual)[quad], updates = reinterpret_cast<const f32x4*>(update)[quad];
  for (u32 i = 0; i < 4; i++) values.v[i] += updates.v[i];
  reinterpret_cast<f32x4*>(residual)[quad] = values;
}
