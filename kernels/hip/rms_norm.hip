// out[row] = x[row] / sqrt(mean(x[row]^2) + epsilon) * weight, one block a row. The order of the sum depends on the
// block's size and WAVE alone, never on the number of rows.
#include "prelude.h"

KERNEL(rms_norm, 1024, const float* x, const float* weight, float* out, u32 width, float epsilon) {
  const float* from = x + (u64)block_index_x() * width;
  float* to = out + (u64)block_index_x() * width;
  float squares = 0.0f;
  for (u32 i = thread_index(); i < width; i += block_threads()) squares = fused_multiply_add(from[i], from[i], squares);
  float scale = reciprocal_square_root(block_sum(squares) / (float)width + epsilon);
  for (u32 i = thread_index(); i < width; i += block_threads()) to[i] = from[i] * scale * weight[i];
}
