// Paged causal grouped-query attention: see worker-gpu/src/launch/attention.rs.
//
// One block takes one query row, up to GROUP query heads of one kv head, and one partition of PARTITION positions after
// the other (or a single one): scores with a thread per position, softmax with a wave per head, outputs with a thread per
// dimension. A partition is reduced relative to its own maximum; partitions are folded in order of position, by the same
// operations wherever that happens.
#include "step.h"

static constexpr u32 KV_BLOCK = 32;
static constexpr u32 PARTITION = 256;

// Where the keys of a kv head start in a block, in elements. Its values follow at KV_BLOCK * key_dim.
DEVICE u64 head_offset(u32 block, u32 kv_heads, u32 kv_head, u32 key_dim, u32 value_dim) {
  return ((u64)block * kv_heads + kv_head) * (KV_BLOCK * (key_dim + value_dim));
}

DEVICE void store(float* to, float value) { *to = value; }
DEVICE void store(f16* to, float value) { *to = to_f16(value); }

// Keys in pieces of 16 bytes, [piece][token][16 bytes], then values, [token][value_dim].
template <class E>
DEVICE void kv_append(const float* k, const float* v, const RowMeta* meta, const u32* tables, E* cache, u32 kv_heads,
                      u32 key_dim, u32 value_dim) {
  constexpr u32 PIECE = 16 / sizeof(E);
  u32 row = block_index_x(), kv_head = block_index_y();
  u32 position = meta[row].position, slot = position % KV_BLOCK;
  u32 block = tables[meta[row].table + position / KV_BLOCK];
  E* keys = cache + head_offset(block, kv_heads, kv_head, key_dim, value_dim);
  E* values = keys + KV_BLOCK * key_dim + slot * value_dim;
  k += ((u64)row * kv_heads + kv_head) * key_dim;
  v += ((u64)row * kv_heads + kv_head) * value_dim;
  for (u32 i = thread_index(); i < key_dim; i += block_threads()) {
    store(keys + (i / PIECE * KV_BLOCK + slot) * PIECE + i % PIECE, k[i]);
  }
  for (u32 i = thread_index(); i < value_dim; i += block_threads()) store(values + i, v[i]);
}

// The result over some positions: outputs and sum are relative to the largest score.
struct Partial {
  float output, largest, sum;
};

DEVICE Partial fold(Partial a, Partial b) {
  float largest = larger(a.largest, b.largest);
  float of_a = exp_f32(a.largest - largest), of_b = exp_f32(b.largest - largest);
  return Partial{fused_multiply_add(a.output, of_a, b.output * of_b), largest,
                 fused_multiply_add(a.sum, of_a, b.sum * of_b)};
}

DEVICE float finish(Partial all, const float* gate, u64 at) {
  float value = all.output / all.sum;
  return gate == nullptr ? value : value * sigmoid(gate[at]);
}

DEVICE void unpack(i32x4 bytes, float* out, float) {
  for (u32 i = 0; i < 4; i++) out[i] = bit_cast<float>(bytes.v[i]);
}
DEVICE void unpack(i32x4 bytes, float* out, f16) {
  for (u32 i = 0; i < 8; i++) out[i] = to_f32(f16{(u16)((u32)bytes.v[i / 2] >> i % 2 * 16)});
}
DEVICE float value_of(float x) { return x; }
DEVICE float value_of(f16 x) { return to_f32(x); }

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
  float* weights;  // [PARTITION][GROUP]: scores, then their exponentials
  float* teams;    // [PARTITION][GROUP]
  float* largest;  // [GROUP]
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

// Exponentials of the scores, relative to the largest, and their sum: a wave a head.
template <u32 GROUP>
DEVICE void exponentials(const Scratch<GROUP>& scratch) {
  for (u32 g = wave_index(); g < GROUP; g += block_threads() / WAVE) {
    float largest = -infinity();
    for (u32 i = lane_index(); i < PARTITION; i += WAVE) largest = larger(largest, scratch.weights[i * GROUP + g]);
    largest = wave_max(largest);
    float sum = 0.0f;
    for (u32 i = lane_index(); i < PARTITION; i += WAVE) {
      float weight = exp_f32(scratch.weights[i * GROUP + g] - largest);
      scratch.weights[i * GROUP + g] = weight;
      sum += weight;
    }
    sum = wave_sum(sum);
    if (lane_index() == 0) scratch.largest[g] = largest, scratch.sums[g] = sum;
  }
}

