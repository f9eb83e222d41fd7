// NVIDIA: clang -x cuda, device pass only, without CUDA's headers and libdevice; or NVRTC. Included by prelude.h alone.
#pragma once

#define SPILLWAY_NVIDIA 1
#define WAVE 32

#if defined(__clang__)
#define DEVICE static inline __attribute__((device, always_inline))
#define DEVICE_MEMBER inline __attribute__((device, always_inline))
#define SPILLWAY_SHARED __attribute__((shared))
#define KERNEL(name, max_threads, ...) \
  extern "C" __attribute__((global, launch_bounds(max_threads))) void name(__VA_ARGS__)
#define KERNEL_TOGETHER(name, max_threads, blocks, ...) \
  extern "C" __attribute__((global, launch_bounds(max_threads, blocks))) void name(__VA_ARGS__)
#else
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define SPILLWAY_SHARED __shared__
#define KERNEL(name, max_threads, ...) extern "C" __global__ __launch_bounds__(max_threads) void name(__VA_ARGS__)
#define KERNEL_TOGETHER(name, max_threads, blocks, ...) \
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

DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

DEVICE void block_barrier() { __syncthreads(); }
DEVICE void wave_barrier() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// The address of shared memory as instructions that know no other memory take it.
DEVICE u32 shared_address(const void* at) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(at));
  return (u32)address;
}

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

#define SPILLWAY_LOAD_ONCE "ld.global.nc.L1::no_allocate"
DEVICE u32 load_once(const u32* from) {
  u32 value;
  asm volatile(SPILLWAY_LOAD_ONCE ".b32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
DEVICE i32x2 load_once(const i32x2* from) {
  i32x2 value;
  asm volatile(SPILLWAY_LOAD_ONCE ".v2.b32 {%0, %1}, [%2];" : "=r"(value.v[0]), "=r"(value.v[1]) : "l"(from));
  return value;
}
DEVICE i32x4 load_once(const i32x4* from) {
  i32x4 value;
  asm volatile(SPILLWAY_LOAD_ONCE ".v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.v[0]), "=r"(value.v[1]), "=r"(value.v[2]), "=r"(value.v[3])
      : "l"(from));
  return value;
}
#undef SPILLWAY_LOAD_ONCE
// The assembler moves loads down to their uses, but not past a barrier. The threads need not be a whole wave.
DEVICE void loads_under_way() {
  asm volatile("{.reg .b32 mask; activemask.b32 mask; bar.warp.sync mask;}" ::: "memory");
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
