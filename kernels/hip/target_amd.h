// AMD: clang -x hip, device pass only, without HIP's headers and device libraries. Included by prelude.h alone.
#pragma once

#define SPILLWAY_AMD 1
#define DEVICE static inline __attribute__((device, always_inline))
#define DEVICE_MEMBER inline __attribute__((device, always_inline))
#define KERNEL(name, max_threads, ...)                                                              \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, max_threads))) void name(__VA_ARGS__)
#define KERNEL_TOGETHER(name, max_threads, blocks, ...) KERNEL(name, max_threads, __VA_ARGS__)
#define SPILLWAY_TEXT(tokens) #tokens
#define UNROLL(times) _Pragma(SPILLWAY_TEXT(unroll times))
#define SHARED_ARRAY(type, name, count) static __attribute__((shared)) type name[count]
extern __attribute__((shared, aligned(16))) u8 spillway_dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(spillway_dynamic_shared)

// GCN and CDNA have waves of 64; RDNA is built for waves of 32, its default.
#if defined(__GFX9__)
#define WAVE 64
#else
#define WAVE 32
#endif

DEVICE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_threads() { return __builtin_amdgcn_workgroup_size_x(); }
DEVICE u32 block_index_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 block_index_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE u32 block_index_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEVICE u32 grid_blocks_x() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }
DEVICE u32 grid_blocks_y() { return __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(); }

DEVICE u32 lane_index() {
  u32 below = __builtin_amdgcn_mbcnt_lo(~0u, 0u);
  return WAVE == 64 ? __builtin_amdgcn_mbcnt_hi(~0u, below) : below;
}

DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE void prefetch(const void*) {}

DEVICE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

DEVICE u32 wave_shuffle(u32 bits, u32 lane) {
  return (u32)__builtin_amdgcn_ds_bpermute((i32)(lane * 4), (i32)bits);
}
DEVICE u32 wave_shuffle_xor(u32 bits, u32 mask) { return wave_shuffle(bits, lane_index() ^ mask); }

// By architecture, since __has_builtin answers yes whatever the target. The first RDNA chips lack the instruction.
DEVICE i32 dot4(i32 a, i32 b, i32 c) {
#if defined(__GFX11__) || defined(__GFX12__)
  return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
#elif defined(__GFX9__) && !defined(__gfx900__) && !defined(__gfx902__) && !defined(__gfx904__) && \
        !defined(__gfx909__) && !defined(__gfx90c__) ||                                           \
    defined(__GFX10__) && !defined(__gfx1010__) && !defined(__gfx1013__)
  return __builtin_amdgcn_sdot4(a, b, c, false);
#else
  for (i32 byte = 0; byte < 4; byte++) c += (i32)(i8)(a >> 8 * byte) * (i32)(i8)(b >> 8 * byte);
  return c;
#endif
}

DEVICE u32 load_once(const u32* from) { return __builtin_nontemporal_load(from); }
template <class T>
DEVICE T load_once(const T* from) {
  typedef i32 Words __attribute__((ext_vector_type(sizeof(T) / 4)));
  return __builtin_bit_cast(T, __builtin_nontemporal_load(reinterpret_cast<const Words*>(from)));
}

DEVICE void loads_under_way() { __builtin_amdgcn_sched_barrier(0); }

DEVICE u32 byte_lookup(u32 low, u32 high, u32 at) { return __builtin_amdgcn_perm(high, low, at); }

DEVICE float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float reciprocal_fast(float x) { return __builtin_amdgcn_rcpf(x); }

DEVICE float to_f32(f16 value) { return (float)__builtin_bit_cast(_Float16, value); }
DEVICE f16 to_f16(float value) { return __builtin_bit_cast(f16, (_Float16)value); }
