// Rows to their 8-bit form, as the CPU does it (kernels/src/activations): per cell of 32 columns codes
// round(x / scale) with scale = max|x| / 127, and the sums of each 16 codes. 8 lanes a cell, four columns a lane.
#pragma once

#include "matmul.h"

// Four values in the memory of a row.
DEVICE f32x4 load_quad(const float* values, u64 quad) { return reinterpret_cast<const f32x4*>(values)[quad]; }

DEVICE i32 sum_with(i32 value, u32 mask) { return value + (i32)wave_shuffle_xor((u32)value, mask); }

// Writes the 8-bit form of columns 4 * quad to 4 * quad + 3, counted over all rows. All lanes of the wave take part, eight
// neighbours with the quads of a cell; those that are not `real` write nothing.
DEVICE void quantize_quad(const f32x4& x, i8* codes, InputCell* scales, u64 quad, bool real) {
  // As integers, infinities and NaNs are above all numbers.
  u32 bits = 0;
  for (u32 i = 0; i < 4; i++) {
    u32 size = bit_cast<u32>(x.v[i]) & 0x7fffffffu;
    bits = size > bits ? size : bits;
  }
  for (u32 mask = 4; mask > 0; mask /= 2) {
    u32 other = wave_shuffle_xor(bits, mask);
    bits = other > bits ? other : bits;
  }
  float largest = bit_cast<float>(bits);
  bool finite = bits < 0x7f800000u;
  bool usable = finite && largest >= 7.888609052210118e-31f;  // 2^-100: smaller scales have no inverse
  // Values of a cell that is not usable count as zeros, without branches: all lanes must reach the shuffles together.
  u32 kept = usable ? ~0u : 0u;
  float inverse = 127.0f / (usable ? largest : 1.0f);
  u32 packed = 0;
  i32 sum = 0;
  for (u32 i = 0; i < 4; i++) {
    i32 code = (i32)nearest(bit_cast<float>(bit_cast<u32>(x.v[i]) & kept) * inverse);
    packed |= ((u32)code & 0xffu) << 8 * i;
    sum += code;
  }
  sum = sum_with(sum_with(sum, 1), 2);
  i32 other = (i32)wave_shuffle_xor((u32)sum, 4);
  if (!real) return;
  reinterpret_cast<u32*>(codes)[quad] = packed;
  if (quad % 8 == 0) {
    float scale = usable ? largest / 127.0f : finite ? 0.0f : not_a_number();
    scales[quad / 8] = InputCell{scale, ((u32)sum & 0xffffu) | (u32)other << 16};
  }
}
