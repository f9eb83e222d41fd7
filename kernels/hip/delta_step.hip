// A DeltaNet layer for a step with one token per sequence, in one kernel: delta_net.h says what is computed.
//
// A block has a value head of a sequence. The head's state is fetched first; while it is on its way, the block convolves the
// head's query, key and value. A query and key head is convolved again for each of its value heads, which costs less than
// another kernel.
#include "delta_net.h"

// What the block's threads share.
template <u32 DIM>
struct alignas(16) Shared {
  float q[DIM], k[DIM], v[DIM];
  float gate[DIM];  // silu
  float out[DIM];
  float decay, strength, overlap;
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

// Convolves channel `at` of the vector that `head` is, and keeps the input for the next steps where this block is the one to.
template <u32 DIM>
DEVICE float convolve_channel(const Layer<DIM>& layer, float* history, const ConvolutionRow& row, u32 head, u32 at,
                              bool keep) {
  const Convolution& from = layer.convolution;
  u32 channel = head * DIM + at;
  if (keep) {
    u64 to = history_at(row.slot, row.position, channel, from.channels, from.taps);
    history[to] = from.inputs[(u64)row.row * from.channels + channel];
  }
  return convolve(from, row, channel, load_taps(from, channel));
}

// Everything of a head that does not need its state: an element or a gate a thread.
template <u32 DIM>
DEVICE void prepare(Shared<DIM>& shared, const Layer<DIM>& layer, float* history, const ConvolutionRow& row, u32 head) {
  u32 key_head = head % layer.key_heads;
  u64 head_of_row = (u64)row.row * layer.value_heads + head;
  for (u32 item = thread_index(); item < 4 * DIM + 2; item += block_threads()) {
    u32 part = item / DIM, at = item % DIM;
    if (part == 0) {
      shared.q[at] = convolve_channel<DIM>(layer, history, row, key_head, at, head < layer.key_heads);
    } else if (part == 1) {
      u32 of_keys = layer.key_heads + key_head;
      shared.k[at] = convolve_channel<DIM>(layer, history, row, of_keys, at, head < layer.key_heads);
    } else if (part == 2) {
      shared.v[at] = convolve_channel<DIM>(layer, history, row, 2 * layer.key_heads + head, at, true);
    } else if (part == 3) {
      shared.gate[at] = silu(layer.gate[head_of_row * DIM + at]);
    } else if (at == 0) {
      shared.decay = decay_of(layer.gates, head_of_row, head);
    } else {
      shared.strength = strength_of(layer.gates, head_of_row);
    }
  }
}

// Norms of the query and the key, by the first wave: its groups of lanes all do the same.
template <u32 DIM>
DEVICE void normalize(Shared<DIM>& shared, float epsilon) {
  Head<DIM> q = load_head<DIM>(shared.q), k = load_head<DIM>(shared.k);
  normalize_head<DIM>(q, true, epsilon);
  normalize_head<DIM>(k, false, epsilon);
  float overlap = head_dot<DIM>(k, q);
  if (thread_index() >= Head<DIM>::LANES) return;
  store_head<DIM>(shared.q, q);
  store_head<DIM>(shared.k, k);
  shared.overlap = overlap;
}

template <u32 DIM>
DEVICE void delta_step(const Layer<DIM>& layer, float* history, float* matrix, const RowMeta* meta,
                       const SpanMeta* spans, float* out, i8* codes, InputCell* scales) {
  SHARED_ARRAY(Shared<DIM>, of_block, 1);
  Shared<DIM>& shared = *of_block;
  SpanMeta span = spans[block_index_x()];
  u32 head = block_index_y(), value = thread_index() / Head<DIM>::LANES * STATE_ROWS;
  float* home = matrix + (((u64)span.slot * layer.value_heads + head) * DIM + value) * DIM;
  State<DIM> state;
  load_state<DIM>(state, home, span.reset != 0);
  prepare<DIM>(shared, layer, history, ConvolutionRow{span.first_row, 0, meta[span.first_row].position, span.slot}, head);
  block_barrier();
  if (wave_index() == 0) normalize<DIM>(shared, layer.epsilon);
  block_barrier();
  Token<DIM> token{load_head<DIM>(shared.q), load_head<DIM>(shared.k),
                   {shared.v[value], shared.v[value + 1]}, shared.decay, shared.strength, shared.overlap};
  Output output = advance<DIM>(state, token);
  if (output.mine) shared.out[value + output.row] = output.value;
  store_state<DIM>(home, state);
  block_barrier();
  if (wave_index() != 0) return;
  Head<DIM> finished = load_head<DIM>(shared.out);
  gated_norm<DIM>(finished, load_head<DIM>(layer.norm), load_head<DIM>(shared.gate), layer.epsilon);
  u64 head_of_row = (u64)span.first_row * layer.value_heads + head;
  store_output<DIM>(finished, head_of_row, out, codes, scales, thread_index() < Head<DIM>::LANES);
}

#define DELTA_STEP_KERNEL(name, DIM)                                                                                     \
  KERNEL(name, DIM / STATE_ROWS * Head<DIM>::LANES, const float* inputs, float* history, const float* weights,           \
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
