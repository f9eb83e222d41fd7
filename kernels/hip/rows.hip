// Operations on elements, rows and heads without sums.
#include "prelude.h"

DEVICE u32 element_index() { return block_index_x() * block_threads() + thread_index(); }

// gate = silu(gate) * up
KERNEL(silu_mul, 256, float* gate, const float* up, u32 count) {
  u32 i = element_index();
  if (i < count) gate[i] = silu(gate[i]) * up[i];
}

// target *= sigmoid(gate)
KERNEL(sigmoid_mul, 256, float* target, const float* gate, u32 count) {
  u32 i = element_index();
  if (i < count) target[i] *= sigmoid(gate[i]);
}

// Heads [first | second] apart; `count` elements in each half.
KERNEL(split_heads, 256, const float* source, float* first, float* second, u32 head_dim, u32 count) {
  u32 i = element_index();
  if (i >= count) return;
  u64 from = (u64)(i / head_dim) * 2 * head_dim + i % head_dim;
  first[i] = source[from];
  second[i] = source[from + head_dim];
}

// out[i] = source[rows[i]]
KERNEL(gather_rows, 256, const float* source, const u32* rows, float* out, u32 width) {
  u32 i = block_index_y() * block_threads() + thread_index();
  if (i < width) out[(u64)block_index_x() * width + i] = source[(u64)rows[block_index_x()] * width + i];
}

// Rotates elements `a` and `b` of a head by pair `pair`'s angle in this row.
DEVICE void rotate(float* head, u32 a, u32 b, const float* cosines, const float* sines, u32 pair, u32 pairs) {
  float cosine = cosines[(u64)block_index_x() * pairs + pair], sine = sines[(u64)block_index_x() * pairs + pair];
  float x = head[a], y = head[b];
  head[a] = x * cosine - y * sine;
  head[b] = y * cosine + x * sine;
}

// Pairs (i, i + pairs) of every head.
KERNEL(rope_halves, 256, float* heads, const float* cosines, const float* sines, u32 count, u32 head_dim, u32 pairs) {
  u32 i = block_index_y() * block_threads() + thread_index();
  if (i >= count * pairs) return;
  float* head = heads + ((u64)block_index_x() * count + i / pairs) * head_dim;
  rotate(head, i % pairs, i % pairs + pairs, cosines, sines, i % pairs, pairs);
}

// Pairs (2 i, 2 i + 1) of every head.
KERNEL(rope_adjacent, 256, float* heads, const float* cosines, const float* sines, u32 count, u32 head_dim, u32 pairs) {
  u32 i = block_index_y() * block_threads() + thread_index();
  if (i >= count * pairs) return;
  float* head = heads + ((u64)block_index_x() * count + i / pairs) * head_dim;
  rotate(head, i % pairs * 2, i % pairs * 2 + 1, cosines, sines, i % pairs, pairs);
}
