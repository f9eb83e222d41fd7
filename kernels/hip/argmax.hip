// out[row] = the first place of the row's largest value, one block a row. NaNs are passed over.
#include "prelude.h"

struct Best {
  float value;
  u32 at;
};

DEVICE Best better(Best a, Best b) {
  bool take = b.value > a.value || (b.value == a.value && b.at < a.at);
  return take ? b : a;
}

KERNEL(argmax, 1024, const float* x, u32* out, u32 width) {
  const float* row = x + (u64)block_index_x() * width;
  Best best{-infinity(), 0};
  for (u32 i = thread_index(); i < width; i += block_threads()) best = better(best, Best{row[i], i});
  for (u32 mask = WAVE / 2; mask > 0; mask /= 2) {
    best = better(best, Best{wave_shuffle_xor(best.value, mask), wave_shuffle_xor(best.at, mask)});
  }
  SHARED_ARRAY(Best, of_wave, 1024 / WAVE);
  if (lane_index() == 0) of_wave[wave_index()] = best;
  block_barrier();
  if (thread_index() != 0) return;
  for (u32 wave = 1; wave < block_threads() / WAVE; wave++) best = better(best, of_wave[wave]);
  out[block_index_x()] = best.at;
}
