// residual[i] += update[i]: the sum after each half of a layer, in f32.
#include "prelude.h"

KERNEL(residual_add, 256, float* residual, const float* update, u32 count) {
  u32 i = block_index_x() * block_threads() + thread_index();
  if (i < count) residual[i] += update[i];
}
