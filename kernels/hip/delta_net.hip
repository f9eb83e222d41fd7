// Causal depthwise convolution and gated delta rule: see kernels/src/ops/deltanet.rs, which computes the same.
//
// Tokens of a span are processed one after the other, so cutting a sequence into steps changes no operation and no bit.
#include "step.h"

static constexpr u32 LANES_PER_ROW = 8;

// A past input of a span: row `index` of the step's inputs from the span's first on, or, negative, of the history.
DEVICE float past_input(const float* inputs, const float* history, const SpanMeta& span, i32 index, u32 channel,
                        u32 channels, u32 past) {
  if (index >= 0) return inputs[((u64)span.first_row + (u32)index) * channels + channel];
  if (span.reset) return 0.0f;
  return history[((u64)span.slot * past + (u32)(index + (i32)past)) * channels + channel];
}

// out = silu(convolution), then, for query and key heads, x * scale / sqrt(sum of squares + epsilon). A block is one head
// of one row.
KERNEL(delta_conv, 256, const float* inputs, const float* history, const float* weights, const RowMeta* meta,
       const SpanMeta* spans, float* out, u32 channels, u32 key_heads, u32 head_dim, u32 taps, float epsilon) {
  u32 row = block_index_x(), head = block_index_y(), channel = head * head_dim + thread_index();
  SpanMeta span = spans[meta[row].span];
  i32 oldest = (i32)(row - span.first_row) - (i32)(taps - 1);
  float value = 0.0f;
  if (thread_index() < head_dim) {
    for (u32 tap = 0; tap < taps; tap++) {
      float input = past_input(inputs, history, span, oldest + (i32)tap, channel, channels, taps - 1);
      value = fused_multiply_add(weights[(u64)channel * taps + tap], input, value);
    }
    value = silu(value);
  }
  if (head < 2 * key_heads) {
    float scale = head < key_heads ? 1.0f / square_root((float)head_dim) : 1.0f;
    value *= scale / square_root(block_sum(value * value) + epsilon);
  }
  if (thread_index() < head_dim) out[(u64)row * channels + channel] = value;
}

// Keeps the last inputs of every span for the next step. Rows move to lower places, so the order of writing is safe.
KERNEL(delta_remember, 256, const float* inputs, float* history, const SpanMeta* spans, u32 channels, u32 taps) {
  u32 channel = block_index_y() * block_threads() + thread_index(), past = taps - 1;
  SpanMeta span = spans[block_index_x()];
  if (channel >= channels || span.tokens == 0) return;
  for (u32 i = 0; i < past; i++) {
    i32 index = (i32)(span.tokens + i) - (i32)past;
    float value = past_input(inputs, history, span, index, channel, channels, past);
    history[((u64)span.slot * past + i) * channels + channel] = value;
  }
}

// Decays exp(rate * softplus(alpha + bias)), then strengths sigmoid(beta), of every row and value head.
KERNEL(delta_gates, 256, const float* alpha, const float* beta, const float* rate, const float* bias, float* gates,
       u32 heads, u32 count) {
  u32 i = block_index_x() * block_threads() + thread_index();
  if (i >= count) return;
  gates[i] = exp_f32(rate[i % heads] * softplus(alpha[i] + bias[i % heads]));
  gates[count + i] = sigmoid(beta[i]);
}

// Sums over the lanes that share a row of the state.
DEVICE float row_sum(float value) {
  for (u32 mask = LANES_PER_ROW / 2; mask > 0; mask /= 2) value += wave_shuffle_xor(value, mask);
  return value;
}

// A lane's share of a query or key, and what else a token brings to a row of the state.
template <u32 PIECES>
struct TokenShare {
  f32x4 q[PIECES], k[PIECES];
  float v, decay, strength;
};

// What the recurrence of one row of the state reads.
struct Source {
  const float* convolved;  // [row][channels]
  const float* gates;      // [row][value_heads] decays, then strengths
  u32 rows, key_heads, value_heads, head, value;
};

DEVICE u32 lane_of_row() { return thread_index() % LANES_PER_ROW; }

template <u32 DIM, u32 PIECES>
DEVICE TokenShare<PIECES> load_token(const Source& from, u32 row) {
  const float* channels = from.convolved + (u64)row * (2 * from.key_heads + from.value_heads) * DIM;
  u32 key_head = from.head % from.key_heads;
  const f32x4* q = reinterpret_cast<const f32x4*>(channels + key_head * DIM);
  const f32x4* k = reinterpret_cast<const f32x4*>(channels + (from.key_heads + key_head) * DIM);
  TokenShare<PIECES> share;
  for (u32 i = 0; i < PIECES; i++) {
    share.q[i] = q[i * LANES_PER_ROW + lane_of_row()];
    share.k[i] = k[i * LANES_PER_ROW + lane_of_row()];
  }
  share.v = channels[(2 * from.key_heads + from.head) * DIM + from.value];
  share.decay = from.gates[(u64)row * from.value_heads + from.head];
  share.strength = from.gates[((u64)from.rows + row) * from.value_heads + from.head];
  return share;
}

