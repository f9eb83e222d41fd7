// Rows to their 8-bit form.
#include "quantize.h"

KERNEL(quantize_rows, 256, const float* x, i8* codes, InputCell* scales, u32 cells) {
  u32 thread = block_index_x() * block_threads() + thread_index();
  bool real = thread / CELL < cells;
  QuantizedValue quantized = quantize(real ? x[thread] : 0.0f);
  if (!real) return;
  codes[thread] = (i8)quantized.code;
  if (thread % CELL == 0) scales[thread / CELL] = quantized.cell;
}
