// Causal depthwise convolution and gated delta rule: see kernels/src/ops/deltanet.rs, which computes the same.
//
// Two ways lead through a layer. delta_net.hip takes any step, in three kernels: convolution and gates, recurrence, gated
// norm. delta_step.hip takes a step with one token per sequence, in one kernel. Both are made of the pieces in this file, so
// they give the same bits. Tokens of a span are processed one after the other, so cutting a sequence into steps changes
// neither.
#pragma once

#include "quantize.h"
#include "step.h"

// How a head's vector lies in lanes: neighbouring lanes have neighbouring quads, in several pieces where lanes run out.
template <u32 DIM>
struct Head {
  static constexpr u32 LANES = DIM / 4 < 16 ? DIM / 4 : 16, PIECES = DIM / 4 / LANES;
  f32x4 piece[PIECES];
};

template <u32 DIM>
DEVICE u32 lane_of_head() { return thread_index() % Head<DIM>::LANES; }

// Sum over the lanes of a head, in each of them.
template <u32 DIM>
DEVICE float head_sum(float value) {
  for (u32 mask = Head<DIM>::LANES / 2; mask > 0; mask /= 2) value += wave_shuffle_xor(value, mask);
  return value;
}

// A lane's share of the head at `values`.
template <u32 DIM>
DEVICE Head<DIM> load_head(const float* values) {
  Head<DIM> head;
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) head.piece[i] = load_quad(values, i * Head<DIM>::LANES + lane_of_head<DIM>());
  return head;
}

template <u32 DIM>
DEVICE void store_head(float* values, const Head<DIM>& head) {
  f32x4* quads = reinterpret_cast<f32x4*>(values);
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) quads[i * Head<DIM>::LANES + lane_of_head<DIM>()] = head.piece[i];
}

template <u32 DIM>
DEVICE float head_dot(const Head<DIM>& a, const Head<DIM>& b) {
  float sum = 0.0f;
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
    for (u32 j = 0; j < 4; j++) sum = fused_multiply_add(a.piece[i].v[j], b.piece[i].v[j], sum);
  }
  return head_sum<DIM>(sum);
}

// A query or key head over its length; queries also over sqrt(DIM).
template <u32 DIM>
DEVICE void normalize_head(Head<DIM>& head, bool query, float epsilon) {
  float scale = query ? 1.0f / square_root((float)DIM) : 1.0f;
  scale /= square_root(head_dot<DIM>(head, head) + epsilon);
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
    for (u32 j = 0; j < 4; j++) head.piece[i].v[j] *= scale;
  }
}

// Inputs and weights of a convolution.
struct Convolution {
  const float* inputs;   // [row][channels]
  const float* history;  // [slot][position % taps][channels]
  const float* weights;  // [channel][taps], oldest first
  u32 channels, taps;
};

// The row that a convolution ends at.
struct ConvolutionRow {
  u32 row;
  u32 index;     // in its span
  u32 position;  // in its sequence
  u32 slot;
};

// Where a channel's input of a position is kept. A step reads taps - 1 past positions and writes other places, so blocks
// that share a channel do not disturb each other.
DEVICE u64 history_at(u32 slot, u32 position, u32 channel, u32 channels, u32 taps) {
  return ((u64)slot * taps + position % taps) * channels + channel;
}

// silu(convolution) of a channel.
DEVICE float convolve(const Convolution& from, const ConvolutionRow& at, u32 channel) {
  const float* weights = from.weights + (u64)channel * from.taps;
  u32 now = at.position % from.taps;  // place in the history
  float sum = 0.0f;
  UNROLL(4)
  for (u32 tap = 0; tap < from.taps; tap++) {
    u32 back = from.taps - 1 - tap, place = now >= back ? now - back : now + from.taps - back;
    bool in_step = back <= at.index;
    u64 row = in_step ? at.row - back : (u64)at.slot * from.taps + place;
    // Before the sequence there are zeros.
    float input = back <= at.position ? (in_step ? from.inputs : from.history)[row * from.channels + channel] : 0.0f;
    sum = fused_multiply_add(weights[tap], input, sum);
  }
  return silu(sum);
}

// What decides the gates of a row: inputs [row][value_heads], weights [value_heads].
struct GateInputs {
  const float *alpha, *beta, *rate, *bias;
};

DEVICE float decay_of(const GateInputs& from, u64 at, u32 head) {
  return exp_f32(from.rate[head] * softplus(from.alpha[at] + from.bias[head]));
}

DEVICE float strength_of(const GateInputs& from, u64 at) { return sigmoid(from.beta[at]); }

// Rows of the state (one value, all keys) that the lanes of a head hold together, each its share of the keys.
static constexpr u32 STATE_ROWS = 2;  // also in advance()

template <u32 DIM>
struct State {
  Head<DIM> row[STATE_ROWS];
};

// What a token brings to the rows of a state.
template <u32 DIM>
struct Token {
  Head<DIM> q, k;
  float v[STATE_ROWS];
  float decay, strength, overlap;  // overlap: k q
};

