// Weight formats: the rows of kernels/src/formats.rs and the device layout of kernels/src/device_layout.rs, as types.
//
// A lane holds one row of a cell (32 columns) in registers. A weight is scale * (code - BIAS) - min; codes of eight bits
// and codebook values are signed and have no bias.
#pragma once

#include "prelude.h"

static constexpr u32 TILE_ROWS = 16;
static constexpr u32 CELL = 32;  // columns

enum SubScales { NO_SCALES, BYTE_SCALES, NIBBLE_SCALES };

template <u32 LOW, u32 HIGH, u32 RUN, u32 BLOCK, SubScales SCALES, bool MINS, i32 CODE_BIAS, bool IS_CODEBOOK = false>
struct Quant {
  static constexpr bool QUANTISED = true;
  static constexpr u32 LOW_BITS = LOW, HIGH_BITS = HIGH;
  static constexpr u32 RUNS = CELL / RUN;          // runs of a cell, each with a scale
  static constexpr u32 BLOCK_CELLS = BLOCK / CELL;  // cells that share the factors
  static constexpr SubScales SUB_SCALES = SCALES;
  static constexpr bool HAS_MINS = MINS, CODEBOOK = IS_CODEBOOK;
  static constexpr i32 BIAS = CODE_BIAS;
  // Bytes of a row, per cell and, of the factors, per block.
  static constexpr u32 LOW_BYTES = CELL * LOW / 8, HIGH_BYTES = CELL * HIGH / 8;
  static constexpr u32 SCALE_BYTES = SCALES == NO_SCALES ? 0 : RUNS * (SCALES == BYTE_SCALES && MINS ? 2 : 1);
  static constexpr u32 FACTOR_BYTES = MINS ? 4 : 2;
  static constexpr u32 CELL_BYTES = LOW_BYTES + HIGH_BYTES + SCALE_BYTES;
};

template <class T>
struct Floats {
  static constexpr bool QUANTISED = false;
  static constexpr u32 LOW_BYTES = CELL * sizeof(T), CELL_BYTES = LOW_BYTES, FACTOR_BYTES = 0, BLOCK_CELLS = 1;
  typedef T Value;
};

typedef Floats<float> F32;
typedef Floats<f16> F16;
typedef Floats<bf16> BF16;
typedef Quant<4, 0, 32, 32, NO_SCALES, false, 8> Q4_0;
typedef Quant<4, 0, 32, 32, NO_SCALES, true, 0> Q4_1;
typedef Quant<4, 1, 32, 32, NO_SCALES, false, 16> Q5_0;
typedef Quant<4, 1, 32, 32, NO_SCALES, true, 0> Q5_1;
typedef Quant<8, 0, 32, 32, NO_SCALES, false, 0> Q8_0;
typedef Quant<2, 0, 16, 256, NIBBLE_SCALES, true, 0> Q2_K;
typedef Quant<2, 1, 16, 256, BYTE_SCALES, false, 4> Q3_K;
typedef Quant<4, 0, 32, 256, BYTE_SCALES, true, 0> Q4_K;
typedef Quant<4, 1, 32, 256, BYTE_SCALES, true, 0> Q5_K;
typedef Quant<4, 2, 16, 256, BYTE_SCALES, false, 32> Q6_K;
typedef Quant<4, 0, 32, 32, NO_SCALES, false, 0, true> IQ4_NL;
typedef Quant<4, 0, 32, 256, BYTE_SCALES, false, 0, true> IQ4_XS;

template <class F>
DEVICE u64 tile_bytes(u32 cells) {
  return (u64)TILE_ROWS * ((u64)cells * F::CELL_BYTES + (cells + F::BLOCK_CELLS - 1) / F::BLOCK_CELLS * F::FACTOR_BYTES);
}

// One row of a quantised cell: codes of four columns to a word, and what they mean.
template <class F>
struct QuantCell {
  i32 code[8];
  float scale[F::RUNS];
  float min[F::RUNS];  // unset without mins
};

template <class T>
DEVICE T load(const u8* from) {
  return *reinterpret_cast<const T*>(from);
}

// Codes to the values of the IQ4 formats.
DEVICE u32 codebook_values(u32 codes) {
  // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
  u32 low = byte_lookup(0xbfad9881u, 0xf6eaddcfu, codes & 0x07070707u);
  u32 high = byte_lookup(0x26190d01u, 0x71594535u, codes & 0x07070707u);
  u32 upper = (codes >> 3 & 0x01010101u) * 0xffu;
  return (low & ~upper) | (high & upper);
}

// WORDS of the eight code words of a row of a cell as they lie in memory: those from `first` on, a multiple of WORDS.
template <class F, u32 WORDS>
struct RawCodes {
  static constexpr u32 LOW_WORDS = F::LOW_BITS == 8 ? WORDS : F::LOW_BITS == 2 ? 2 : WORDS < 4 ? WORDS : 4;
  static constexpr u32 HIGH_WORDS = F::HIGH_BITS == 2 && WORDS == 8 ? 2 : 1;
  u32 low[LOW_WORDS];
  u32 high[HIGH_WORDS];  // unset without high bits
};

