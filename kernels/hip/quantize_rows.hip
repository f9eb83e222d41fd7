// Rows to their 8-bit form: see quantize.h.
#include "quantize.h"

KERNEL(quantize_rows, 256, const float* x, i8* codes, InputCell* scales, u32 quads) {
  u32 quad = block_index_x() * block_threads() + thread_index();
  bool real = quad < quads;  // all lanes take part in the shuffles
  f32x4 values = real ? load_quad(x, quad) : f32x4{{0.0f, 0.0f, 0.0f, 0.0f}};
  quantize_quad(values, codes, scales, quad, real);
}
