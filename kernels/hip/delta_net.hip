// A DeltaNet layer for any step: delta_net.h says what is computed.
#include "delta_net.h"

// Rows of a block of the convolution at most.
static constexpr u32 CONV_ROWS = 8;
// Threads of a block of the recurrence, and tokens that it fetches at a time.
static constexpr u32 RULE_THREADS = 128, RULE_TOKENS = 16;

// The sizes of a layer.
struct Shape {
  u32 rows, key_heads, value_heads, taps;
};

DEVICE u32 channels_of(const Shape& shape, u32 dim) { return (2 * shape.key_heads + shape.value_heads) * dim; }

// silu(convolution) of a channel with USUAL_TAPS taps whose inputs all are in the step.
DEVICE float convolve_inside(const Convolution& from, u32 row, u32 channel, const f32x4& weights) {
  const float* input = from.inputs + (u64)(row - (USUAL_TAPS - 1)) * from.channels + channel;
  float sum = 0.0f;
  for (u32 tap = 0; tap < USUAL_TAPS; tap++) {
    sum = fused_multiply_add(weights.v[tap], input[(u64)tap * from.channels], sum);
  }
  return silu(sum);
}

// A step's convolution.
struct ConvolutionStep {
  Convolution convolution;
  GateInputs gates;
  const RowMeta* meta;
  const SpanMeta* spans;
  float epsilon;
};

// Rows of a block.
struct Rows {
  u32 first, count;
};

// Convolves a channel of `rows` into `to`, a row every `stride` values.
DEVICE void convolve_rows(const ConvolutionStep& step, Rows rows, u32 channel, float* to, u32 stride) {
  const Convolution& from = step.convolution;
  bool usual = from.taps == USUAL_TAPS;
  f32x4 weights = usual ? load_quad(from.weights, channel) : f32x4{{0.0f, 0.0f, 0.0f, 0.0f}};
  for (u32 row = rows.first; row < rows.first + rows.count; row++) {
    RowMeta fact = step.meta[row];
    SpanMeta span = step.spans[fact.span];
    u32 index = row - span.first_row;
    bool inside = usual && index >= USUAL_TAPS - 1;
    *to = inside ? convolve_inside(from, row, channel, weights)
                 : convolve(from, ConvolutionRow{row, index, fact.position, span.slot}, channel);
    to += stride;
  }
}

// A query and its key: convolved, normalised, and their overlap.
template <u32 DIM>
DEVICE void convolve_pair(const ConvolutionStep& step, const Shape& shape, Rows rows, u32 head, float* out,
                          float* overlaps) {
  SHARED_ARRAY(f32x4, staged, 2 * CONV_ROWS * DIM / 4);
  float* convolved = reinterpret_cast<float*>(staged);  // [query, key][row]
  u32 part = thread_index() / DIM, at = thread_index() % DIM, query = head * DIM, key = (shape.key_heads + head) * DIM;
  convolve_rows(step, rows, (part == 0 ? query : key) + at, convolved + part * CONV_ROWS * DIM + at, DIM);
  block_barrier();
  constexpr u32 GROUPS = 2 * DIM / Head<DIM>::LANES;
  for (u32 first = 0; first < CONV_ROWS; first += GROUPS) {
    u32 group = first + thread_index() / Head<DIM>::LANES, i = smaller(group, rows.count - 1);
    Head<DIM> q = load_vector<Head<DIM>>(convolved + i * DIM);  // all lanes take part in the sums
    Head<DIM> k = load_vector<Head<DIM>>(convolved + (CONV_ROWS + i) * DIM);
    float overlap = normalize_pair<DIM>(q, k, step.epsilon);
    if (group < rows.count) {
      float* to = out + (u64)(rows.first + i) * step.convolution.channels;
      store_vector(to + query, q);
      store_vector(to + key, k);
      if (quad_of<Head<DIM>>(0) == 0) overlaps[(u64)(rows.first + i) * shape.key_heads + head] = overlap;
    }
  }
}