// Weighted sums of values, a thread a dimension. Narrow values leave threads over: teams of them take every
// `teams`-th token of a block, and the first team adds the others' sums in order.
template <class E, u32 GROUP>
DEVICE void outputs(const Task<E>& task, const Scratch<GROUP>& scratch, u32 first, float* output) {
  u32 teams = PARTITION / task.value_dim, team = thread_index() / task.value_dim;
  u32 dimension = thread_index() % task.value_dim;
  for (u32 g = 0; g < GROUP; g++) output[g] = 0.0f;
  u32 tokens = task.context - first < PARTITION ? task.context - first : PARTITION;
  for (u32 start = 0; start < tokens && team < teams; start += KV_BLOCK) {
    u32 block = task.table[(first + start) / KV_BLOCK];
    const E* values = task.cache + head_offset(block, task.kv_heads, task.kv_head, task.key_dim, task.value_dim) +
                      KV_BLOCK * task.key_dim + dimension;
    for (u32 t = team; t < KV_BLOCK && start + t < tokens; t += teams) {
      float value = value_of(values[t * task.value_dim]);
      const float* weight = scratch.weights + (start + t) * GROUP;
      for (u32 g = 0; g < GROUP; g++) output[g] = fused_multiply_add(weight[g], value, output[g]);
    }
  }
  for (u32 g = 0; g < GROUP; g++) scratch.teams[thread_index() * GROUP + g] = output[g];
  block_barrier();
  if (team != 0) return;
  for (u32 other = 1; other < teams; other++) {
    for (u32 g = 0; g < GROUP; g++) output[g] += scratch.teams[(other * task.value_dim + dimension) * GROUP + g];
  }
}

// With SPLIT the block has one partition, block_index_z, and `out` takes partial results: the outputs, the largest score
// and the sum, [partition][row][head][value_dim + 2]. Else it folds them all and `out` is [row][head][value_dim].
template <class E, u32 GROUP, bool SPLIT>
DEVICE void attend(const float* q, const E* cache, const RowMeta* meta, const u32* tables, const float* gate,
                   float* out, u32 heads, u32 kv_heads, u32 group, u32 key_dim, u32 value_dim, float scale) {
  u32 row = block_index_x(), blocks = (group + GROUP - 1) / GROUP;
  u32 kv_head = block_index_y() / blocks, skipped = block_index_y() % blocks * GROUP;
  u32 head = kv_head * group + skipped, taken = group - skipped < GROUP ? group - skipped : GROUP;
  Task<E> task{cache, tables + meta[row].table, meta[row].position + 1, kv_heads, kv_head, key_dim, value_dim};
  u32 partitions = (task.context + PARTITION - 1) / PARTITION;
  u32 begin = SPLIT ? block_index_z() : 0, end = SPLIT ? begin + 1 : partitions;
  if (begin >= partitions) return;  // the whole block

  SHARED_ARRAY(f32x4, queries, GROUP * PARTITION / 4);
  SHARED_ARRAY(f32x4, weights, (GROUP * PARTITION + 3) / 4);
  SHARED_ARRAY(float, teams, GROUP * PARTITION);
  SHARED_ARRAY(float, largest, GROUP);
  SHARED_ARRAY(float, sums, GROUP);
  Scratch<GROUP> scratch{queries->v, weights->v, teams, largest, sums};
  for (u32 i = thread_index(); i < GROUP * key_dim; i += block_threads()) {
    scratch.queries[i] = i < taken * key_dim ? q[((u64)row * heads + head) * key_dim + i] * scale : 0.0f;
  }
  Partial all[GROUP];
  for (u32 g = 0; g < GROUP; g++) all[g] = Partial{0.0f, -infinity(), 0.0f};
  for (u32 partition = begin; partition < end; partition++) {
    block_barrier();  // the queries are there, and the last partition's weights are done with
    scores<E, GROUP>(task, scratch, partition * PARTITION);
    block_barrier();
    exponentials<GROUP>(scratch);
    block_barrier();
    float output[GROUP];
    outputs<E, GROUP>(task, scratch, partition * PARTITION, output);
    for (u32 g = 0; g < GROUP; g++) {
      Partial one{output[g], scratch.largest[g], scratch.sums[g]};
      all[g] = SPLIT ? one : fold(all[g], one);
    }
  }
  if (thread_index() >= value_dim) return;
  UNROLL(GROUP)  // all of it, or the results would need addresses
  for (u32 g = 0; g < GROUP; g++) {
    if (g >= taken) continue;
    if (SPLIT) {
      u64 at = (((u64)begin * grid_blocks_x() + row) * heads + head + g) * (value_dim + 2);
      out[at + thread_index()] = all[g].output;
      if (thread_index() == 0) out[at + value_dim] = all[g].largest, out[at + value_dim + 1] = all[g].sum;
    } else {
      u64 at = ((u64)row * heads + head + g) * value_dim + thread_index();
      out[at] = finish(all[g], gate, at);
    }
  }
}

