// The emulated device: a C++ compiler, one fiber per thread of a block (emulated_fibers.h). Included by prelude.h alone.
#pragma once

#include <cmath>

#include "emulated_fibers.h"

#define DEVICE [[maybe_unused]] static inline
#define DEVICE_MEMBER inline
#define WAVE SPILLWAY_WAVE
// The host looks up `<name>_emulated` and finds there what a GPU driver reads from a code object.
#define KERNEL(name, max_threads, ...)                                                        \
  static void name(__VA_ARGS__);                                                              \
  extern "C" __attribute__((visibility("default"))) const emulated::Kernel* name##_emulated() { \
    return &emulated::Describe<&name, max_threads>::kernel;                                   \
  }                                                                                           \
  static void name(__VA_ARGS__)
#define KERNEL_TOGETHER(name, max_threads, blocks, ...) KERNEL(name, max_threads, __VA_ARGS__)
#define UNROLL(times)
#define SHARED_ARRAY(type, name, count) type* const name = emulated::shared_array<type, count>(__COUNTER__)
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulated::block->dynamic_shared)

DEVICE u32 thread_index() { return emulated::current->thread; }
DEVICE u32 block_threads() { return emulated::block->launch.block[0]; }
DEVICE u32 block_index_x() { return emulated::block->index[0]; }
DEVICE u32 block_index_y() { return emulated::block->index[1]; }
DEVICE u32 block_index_z() { return emulated::block->index[2]; }
DEVICE u32 grid_blocks_x() { return emulated::block->launch.grid[0]; }
DEVICE u32 grid_blocks_y() { return emulated::block->launch.grid[1]; }
DEVICE u32 lane_index() { return emulated::current->thread % WAVE; }

DEVICE void prefetch(const void*) {}

DEVICE void block_barrier() { emulated::block->barrier(); }
DEVICE void wave_barrier() { emulated::block->shuffle(0, 0); }
DEVICE u32 wave_shuffle(u32 bits, u32 lane) { return emulated::block->shuffle(bits, lane % WAVE); }
DEVICE u32 wave_shuffle_xor(u32 bits, u32 mask) { return wave_shuffle(bits, lane_index() ^ mask); }

DEVICE i32 dot4(i32 a, i32 b, i32 c) {
  for (i32 byte = 0; byte < 4; byte++) c += (i32)(i8)(a >> 8 * byte) * (i32)(i8)(b >> 8 * byte);
  return c;
}

template <class T>
DEVICE T load_once(const T* from) {
  return *from;
}

DEVICE void loads_under_way() {}

DEVICE u32 byte_lookup(u32 low, u32 high, u32 at) {
  u32 out = 0;
  for (u32 byte = 0; byte < 4; byte++) {
    u32 from = at >> 8 * byte & 7;
    out |= ((from < 4 ? low : high) >> from % 4 * 8 & 0xffu) << 8 * byte;
  }
  return out;
}

DEVICE float fused_multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
DEVICE float square_root(float x) { return std::sqrt(x); }
DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float reciprocal_fast(float x) { return 1.0f / x; }

DEVICE float to_f32(f16 value) { return (float)__builtin_bit_cast(_Float16, value); }
DEVICE f16 to_f16(float value) { return __builtin_bit_cast(f16, (_Float16)value); }