// Blocks of up to `run` rows: first those of pairs of a query and a key head, then those of two value heads each, then one
// for the gates of the rows: decays, then strengths, of every value head, then overlaps of every key head.
template <u32 DIM>
DEVICE void convolve_and_gate(const ConvolutionStep& step, const Shape& shape, float* out, float* gates, u32 run) {
  Rows rows{block_index_x() * run, smaller(run, shape.rows - block_index_x() * run)};
  u64 count = (u64)shape.rows * shape.value_heads;
  if (block_index_y() < shape.key_heads) {
    convolve_pair<DIM>(step, shape, rows, block_index_y(), out, gates + 2 * count);
    return;
  }
  u32 head = (block_index_y() - shape.key_heads) * 2 + thread_index() / DIM;
  if (head < shape.value_heads) {
    u32 channel = (2 * shape.key_heads + head) * DIM + thread_index() % DIM, channels = step.convolution.channels;
    convolve_rows(step, rows, channel, out + (u64)rows.first * channels + channel, channels);
  }
  if (block_index_y() + 1 < grid_blocks_y()) return;
  u64 first = (u64)rows.first * shape.value_heads;
  for (u32 i = thread_index(); i < rows.count * shape.value_heads; i += block_threads()) {
    gates[first + i] = decay_of(step.gates, first + i, i % shape.value_heads);
    gates[count + first + i] = strength_of(step.gates, first + i);
  }
}

#define DELTA_CONV_KERNEL(name, DIM)                                                                                     \
  KERNEL(name, 2 * DIM, const float* inputs, const float* history, const float* weights, const float* alpha,             \
         const float* beta, const float* rate, const float* bias, const RowMeta* meta, const SpanMeta* spans,            \
         float* out, float* gates, u32 rows, u32 key_heads, u32 value_heads, u32 taps, u32 run, float epsilon) {         \
    Shape shape{rows, key_heads, value_heads, taps};                                                                     \
    ConvolutionStep step{Convolution{inputs, history, weights, channels_of(shape, DIM), taps},                           \
                         GateInputs{alpha, beta, rate, bias}, meta, spans, epsilon};                                     \
    convolve_and_gate<DIM>(step, shape, out, gates, run);                                                                \
  }
DELTA_CONV_KERNEL(delta_conv_32, 32)
DELTA_CONV_KERNEL(delta_conv_64, 64)
DELTA_CONV_KERNEL(delta_conv_128, 128)
DELTA_CONV_KERNEL(delta_conv_256, 256)

// A block of the recurrence: some rows of the state of one value head, for all tokens of one span.
struct Part {
  const float* convolved;  // [row][channels]
  const float* gates;      // [row][value_heads] decays, then strengths; [row][key_heads] overlaps
  SpanMeta span;
  u32 head, key_head;
  u32 value;  // its first row of the state
};

template <u32 DIM>
struct Rule {
  static constexpr u32 GROUPS = RULE_THREADS / Keys<DIM>::LANES, ROWS = GROUPS * STATE_ROWS;
  static constexpr u32 QUADS = RULE_TOKENS * DIM / 2 / RULE_THREADS, VALUES = RULE_TOKENS * ROWS / RULE_THREADS;
  // What a thread has of the next tokens, on its way from memory.
  f32x4 qk[QUADS];
  float v[VALUES], scalar;
};

// Tokens of a block, in shared memory.
template <u32 DIM>
struct Tokens {
  f32x4 qk[RULE_TOKENS * DIM / 2];  // query, key
  f32x4 scalars[RULE_TOKENS];       // decay, strength, overlap, nothing
  float v[RULE_TOKENS * Rule<DIM>::ROWS];
};