// One token: with decay g, strength b and the state S before it, d = b (v - g S k), S' = g S + k d, and the output is
// S' q = g (S q) + d (k q).
template <u32 PIECES>
DEVICE float step(f32x4* state, const TokenShare<PIECES>& token) {
  float by_k = 0.0f, by_q = 0.0f, overlap = 0.0f;
  for (u32 i = 0; i < PIECES; i++) {
    for (u32 j = 0; j < 4; j++) {
      by_k = fused_multiply_add(state[i].v[j], token.k[i].v[j], by_k);
      by_q = fused_multiply_add(state[i].v[j], token.q[i].v[j], by_q);
      overlap = fused_multiply_add(token.k[i].v[j], token.q[i].v[j], overlap);
    }
  }
  by_k = row_sum(by_k), by_q = row_sum(by_q), overlap = row_sum(overlap);
  float delta = token.strength * (token.v - token.decay * by_k);
  for (u32 i = 0; i < PIECES; i++) {
    for (u32 j = 0; j < 4; j++) {
      state[i].v[j] = fused_multiply_add(token.k[i].v[j], delta, state[i].v[j] * token.decay);
    }
  }
  return fused_multiply_add(delta, overlap, token.decay * by_q);
}

// The recurrence of one value head of one span. LANES_PER_ROW lanes hold a row of the state (one value, all keys) in
// registers, in pieces of four keys in turn, for all tokens of the span.
template <u32 DIM>
DEVICE void delta_rule(const float* convolved, const float* gates, float* matrix, const SpanMeta* spans, float* out,
                       u32 rows, u32 key_heads, u32 value_heads) {
  constexpr u32 PIECES = DIM / LANES_PER_ROW / 4;
  SpanMeta span = spans[block_index_x()];
  if (span.tokens == 0) return;  // the whole block
  u32 head = block_index_y(), value = (block_index_z() * block_threads() + thread_index()) / LANES_PER_ROW;
  Source source{convolved, gates, rows, key_heads, value_heads, head, value};
  f32x4* home = reinterpret_cast<f32x4*>(matrix + (((u64)span.slot * value_heads + head) * DIM + value) * DIM);
  f32x4 state[PIECES];
  for (u32 i = 0; i < PIECES; i++) {
    state[i] = span.reset ? f32x4{{0.0f, 0.0f, 0.0f, 0.0f}} : home[i * LANES_PER_ROW + lane_of_row()];
  }
  TokenShare<PIECES> token = load_token<DIM, PIECES>(source, span.first_row);
  for (u32 t = 0; t < span.tokens; t++) {
    // The next token is on its way while this one is computed.
    TokenShare<PIECES> next = load_token<DIM, PIECES>(source, span.first_row + (t + 1 < span.tokens ? t + 1 : t));
    float output = step<PIECES>(state, token);
    if (lane_of_row() == 0) out[((u64)(span.first_row + t) * value_heads + head) * DIM + value] = output;
    token = next;
  }
  for (u32 i = 0; i < PIECES; i++) home[i * LANES_PER_ROW + lane_of_row()] = state[i];
}

#define DELTA_RULE_KERNEL(name, DIM)                                                                                    \
  KERNEL(name, 256, const float* convolved, const float* gates, float* matrix, const SpanMeta* spans, float* out,      \
         u32 rows, u32 key_heads, u32 value_heads) {                                                                   \
    delta_rule<DIM>(convolved, gates, matrix, spans, out, rows, key_heads, value_heads);                               \
  }
DELTA_RULE_KERNEL(delta_rule_32, 32)
DELTA_RULE_KERNEL(delta_rule_64, 64)
DELTA_RULE_KERNEL(delta_rule_128, 128)
DELTA_RULE_KERNEL(delta_rule_256, 256)

// out = out / sqrt(mean(out^2) + epsilon) * weight * silu(gate), in place, one block a head of a row.
KERNEL(delta_gated_norm, 256, float* out, const float* gate, const float* weight, u32 head_dim, float epsilon) {
  u64 at = (u64)block_index_x() * head_dim + thread_index();
  bool real = thread_index() < head_dim;
  float value = real ? out[at] : 0.0f;
  float scale = reciprocal_square_root(block_sum(value * value) / (float)head_dim + epsilon);
  if (real) out[at] = value * scale * weight[thread_index()] * silu(gate[at]);
}
