// A DeltaNet layer for any step: delta_net.h says what is computed.
#include "delta_net.h"

// Rows of a block of the convolution at most, and tokens that the recurrence fetches at a time.
static constexpr u32 RUN = 8;
static constexpr u32 RULE_THREADS = 128;

// Threads of a block of the convolution: a channel each, whole waves of either size.
template <u32 DIM>
struct ConvBlock {
  static constexpr u32 THREADS = DIM < 64 ? 64 : DIM;
};

// The sizes of a layer.
struct Shape {
  u32 rows, key_heads, value_heads, taps;
};

DEVICE u32 channels_of(const Shape& shape, u32 dim) { return (2 * shape.key_heads + shape.value_heads) * dim; }

// The taps that models have, for which there is a shorter way through the convolution.
static constexpr u32 USUAL_TAPS = 4;

// silu(convolution) of a channel with USUAL_TAPS taps whose inputs all are in the step.
DEVICE float convolve_inside(const Convolution& from, u32 row, u32 channel, const f32x4& weights) {
  const float* input = from.inputs + (u64)(row - (USUAL_TAPS - 1)) * from.channels + channel;
  float sum = 0.0f;
  for (u32 tap = 0; tap < USUAL_TAPS; tap++) {
    sum = fused_multiply_add(weights.v[tap], input[(u64)tap * from.channels], sum);
  }
  return silu(sum);
}

// Convolves one head of up to `run` rows; query and key heads are normalised.
template <u32 DIM>
DEVICE void convolve_head(const Convolution& from, const RowMeta* meta, const SpanMeta* spans, float* out, u32 head,
                          u32 key_heads, u32 first_row, u32 rows, float epsilon) {
  SHARED_ARRAY(f32x4, staged, RUN * DIM / 4);
  float* convolved = reinterpret_cast<float*>(staged);
  u32 channel = head * DIM + thread_index();
  bool is_value = head >= 2 * key_heads, usual = from.taps == USUAL_TAPS;
  if (thread_index() < DIM) {
    f32x4 weights = usual ? load_quad(from.weights, channel) : f32x4{{0.0f, 0.0f, 0.0f, 0.0f}};
    for (u32 i = 0; i < rows; i++) {
      u32 row = first_row + i;
      RowMeta fact = meta[row];
      SpanMeta span = spans[fact.span];
      ConvolutionRow at{row, row - span.first_row, fact.position, span.slot};
      bool inside = usual && at.index >= USUAL_TAPS - 1;
      float value = inside ? convolve_inside(from, row, channel, weights) : convolve(from, at, channel);
      if (is_value) {
        out[(u64)row * from.channels + channel] = value;
      } else {
        convolved[i * DIM + thread_index()] = value;
      }
    }
  }
  if (is_value) return;  // the whole block
  block_barrier();
  constexpr u32 GROUPS = ConvBlock<DIM>::THREADS / Head<DIM>::LANES;
  for (u32 group = thread_index() / Head<DIM>::LANES; group < RUN; group += GROUPS) {
    u32 i = smaller(group, rows - 1);  // all lanes take part in the sums
    Head<DIM> vector = load_head<DIM>(convolved + i * DIM);
    normalize_head<DIM>(vector, head < key_heads, epsilon);
    if (group < rows) store_head<DIM>(out + (u64)(first_row + i) * from.channels + head * DIM, vector);
  }
}

// Blocks of one head of `run` rows each; behind the heads comes a row of blocks that compute the gates: decays, then
// strengths, of every row and value head.
template <u32 DIM>
DEVICE void convolve_and_gate(const Convolution& from, const GateInputs& gate_inputs, const RowMeta* meta,
                              const SpanMeta* spans, float* out, float* gates, const Shape& shape, u32 run,
                              float epsilon) {
  u32 first_row = block_index_x() * run, rows = smaller(run, shape.rows - first_row), head = block_index_y();
  if (head < 2 * shape.key_heads + shape.value_heads) {
    convolve_head<DIM>(from, meta, spans, out, head, shape.key_heads, first_row, rows, epsilon);
    return;
  }
  u64 first = (u64)first_row * shape.value_heads, count = (u64)shape.rows * shape.value_heads;
  for (u32 i = thread_index(); i < rows * shape.value_heads; i += block_threads()) {
    gates[first + i] = decay_of(gate_inputs, first + i, i % shape.value_heads);
    gates[count + first + i] = strength_of(gate_inputs, first + i);
  }
}