// Fetches the tokens from `first` on; beyond the last one, that one again.
template <u32 DIM>
DEVICE void fetch(Rule<DIM>& next, const Part& part, const Shape& shape, u32 first) {
  u32 channels = channels_of(shape, DIM), last = part.span.tokens - 1;
  UNROLL(16)
  for (u32 i = 0; i < Rule<DIM>::QUADS; i++) {
    u32 item = i * RULE_THREADS + thread_index(), token = smaller(first + item / (DIM / 2), last);
    u32 quad = item % (DIM / 2), is_key = quad / (DIM / 4);
    const float* row = part.convolved + (u64)(part.span.first_row + token) * channels;
    next.qk[i] = load_quad(row + (is_key * shape.key_heads + part.key_head) * DIM, quad % (DIM / 4));
  }
  UNROLL(4)
  for (u32 i = 0; i < Rule<DIM>::VALUES; i++) {
    u32 item = i * RULE_THREADS + thread_index(), token = smaller(first + item / Rule<DIM>::ROWS, last);
    const float* row = part.convolved + (u64)(part.span.first_row + token) * channels;
    next.v[i] = row[(2 * shape.key_heads + part.head) * DIM + part.value + item % Rule<DIM>::ROWS];
  }
  u32 kind = thread_index() / RULE_TOKENS;  // decay, strength, overlap
  if (kind < 3) {
    u64 row = part.span.first_row + smaller(first + thread_index() % RULE_TOKENS, last);
    u64 at = (row + (kind == 1 ? shape.rows : 0)) * shape.value_heads + part.head;
    u64 overlap = 2 * (u64)shape.rows * shape.value_heads + row * shape.key_heads + part.key_head;
    next.scalar = part.gates[kind == 2 ? overlap : at];
  }
}

// Hands the fetched tokens to the block.
template <u32 DIM>
DEVICE void share(Tokens<DIM>& tokens, const Rule<DIM>& next) {
  UNROLL(16)
  for (u32 i = 0; i < Rule<DIM>::QUADS; i++) tokens.qk[i * RULE_THREADS + thread_index()] = next.qk[i];
  UNROLL(4)
  for (u32 i = 0; i < Rule<DIM>::VALUES; i++) tokens.v[i * RULE_THREADS + thread_index()] = next.v[i];
  u32 kind = thread_index() / RULE_TOKENS;
  if (kind < 3) tokens.scalars[thread_index() % RULE_TOKENS].v[kind] = next.scalar;
}

template <u32 DIM>
DEVICE Token<DIM> token_of(const Tokens<DIM>& tokens, u32 at) {
  Token<DIM> token;
  const float* query = reinterpret_cast<const float*>(tokens.qk + at * (DIM / 2));
  token.q = load_vector<Keys<DIM>>(query);
  token.k = load_vector<Keys<DIM>>(query + DIM);
  u32 row = thread_index() / Keys<DIM>::LANES * STATE_ROWS;
  for (u32 i = 0; i < STATE_ROWS; i++) token.v[i] = tokens.v[at * Rule<DIM>::ROWS + row + i];
  f32x4 scalars = tokens.scalars[at];
  token.scalars = Scalars{scalars.v[0], scalars.v[1], scalars.v[2]};
  return token;
}

template <u32 DIM>
DEVICE void recur(const Part& part, const Shape& shape, float* matrix, float* out) {
  SHARED_ARRAY(Tokens<DIM>, shared, 1);
  Tokens<DIM>& tokens = *shared;
  u32 row = part.value + thread_index() / Keys<DIM>::LANES * STATE_ROWS;
  float* home = matrix + (((u64)part.span.slot * shape.value_heads + part.head) * DIM + row) * DIM;
  State<DIM> state;
  load_state<DIM>(state, home, part.span.reset != 0);
  Rule<DIM> next;
  fetch<DIM>(next, part, shape, 0);
  float* to = out + ((u64)part.span.first_row * shape.value_heads + part.head) * DIM + row;
  for (u32 first = 0; first < part.span.tokens; first += RULE_TOKENS) {
    block_barrier();  // the tokens before are used up
    share<DIM>(tokens, next);
    block_barrier();
    fetch<DIM>(next, part, shape, first + RULE_TOKENS);  // on their way while these are computed
    u32 count = smaller(RULE_TOKENS, part.span.tokens - first);
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
  Head<DIM> value = load_vector<Head<DIM>>(out + at * DIM), factor = load_vector<Head<DIM>>(weight);
  Head<DIM> gates = load_vector<Head<DIM>>(gate + at * DIM);
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
