// Paged causal grouped-query attention on f32 arithmetic, and what it shares with attention_tiles.hip: the preparation of a
// step's heads and the folding of partitions. See worker-gpu/src/launch/attention.rs.
#include "attention.h"

static constexpr u32 MAX_DIM = 256;
static constexpr u32 LANE_PAIRS = MAX_DIM / 2 / WAVE;

// Norm and rotation of a head.
struct HeadSteps {
  const float* norm;  // weight of an RMS norm, or null
  float epsilon;
  const float* cosines;  // [row][pairs]
  const float* sines;
  u32 pairs;     // that are rotated: none without a rotation
  u32 adjacent;  // pairs are (2 i, 2 i + 1) instead of (i, i + pairs)
};

// The elements that pair `i` of a head consists of: those that are rotated together, then what is left.
DEVICE u32 first_of_pair(const HeadSteps& steps, u32 i) { return i < steps.pairs && !steps.adjacent ? i : 2 * i; }
DEVICE u32 second_of_pair(const HeadSteps& steps, u32 i) {
  return i < steps.pairs && !steps.adjacent ? i + steps.pairs : 2 * i + 1;
}

// One wave normalises and rotates a head and hands each element to `store`.
template <class Store>
DEVICE void prepare_head(const float* from, u32 row, u32 dim, const HeadSteps& steps, Store store) {
  // All loads come first, since each waits for memory.
  float x[LANE_PAIRS], y[LANE_PAIRS], x_weight[LANE_PAIRS], y_weight[LANE_PAIRS], cosine[LANE_PAIRS], sine[LANE_PAIRS];
  float squares = 0.0f;
  UNROLL(LANE_PAIRS)
  for (u32 n = 0; n < LANE_PAIRS; n++) {
    u32 i = n * WAVE + lane_index(), first = first_of_pair(steps, i), second = second_of_pair(steps, i);
    bool here = i < dim / 2, normed = here && steps.norm != nullptr, turned = i < steps.pairs;
    x[n] = here ? from[first] : 0.0f;
    y[n] = here ? from[second] : 0.0f;
    x_weight[n] = normed ? steps.norm[first] : 1.0f;
    y_weight[n] = normed ? steps.norm[second] : 1.0f;
    cosine[n] = turned ? steps.cosines[(u64)row * steps.pairs + i] : 1.0f;
    sine[n] = turned ? steps.sines[(u64)row * steps.pairs + i] : 0.0f;
  }
  UNROLL(LANE_PAIRS)
  for (u32 n = 0; n < LANE_PAIRS; n++) {
    squares = fused_multiply_add(y[n], y[n], fused_multiply_add(x[n], x[n], squares));
  }
  float scale = steps.norm == nullptr ? 1.0f : reciprocal_square_root(wave_sum(squares) / (float)dim + steps.epsilon);
  UNROLL(LANE_PAIRS)
  for (u32 n = 0; n < LANE_PAIRS; n++) {
    u32 i = n * WAVE + lane_index();
    if (i >= dim / 2) continue;
    float first = x[n] * scale * x_weight[n], second = y[n] * scale * y_weight[n];
    bool turned = i < steps.pairs;
    store(first_of_pair(steps, i), turned ? first * cosine[n] - second * sine[n] : first);
    store(second_of_pair(steps, i), turned ? second * cosine[n] + first * sine[n] : second);
  }
}

DEVICE void put(float* to, float value) { *to = value; }
DEVICE void put(f16* to, float value) { *to = to_f16(value); }

// Where a step's heads come from and go to.
struct Heads {
  const float* q;  // heads are q_stride apart
  u32 q_stride;
  float* prepared;  // [row][head][key_dim]
  const float* k;   // [row][kv_head][key_dim]
  const float* v;   // [row][kv_head][value_dim]
  u32 heads, kv_heads, key_dim, value_dim;
};

