// A cell of 32 values to its 8-bit form, as the CPU does it (kernels/src/activations): codes round(x / scale) with
// scale = max|x| / 127, and the sums of each 16 codes. 32 lanes a cell.
#pragma once

#include "matmul.h"

DEVICE u32 max_of_32(u32 value) {
  for (u32 mask = 16; mask > 0; mask /= 2) {
    u32 other = wave_shuffle_xor(value, mask);
    value = value > other ? value : other;
  }
  return value;
}

DEVICE i32 sum_of_16(i32 value) {
  for (u32 mask = 8; mask > 0; mask /= 2) value += (i32)wave_shuffle_xor((u32)value, mask);
  return value;
}

struct QuantizedValue {
  i32 code;
  InputCell cell;  // the same in all lanes of the cell but for the order of the sums: right in the first 16
};

// All lanes of the wave take part.
DEVICE QuantizedValue quantize(float value) {
  // As integers, infinities and NaNs are above all numbers.
  float largest = bit_cast<float>(max_of_32(bit_cast<u32>(value) & 0x7fffffffu));
  bool finite = bit_cast<u32>(largest) < 0x7f800000u;
  bool usable = finite && largest >= 7.888609052210118e-31f;  // 2^-100: smaller scales have no inverse
  i32 code = usable ? (i32)nearest(value * (127.0f / largest)) : 0;
  i32 sum = sum_of_16(code);
  i32 other = (i32)wave_shuffle_xor((u32)sum, 16);
  float scale = usable ? largest / 127.0f : finite ? 0.0f : not_a_number();
  return QuantizedValue{code, InputCell{scale, ((u32)sum & 0xffffu) | (u32)other << 16}};
}