// Folds the partitions of a row and head.
KERNEL(attend_fold, 256, const float* partials, const RowMeta* meta, const float* gate, float* out, u32 heads,
       u32 value_dim) {
  u32 row = block_index_x(), head = block_index_y();
  u32 partitions = (meta[row].position + PARTITION) / PARTITION;
  if (thread_index() >= value_dim) return;
  Partial all{0.0f, -infinity(), 0.0f};
  for (u32 partition = 0; partition < partitions; partition++) {
    const float* one = partials + (((u64)partition * grid_blocks_x() + row) * heads + head) * (value_dim + 2);
    all = fold(all, Partial{one[thread_index()], one[value_dim], one[value_dim + 1]});
  }
  u64 at = ((u64)row * heads + head) * value_dim + thread_index();
  out[at] = finish(all, gate, at);
}

#define KV_APPEND_KERNEL(name, E)                                                                                   \
  KERNEL(name, 64, const float* k, const float* v, const RowMeta* meta, const u32* tables, E* cache, u32 kv_heads,  \
         u32 key_dim, u32 value_dim) {                                                                              \
    kv_append<E>(k, v, meta, tables, cache, kv_heads, key_dim, value_dim);                                          \
  }
#define ATTEND_KERNEL(name, E, GROUP, SPLIT)                                                                       \
  KERNEL(name, 256, const float* q, const E* cache, const RowMeta* meta, const u32* tables, const float* gate,     \
         float* out, u32 heads, u32 kv_heads, u32 group, u32 key_dim, u32 value_dim, float scale) {                \
    attend<E, GROUP, SPLIT>(q, cache, meta, tables, gate, out, heads, kv_heads, group, key_dim, value_dim, scale); \
  }

KV_APPEND_KERNEL(kv_append_f32, float)
KV_APPEND_KERNEL(kv_append_f16, f16)
ATTEND_KERNEL(attend_split_f32_1, float, 1, true)
ATTEND_KERNEL(attend_split_f32_2, float, 2, true)
ATTEND_KERNEL(attend_split_f32_4, float, 4, true)
ATTEND_KERNEL(attend_split_f32_8, float, 8, true)
ATTEND_KERNEL(attend_split_f16_1, f16, 1, true)
ATTEND_KERNEL(attend_split_f16_2, f16, 2, true)
ATTEND_KERNEL(attend_split_f16_4, f16, 4, true)
ATTEND_KERNEL(attend_split_f16_8, f16, 8, true)
ATTEND_KERNEL(attend_whole_f32_1, float, 1, false)
ATTEND_KERNEL(attend_whole_f32_2, float, 2, false)
ATTEND_KERNEL(attend_whole_f32_4, float, 4, false)
ATTEND_KERNEL(attend_whole_f32_8, float, 8, false)
ATTEND_KERNEL(attend_whole_f16_1, f16, 1, false)
ATTEND_KERNEL(attend_whole_f16_2, f16, 2, false)
ATTEND_KERNEL(attend_whole_f16_4, f16, 4, false)
ATTEND_KERNEL(attend_whole_f16_8, f16, 8, false)
