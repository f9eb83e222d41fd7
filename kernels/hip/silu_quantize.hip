// silu(gate) * up in 8-bit form: the input of the last matrix of a gated MLP, whose values nobody else reads.
#include "quantize.h"

KERNEL(silu_quantize, 256, const float* gate, const float* up, i8* codes, InputCell* scales, u32 cells) {
  u32 thread = block_index_x() * block_threads() + thread_index();
  bool real = thread / CELL < cells;
  QuantizedValue quantized = quantize(real ? silu(gate[thread]) * up[thread] : 0.0f);
  if (!real) return;
  codes[thread] = (i8)quantized.code;
  if (thread % CELL == 0) scales[thread / CELL] = quantized.cell;
}
