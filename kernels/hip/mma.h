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

// Operands of twice the depth, moved in pieces of 16 bytes: 16 rows of 32 f16, four pieces each. The order in which a
// target multiplies the 32 values is its own, but the same for both operands.
#if defined(SPILLWAY_NVIDIA)
static constexpr u32 MMA_PIECES = 2;
#elif defined(SPILLWAY_AMD) && defined(__GFX11__)
static constexpr u32 MMA_PIECES = 4;
#else
static constexpr u32 MMA_PIECES = 64 / WAVE;
#endif

struct MmaDeepF16 {
  static constexpr u32 DEPTH = 32;
  i32x4 piece[MMA_PIECES];
};

// Row, and which of its four pieces, this lane's piece `i` stands for.
DEVICE u32 mma_piece_row(u32 i) {
#if defined(SPILLWAY_NVIDIA)
  return lane_index() / 4 + i * 8;
#else
  (void)i;
  return lane_index() % 16;
#endif
}
DEVICE u32 mma_piece_column(u32 i) {
#if defined(SPILLWAY_NVIDIA)
  (void)i;
  return lane_index() % 4;
#elif defined(SPILLWAY_AMD) && defined(__GFX11__)
  return i;
#else
  return lane_index() / 16 + i * (WAVE / 16);
#endif
}

// Loads an operand whose rows are `row_stride` values apart and whose pieces are `piece_stride` values apart.
DEVICE MmaDeepF16 mma_load_deep(const f16* rows, u32 row_stride, u32 piece_stride) {
  MmaDeepF16 operand;
  UNROLL(MMA_PIECES)
  for (u32 i = 0; i < MMA_PIECES; i++) {
    const f16* from = rows + mma_piece_row(i) * row_stride + mma_piece_column(i) * piece_stride;
    operand.piece[i] = *reinterpret_cast<const i32x4*>(from);
  }
  return operand;
}

DEVICE MmaF16 mma_half_depth(const MmaDeepF16& operand, u32 half) {
  MmaF16 out;
#if defined(SPILLWAY_NVIDIA)
  for (u32 i = 0; i < 4; i++) out.word[i] = (u32)operand.piece[i % 2].v[half * 2 + i / 2];
#else
  for (u32 i = 0; i < MMA_F16_WORDS; i++) {
    u32 word = half * MMA_F16_WORDS + i;
    out.word[i] = (u32)operand.piece[word / 4].v[word % 4];
  }
#endif
  return out;
}

// Of a row of D, MMA_ROW_LANES neighbouring lanes hold values; a lane holds values of MMA_LANE_ROWS rows: its value `i` is
// of the row of its value mma_lane_row(i) * MMA_ROW_STEP.
#if defined(SPILLWAY_NVIDIA)
static constexpr u32 MMA_LANE_ROWS = 2, MMA_ROW_LANES = 4, MMA_ROW_STEP = 2;
DEVICE u32 mma_lane_row(u32 i) { return i / 2 % 2; }
#else
static constexpr u32 MMA_LANE_ROWS = MMA_VALUES, MMA_ROW_LANES = 16, MMA_ROW_STEP = 1;
DEVICE u32 mma_lane_row(u32 i) { return i; }
#endif

// An operand in shared memory as mma_load_image reads it best: MMA_IMAGE_WORDS words for 16 rows of 32 f16, where
// mma_image_word(row, w) is the place of values 2 w and 2 w + 1 of a row.
#if defined(SPILLWAY_NVIDIA)
// By lane, four words each, which one load brings into the registers of one multiplication. The exclusive or spreads the
// words that a wave stores at once over the banks.
static constexpr u32 MMA_IMAGE_WORDS = 256;
DEVICE u32 mma_image_slot(u32 row, u32 piece) { return row * 4 + (piece ^ row / 2); }
DEVICE u32 mma_image_word(u32 row, u32 w) {
  return (w / 2 % 2 * 32 + mma_image_slot(row % 8, w / 4)) * 4 + w % 2 * 2 + row / 8;
}
#else
// By row, with a distance that spreads rows over the banks.
static constexpr u32 MMA_IMAGE_STRIDE = 20, MMA_IMAGE_WORDS = MMA_SIDE * MMA_IMAGE_STRIDE;
DEVICE u32 mma_image_word(u32 row, u32 w) { return row * MMA_IMAGE_STRIDE + w; }
#endif

struct MmaImageF16 {
  MmaF16 half[2];
};

DEVICE MmaImageF16 mma_load_image(const u32* image) {
  MmaImageF16 operand;
#if defined(SPILLWAY_NVIDIA)
  const i32x4* slot = reinterpret_cast<const i32x4*>(image) + mma_image_slot(lane_index() / 4, lane_index() % 4);
  for (u32 half = 0; half < 2; half++) operand.half[half] = bit_cast<MmaF16>(slot[half * 32]);
#else
  MmaDeepF16 deep = mma_load_deep(reinterpret_cast<const f16*>(image), 2 * MMA_IMAGE_STRIDE, 8);
  for (u32 half = 0; half < 2; half++) operand.half[half] = mma_half_depth(deep, half);
#endif
  return operand;
}

DEVICE void mma(MmaSumF32& sum, const MmaImageF16& a, const MmaDeepF16& b) {
  mma(sum, a.half[0], mma_half_depth(b, 0));
  mma(sum, a.half[1], mma_half_depth(b, 1));
}

// Stores D rounded to f16 as columns `column` to `column` + 15 of an operand.
DEVICE void mma_store(u32* image, u32 column, const f16 (&values)[MMA_VALUES]) {
#if defined(SPILLWAY_NVIDIA)
  UNROLL(MMA_VALUES)
  for (u32 i = 0; i < MMA_VALUES; i += 2) {  // neighbouring columns
    u32 pair = (u32)values[i].bits | (u32)values[i + 1].bits << 16;
    image[mma_image_word(mma_row(i), (column + mma_column(i)) / 2)] = pair;
  }
#else
  f16* to = reinterpret_cast<f16*>(image) + column;
  UNROLL(MMA_VALUES)
  for (u32 i = 0; i < MMA_VALUES; i++) to[mma_row(i) * 2 * MMA_IMAGE_STRIDE + mma_column(i)] = values[i];
#endif
}

// Sum and largest of a value over the lanes that hold a row.
DEVICE float mma_row_sum(float value) {
  for (u32 mask = MMA_ROW_LANES / 2; mask > 0; mask /= 2) value += wave_shuffle_xor(value, mask);
  return value;
}
DEVICE float mma_row_max(float value) {
  for (u32 mask = MMA_ROW_LANES / 2; mask > 0; mask /= 2) value = larger(value, wave_shuffle_xor(value, mask));
  return value;
}
