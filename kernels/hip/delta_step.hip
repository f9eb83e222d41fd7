// A DeltaNet layer for a step with one token per sequence, in one kernel: delta_net.h says what is computed.
//
// A block has a value head of a sequence. The head's state is fetched first; while it is on its way, the block convolves the
// head's query, key and value. A query and key head is convolved again for each of its value heads, which costs less than
// another kernel.
#include "delta_net.h"

// What the block's threads share.
template <u32 DIM>
struct alignas(16) Shared {
  float qkv[3 * DIM];
  float factor[DIM];  // of the norm: weight * silu(gate)
  float out[DIM];
  Scalars scalars;
};

template <u32 DIM>
struct Layer {
  Convolution convolution;
  GateInputs gates;
  const float* gate;
  const float* norm;
  u32 key_heads, value_heads;
  float epsilon;
};

// Convolves a channel, and keeps its input for the next steps where this block is the one to.
DEVICE float convolve_channel(const Convolution& from, float* history, const ConvolutionRow& row, u32 channel, bool keep) {
  if (keep) {
    u64 to = history_at(row.slot, row.position, channel, from.channels, from.taps);
    history[to] = from.inputs[(u64)row.row * from.channels + channel];
  }
  return convolve(from, row, channel);
}

// Everything of a head that does not need its state: an element or a gate a thread.
template <u32 DIM>
DEVICE void prepare(Shared<DIM>& shared, const Layer<DIM>& layer, float* history, const ConvolutionRow& row, u32 head) {
  u32 key_head = head % layer.key_heads;
  u64 head_of_row = (u64)row.row * layer.value_heads + head;
  for (u32 item = thread_index(); item < 4 * DIM + 2; item += block_threads()) {
    u32 part = item / DIM, at = item % DIM;
    if (part < 3) {
      u32 of_part = part == 0 ? key_head : part == 1 ? layer.key_heads + key_head : 2 * layer.key_heads + head;
      bool keep = part == 2 || head < layer.key_heads;
      shared.qkv[item] = convolve_channel(layer.convolution, history, row, of_part * DIM + at, keep);
    } else if (part == 3) {
      shared.factor[at] = layer.norm[at] * silu(layer.gate[head_of_row * DIM + at]);
    } else if (at == 0) {
      shared.scalars.decay = decay_of(layer.gates, head_of_row, head);
    } else {
      shared.scalars.strength = strength_of(layer.gates, head_of_row);
    }
  }
}

// Norms of the query and the key, by the first wave: its groups of lanes all do the same.
template <u32 DIM>
DEVICE void normalize(Shared<DIM>& shared, float epsilon) {
  Head<DIM> q = load_vector<Head<DIM>>(shared.qkv), k = load_vector<Head<DIM>>(shared.qkv + DIM);
  float overlap = normalize_pair<DIM>(q, k, epsilon);
  if (thread_index() >= Head<DIM>::LANES) return;
  store_vector(shared.qkv, q);
  store_vector(shared.qkv + DIM, k);
  shared.scalars.overlap = overlap;
}

template <u32 DIM>
DEVICE void delta_step(const Layer<DIM>& layer, float* history, float* matrix, const RowMeta* meta,
                       const SpanMeta* spans, float* out, i8* codes, InputCell* scales) {
  SHARED_ARRAY(Shared<DIM>, of_block, 1);
  Shared<DIM>& shared = *of_block;
  u32 row = block_index_x();  // and span
  SpanMeta span = spans[row];
  u32 head = block_index_y(), value = thread_index() / Keys<DIM>::LANES * STATE_ROWS;
  float* home = matrix + (((u64)span.slot * layer.value_heads + head) * DIM + value) * DIM;
  State<DIM> state;
  load_state<DIM>(state, home, span.reset != 0);
  prepare<DIM>(shared, layer, history, ConvolutionRow{row, 0, meta[row].position, span.slot}, head);
  block_barrier();
  if (wave_index() == 0) normalize<DIM>(shared, layer.epsilon);
  block_barrier();
  const float* v = shared.qkv + 2 * DIM + value;
  Token<DIM> token{load_vector<Keys<DIM>>(shared.qkv), load_vector<Keys<DIM>>(shared.qkv + DIM), {v[0], v[1]},
                   shared.scalars};
  Output output = advance<DIM>(state, token);
  if (output.mine) shared.out[value + output.row] = output.value;
  store_state<DIM>(home, state);
  block_barrier();
  if (wave_index() != 0) return;
  Head<DIM> finished = load_vector<Head<DIM>>(shared.out);
  gated_norm<DIM>(finished, load_vector<Head<DIM>>(shared.factor), layer.epsilon);
  u64 head_of_row = (u64)row * layer.value_heads + head;
  store_output<DIM>(finished, head_of_row, out, codes, scales, thread_index() < Head<DIM>::LANES);
}

#define DELTA_STEP_KERNEL(name, DIM)                                                                                     \
  KERNEL(name, DIM / STATE_ROWS * Keys<DIM>::LANES, const float* inputs, float* history, const float* weights,           \
         const float* alpha, const float* beta, const float* rate, const float* bias, const float* gate,                 \
         const float* norm, float* matrix, const RowMeta* meta, const SpanMeta* spans, float* out, i8* codes,            \
         InputCell* scales, u32 key_heads, u32 value_heads, u32 taps, float epsilon) {                                   \
    u32 channels = (2 * key_heads + value_heads) * DIM;                                                                  \
    Layer<DIM> layer{Convolution{inputs, history, weights, channels, taps}, GateInputs{alpha, beta, rate, bias}, gate,   \
                     norm, key_heads, value_heads, epsilon};                                                             \
    delta_step<DIM>(layer, history, matrix, meta, spans, out, codes, scales);                                            \
  }
DELTA_STEP_KERNEL(delta_step_32, 32)
DELTA_STEP_KERNEL(delta_step_64, 64)
DELTA_STEP_KERNEL(delta_step_128, 128)