#define DELTA_CONV_KERNEL(name, DIM)                                                                                     \
  KERNEL(name, ConvBlock<DIM>::THREADS, const float* inputs, const float* history, const float* weights, const float* alpha,   \
         const float* beta, const float* rate, const float* bias, const RowMeta* meta, const SpanMeta* spans,            \
         float* out, float* gates, u32 rows, u32 key_heads, u32 value_heads, u32 taps, u32 run, float epsilon) {         \
    Shape shape{rows, key_heads, value_heads, taps};                                                                     \
    convolve_and_gate<DIM>(Convolution{inputs, history, weights, channels_of(shape, DIM), taps},                         \
                           GateInputs{alpha, beta, rate, bias}, meta, spans, out, gates, shape, run, epsilon);           \
  }
DELTA_CONV_KERNEL(delta_conv_32, 32)
DELTA_CONV_KERNEL(delta_conv_64, 64)
DELTA_CONV_KERNEL(delta_conv_128, 128)
DELTA_CONV_KERNEL(delta_conv_256, 256)

// A block of the recurrence: some rows of the state of one value head, for all tokens of one span.
struct Part {
  const float* convolved;  // [row][channels]
  const float* gates;      // [row][value_heads] decays, then strengths
  SpanMeta span;
  u32 head, key_head;
  u32 value;  // its first row of the state
};

template <u32 DIM>
struct Rule {
  static constexpr u32 GROUPS = RULE_THREADS / Head<DIM>::LANES, ROWS = GROUPS * STATE_ROWS;
  static constexpr u32 QUADS = RUN * DIM / 2 / RULE_THREADS, VALUES = RUN * ROWS / RULE_THREADS;
  // What a thread has of the next tokens, on its way from memory.
  f32x4 qk[QUADS];
  float v[VALUES], gate;
};

// Tokens of a block, in shared memory.
template <u32 DIM>
struct Tokens {
  f32x4 qk[RUN * DIM / 2];  // query, key
  float v[RUN * Rule<DIM>::ROWS];
  float decay[RUN], strength[RUN], overlap[RUN];
};

// Fetches the tokens from `first` on; beyond the last one, that one again.
template <u32 DIM>
DEVICE void fetch(Rule<DIM>& next, const Part& part, const Shape& shape, u32 first) {
  u32 channels = channels_of(shape, DIM);
  UNROLL(8)
  for (u32 i = 0; i < Rule<DIM>::QUADS; i++) {
    u32 item = i * RULE_THREADS + thread_index(), token = smaller(first + item / (DIM / 2), part.span.tokens - 1);
    u32 quad = item % (DIM / 2), is_key = quad / (DIM / 4);
    const float* row = part.convolved + (u64)(part.span.first_row + token) * channels;
    next.qk[i] = load_quad(row + (is_key * shape.key_heads + part.key_head) * DIM, quad % (DIM / 4));
  }
  UNROLL(2)
  for (u32 i = 0; i < Rule<DIM>::VALUES; i++) {
    u32 item = i * RULE_THREADS + thread_index(), token = smaller(first + item / Rule<DIM>::ROWS, part.span.tokens - 1);
    const float* row = part.convolved + (u64)(part.span.first_row + token) * channels;
    next.v[i] = row[(2 * shape.key_heads + part.head) * DIM + part.value + item % Rule<DIM>::ROWS];
  }
  if (thread_index() < 2 * RUN) {
    u32 token = smaller(first + thread_index() % RUN, part.span.tokens - 1);
    u64 row = part.span.first_row + token + (u64)(thread_index() / RUN) * shape.rows;
    next.gate = part.gates[row * shape.value_heads + part.head];
  }
}

