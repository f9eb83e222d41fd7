// silu(gate) * up in 8-bit form: the input of the last matrix of a gated MLP, whose values nobody else reads.
#include "quantize.h"

KERNEL(silu_quantize, 256, const float* gate, const float* up, i8* codes, InputCell* scales, u32 quads) {
  u32 quad = block_index_x() * block_threads() + thread_index();
  bool real = quad < quads;  // all lanes take part in the shuffles
  f32x4 values{{0.0f, 0.0f, 0.0f, 0.0f}}, others = values;
  if (real) values = load_quad(gate, quad), others = load_quad(up, quad);
  for (u32 i = 0; i < 4; i++) values.v[i] = silu(values.v[i]) * others.v[i];
  quantize_quad(values, codes, scales, quad, real);
}
