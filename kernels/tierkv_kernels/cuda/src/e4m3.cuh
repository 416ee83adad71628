// float8_e4m3fn to float16 and from float: 1 sign, 4 exponent bits (bias 7), 3 mantissa bits, no
// infinity, all ones is NaN. See "FP8 Formats for Deep Learning", arXiv:2209.05433.
#ifndef TKV_E4M3_CUH
#define TKV_E4M3_CUH

#include "dev.cuh"

// The bytes first and second of x, each an e4m3, as two float16.
//
// Without an instruction for it, the bits are moved to where float16 has them; what is left is a factor
// of 2 ** (15 - 7), as the biases differ. Subnormals come out right, as the product is exact. NaN would
// become 480, so its exponent is filled up.
template <int first, int second>
TKV_DEVICE u32 unpack_e4m3(u32 x) {
#if TKV_HAS_E4M3
  return dev::f16_of_e4m3(dev::permute(x, 0, 0x4400 | second << 4 | first));
#else
  const u32 upper = dev::permute(x, 0, second << 12 | 4 << 8 | first << 4 | 4);
  const u32 magnitude = upper & 0x7f007f00u;
  const u32 is_nan = (magnitude + 0x01000100u) & 0x80008000u;
  const u32 bits = dev::multiply_f16((upper & 0x80008000u) | magnitude >> 1, 0x5c005c00u);
  return bits | (is_nan - (is_nan >> 8));
#endif
}

// Nearest e4m3, ties to even; beyond 448 is 448, NaN stays.
TKV_DEVICE u32 narrow_to_e4m3(float value) {
#if TKV_HAS_E4M3
  return dev::e4m3_of(value, 0.0f) & 0xff;
#else
  const u32 bits = dev::bits_of(value);
  const u32 sign = bits >> 24 & 0x80;
  const u32 magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448
  if (magnitude < 0x3c800000) {  // below 2 ** -6: multiples of 2 ** -9, which this sum rounds to
    const float shifted = dev::float_of(magnitude) + 16384.0f;  // one unit in its last place: 2 ** -9
    return sign | (dev::bits_of(shifted) & 0xf);
  }
  const u32 rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
  return sign | ((rounded >> 20) - (120 << 3));
#endif
}

#endif
