// Products of small matrices on the matrix units: D[16 x 16] += A[16 x K] * B[16 x K]^T, one wave a product.
//
// f16 with f32 sums (K = 16) and int8 with int32 sums (K = 32, or 16 of them). Both operands are loaded the same way, as 16
// rows of K values; which lane holds what is private to the target and reached through mma_row and mma_column. WMMA on RDNA
// 3 and 4, MFMA on CDNA, mma.sync on NVIDIA; elsewhere the same values are exchanged by shuffles, slowly.
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

// Where nothing better is there, lanes exchange what they hold: to be right, not to be used.
#if !defined(SPILLWAY_NVIDIA) && !defined(SPILLWAY_MFMA) && \
    !(defined(SPILLWAY_AMD) && (defined(__GFX11__) || defined(__GFX12__)))
#define SPILLWAY_MMA_BY_SHUFFLES 1
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

// A lane's values are those of MMA_ROWS rows and MMA_COLUMNS columns of D: value `i` is in the lane's row mma_value_row(i)
// and column mma_value_column(i), which are row mma_row(i) and column mma_column(i) of D.
#if defined(SPILLWAY_NVIDIA)
static constexpr u32 MMA_COLUMNS = 4;
#else
static constexpr u32 MMA_COLUMNS = 1;
#endif
static constexpr u32 MMA_ROWS = MMA_VALUES / MMA_COLUMNS;

DEVICE constexpr u32 mma_value_row(u32 i) { return MMA_COLUMNS == 1 ? i : i / 2 % 2; }
DEVICE constexpr u32 mma_value_column(u32 i) { return MMA_COLUMNS == 1 ? 0 : i / 4 * 2 + i % 2; }
// A value of the lane's row `n`, or column.
DEVICE constexpr u32 mma_with_row(u32 n) { return MMA_COLUMNS == 1 ? n : n * 2; }
DEVICE constexpr u32 mma_with_column(u32 n) { return n / 2 * 4 + n % 2; }

// How many of a lane's values, from the first on, hold all columns below 8 of D.
static constexpr u32 MMA_NARROW_VALUES = MMA_COLUMNS == 1 ? MMA_VALUES : MMA_VALUES / 2;

