// out[i] = x[i] / sqrt(mean(x[i]^2) + epsilon) * weight, one block a row, and the row's 8-bit form where it is asked for.
// The order of the sum depends on the block's size and WAVE alone, never on the number of rows.
//
// A block's values and weights are fetched at once and stay in registers: a row costs one trip to memory. Only rows of more
// than 4 * KEPT values a thread are read again.
#include "quantize.h"

static constexpr u32 KEPT = 2;  // quads that a thread holds

struct Part {
  f32x4 x[KEPT], weight[KEPT];
};

DEVICE f32x4 load_columns(const float* row, u32 quad, u32 width) {
  if (width % 4 == 0) return load_quad(row, quad);
  f32x4 values;
  for (u32 i = 0; i < 4; i++) values.v[i] = quad * 4 + i < width ? row[quad * 4 + i] : 0.0f;
  return values;
}

DEVICE void store_columns(float* row, u32 quad, u32 width, const f32x4& values) {
  if (width % 4 == 0) {
    reinterpret_cast<f32x4*>(row)[quad] = values;
    return;
  }
  for (u32 i = 0; i < 4; i++) {
    if (quad * 4 + i < width) row[quad * 4 + i] = values.v[i];
  }
}

// A thread's i-th quad of the part that starts at `first`.
DEVICE u32 quad_of(u32 first, u32 i) { return first + i * block_threads() + thread_index(); }

DEVICE void load_part(Part& part, const float* x, const float* weight, u32 first, u32 width) {
  UNROLL(KEPT)
  for (u32 i = 0; i < KEPT; i++) {
    u32 quad = quad_of(first, i);
    bool real = quad * 4 < width;
    part.x[i] = real ? load_columns(x, quad, width) : f32x4{{0.0f, 0.0f, 0.0f, 0.0f}};
    part.weight[i] = real ? load_columns(weight, quad, width) : f32x4{{0.0f, 0.0f, 0.0f, 0.0f}};
  }
}

// `rows`, where given, says which row of x each row of out comes from; else out may be x. `codes` and `scales` are null
// where nobody reads the 8-bit form, for which the width is a multiple of 32.
KERNEL(rms_norm, 1024, const float* x, const u32* rows, const float* weight, float* out, i8* codes, InputCell* scales,
       u32 width, float epsilon) {
  u32 row = block_index_x(), step = KEPT * block_threads(), quads = (width + 3) / 4;
  const float* from = x + (u64)(rows != nullptr ? rows[row] : row) * width;
  float* to = out + (u64)row * width;
  Part part;
  float squares = 0.0f;
  for (u32 first = 0; first < quads; first += step) {
    load_part(part, from, weight, first, width);
    UNROLL(KEPT)
    for (u32 i = 0; i < KEPT; i++) {
      for (u32 j = 0; j < 4; j++) squares = fused_multiply_add(part.x[i].v[j], part.x[i].v[j], squares);
    }
  }
  float scale = reciprocal_square_root(block_sum(squares) / (float)width + epsilon);
  for (u32 first = 0; first < quads; first += step) {
    if (quads > step) load_part(part, from, weight, first, width);
    UNROLL(KEPT)
    for (u32 i = 0; i < KEPT; i++) {
      for (u32 j = 0; j < 4; j++) part.x[i].v[j] = part.x[i].v[j] * scale * part.weight[i].v[j];
      u32 quad = quad_of(first, i);
      if (quad < quads) store_columns(to, quad, width, part.x[i]);
      if (codes != nullptr) quantize_quad(part.x[i], codes, scales, (u64)row * quads + quad, quad < quads);
    }
  }
}
