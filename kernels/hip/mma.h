// Products of small matrices on the matrix units: D[16 x 16] += A[16 x K] * B[16 x K]^T, one wave a product.
//
// f16 with f32 sums (K = 16) and int8 with int32 sums (K = 32). Both operands are loaded the same way, as 16 rows of K
// values; which lane holds what is private to the target and reached through mma_row and mma_column. WMMA on RDNA 3 and 4,
// MFMA on CDNA, mma.sync on NVIDIA; elsewhere the same values are exchanged by shuffles, slowly.
#pragma once

#include "prelude.h"

static constexpr u32 MMA_SIDE = 16;                          // rows and columns of D
static constexpr u32 MMA_VALUES = MMA_SIDE * MMA_SIDE / WAVE;  // values of D in each lane

// CDNA's generations; the later ones multiply twice as many bytes at a time.
#if defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__)
#define SPILLWAY_MFMA 1
#define SPILLWAY_MFMA_DEEP 1
#elif defined(__gfx908__) || defined(__gfx90a__)
#define SPILLWAY_MFMA 1
#endif

// How a lane's share of an operand is laid out, in 32-bit words.
#if defined(SPILLWAY_AMD) && defined(__GFX11__)
#define MMA_F16_WORDS 8  // a whole row, in both halves of the wave
#define MMA_I8_WORDS 8
#elif defined(SPILLWAY_NVIDIA)
#define MMA_F16_WORDS 4
#define MMA_I8_WORDS 4
#else
#define MMA_F16_WORDS (MMA_SIDE * 16 / 2 / WAVE)  // a row is cut into WAVE / 16 pieces
#define MMA_I8_WORDS (MMA_SIDE * 32 / 4 / WAVE)
#endif

struct MmaF16 {
  static constexpr u32 DEPTH = 16;
  u32 word[MMA_F16_WORDS];
};
struct MmaI8 {
  static constexpr u32 DEPTH = 32;
  u32 word[MMA_I8_WORDS];
};
struct MmaSumF32 {
  float value[MMA_VALUES];
};
struct MmaSumI32 {
  i32 value[MMA_VALUES];
};

// Row and column of D that this lane's value `i` stands for.
DEVICE u32 mma_row(u32 i) {
#if defined(SPILLWAY_NVIDIA)
  return lane_index() / 4 + (i / 2 % 2) * 8;
#elif defined(SPILLWAY_AMD) && defined(__GFX11__)
  return i * 2 + lane_index() / 16;
#else
  return lane_index() / 16 * MMA_VALUES + i;
#endif
}
DEVICE u32 mma_column(u32 i) {
#if defined(SPILLWAY_NVIDIA)
  return i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
#else
  (void)i;
  return lane_index() % 16;
#endif
}

// How many of a lane's values, from the first on, hold all columns below 8 of D.
#if defined(SPILLWAY_NVIDIA)
static constexpr u32 MMA_NARROW_VALUES = MMA_VALUES / 2;
#else
static constexpr u32 MMA_NARROW_VALUES = MMA_VALUES;
#endif

// A lane's values have MMA_ROWS different rows and MMA_COLUMNS different columns: which of them value `i` has, and a value
// that has number `n`.
#if defined(SPILLWAY_NVIDIA)
static constexpr u32 MMA_ROWS = 2;
DEVICE constexpr u32 mma_row_number(u32 i) { return i / 2 % 2; }
DEVICE constexpr u32 mma_column_number(u32 i) { return i / 4 * 2 + i % 2; }
DEVICE constexpr u32 mma_with_row(u32 n) { return n * 2; }
DEVICE constexpr u32 mma_with_column(u32 n) { return n / 2 * 4 + n % 2; }
#else
static constexpr u32 MMA_ROWS = MMA_VALUES;
DEVICE constexpr u32 mma_row_number(u32 i) { return i; }
DEVICE constexpr u32 mma_column_number(u32) { return 0; }
DEVICE constexpr u32 mma_with_row(u32 n) { return n; }
DEVICE constexpr u32 mma_with_column(u32) { return 0; }
#endif
static constexpr u32 MMA_COLUMNS = MMA_VALUES / MMA_ROWS;