// A wave takes one head of a row after the other: query heads, then key heads, then value heads.
template <class E>
DEVICE void prepare(const Heads& of, const HeadSteps& q_steps, const HeadSteps& k_steps, const RowMeta* meta,
                    const u32* tables, E* cache) {
  constexpr u32 PIECE = 16 / sizeof(E);
  u32 row = block_index_x(), waves = block_threads() / WAVE;
  u32 position = meta[row].position, slot = position % KV_BLOCK;
  u32 block = tables[meta[row].table + position / KV_BLOCK];
  for (u32 i = block_index_y() * waves + wave_index(); i < of.heads + 2 * of.kv_heads; i += grid_blocks_y() * waves) {
    if (i < of.heads) {
      u64 at = (u64)row * of.heads + i;
      float* to = of.prepared + at * of.key_dim;
      prepare_head(of.q + at * of.q_stride, row, of.key_dim, q_steps, [=](u32 n, float value) { to[n] = value; });
      continue;
    }
    u32 kv_head = (i - of.heads) % of.kv_heads;
    u64 at = (u64)row * of.kv_heads + kv_head;
    E* keys = cache + head_offset(block, of.kv_heads, kv_head, of.key_dim, of.value_dim);
    if (i < of.heads + of.kv_heads) {
      prepare_head(of.k + at * of.key_dim, row, of.key_dim, k_steps, [=](u32 n, float value) {
        put(keys + (n / PIECE * KV_BLOCK + slot) * PIECE + n % PIECE, value);
      });
    } else {
      E* values = keys + KV_BLOCK * of.key_dim;
      for (u32 n = lane_index(); n < of.value_dim; n += WAVE) {
        put(values + n * KV_BLOCK + slot, of.v[at * of.value_dim + n]);
      }
    }
  }
}

DEVICE void unpack(i32x4 bytes, float* out, float) {
  for (u32 i = 0; i < 4; i++) out[i] = bit_cast<float>(bytes.v[i]);
}
DEVICE void unpack(i32x4 bytes, float* out, f16) {
  for (u32 i = 0; i < 8; i++) out[i] = to_f32(f16{(u16)((u32)bytes.v[i / 2] >> i % 2 * 16)});
}

// One block of the kernels below takes one query row, up to GROUP query heads of one kv head, and one partition after the
// other (or a single one): scores with a thread per position, weights with a wave per head, outputs with a thread per
// dimension.
static constexpr u32 PARTITION = 256;

// What a block works on.
template <class E>
struct Task {
  const E* cache;
  const u32* table;  // the sequence's blocks
  u32 context;       // positions the row sees
  u32 kv_heads, kv_head, key_dim, value_dim;
};

// Working memory of a block.
template <u32 GROUP>
struct Scratch {
  float* queries;  // [GROUP][key_dim], scaled
  float* weights;  // [PARTITION][GROUP]: scores, then weights
  float* teams;    // [PARTITION][GROUP]
  float* tops;     // [GROUP]
  float* sums;     // [GROUP]
};

// Scores of position `first + thread`: sums over the key's dimensions in order.
template <class E, u32 GROUP>
DEVICE void scores(const Task<E>& task, const Scratch<GROUP>& scratch, u32 first) {
  constexpr u32 PIECE = 16 / sizeof(E);
  u32 position = first + thread_index();
  float score[GROUP];
  for (u32 g = 0; g < GROUP; g++) score[g] = 0.0f;
  if (position < task.context) {
    u32 block = task.table[position / KV_BLOCK];
    const E* keys = task.cache + head_offset(block, task.kv_heads, task.kv_head, task.key_dim, task.value_dim);
    const i32x4* piece = reinterpret_cast<const i32x4*>(keys) + position % KV_BLOCK;
    for (u32 at = 0; at < task.key_dim; at += PIECE, piece += KV_BLOCK) {
      float key[PIECE];
      unpack(*piece, key, E{});
      for (u32 g = 0; g < GROUP; g++) {
        const float* query = scratch.queries + g * task.key_dim + at;
        for (u32 i = 0; i < PIECE; i++) score[g] = fused_multiply_add(query[i], key[i], score[g]);
      }
    }
  }
  for (u32 g = 0; g < GROUP; g++) {
    scratch.weights[thread_index() * GROUP + g] = position < task.context ? score[g] : -infinity();
  }
}