// Hands the fetched tokens to the block.
template <u32 DIM>
DEVICE void share(Tokens<DIM>& tokens, const Rule<DIM>& next) {
  UNROLL(8)
  for (u32 i = 0; i < Rule<DIM>::QUADS; i++) tokens.qk[i * RULE_THREADS + thread_index()] = next.qk[i];
  UNROLL(2)
  for (u32 i = 0; i < Rule<DIM>::VALUES; i++) tokens.v[i * RULE_THREADS + thread_index()] = next.v[i];
  if (thread_index() < RUN) tokens.decay[thread_index()] = next.gate;
  if (thread_index() >= RUN && thread_index() < 2 * RUN) tokens.strength[thread_index() - RUN] = next.gate;
}

template <u32 DIM>
DEVICE const float* query_of(const Tokens<DIM>& tokens, u32 token) {
  return reinterpret_cast<const float*>(tokens.qk + token * (DIM / 2));
}

// The overlaps of the block's tokens, one a group of lanes.
template <u32 DIM>
DEVICE void find_overlaps(Tokens<DIM>& tokens) {
  for (u32 first = 0; first < RUN; first += Rule<DIM>::GROUPS) {
    u32 token = first + thread_index() / Head<DIM>::LANES;
    const float* query = query_of<DIM>(tokens, token % RUN);  // all lanes take part in the sums
    float overlap = head_dot<DIM>(load_head<DIM>(query + DIM), load_head<DIM>(query));
    if (lane_of_head<DIM>() == 0 && token < RUN) tokens.overlap[token] = overlap;
  }
}

template <u32 DIM>
DEVICE Token<DIM> token_of(const Tokens<DIM>& tokens, u32 at) {
  Token<DIM> token;
  token.q = load_head<DIM>(query_of<DIM>(tokens, at));
  token.k = load_head<DIM>(query_of<DIM>(tokens, at) + DIM);
  u32 row = thread_index() / Head<DIM>::LANES * STATE_ROWS;
  for (u32 i = 0; i < STATE_ROWS; i++) token.v[i] = tokens.v[at * Rule<DIM>::ROWS + row + i];
  token.decay = tokens.decay[at], token.strength = tokens.strength[at], token.overlap = tokens.overlap[at];
  return token;
}

template <u32 DIM>
DEVICE void recur(const Part& part, const Shape& shape, float* matrix, float* out) {
  SHARED_ARRAY(Tokens<DIM>, shared, 1);
  Tokens<DIM>& tokens = *shared;
  u32 row = part.value + thread_index() / Head<DIM>::LANES * STATE_ROWS;
  float* home = matrix + (((u64)part.span.slot * shape.value_heads + part.head) * DIM + row) * DIM;
  State<DIM> state;
  load_state<DIM>(state, home, part.span.reset != 0);
  Rule<DIM> next;
  fetch<DIM>(next, part, shape, 0);
  float* to = out + ((u64)part.span.first_row * shape.value_heads + part.head) * DIM + row;
  for (u32 first = 0; first < part.span.tokens; first += RUN) {
    block_barrier();  // the tokens before are used up
    share<DIM>(tokens, next);
    block_barrier();
    fetch<DIM>(next, part, shape, first + RUN);  // on their way while these are computed
    find_overlaps<DIM>(tokens);
    block_barrier();
    u32 count = smaller(RUN, part.span.tokens - first);
    UNROLL(4)
    for (u32 i = 0; i < count; i++) {
      Output output = advance<DIM>(state, token_of<DIM>(tokens, i));
      if (output.mine) to[output.row] = output.value;
      to += shape.value_heads * DIM;
    }
  }
  store_state<DIM>(home, state);
}