// An int8 operand straight from memory: a lane brings MMA_LANE_WORDS of the eight words of MMA_LANE_ROWS of its rows, from
// word mma_lane_word() on. Which words of depth they stand for does not matter as long as both operands are built so.
#if defined(SPILLWAY_NVIDIA)
static constexpr u32 MMA_LANE_ROWS = 2;
#else
static constexpr u32 MMA_LANE_ROWS = 1;
#endif
static constexpr u32 MMA_LANE_WORDS = MMA_I8_WORDS / MMA_LANE_ROWS;

DEVICE u32 mma_lane_row(u32 i) {
#if defined(SPILLWAY_NVIDIA)
  return lane_index() / 4 + i * 8;
#else
  (void)i;
  return lane_index() % 16;
#endif
}
DEVICE u32 mma_lane_word() {
#if defined(SPILLWAY_NVIDIA)
  return lane_index() % 4 * MMA_LANE_WORDS;
#else
  return MMA_LANE_WORDS == 8 ? 0 : lane_index() / 16 * MMA_LANE_WORDS;
#endif
}
DEVICE MmaI8 mma_operand(const i32 (*words)[MMA_LANE_WORDS]) {
  MmaI8 operand;
  for (u32 row = 0; row < MMA_LANE_ROWS; row++) {
    for (u32 i = 0; i < MMA_LANE_WORDS; i++) operand.word[i * MMA_LANE_ROWS + row] = (u32)words[row][i];
  }
  return operand;
}

// Loads an operand: `words` points at its first row, rows are `stride` words apart. A row has eight words at both depths.
template <class Operand, u32 WORDS>
DEVICE Operand mma_load_words(const u32* words, u32 stride) {
  Operand operand;
#if defined(SPILLWAY_NVIDIA)
  // Words 0..3: (row, low half), (row + 8, low half), (row, high half), (row + 8, high half).
  u32 row = lane_index() / 4, column = lane_index() % 4;
  for (u32 i = 0; i < WORDS; i++) operand.word[i] = words[(row + i % 2 * 8) * stride + column + i / 2 * 4];
#elif defined(SPILLWAY_AMD) && defined(__GFX11__)
  for (u32 i = 0; i < WORDS; i++) operand.word[i] = words[lane_index() % 16 * stride + i];
#else
  for (u32 i = 0; i < WORDS; i++) operand.word[i] = words[lane_index() % 16 * stride + lane_index() / 16 * WORDS + i];
#endif
  return operand;
}

// Loads 16 rows of 16 f16, `stride` values apart; rows are 4-byte aligned.
DEVICE MmaF16 mma_load(const f16* rows, u32 stride) {
  return mma_load_words<MmaF16, MMA_F16_WORDS>(reinterpret_cast<const u32*>(rows), stride / 2);
}
// Loads 16 rows of 32 int8, `stride` values apart; rows are 4-byte aligned.
DEVICE MmaI8 mma_load(const i8* rows, u32 stride) {
  return mma_load_words<MmaI8, MMA_I8_WORDS>(reinterpret_cast<const u32*>(rows), stride / 4);
}

#if defined(SPILLWAY_NVIDIA)