// `a` where `mask` is all ones, `b` where it is zero. A conditional expression would let a compiler branch, and shuffle on
// each side: NVIDIA's does, and such a shuffle takes hundreds of cycles.
DEVICE float choose(u32 mask, float a, float b) {
  return bit_cast<float>((bit_cast<u32>(a) & mask) | (bit_cast<u32>(b) & ~mask));
}

// Sums over groups of LANES lanes, of which each has a value of each of COUNT sums: neighbours exchange halves of the sums
// while there are halves, so that each exchange halves the work. Sum i ends in the lanes from i * LANES / COUNT on.
template <u32 COUNT, u32 LANES>
DEVICE float share_out_sums(const float* values) {
  constexpr u32 other = LANES / 2;
  if constexpr (LANES == 1) {
    return values[0];
  } else if constexpr (COUNT == 1) {
    float sum = values[0] + wave_shuffle_xor(values[0], other);
    return share_out_sums<1, other>(&sum);
  } else {
    constexpr u32 half = COUNT / 2;
    u32 upper = 0u - (lane_index() / other & 1u);
    float kept[half];
    for (u32 i = 0; i < half; i++) {
      float low = values[i], high = values[i + half];
      kept[i] = choose(upper, high, low) + wave_shuffle_xor(choose(upper, low, high), other);
    }
    return share_out_sums<half, other>(kept);
  }
}

// What a lane has of a token's output: an output of its group, and for which row of the group's state.
struct Output {
  float value;
  u32 row;
  bool mine;  // one lane of the group for each row
};

// One token: with decay g, strength b and the state S before it, d = b (v - g S k), S' = g S + k d, and the output is
// S' q = g (S q) + d (k q).
template <u32 DIM>
DEVICE Output advance(State<DIM>& state, const Token<DIM>& token) {
  constexpr u32 LANES = Head<DIM>::LANES, SUMS = 2 * STATE_ROWS, LANES_PER_SUM = LANES / SUMS;
  float sums[SUMS];  // S k of the rows, then S q
  for (u32 row = 0; row < STATE_ROWS; row++) {
    float by_k = 0.0f, by_q = 0.0f;
    for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
      for (u32 j = 0; j < 4; j++) {
        by_k = fused_multiply_add(state.row[row].piece[i].v[j], token.k.piece[i].v[j], by_k);
        by_q = fused_multiply_add(state.row[row].piece[i].v[j], token.q.piece[i].v[j], by_q);
      }
    }
    sums[row] = by_k, sums[STATE_ROWS + row] = by_q;
  }
  float sum = share_out_sums<SUMS, LANES>(sums);
  u32 lane = lane_of_head<DIM>(), first = lane_index() - lane;
  float delta[STATE_ROWS];
  for (u32 row = 0; row < STATE_ROWS; row++) {
    float by_k = wave_shuffle(sum, first + row * LANES_PER_SUM);
    delta[row] = token.strength * (token.v[row] - token.decay * by_k);
    for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
      for (u32 j = 0; j < 4; j++) {
        float& element = state.row[row].piece[i].v[j];
        element = fused_multiply_add(token.k.piece[i].v[j], delta[row], element * token.decay);
      }
    }
  }
  u32 row = lane / LANES_PER_SUM % STATE_ROWS;
  bool mine = lane >= STATE_ROWS * LANES_PER_SUM && lane % LANES_PER_SUM == 0;
  float update = choose(0u - row, delta[1], delta[0]) * token.overlap;
  return Output{fused_multiply_add(token.decay, sum, update), row, mine};
}

template <u32 DIM>
DEVICE void load_state(State<DIM>& state, const float* rows, bool empty) {
  for (u32 row = 0; row < STATE_ROWS; row++) {
    UNROLL(4)
    for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
      u32 quad = row * (DIM / 4) + i * Head<DIM>::LANES + lane_of_head<DIM>();
      state.row[row].piece[i] = empty ? f32x4{{0.0f, 0.0f, 0.0f, 0.0f}} : load_quad(rows, quad);
    }
  }
}

template <u32 DIM>
DEVICE void store_state(float* rows, const State<DIM>& state) {
  for (u32 row = 0; row < STATE_ROWS; row++) store_head<DIM>(rows + row * DIM, state.row[row]);
}

// out / sqrt(mean(out^2) + epsilon) * factor, where the factor is weight * silu(gate).
template <u32 DIM>
DEVICE void gated_norm(Head<DIM>& out, const Head<DIM>& factor, float epsilon) {
  float scale = reciprocal_square_root(head_dot<DIM>(out, out) / (float)DIM + epsilon);
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
    for (u32 j = 0; j < 4; j++) out.piece[i].v[j] = out.piece[i].v[j] * scale * factor.piece[i].v[j];
  }
}

// Writes a head of the output, and its 8-bit form unless `codes` is null. `head` counts heads over all rows.
template <u32 DIM>
DEVICE void store_output(const Head<DIM>& value, u64 head, float* out, i8* codes, InputCell* scales, bool real) {
  if (real) store_head<DIM>(out + head * DIM, value);
  if (codes == nullptr) return;  // the whole launch
  UNROLL(4)
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
    u64 quad = head * (DIM / 4) + i * Head<DIM>::LANES + lane_of_head<DIM>();
    quantize_quad(value.piece[i], codes, scales, quad, real);
  }
}