// Weights of the scores and their sum: a wave a head.
template <u32 GROUP>
DEVICE void weigh(const Scratch<GROUP>& scratch) {
  for (u32 g = wave_index(); g < GROUP; g += block_threads() / WAVE) {
    float largest = -infinity();
    for (u32 i = lane_index(); i < PARTITION; i += WAVE) largest = larger(largest, scratch.weights[i * GROUP + g]);
    float top = top_of(wave_max(largest));
    float sum = 0.0f;
    for (u32 i = lane_index(); i < PARTITION; i += WAVE) {
      float weight = exp2_fast(scratch.weights[i * GROUP + g] - top);
      scratch.weights[i * GROUP + g] = weight;
      sum += weight;
    }
    sum = wave_sum(sum);
    if (lane_index() == 0) scratch.tops[g] = top, scratch.sums[g] = sum;
  }
}

// Weighted sums of values, a thread a dimension. Narrow values leave threads over: teams of them take every
// `teams`-th piece of a block, and the first team adds the others' sums in order.
template <class E, u32 GROUP>
DEVICE void outputs(const Task<E>& task, const Scratch<GROUP>& scratch, u32 first, float* output) {
  constexpr u32 PIECE = 16 / sizeof(E);
  u32 teams = PARTITION / task.value_dim, team = thread_index() / task.value_dim;
  u32 dimension = thread_index() % task.value_dim;
  for (u32 g = 0; g < GROUP; g++) output[g] = 0.0f;
  u32 tokens = task.context - first < PARTITION ? task.context - first : PARTITION;
  for (u32 start = 0; start < tokens && team < teams; start += KV_BLOCK) {
    u32 block = task.table[(first + start) / KV_BLOCK];
    const E* values = task.cache + head_offset(block, task.kv_heads, task.kv_head, task.key_dim, task.value_dim) +
                      KV_BLOCK * (task.key_dim + dimension);
    for (u32 t = team * PIECE; t < KV_BLOCK && start + t < tokens; t += teams * PIECE) {
      float value[PIECE];
      unpack(*reinterpret_cast<const i32x4*>(values + t), value, E{});
      for (u32 i = 0; i < PIECE && start + t + i < tokens; i++) {
        const float* weight = scratch.weights + (start + t + i) * GROUP;
        for (u32 g = 0; g < GROUP; g++) output[g] = fused_multiply_add(weight[g], value[i], output[g]);
      }
    }
  }
  for (u32 g = 0; g < GROUP; g++) scratch.teams[thread_index() * GROUP + g] = output[g];
  block_barrier();
  if (team != 0) return;
  for (u32 other = 1; other < teams; other++) {
    for (u32 g = 0; g < GROUP; g++) output[g] += scratch.teams[(other * task.value_dim + dimension) * GROUP + g];
  }
}

