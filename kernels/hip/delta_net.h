// Causal depthwise convolution and gated delta rule: see kernels/src/ops/deltanet.rs, which computes the same.
//
// Two ways lead through a layer. delta_net.hip takes any step, in three kernels: convolution and gates, recurrence, gated
// norm. delta_step.hip takes a step with one token per sequence, in one kernel. Both are made of the pieces in this file, so
// they give the same bits. Tokens of a span are processed one after the other, so cutting a sequence into steps changes
// neither.
#pragma once

#include "quantize.h"
#include "step.h"

// A lane's share of a vector of WIDTH values: neighbouring lanes have neighbouring quads, in several pieces where lanes run
// out.
template <u32 WIDTH, u32 MOST_LANES>
struct Vector {
  static constexpr u32 DIM = WIDTH, LANES = DIM / 4 < MOST_LANES ? DIM / 4 : MOST_LANES, PIECES = DIM / 4 / LANES;
  f32x4 piece[PIECES];
};

// A head where it is normed: in many lanes, so that this takes little time.
template <u32 DIM>
using Head = Vector<DIM, 32>;
// Keys and queries where they meet the state, and rows of it: in fewer lanes, so that sums over them take few exchanges.
template <u32 DIM>
using Keys = Vector<DIM, 16>;

// The quad that piece `i` is.
template <class V>
DEVICE u32 quad_of(u32 i) { return i * V::LANES + thread_index() % V::LANES; }

template <class V>
DEVICE V load_vector(const float* values) {
  V vector;
  UNROLL(4)
  for (u32 i = 0; i < V::PIECES; i++) vector.piece[i] = load_quad(values, quad_of<V>(i));
  return vector;
}

template <class V>
DEVICE void store_vector(float* values, const V& vector) {
  UNROLL(4)
  for (u32 i = 0; i < V::PIECES; i++) reinterpret_cast<f32x4*>(values)[quad_of<V>(i)] = vector.piece[i];
}

// In every lane.
template <class V>
DEVICE float dot(const V& a, const V& b) {
  float sum = 0.0f;
  for (u32 i = 0; i < V::PIECES; i++) {
    for (u32 j = 0; j < 4; j++) sum = fused_multiply_add(a.piece[i].v[j], b.piece[i].v[j], sum);
  }
  for (u32 mask = V::LANES / 2; mask > 0; mask /= 2) sum += wave_shuffle_xor(sum, mask);
  return sum;
}

template <class V>
DEVICE void scale_by(V& vector, float scale) {
  for (u32 i = 0; i < V::PIECES; i++) {
    for (u32 j = 0; j < 4; j++) vector.piece[i].v[j] *= scale;
  }
}

// Query and key over their lengths, the query also over sqrt(DIM); returns their product, the overlap.
template <u32 DIM>
DEVICE float normalize_pair(Head<DIM>& query, Head<DIM>& key, float epsilon) {
  constexpr float ROOT = DIM == 32 ? 0.176776695f : DIM == 64 ? 0.125f : DIM == 128 ? 0.0883883476f : 0.0625f;
  float of_query = dot(query, query), of_key = dot(key, key);
  scale_by(query, ROOT / square_root(of_query + epsilon));
  scale_by(key, 1.0f / square_root(of_key + epsilon));
  return dot(key, query);
}

// The taps that models have, for which there is a shorter way through the convolution.
static constexpr u32 USUAL_TAPS = 4;

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

// A convolution of TAPS taps, or of as many as it says where that is 0.
template <u32 TAPS>
DEVICE float convolve_taps(const Convolution& from, const ConvolutionRow& at, u32 channel) {
  constexpr u32 TOGETHER = TAPS == 0 ? 1 : TAPS;
  u32 taps = TAPS == 0 ? from.taps : TAPS, now = at.position % taps;  // now: place in the history
  const float* weights = from.weights + (u64)channel * taps;
  float sum = 0.0f;
  UNROLL(TOGETHER)
  for (u32 tap = 0; tap < taps; tap++) {
    u32 back = taps - 1 - tap, place = now >= back ? now - back : now + taps - back;
    bool in_step = back <= at.index;
    u64 row = in_step ? at.row - back : (u64)at.slot * taps + place;
    // Before the sequence there are zeros.
    float input = back <= at.position ? (in_step ? from.inputs : from.history)[row * from.channels + channel] : 0.0f;
    sum = fused_multiply_add(weights[tap], input, sum);
  }
  return silu(sum);
}

// silu(convolution) of a channel.
DEVICE float convolve(const Convolution& from, const ConvolutionRow& at, u32 channel) {
  return from.taps == USUAL_TAPS ? convolve_taps<USUAL_TAPS>(from, at, channel) : convolve_taps<0>(from, at, channel);
}

