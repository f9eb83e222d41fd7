// The vocabulary of every device source: one file for AMD, NVIDIA and the emulated device, no vendor headers.
//
// A target header supplies what differs (built with clang for HIP, with clang or NVRTC for CUDA, with a C++ compiler for
// the emulated device); everything below it is portable and written so that all targets compute the same bits:
//   KERNEL(name, max_threads, parameters...)   an entry point; blocks are whole waves, at most max_threads threads
//   KERNEL_TOGETHER(name, max_threads, blocks, parameters...)   the same, with registers for `blocks` of them on one
//                                              multiprocessor where the target lets one say so
//   DEVICE DEVICE_MEMBER                       a helper; one in a struct
//   SHARED_ARRAY(type, name, count)            memory of the block; not initialised
//   DYNAMIC_SHARED(type, name)                 the block's memory whose size the launch gives, 16-byte aligned
//   UNROLL(times)                              before a loop: how often the compiler may repeat its body
//   WAVE                                       lanes of a wave: 32 or 64
//   thread_index() block_threads() block_index_{x,y,z}() grid_blocks_{x,y}() lane_index()
//   block_barrier()                            all threads of the block; orders shared and global memory
//   wave_barrier()                             all lanes of the wave; orders their shared memory
//   wave_shuffle(bits, lane) wave_shuffle_xor(bits, mask)   all lanes of the wave take part
//   prefetch(address)                          asks for global memory to be near when it is loaded, or does nothing
//   dot4(a, b, c)                              c + the products of four signed bytes
//   byte_lookup(low, high, at)                 four bytes: each the one that a byte of `at`, 0 to 7, selects from low and high
//   load_once(from)                            u32, i32x2 or i32x4 that nobody writes and that caches need not keep
//   loads_under_way()                          the loads above are asked for before anything below is done
//   fused_multiply_add(a, b, c) square_root(x) rounded once, as IEEE 754 says
//   exp2_fast(x)                               hardware: about 2 ulp, denormal results may be zero
//   reciprocal_fast(x)                         hardware: about 1 ulp
//   to_f32(f16) to_f16(float)                  round to nearest even
// Products and sums are never contracted by the compiler: a kernel that wants a fused multiply-add writes one.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Storage formats: converted on use, so that a compiler without half-precision arithmetic can hold them.
struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

// Sixteen bytes that travel in one memory instruction.
struct alignas(16) i32x4 {
  i32 v[4];
};
struct alignas(16) f32x4 {
  float v[4];
};
struct alignas(8) i32x2 {
  i32 v[2];
};

#if defined(SPILLWAY_EMULATED)
#include "target_emulated.h"
#elif defined(__HIP__)
#include "target_amd.h"
#elif defined(__CUDA__) || defined(__CUDACC_RTC__)
#include "target_nvidia.h"
#else
#error "prelude.h: unknown target; build through the kernel compiler of worker-gpu"
#endif

static_assert(WAVE == 32 || WAVE == 64, "a wave has 32 or 64 lanes");

template <class To, class From>
DEVICE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  return __builtin_bit_cast(To, value);
}

DEVICE float infinity() { return bit_cast<float>(0x7f800000u); }
DEVICE float not_a_number() { return bit_cast<float>(0x7fc00000u); }

DEVICE u32 wave_index() { return thread_index() / WAVE; }

DEVICE float wave_shuffle(float value, u32 lane) { return bit_cast<float>(wave_shuffle(bit_cast<u32>(value), lane)); }
DEVICE float wave_shuffle_xor(float value, u32 mask) {
  return bit_cast<float>(wave_shuffle_xor(bit_cast<u32>(value), mask));
}

// Sum over the wave, in every lane: a butterfly, so one fixed order of additions for each WAVE.
DEVICE float wave_sum(float value) {
  for (u32 mask = WAVE / 2; mask > 0; mask /= 2) value += wave_shuffle_xor(value, mask);
  return value;
}

DEVICE float larger(float a, float b) { return a > b ? a : b; }

DEVICE float wave_max(float value) {
  for (u32 mask = WAVE / 2; mask > 0; mask /= 2) value = larger(value, wave_shuffle_xor(value, mask));
  return value;
}

// Sum over the block, in every thread: a butterfly over the sums of the waves. The barrier in front lets a kernel call it
// twice.
DEVICE float block_sum(float value) {
  SHARED_ARRAY(float, of_wave, 1024 / WAVE);
  value = wave_sum(value);
  if (block_threads() == WAVE) return value;
  block_barrier();
  if (lane_index() == 0) of_wave[wave_index()] = value;
  block_barrier();
  return wave_sum(lane_index() < block_threads() / WAVE ? of_wave[lane_index()] : 0.0f);
}

