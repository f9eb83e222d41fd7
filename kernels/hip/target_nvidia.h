// NVIDIA: clang -x cuda, device pass only, without CUDA's headers and libdevice; or NVRTC. Included by prelude.h alone.
#pragma once

#define SPILLWAY_NVIDIA 1
#define WAVE 32

#if defined(__clang__)
#define DEVICE static inline __attribute__((device, always_inline))
#define SPILLWAY_SHARED __attribute__((shared))
#define KERNEL(name, max_threads, ...) \
  extern "C" __attribute__((global, launch_bounds(max_threads))) void name(__VA_ARGS__)
#define KERNEL_RESIDENT(name, max_threads, blocks, ...) \
  extern "C" __attribute__((global, launch_bounds(max_threads, blocks))) void name(__VA_ARGS__)
#else
#define DEVICE static __device__ __forceinline__
#define SPILLWAY_SHARED __shared__
#define KERNEL(name, max_threads, ...) extern "C" __global__ __launch_bounds__(max_threads) void name(__VA_ARGS__)
#define KERNEL_RESIDENT(name, max_threads, blocks, ...) \
  extern "C" __global__ __launch_bounds__(max_threads, blocks) void name(__VA_ARGS__)
#endif
#define SPILLWAY_TEXT(tokens) #tokens
#define UNROLL(times) _Pragma(SPILLWAY_TEXT(unroll times))
#define SHARED_ARRAY(type, name, count) static SPILLWAY_SHARED type name[count]
extern SPILLWAY_SHARED __attribute__((aligned(16))) u8 spillway_dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(spillway_dynamic_shared)

#define SPILLWAY_REGISTER(function, source)         \
  DEVICE u32 function() {                           \
    u32 value;                                      \
    asm("mov.u32 %0, %%" source ";" : "=r"(value)); \
    return value;                                   \
  }
SPILLWAY_REGISTER(thread_index, "tid.x")
SPILLWAY_REGISTER(block_threads, "ntid.x")
SPILLWAY_REGISTER(block_index_x, "ctaid.x")
SPILLWAY_REGISTER(block_index_y, "ctaid.y")
SPILLWAY_REGISTER(block_index_z, "ctaid.z")
SPILLWAY_REGISTER(grid_blocks_x, "nctaid.x")
SPILLWAY_REGISTER(grid_blocks_y, "nctaid.y")
SPILLWAY_REGISTER(lane_index, "laneid")
#undef SPILLWAY_REGISTER

DEVICE void block_barrier() { __syncthreads(); }

#if defined(__clang__)
DEVICE u32 wave_shuffle(u32 bits, u32 lane) {
  return (u32)__nvvm_shfl_sync_idx_i32(0xffffffffu, (i32)bits, (i32)lane, 31);
}
DEVICE u32 wave_shuffle_xor(u32 bits, u32 mask) {
  return (u32)__nvvm_shfl_sync_bfly_i32(0xffffffffu, (i32)bits, (i32)mask, 31);
}
DEVICE float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
DEVICE u32 wave_shuffle(u32 bits, u32 lane) { return __shfl_sync(0xffffffffu, bits, (i32)lane); }
DEVICE u32 wave_shuffle_xor(u32 bits, u32 mask) { return __shfl_xor_sync(0xffffffffu, bits, (i32)mask); }
DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#endif

DEVICE i32 dot4(i32 a, i32 b, i32 c) {
  i32 sum;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// The instruction takes its selectors from four bits each.
DEVICE u32 byte_lookup(u32 low, u32 high, u32 at) {
  at = (at | at >> 4) & 0x00ff00ffu;
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(at | at >> 8));
  return bytes;
}

DEVICE float square_root(float x) {
  float root;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}
DEVICE float exp2_fast(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
DEVICE float reciprocal_fast(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

DEVICE float to_f32(f16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
DEVICE f16 to_f16(float value) {
  f16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}