// What decides the gates of a row: inputs [row][value_heads], weights [value_heads].
struct GateInputs {
  const float *alpha, *beta, *rate, *bias;
};

DEVICE float decay_of(const GateInputs& from, u64 at, u32 head) {
  return exp_f32(from.rate[head] * softplus(from.alpha[at] + from.bias[head]));
}

DEVICE float strength_of(const GateInputs& from, u64 at) { return sigmoid(from.beta[at]); }

// Rows of the state (one value, all keys) that a group of lanes holds, each lane its share of the keys.
static constexpr u32 STATE_ROWS = 2;  // also in advance()

template <u32 DIM>
struct State {
  Keys<DIM> row[STATE_ROWS];
};

// What a head has for a token beside vectors; the overlap is k q.
struct Scalars {
  float decay, strength, overlap;
};

// What a token brings to the rows of a state.
template <u32 DIM>
struct Token {
  Keys<DIM> q, k;
  float v[STATE_ROWS];
  Scalars scalars;
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
  constexpr u32 LANES = Keys<DIM>::LANES, SUMS = 2 * STATE_ROWS, LANES_PER_SUM = LANES / SUMS;
  float sums[SUMS];  // S k of the rows, then S q
  for (u32 row = 0; row < STATE_ROWS; row++) {
    float by_k = 0.0f, by_q = 0.0f;
    for (u32 i = 0; i < Keys<DIM>::PIECES; i++) {
      for (u32 j = 0; j < 4; j++) {
        by_k = fused_multiply_add(state.row[row].piece[i].v[j], token.k.piece[i].v[j], by_k);
        by_q = fused_multiply_add(state.row[row].piece[i].v[j], token.q.piece[i].v[j], by_q);
      }
    }
    sums[row] = by_k, sums[STATE_ROWS + row] = by_q;
  }
  float sum = share_out_sums<SUMS, LANES>(sums), decay = token.scalars.decay;
  u32 lane = thread_index() % LANES, first = lane_index() - lane;
  float delta[STATE_ROWS];
  for (u32 row = 0; row < STATE_ROWS; row++) {
    float by_k = wave_shuffle(sum, first + row * LANES_PER_SUM);
    delta[row] = token.scalars.strength * (token.v[row] - decay * by_k);
    for (u32 i = 0; i < Keys<DIM>::PIECES; i++) {
      for (u32 j = 0; j < 4; j++) {
        float& element = state.row[row].piece[i].v[j];
        element = fused_multiply_add(token.k.piece[i].v[j], delta[row], element * decay);
      }
    }
  }
  u32 row = lane / LANES_PER_SUM % STATE_ROWS;
  bool mine = lane >= STATE_ROWS * LANES_PER_SUM && lane % LANES_PER_SUM == 0;
  float update = choose(0u - row, delta[1], delta[0]) * token.scalars.overlap;
  return Output{fused_multiply_add(decay, sum, update), row, mine};
}

template <u32 DIM>
DEVICE void load_state(State<DIM>& state, const float* rows, bool empty) {
  for (u32 row = 0; row < STATE_ROWS; row++) {
    UNROLL(4)
    for (u32 i = 0; i < Keys<DIM>::PIECES; i++) {
      u32 quad = row * (DIM / 4) + quad_of<Keys<DIM>>(i);
      state.row[row].piece[i] = empty ? f32x4{{0.0f, 0.0f, 0.0f, 0.0f}} : load_quad(rows, quad);
    }
  }
}

template <u32 DIM>
DEVICE void store_state(float* rows, const State<DIM>& state) {
  for (u32 row = 0; row < STATE_ROWS; row++) store_vector(rows + row * DIM, state.row[row]);
}

// out / sqrt(mean(out^2) + epsilon) * factor, where the factor is weight * silu(gate).
template <u32 DIM>
DEVICE void gated_norm(Head<DIM>& out, const Head<DIM>& factor, float epsilon) {
  float scale = reciprocal_square_root(dot(out, out) / (float)DIM + epsilon);
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
    for (u32 j = 0; j < 4; j++) out.piece[i].v[j] = out.piece[i].v[j] * scale * factor.piece[i].v[j];
  }
}

// Writes a head of the output, and its 8-bit form unless `codes` is null. `head` counts heads over all rows.
template <u32 DIM>
DEVICE void store_output(const Head<DIM>& value, u64 head, float* out, i8* codes, InputCell* scales, bool real) {
  if (real) store_vector(out + head * DIM, value);
  if (codes == nullptr) return;  // the whole launch
  UNROLL(4)
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
    quantize_quad(value.piece[i], codes, scales, head * (DIM / 4) + quad_of<Head<DIM>>(i), real);
  }
}