// WORDS words in as few pieces as can be; weights are read once, so caches need not keep them.
template <u32 WORDS>
DEVICE void load_words(const u8* from, u32* words) {
  if constexpr (WORDS == 1) {
    words[0] = load_once(reinterpret_cast<const u32*>(from));
  } else if constexpr (WORDS == 2) {
    i32x2 two = load_once(reinterpret_cast<const i32x2*>(from));
    for (u32 i = 0; i < 2; i++) words[i] = (u32)two.v[i];
  } else {
    i32x4 four = load_once(reinterpret_cast<const i32x4*>(from));
    for (u32 i = 0; i < 4; i++) words[i] = (u32)four.v[i];
  }
}

// What the scales and mins of a row of a cell are made of.
struct RawScales {
  u32 numbers, factors;
};

// Reads a row of a tile from cell `first` on.
template <class F>
struct CellCursor {
  const u8 *low, *high, *numbers, *factors;
  u32 first;

  DEVICE_MEMBER CellCursor(const u8* tile, u32 cells, u32 first, u32 row) : first(first) {
    u64 tile_rows = (u64)cells * TILE_ROWS, at = (u64)first * TILE_ROWS + row;
    low = tile + (F::LOW_BITS == 8 ? (u64)first * TILE_ROWS * 32 + row * 16 : at * F::LOW_BYTES);
    high = tile + tile_rows * F::LOW_BYTES + at * F::HIGH_BYTES;
    numbers = tile + tile_rows * (F::LOW_BYTES + F::HIGH_BYTES) + at * F::SCALE_BYTES;
    factors = tile + tile_rows * F::CELL_BYTES + row * F::FACTOR_BYTES;
  }

  // Code words of cell first + i, from word `word` on.
  template <u32 WORDS>
  DEVICE_MEMBER RawCodes<F, WORDS> codes(u32 i, u32 word) const {
    RawCodes<F, WORDS> raw;
    const u8* from = low + (u64)i * TILE_ROWS * F::LOW_BYTES;
    if constexpr (F::LOW_BITS == 8) {
      from += word / 4 * TILE_ROWS * 16 + word % 4 * 4;
      load_words<(WORDS < 4 ? WORDS : 4)>(from, raw.low);
      if constexpr (WORDS == 8) load_words<4>(from + TILE_ROWS * 16, raw.low + 4);
    } else {
      load_words<RawCodes<F, WORDS>::LOW_WORDS>(from + (F::LOW_BITS == 4 ? word % 4 * 4 : 0), raw.low);
    }
    const u8* bits = high + (u64)i * TILE_ROWS * F::HIGH_BYTES;
    if constexpr (F::HIGH_BITS == 1) load_words<1>(bits, raw.high);
    if constexpr (F::HIGH_BITS == 2) load_words<RawCodes<F, WORDS>::HIGH_WORDS>(bits + word / 4 * 4, raw.high);
    return raw;
  }

  // Of cell first + i.
  DEVICE_MEMBER RawScales scales(u32 i) const {
    const u8* from = factors + (first + i) / F::BLOCK_CELLS * (TILE_ROWS * F::FACTOR_BYTES);
    RawScales raw{0, F::HAS_MINS ? load<u32>(from) : load<u16>(from)};
    const u8* number = numbers + (u64)i * TILE_ROWS * F::SCALE_BYTES;
    if constexpr (F::SCALE_BYTES == 1) raw.numbers = *number;
    if constexpr (F::SCALE_BYTES == 2) raw.numbers = load<u16>(number);
    return raw;
  }
};

// Codes of four columns to a word.
template <class F, u32 WORDS>
DEVICE void decode_codes(const RawCodes<F, WORDS>& raw, u32 first, i32* code) {
  UNROLL(WORDS)
  for (u32 i = 0; i < WORDS; i++) {
    u32 word = first + i, bits;
    if constexpr (F::LOW_BITS == 8) {
      bits = raw.low[i];
    } else if constexpr (F::LOW_BITS == 4) {
      bits = raw.low[i % 4] >> word / 4 * 4 & 0x0f0f0f0fu;
    } else {
      bits = raw.low[i % 2] >> word / 2 * 2 & 0x03030303u;
    }
    if constexpr (F::HIGH_BITS == 1) bits |= (raw.high[0] >> word & 0x01010101u) << F::LOW_BITS;
    if constexpr (F::HIGH_BITS == 2) {
      bits |= (raw.high[i / 4] >> word % 4 * 2 & 0x03030303u) << F::LOW_BITS;
    }
    if constexpr (F::CODEBOOK) bits = codebook_values(bits);
    code[i] = (i32)bits;
  }
}