DEVICE u32 mma_row(u32 i) {
#if defined(SPILLWAY_NVIDIA)
  return lane_index() / 4 + mma_value_row(i) * 8;
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

// What `of` holds for the lane's rows, one element for each of the 16 rows of D; and for its columns.
template <class T>
DEVICE void mma_load_rows(const T* of, T* to) {
  for (u32 i = 0; i < MMA_ROWS; i++) to[i] = of[mma_row(mma_with_row(i))];
}
template <class T>
DEVICE void mma_load_columns(const T* of, T* to) {
#if defined(SPILLWAY_NVIDIA)
  struct alignas(2 * sizeof(T)) Pair {
    T column[2];
  };
  for (u32 i = 0; i < 2; i++) {
    Pair pair = *reinterpret_cast<const Pair*>(of + i * 8 + lane_index() % 4 * 2);
    to[i * 2] = pair.column[0];
    to[i * 2 + 1] = pair.column[1];
  }
#else
  to[0] = of[lane_index() % 16];
#endif
}

// Loads 16 rows of 16 f16, `stride` values apart; rows are 4-byte aligned.
DEVICE MmaF16 mma_load(const f16* rows, u32 stride) {
  const u32* words = reinterpret_cast<const u32*>(rows);
  u32 words_apart = stride / 2;
  MmaF16 operand;
  for (u32 i = 0; i < MMA_F16_WORDS; i++) {
#if defined(SPILLWAY_NVIDIA)
    // Words 0..3: (row, low half), (row + 8, low half), (row, high half), (row + 8, high half).
    operand.word[i] = words[(lane_index() / 4 + i % 2 * 8) * words_apart + lane_index() % 4 + i / 2 * 4];
#elif defined(SPILLWAY_AMD) && defined(__GFX11__)
    operand.word[i] = words[lane_index() % 16 * words_apart + i];
#else
    operand.word[i] = words[lane_index() % 16 * words_apart + lane_index() / 16 * MMA_F16_WORDS + i];
#endif
  }
  return operand;
}

// Rows of int8 in shared memory are made of pieces of 16 bytes, PIECES (2, 4 or 8) to a row, which are swapped so that the
// lanes of a load meet different banks: this is where a piece is.
template <u32 PIECES>
DEVICE u32 mma_piece_at(u32 row, u32 piece) {
  return row * PIECES + (piece ^ (row * PIECES / 8 % PIECES));
}

// Where a lane finds its share of 16 such rows, two pieces of each: made once for a left or a right operand, then loaded
// `offset` bytes further on, a multiple of 16 rows.
#if defined(SPILLWAY_NVIDIA)
struct MmaSource {
  u32 address;  // of a piece: the instruction takes one from each lane
};
template <u32 PIECES>
DEVICE MmaSource mma_left_source(const i32x4* rows, u32 piece) {
  return MmaSource{shared_address(rows + mma_piece_at<PIECES>(lane_index() % 16, piece + lane_index() / 16))};
}
template <u32 PIECES>
DEVICE MmaSource mma_right_source(const i32x4* rows, u32 piece) {
  u32 row = lane_index() / 16 * 8 + lane_index() % 8;
  return MmaSource{shared_address(rows + mma_piece_at<PIECES>(row, piece + lane_index() / 8 % 2))};
}
// A left operand's words are those of f16, a right one's are (row, low piece), (row, high piece), and those of row + 8.
DEVICE MmaI8 mma_load(MmaSource from, u32 offset) {
  MmaI8 operand;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(operand.word[0]), "=r"(operand.word[1]), "=r"(operand.word[2]), "=r"(operand.word[3])
               : "r"(from.address + offset)
               : "memory");
  return operand;
}
#else
struct MmaSource {
  const u8 *low, *high;
};
template <u32 PIECES>
DEVICE MmaSource mma_left_source(const i32x4* rows, u32 piece) {
  u32 row = lane_index() % 16;
  return MmaSource{reinterpret_cast<const u8*>(rows + mma_piece_at<PIECES>(row, piece)),
                   reinterpret_cast<const u8*>(rows + mma_piece_at<PIECES>(row, piece + 1))};
}
template <u32 PIECES>
DEVICE MmaSource mma_right_source(const i32x4* rows, u32 piece) {
  return mma_left_source<PIECES>(rows, piece);
}
// The first half of the words is from the low pieces, the second from the high ones.
DEVICE MmaI8 mma_load(MmaSource from, u32 offset) {
  constexpr u32 HALF = MMA_I8_WORDS / 2;
#if defined(SPILLWAY_AMD) && defined(__GFX11__)
  u32 first = 0;
#else
  u32 first = lane_index() / 16 * HALF;
#endif
  MmaI8 operand;
  for (u32 i = 0; i < MMA_I8_WORDS; i++) {
    const u8* piece = i < HALF ? from.low : from.high;
    operand.word[i] = reinterpret_cast<const u32*>(piece + offset)[first + i % HALF];
  }
  return operand;
}
#endif

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
DEVICE MmaI8 mma_left(const i32 (*words)[MMA_LANE_WORDS]) {
  MmaI8 operand;
  for (u32 row = 0; row < MMA_LANE_ROWS; row++) {
    for (u32 i = 0; i < MMA_LANE_WORDS; i++) operand.word[i * MMA_LANE_ROWS + row] = (u32)words[row][i];
  }
  return operand;
}
DEVICE MmaI8 mma_right(const i32 (*words)[MMA_LANE_WORDS]) {
  MmaI8 operand;
  for (u32 row = 0; row < MMA_LANE_ROWS; row++) {
    for (u32 i = 0; i < MMA_LANE_WORDS; i++) operand.word[row * MMA_LANE_WORDS + i] = (u32)words[row][i];
  }
  return operand;
}

// Products of int8: a sum that begins with `start`, over all columns or over one half (0 or 1) of them.
#if defined(SPILLWAY_NVIDIA)

DEVICE void mma_half(float* d, const MmaF16& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}
DEVICE void mma(MmaSumF32& sum, const MmaF16& a, const MmaF16& b) {
  mma_half(sum.value, a, b.word[0], b.word[2]);
  mma_half(sum.value + 4, a, b.word[1], b.word[3]);
}