DEVICE float to_f32(bf16 value) { return bit_cast<float>((u32)value.bits << 16); }

DEVICE bf16 to_bf16(float value) {
  u32 bits = bit_cast<u32>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{(u16)(bits >> 16 | 0x40u)};  // a quiet NaN stays one
  return bf16{(u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

DEVICE float reciprocal_square_root(float x) { return 1.0f / square_root(x); }

// 2^n for n in [-126, 127].
DEVICE float power_of_two(i32 n) { return bit_cast<float>((u32)(n + 127) << 23); }

// Nearest integer, ties to even, for |x| < 2^22.
DEVICE float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

static constexpr float LN2_HIGH = 0.693145751953125f;  // 16 significant bits: n * LN2_HIGH is exact for |n| < 2^8
static constexpr float LN2_LOW = 1.42860682030941723e-6f;

// e^x within 1 ulp (2 for denormal results): x = n ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of e^r, whose
// first omitted term is below 6e-9. Without branches, so that several of them overlap: beyond the ends of the range the
// last product overflows, or rounds to zero, by itself, and a NaN passes through all of it.
DEVICE float exp_f32(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  float n = nearest(x * 1.44269504f);
  float r = fused_multiply_add(-n, LN2_LOW, fused_multiply_add(-n, LN2_HIGH, x));
  float p = 1.0f / 5040.0f;
  p = fused_multiply_add(p, r, 1.0f / 720.0f);
  p = fused_multiply_add(p, r, 1.0f / 120.0f);
  p = fused_multiply_add(p, r, 1.0f / 24.0f);
  p = fused_multiply_add(p, r, 1.0f / 6.0f);
  p = fused_multiply_add(p, r, 0.5f);
  p = fused_multiply_add(p, r, 1.0f);
  p = fused_multiply_add(p, r, 1.0f);
  i32 exponent = n == n ? (i32)n : 0;
  i32 half = exponent / 2;  // in two factors, since 2^n alone leaves the range of floats at both ends
  return p * power_of_two(half) * power_of_two(exponent - half);
}

// ln x within 2 ulp: x = 2^n m with m in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh(s) with s = (m - 1) / (m + 1).
DEVICE float log_f32(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -infinity() : not_a_number();
  if (x == infinity()) return x;
  i32 exponent = 0;
  if (x < 1.17549435e-38f) {
    x *= 8388608.0f;
    exponent = -23;
  }
  u32 bits = bit_cast<u32>(x) - 0x3f3504f3u;  // counts the exponent from sqrt(1/2)
  exponent += (i32)bits >> 23;
  float f = bit_cast<float>((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  float s = f / (2.0f + f);
  float z = s * s;
  float p = 2.0f / 9.0f;
  p = fused_multiply_add(p, z, 2.0f / 7.0f);
  p = fused_multiply_add(p, z, 2.0f / 5.0f);
  p = fused_multiply_add(p, z, 2.0f / 3.0f);
  // ln m = f - s (f - p z), which keeps f's bits when m is near 1.
  float n = (float)exponent;
  float correction = s * (f - p * z);
  return fused_multiply_add(n, LN2_HIGH, f - (correction - n * LN2_LOW));
}

// 1 / (1 + e^-x) and x times it, as the CPU computes them: the exponential of a negative number cannot overflow.
DEVICE float sigmoid(float x) {
  float e = exp_f32(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
DEVICE float silu(float x) { return x * sigmoid(x); }

// ln(1 + e^x) within 4 ulp: max(x, 0) + ln(1 + y) with y = e^-|x| and ln(1 + y) = 2 atanh(y / (2 + y)).
DEVICE float softplus(float x) {
  float y = exp_f32(x < 0.0f ? x : -x);
  float s = y / (2.0f + y);
  float z = s * s;
  float p = 1.0f / 13.0f;
  p = fused_multiply_add(p, z, 1.0f / 11.0f);
  p = fused_multiply_add(p, z, 1.0f / 9.0f);
  p = fused_multiply_add(p, z, 1.0f / 7.0f);
  p = fused_multiply_add(p, z, 1.0f / 5.0f);
  p = fused_multiply_add(p, z, 1.0f / 3.0f);
  p = fused_multiply_add(p * z, s, s);
  return (p + p) + (x > 0.0f ? x : 0.0f);
}