// Keeps the last inputs of the span for the next step: of the block's share of the channels, which for a key head and its
// query head is that of the value head of the same number.
template <u32 DIM>
DEVICE void remember(const Part& part, const Shape& shape, const float* inputs, float* history, const RowMeta* meta) {
  constexpr u32 WIDTH = Rule<DIM>::ROWS;
  u32 heads[3] = {2 * shape.key_heads + part.head, part.head, shape.key_heads + part.head};
  u32 kept = smaller(shape.taps - 1, part.span.tokens), channels = channels_of(shape, DIM);
  u32 shares = part.head < shape.key_heads ? 3 : 1;
  for (u32 item = thread_index(); item < kept * shares * WIDTH; item += block_threads()) {
    u32 row = part.span.first_row + part.span.tokens - 1 - item / (shares * WIDTH);
    u32 share = item / WIDTH % shares;
    u32 head = share == 0 ? heads[0] : share == 1 ? heads[1] : heads[2];
    u32 channel = head * DIM + part.value + item % WIDTH;
    u64 to = history_at(part.span.slot, meta[row].position, channel, channels, shape.taps);
    history[to] = inputs[(u64)row * channels + channel];
  }
}

// Blocks of a part of a value head of a span each.
#define DELTA_RULE_KERNEL(name, DIM)                                                                                     \
  KERNEL(name, RULE_THREADS, const float* convolved, const float* gates, const float* inputs, float* history,            \
         float* matrix, const RowMeta* meta, const SpanMeta* spans, float* out, u32 rows, u32 key_heads,                 \
         u32 value_heads, u32 taps) {                                                                                    \
    Shape shape{rows, key_heads, value_heads, taps};                                                                     \
    u32 head = block_index_y();                                                                                          \
    Part part{convolved, gates, spans[block_index_x()], head, head % key_heads, block_index_z() * Rule<DIM>::ROWS};      \
    recur<DIM>(part, shape, matrix, out);                                                                                \
    remember<DIM>(part, shape, inputs, history, meta);                                                                   \
  }
DELTA_RULE_KERNEL(delta_rule_32, 32)
DELTA_RULE_KERNEL(delta_rule_64, 64)
DELTA_RULE_KERNEL(delta_rule_128, 128)
DELTA_RULE_KERNEL(delta_rule_256, 256)

// Finishes the outputs in place, `heads` over all rows.
template <u32 DIM>
DEVICE void finish(float* out, const float* gate, const float* weight, i8* codes, InputCell* scales, u32 heads,
                   float epsilon) {
  u32 head = (block_index_x() * block_threads() + thread_index()) / Head<DIM>::LANES;
  bool real = head < heads;  // all lanes take part in the sums
  u64 at = real ? head : heads - 1;
  Head<DIM> value = load_head<DIM>(out + at * DIM), factor = load_head<DIM>(weight);
  Head<DIM> gates = load_head<DIM>(gate + at * DIM);
  for (u32 i = 0; i < Head<DIM>::PIECES; i++) {
    for (u32 j = 0; j < 4; j++) factor.piece[i].v[j] *= silu(gates.piece[i].v[j]);
  }
  gated_norm<DIM>(value, factor, epsilon);
  store_output<DIM>(value, at, out, codes, scales, real);
}

#define DELTA_FINISH_KERNEL(name, DIM)                                                                                \
  KERNEL(name, 256, float* out, const float* gate, const float* weight, i8* codes, InputCell* scales, u32 heads,      \
         float epsilon) {                                                                                             \
    finish<DIM>(out, gate, weight, codes, scales, heads, epsilon);                                                    \
  }
DELTA_FINISH_KERNEL(delta_finish_32, 32)
DELTA_FINISH_KERNEL(delta_finish_64, 64)
DELTA_FINISH_KERNEL(delta_finish_128, 128)
DELTA_FINISH_KERNEL(delta_finish_256, 256)
