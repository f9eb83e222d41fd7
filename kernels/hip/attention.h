// What the kernels of attention share: the cache's layout, and how partitions of a context are put together.
//
// A context is cut at absolute positions into partitions. Each is reduced on its own: weights are powers of two of scores
// relative to `top`, a whole number near the largest. Partitions are folded in order of position. Since tops are whole
// numbers, scaling from one to another is exact, and folding an empty partition, or folding into nothing, changes no bit: the
// same result wherever and in however many pieces the folding happens.
#pragma once

#include "step.h"

static constexpr u32 KV_BLOCK = 32;
static constexpr float LOG2_E = 1.44269504f;
static constexpr float EMPTY = -3e38f;  // the top of no positions

DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// Where the keys of a kv head start in a block, in elements: [piece of 16 bytes][token][16 bytes]. Its values follow at
// KV_BLOCK * key_dim: [dimension][token].
DEVICE u64 head_offset(u32 block, u32 kv_heads, u32 kv_head, u32 key_dim, u32 value_dim) {
  return ((u64)block * kv_heads + kv_head) * (KV_BLOCK * (key_dim + value_dim));
}

// The whole number that a partition's weights are relative to.
DEVICE float top_of(float largest) { return largest > EMPTY ? nearest(largest) : EMPTY; }

// Factors that bring two tops to the larger one.
struct Fold {
  float top, of_all, of_one;
};

// 2^difference for a whole difference <= 0; nothing when that is beyond the range of floats.
DEVICE float scale_down(float difference) { return difference < -126.0f ? 0.0f : power_of_two((i32)difference); }

DEVICE Fold fold_tops(float all, float one) {
  float top = larger(all, one);
  // Minus zero: a product that added to anything, even to minus zero, leaves it as it is.
  return Fold{top, scale_down(all - top), one > EMPTY ? scale_down(one - top) : -0.0f};
}

DEVICE float fold_values(const Fold& fold, float all, float one) {
  return fused_multiply_add(all, fold.of_all, one * fold.of_one);
}

// Outputs of attention: where those of heads go and what they are multiplied with.
struct Outputs {
  const float* gate;  // or null: heads are gate_stride apart
  u32 gate_stride;
  float* out;         // [row][head][value_dim]
};

// Sigmoid of a gate within a few ulp, without branches: there are many at once.
DEVICE float gate_factor(float gate) { return reciprocal_fast(1.0f + exp2_fast(gate * -LOG2_E)); }

DEVICE float gate_at(const Outputs& to, u64 row_head, u32 dimension) {
  return to.gate == nullptr ? infinity() : to.gate[row_head * to.gate_stride + dimension];
}

// `inverse` is that of the sum, `gate` what gate_at gave.
DEVICE void finish(const Outputs& to, u64 row_head, u32 value_dim, u32 dimension, float output, float inverse, float gate) {
  to.out[row_head * value_dim + dimension] = output * inverse * gate_factor(gate);
}

// The result of one partition of a row's head: value_dim outputs, then the top and the sum.
DEVICE u64 partial_offset(u32 partition, u32 rows, u64 row_head, u32 heads, u32 value_dim) {
  return ((u64)partition * rows * heads + row_head) * (value_dim + 2);
}