DEVICE MmaSumI32 mma_dot(const MmaI8& a, const MmaI8& b, i32 start) {
  MmaSumI32 sum;
  for (u32 side = 0; side < 2; side++) {
    i32* d = sum.value + side * 4;
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[side * 2]),
          "r"(b.word[side * 2 + 1]), "r"(start));
  }
  return sum;
}
DEVICE MmaSumI32 mma_dot_half(const MmaI8& a, const MmaI8& b, u32 half, i32 start) {
  MmaSumI32 sum;
  for (u32 side = 0; side < 2; side++) {
    i32* d = sum.value + side * 4;
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a.word[half * 2]), "r"(a.word[half * 2 + 1]), "r"(b.word[side * 2 + half]), "r"(start));
  }
  return sum;
}

#elif !defined(SPILLWAY_MMA_BY_SHUFFLES)

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
// The instruction multiplies 16 columns, which are a half, or all.
struct MmaSteps {
  MmaBytes step[sizeof(MmaI8) / sizeof(MmaBytes)];
};
DEVICE MmaI32s mma_start(i32 start) {
  MmaI32s sum;
  for (u32 i = 0; i < MMA_VALUES; i++) sum[i] = start;
  return sum;
}
DEVICE MmaSumI32 mma_dot(const MmaI8& a, const MmaI8& b, i32 start) {
  MmaSteps steps_a = bit_cast<MmaSteps>(a), steps_b = bit_cast<MmaSteps>(b);
  MmaI32s sum = mma_start(start);
  for (u32 i = 0; i < sizeof(MmaI8) / sizeof(MmaBytes); i++) sum = mma_step(steps_a.step[i], steps_b.step[i], sum);
  return bit_cast<MmaSumI32>(sum);
}
DEVICE MmaSumI32 mma_dot_half(const MmaI8& a, const MmaI8& b, u32 half, i32 start) {
#if defined(SPILLWAY_MFMA_DEEP)
  MmaI8 only = a;
  only.word[1 - half] = 0;
  return mma_dot(only, b, start);
#else
  MmaSteps steps_a = bit_cast<MmaSteps>(a), steps_b = bit_cast<MmaSteps>(b);
  return bit_cast<MmaSumI32>(mma_step(steps_a.step[half], steps_b.step[half], mma_start(start)));
#endif
}

#else

DEVICE void mma_word(float& sum, u32 a, u32 b) {
  sum = fused_multiply_add(to_f32(f16{(u16)a}), to_f32(f16{(u16)b}), sum);
  sum = fused_multiply_add(to_f32(f16{(u16)(a >> 16)}), to_f32(f16{(u16)(b >> 16)}), sum);
}
DEVICE void mma_word(i32& sum, u32 a, u32 b) { sum = dot4((i32)a, (i32)b, sum); }

// Words `first` to `last` of the operands.
template <class Sum, class Operand>
DEVICE void mma_words(Sum& sum, const Operand& a, const Operand& b, u32 first, u32 last) {
  UNROLL(1)
  for (u32 piece = 0; piece < WAVE / 16; piece++) {
    for (u32 i = first; i < last; i++) {
      u32 column_word = wave_shuffle(b.word[i], piece * 16 + lane_index() % 16);
      for (u32 v = 0; v < MMA_VALUES; v++) {
        mma_word(sum.value[v], wave_shuffle(a.word[i], piece * 16 + mma_row(v)), column_word);
      }
    }
  }
}
DEVICE void mma(MmaSumF32& sum, const MmaF16& a, const MmaF16& b) { mma_words(sum, a, b, 0, MMA_F16_WORDS); }
DEVICE MmaSumI32 mma_dot_words(const MmaI8& a, const MmaI8& b, u32 first, u32 last, i32 start) {
  MmaSumI32 sum;
  for (u32 i = 0; i < MMA_VALUES; i++) sum.value[i] = start;
  mma_words(sum, a, b, first, last);
  return sum;
}
DEVICE MmaSumI32 mma_dot(const MmaI8& a, const MmaI8& b, i32 start) {
  return mma_dot_words(a, b, 0, MMA_I8_WORDS, start);
}
DEVICE MmaSumI32 mma_dot_half(const MmaI8& a, const MmaI8& b, u32 half, i32 start) {
  constexpr u32 HALF = MMA_I8_WORDS / 2;
  return mma_dot_words(a, b, half * HALF, half * HALF + HALF, start);
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

// Neighbouring lanes that hold values of a row of D.
static constexpr u32 MMA_ROW_LANES = MMA_SIDE / MMA_COLUMNS;

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