DEVICE void mma_half(float* d, const MmaF16& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_half(i32* d, const MmaI8& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}
template <class Sum, class Operand>
DEVICE void mma(Sum& sum, const Operand& a, const Operand& b) {
  mma_half(sum.value, a, b.word[0], b.word[2]);
  mma_half(sum.value + 4, a, b.word[1], b.word[3]);
}

#elif defined(SPILLWAY_AMD) && (defined(__GFX11__) || defined(__GFX12__) || defined(SPILLWAY_MFMA))

typedef i32 MmaI32s __attribute__((ext_vector_type(MMA_VALUES)));
typedef float MmaF32s __attribute__((ext_vector_type(MMA_VALUES)));
typedef _Float16 MmaHalves __attribute__((ext_vector_type(MMA_F16_WORDS * 2)));

#if defined(__GFX11__)
typedef i32 MmaBytes __attribute__((ext_vector_type(4)));
DEVICE MmaF32s mma_step(MmaHalves a, MmaHalves b, MmaF32s c) { return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c); }
DEVICE MmaI32s mma_step(MmaBytes a, MmaBytes b, MmaI32s c) {
  return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, a, true, b, c, false);
}
#elif defined(__GFX12__)
typedef i32 MmaBytes __attribute__((ext_vector_type(2)));
DEVICE MmaF32s mma_step(MmaHalves a, MmaHalves b, MmaF32s c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
}
DEVICE MmaI32s mma_step(MmaBytes a, MmaBytes b, MmaI32s c) {
  return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, a, true, b, c, false);
}
#else
DEVICE MmaF32s mma_step(MmaHalves a, MmaHalves b, MmaF32s c) {
  return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
}
#if defined(SPILLWAY_MFMA_DEEP)
typedef long MmaBytes;
DEVICE MmaI32s mma_step(MmaBytes a, MmaBytes b, MmaI32s c) {
  return __builtin_amdgcn_mfma_i32_16x16x32_i8(a, b, c, 0, 0, 0);
}
#else
typedef i32 MmaBytes;
DEVICE MmaI32s mma_step(MmaBytes a, MmaBytes b, MmaI32s c) {
  return __builtin_amdgcn_mfma_i32_16x16x16i8(a, b, c, 0, 0, 0);
}
#endif
#endif

DEVICE void mma(MmaSumF32& sum, const MmaF16& a, const MmaF16& b) {
  sum = bit_cast<MmaSumF32>(mma_step(bit_cast<MmaHalves>(a), bit_cast<MmaHalves>(b), bit_cast<MmaF32s>(sum)));
}
// The instruction may be shallower than 32: steps over equal pieces of both operands' words, in any assignment of words
// to depth, since integer sums have no order.
DEVICE void mma(MmaSumI32& sum, const MmaI8& a, const MmaI8& b) {
  struct Steps {
    MmaBytes step[sizeof(MmaI8) / sizeof(MmaBytes)];
  };
  Steps steps_a = bit_cast<Steps>(a), steps_b = bit_cast<Steps>(b);
  MmaI32s c = bit_cast<MmaI32s>(sum);
  for (u32 i = 0; i < sizeof(MmaI8) / sizeof(MmaBytes); i++) c = mma_step(steps_a.step[i], steps_b.step[i], c);
  sum = bit_cast<MmaSumI32>(c);
}

#else

DEVICE void mma_word(float& sum, u32 a, u32 b) {
  sum = fused_multiply_add(to_f32(f16{(u16)a}), to_f32(f16{(u16)b}), sum);
  sum = fused_multiply_add(to_f32(f16{(u16)(a >> 16)}), to_f32(f16{(u16)(b >> 16)}), sum);
}
DEVICE void mma_word(i32& sum, u32 a, u32 b) { sum = dot4((i32)a, (i32)b, sum); }

template <class Sum, class Operand>
DEVICE void mma(Sum& sum, const Operand& a, const Operand& b) {
  UNROLL(1)
  for (u32 piece = 0; piece < WAVE / 16; piece++) {
    for (u32 i = 0; i < sizeof(Operand) / 4; i++) {
      u32 column_word = wave_shuffle(b.word[i], piece * 16 + lane_index() % 16);
      for (u32 v = 0; v < MMA_VALUES; v++) {
        mma_word(sum.value[v], wave_shuffle(a.word[i], piece * 16 + mma_row(v)), column_word);
      }
    }
  }
}

#endif