// With `partials` the block has one partition, block_index_z, and leaves its result there; else it folds them all.
template <class E, u32 GROUP>
DEVICE void attend(const float* q, const E* cache, const RowMeta* meta, const u32* tables, const Outputs& to,
                   float* partials, u32 heads, u32 kv_heads, u32 group, u32 key_dim, u32 value_dim, float scale) {
  u32 row = block_index_x(), blocks = (group + GROUP - 1) / GROUP;
  u32 kv_head = block_index_y() / blocks, skipped = block_index_y() % blocks * GROUP;
  u32 head = kv_head * group + skipped, taken = group - skipped < GROUP ? group - skipped : GROUP;
  Task<E> task{cache, tables + meta[row].table, meta[row].position + 1, kv_heads, kv_head, key_dim, value_dim};
  u32 partitions = (task.context + PARTITION - 1) / PARTITION;
  u32 begin = partials != nullptr ? block_index_z() : 0, end = partials != nullptr ? begin + 1 : partitions;
  if (begin >= partitions) return;  // the whole block

  SHARED_ARRAY(f32x4, queries, GROUP * MAX_DIM / 4);
  SHARED_ARRAY(f32x4, weights, (GROUP * PARTITION + 3) / 4);
  SHARED_ARRAY(float, teams, GROUP * PARTITION);
  SHARED_ARRAY(float, tops, GROUP);
  SHARED_ARRAY(float, sums, GROUP);
  Scratch<GROUP> scratch{queries->v, weights->v, teams, tops, sums};
  for (u32 i = thread_index(); i < GROUP * key_dim; i += block_threads()) {
    float query = i < taken * key_dim ? q[((u64)row * heads + head) * key_dim + i] : 0.0f;
    scratch.queries[i] = query * (scale * LOG2_E);
  }
  float all[GROUP], top[GROUP], sum[GROUP];
  for (u32 g = 0; g < GROUP; g++) all[g] = 0.0f, top[g] = EMPTY, sum[g] = 0.0f;
  for (u32 partition = begin; partition < end; partition++) {
    block_barrier();  // the queries are there, and the last partition's weights are done with
    scores<E, GROUP>(task, scratch, partition * PARTITION);
    block_barrier();
    weigh<GROUP>(scratch);
    block_barrier();
    float output[GROUP];
    outputs<E, GROUP>(task, scratch, partition * PARTITION, output);
    for (u32 g = 0; g < GROUP; g++) {
      Fold fold = fold_tops(top[g], scratch.tops[g]);
      all[g] = fold_values(fold, all[g], output[g]);
      sum[g] = fold_values(fold, sum[g], scratch.sums[g]);
      top[g] = fold.top;
    }
  }
  if (thread_index() >= value_dim) return;
  UNROLL(GROUP)  // all of it, or the results would need addresses
  for (u32 g = 0; g < GROUP; g++) {
    if (g >= taken) continue;
    u64 row_head = (u64)row * heads + head + g;
    if (partials != nullptr) {
      float* one = partials + partial_offset(begin, grid_blocks_x(), row_head, heads, value_dim);
      one[thread_index()] = all[g];
      if (thread_index() == 0) one[value_dim] = top[g], one[value_dim + 1] = sum[g];
    } else {
      float gate = gate_at(to, row_head, thread_index());
      finish(to, row_head, value_dim, thread_index(), all[g], reciprocal_fast(sum[g]), gate);
    }
  }
}

// Folds the partitions, of `partition` positions each, of a row and head, FOLDED of them at a time: all threads bring them
// into shared memory, a thread a partition finds its factors, and a thread a dimension adds them in order.
static constexpr u32 FOLD_THREADS = 256;
static constexpr u32 FOLD_DIMS = 64;  // of a block
static constexpr u32 FOLDED = 64;
static constexpr u32 OF_THREAD = FOLDED * FOLD_DIMS / FOLD_THREADS;

// What a thread brings into shared memory, on its way.
struct Folded {
  float outputs[OF_THREAD], top, sum;
};

// `partials` are those of a row's head, `stride` apart.
DEVICE Folded load_folded(const float* partials, u64 stride, u32 first, u32 partitions, u32 value_dim, u32 dimension) {
  Folded loaded;
  u32 me = thread_index(), own = first + me;
  UNROLL(OF_THREAD)
  for (u32 i = 0; i < OF_THREAD; i++) {
    u32 at = smaller(first + i * (FOLD_THREADS / FOLD_DIMS) + me / FOLD_DIMS, partitions - 1);
    loaded.outputs[i] = partials[at * stride + smaller(dimension, value_dim - 1)];
  }
  // Beyond the last partition there are empty ones, which change nothing.
  bool here = me < FOLDED && own < partitions;
  loaded.top = here ? partials[own * stride + value_dim] : EMPTY;
  loaded.sum = here ? partials[own * stride + value_dim + 1] : 0.0f;
  return loaded;
}

