// Kernels that are wrong on purpose: tests/kernels.rs proves that the emulated device notices.
#include "prelude.h"

// Reverses each block in place without the barrier between the reads and the writes' readers.
KERNEL(missing_barrier, 256, const float* x, float* out) {
  SHARED_ARRAY(float, staged, 256);
  staged[thread_index()] = x[thread_index()];
  out[thread_index()] = staged[block_threads() - 1 - thread_index()];
}

KERNEL(divergent_barrier, 256, float* out) {
  if (thread_index() < block_threads() / 2) block_barrier();
  out[thread_index()] = 1.0f;
}

KERNEL(divergent_shuffle, 256, float* out) {
  float value = (float)thread_index();
  if (lane_index() % 2 == 0) value = wave_shuffle_xor(value, 2);
  out[thread_index()] = value;
}

KERNEL(too_much_shared, 64, float* out) {
  SHARED_ARRAY(float, wide, 16 * 1024 + 1);
  wide[thread_index()] = 0.0f;
  out[thread_index()] = wide[thread_index()];
}

KERNEL(past_the_end, 64, float* out, u32 count) {
  u32 i = block_index_x() * block_threads() + thread_index();
  if (i <= count) out[i] = 1.0f;
}

KERNEL(past_the_shared_end, 64, float* out) {
  SHARED_ARRAY(float, staged, 64);
  staged[thread_index() + 1] = 1.0f;
  block_barrier();
  out[thread_index()] = staged[thread_index()];
}