// The scales and mins of a cell's runs: factor times integer, rounded once.
template <class F>
DEVICE void decode_scales(RawScales raw, float* scale, float* min) {
  u32 bytes = raw.numbers;
  float d = to_f32(f16{(u16)raw.factors}), dmin = to_f32(f16{(u16)(raw.factors >> 16)});
  for (u32 run = 0; run < F::RUNS; run++) {
    if constexpr (F::SUB_SCALES == NO_SCALES) {
      scale[run] = d;
      min[run] = dmin;
    } else if constexpr (F::SUB_SCALES == NIBBLE_SCALES) {
      scale[run] = d * (float)(bytes >> run * 8 & 15u);
      min[run] = dmin * (float)(bytes >> (run * 8 + 4) & 15u);
    } else if constexpr (F::HAS_MINS) {
      scale[run] = d * (float)(i8)(bytes >> run * 16);
      min[run] = dmin * (float)(i8)(bytes >> (run * 16 + 8));
    } else {
      scale[run] = d * (float)(i8)(bytes >> run * 8);
    }
  }
}

// A row of a cell on its way from memory.
template <class F>
struct RawCell {
  RawCodes<F, 8> codes;
  RawScales scales;
};

template <class F>
DEVICE QuantCell<F> decode(const RawCell<F>& raw) {
  QuantCell<F> out;
  decode_codes<F, 8>(raw.codes, 0, out.code);
  decode_scales<F>(raw.scales, out.scale, out.min);
  return out;
}

template <class F>
DEVICE RawCell<F> fetch_cell(const u8* tile, u32 cells, u32 cell, u32 row) {
  CellCursor<F> at(tile, cells, cell, row);
  return RawCell<F>{at.template codes<8>(0, 0), at.scales(0)};
}

template <class F>
DEVICE QuantCell<F> load_cell(const u8* tile, u32 cells, u32 cell, u32 row) {
  return decode<F>(fetch_cell<F>(tile, cells, cell, row));
}

// Asks for the planes of a row of a cell.
template <class F>
DEVICE void prefetch_cell(const u8* tile, u32 cells, u32 cell, u32 row) {
  u32 at = cell * TILE_ROWS + row, rows = cells * TILE_ROWS;
  prefetch(tile + (u64)at * F::LOW_BYTES);
  if constexpr (F::HIGH_BITS != 0) prefetch(tile + (u64)rows * F::LOW_BYTES + (u64)at * F::HIGH_BYTES);
  if constexpr (F::SCALE_BYTES != 0) {
    prefetch(tile + (u64)rows * (F::LOW_BYTES + F::HIGH_BYTES) + (u64)at * F::SCALE_BYTES);
  }
}

// Four codes without their bias: signed bytes. Codes are below 128 and no carry leaves a byte.
template <class F>
DEVICE i32 signed_codes(i32 codes) {
  if constexpr (F::BIAS == 0) return codes;
  return (i32)(((u32)codes + (u32)(128 - F::BIAS) * 0x01010101u) ^ 0x80808080u);
}

// Sixteen bytes of a row of floating-point cells, counted over all cells.
DEVICE i32x4 load_piece(const u8* tile, u64 piece, u32 row) {
  return load_once(reinterpret_cast<const i32x4*>(tile + (piece * TILE_ROWS + row) * 16));
}

template <class F>
DEVICE void decode_piece(const i32x4& piece, float* out) {
  UNROLL(8)
  for (u32 i = 0; i < 16 / sizeof(typename F::Value); i++) {
    if constexpr (sizeof(typename F::Value) == 4) {
      out[i] = bit_cast<float>(piece.v[i]);
    } else {
      out[i] = to_f32(typename F::Value{(u16)((u32)piece.v[i / 2] >> i % 2 * 16)});
    }
  }
}

// Four columns of a row of a floating-point cell as they lie in memory.
template <class F>
struct RawFloats {
  i32 word[sizeof(typename F::Value)];
};

// Columns `first` to `first + 4`.
template <class F>
DEVICE RawFloats<F> fetch_floats(const u8* tile, u32 cell, u32 row, u32 first) {
  constexpr u32 PIECE = 16 / sizeof(typename F::Value);
  constexpr u32 PIECES = CELL / PIECE;
  u64 at = ((u64)(cell * PIECES + first / PIECE) * TILE_ROWS + row) * 16 + first % PIECE * sizeof(typename F::Value);
  RawFloats<F> raw;
  if constexpr (sizeof(typename F::Value) == 4) {
    i32x4 words = load<i32x4>(tile + at);
    for (u32 i = 0; i < 4; i++) raw.word[i] = words.v[i];
  } else {
    i32x2 words = load<i32x2>(tile + at);
    for (u32 i = 0; i < 2; i++) raw.word[i] = words.v[i];
  }
  return raw;
}

template <class F>
DEVICE float decode_float(const RawFloats<F>& raw, u32 i) {
  if constexpr (sizeof(typename F::Value) == 4) return bit_cast<float>(raw.word[i]);
  else return to_f32(typename F::Value{(u16)((u32)raw.word[i / 2] >> i % 2 * 16)});
}

// One value of a row of floating-point cells.
template <class F>
DEVICE float load_value(const u8* tile, u32 column, u32 row) {
  constexpr u32 PIECE = 16 / sizeof(typename F::Value);
  const u8* from = tile + ((u64)(column / PIECE) * TILE_ROWS + row) * 16 + column % PIECE * sizeof(typename F::Value);
  if constexpr (sizeof(typename F::Value) == 4) {
    return load<float>(from);
  } else {
    return to_f32(load<typename F::Value>(from));
  }
}
