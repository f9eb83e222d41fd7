// Operations on elements, rows and heads without sums.
#include "prelude.h"

DEVICE u32 element_index() { return block_index_x() * block_threads() + thread_index(); }

enum Activation { SILU_OF_TARGET, SIGMOID_OF_OTHER };

template <Activation ACTIVATION>
DEVICE float activate(float target, float other) {
  return ACTIVATION == SILU_OF_TARGET ? silu(target) * other : target * sigmoid(other);
}

// Four neighbouring elements of `count`; the last thread may have fewer.
template <Activation ACTIVATION>
DEVICE void activate_quad(float* target, const float* other, u32 count) {
  u32 quad = element_index();
  if (quad * 4 + 4 > count) {
    for (u32 i = quad * 4; i < count; i++) target[i] = activate<ACTIVATION>(target[i], other[i]);
    return;
  }
  f32x4 values = reinterpret_cast<f32x4*>(target)[quad], others = reinterpret_cast<const f32x4*>(other)[quad];
  for (u32 i = 0; i < 4; i++) values.v[i] = activate<ACTIVATION>(values.v[i], others.v[i]);
  reinterpret_cast<f32x4*>(target)[quad] = values;
}

// gate = silu(gate) * up
KERNEL(silu_mul, 256, float* gate, const float* up, u32 count) { activate_quad<SILU_OF_TARGET>(gate, up, count); }

// target *= sigmoid(gate)
KERNEL(sigmoid_mul, 256, float* target, const float* gate, u32 count) {
  activate_quad<SIGMOID_OF_OTHER>(target, gate, count);
}

// Heads [first | second] apart; `count` elements in each half.
KERNEL(split_heads, 256, const float* source, float* first, float* second, u32 head_dim, u32 count) {
  u32 i = element_index();
  if (i >= count) return;
  u64 from = (u64)(i / head_dim) * 2 * head_dim + i % head_dim;
  first[i] = source[from];
  second[i] = source[from + head_dim];
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