KERNEL(attend_fold, FOLD_THREADS, const float* partials, const RowMeta* meta, const float* gate, u32 gate_stride,
       float* out, u32 heads, u32 value_dim, u32 partition) {
  u32 row = block_index_x(), me = thread_index(), dimension = block_index_z() * FOLD_DIMS + me % FOLD_DIMS;
  u64 row_head = (u64)row * heads + block_index_y();
  u32 partitions = meta[row].position / partition + 1;
  Outputs to{gate, gate_stride, out};
  bool mine = me < FOLD_DIMS && dimension < value_dim;
  float own_gate = mine ? gate_at(to, row_head, dimension) : 0.0f;
  SHARED_ARRAY(float, outputs, FOLDED * FOLD_DIMS);
  SHARED_ARRAY(float, tops, FOLDED);
  SHARED_ARRAY(float, sums, FOLDED);
  SHARED_ARRAY(float, factors, FOLDED * 2);
  partials += partial_offset(0, grid_blocks_x(), row_head, heads, value_dim);
  u64 stride = partial_offset(1, grid_blocks_x(), 0, heads, value_dim);
  Folded loaded = load_folded(partials, stride, 0, partitions, value_dim, dimension);
  float all = 0.0f, top = EMPTY, sum = 0.0f;
  for (u32 first = 0; first < partitions; first += FOLDED) {
    block_barrier();  // the last ones are done with
    UNROLL(OF_THREAD)
    for (u32 i = 0; i < OF_THREAD; i++) outputs[i * FOLD_THREADS + me] = loaded.outputs[i];
    if (me < FOLDED) tops[me] = loaded.top, sums[me] = loaded.sum;
    float own_top = loaded.top, before = top;
    block_barrier();
    if (first + FOLDED < partitions) {
      loaded = load_folded(partials, stride, first + FOLDED, partitions, value_dim, dimension);
    }
    UNROLL(16)
    for (u32 i = 0; i < FOLDED; i++) {
      if (i < me) before = larger(before, tops[i]);
      top = larger(top, tops[i]);
    }
    if (me < FOLDED) {
      Fold fold = fold_tops(before, own_top);
      factors[me * 2] = fold.of_all, factors[me * 2 + 1] = fold.of_one;
    }
    block_barrier();
    if (!mine) continue;
    UNROLL(16)
    for (u32 i = 0; i < FOLDED; i++) {
      Fold fold{0.0f, factors[i * 2], factors[i * 2 + 1]};
      all = fold_values(fold, all, outputs[i * FOLD_DIMS + me]);
      sum = fold_values(fold, sum, sums[i]);
    }
  }
  if (mine) finish(to, row_head, value_dim, dimension, all, reciprocal_fast(sum), own_gate);
}

#define PREPARE_KERNEL(name, E)                                                                                       \
  KERNEL(name, 128, const float* q, u32 q_stride, float* prepared, const float* q_norm, float q_epsilon,              \
         const float* q_cosines, const float* q_sines, u32 q_pairs, u32 q_adjacent, const float* k,                   \
         const float* k_norm, float k_epsilon, const float* k_cosines, const float* k_sines, u32 k_pairs,             \
         u32 k_adjacent, const float* v, const RowMeta* meta, const u32* tables, E* cache, u32 heads, u32 kv_heads,   \
         u32 key_dim, u32 value_dim) {                                                                                \
    Heads of{q, q_stride, prepared, k, v, heads, kv_heads, key_dim, value_dim};                                       \
    HeadSteps q_steps{q_norm, q_epsilon, q_cosines, q_sines, q_pairs, q_adjacent};                                    \
    HeadSteps k_steps{k_norm, k_epsilon, k_cosines, k_sines, k_pairs, k_adjacent};                                    \
    prepare<E>(of, q_steps, k_steps, meta, tables, cache);                                                            \
  }
#define ATTEND_KERNEL(name, E, GROUP)                                                                                \
  KERNEL(name, PARTITION, const float* q, const E* cache, const RowMeta* meta, const u32* tables, const float* gate, \
         u32 gate_stride, float* out, float* partials, u32 heads, u32 kv_heads, u32 group, u32 key_dim,              \
         u32 value_dim, float scale) {                                                                               \
    attend<E, GROUP>(q, cache, meta, tables, Outputs{gate, gate_stride, out}, partials, heads, kv_heads, group,      \
                     key_dim, value_dim, scale);                                                                     \
  }

PREPARE_KERNEL(attention_prepare_f32, float)
PREPARE_KERNEL(attention_prepare_f16, f16)
ATTEND_KERNEL(attend_f32_1, float, 1)
ATTEND_KERNEL(attend_f32_2, float, 2)
ATTEND_KERNEL(attend_f32_4, float, 4)
ATTEND_KERNEL(attend_f32_8, float, 8)
ATTEND_KERNEL(attend_f16_1, f16, 1)
ATTEND_KERNEL(attend_f16_2, f16, 2)
ATTEND_KERNEL(attend_f16_4, f16, 4)
ATTEND_KERNEL(attend_f16_8, f16, 8)
