// The number formats of the device, from their definitions.

#include <cmath>
#include <vector>

#include "dev.cuh"

namespace cusim {

namespace {

// A value of sign, exponent and mantissa bits, with subnormals.
float decode(u32 bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const u32 mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const bool negative = bits >> (exponent_bits + mantissa_bits) & 1;
  const float fraction = std::ldexp(static_cast<float>(mantissa), -mantissa_bits);
  const float size = exponent ? std::ldexp(1.0f + fraction, exponent - bias)
                              : std::ldexp(fraction, 1 - bias);
  return negative ? -size : size;
}

float decode_f16(u32 bits) {
  if ((bits >> 10 & 31) != 31) return decode(bits, 5, 10);
  if (bits & 1023) return NAN;
  return bits >> 15 ? -INFINITY : INFINITY;
}

// Every f16, as it is asked for millions of times.
const std::vector<float> &f16_values() {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 16);
    for (u32 bits = 0; bits < all.size(); ++bits) all[bits] = decode_f16(bits);
    return all;
  }();
  return values;
}

// Nearest, ties to even: the lowest `dropped` bits go.
u32 round_off(u32 bits, int dropped) {
  return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
}

u16 narrow_to_bf16(float x) {
  const u32 bits = get<u32>(&x);
  return static_cast<u16>(std::isnan(x) ? 0x7fff : round_off(bits, 16));
}

u16 narrow_to_f16(float x) {
  const u32 bits = get<u32>(&x);
  const u32 sign = bits >> 16 & 0x8000;
  if (std::isnan(x)) return 0x7fff;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return static_cast<u16>(sign | 0x7c00);
  if (size < 0x1p-14f) {
    return static_cast<u16>(sign | static_cast<u32>(std::nearbyint(size * 0x1p24f)));
  }
  return static_cast<u16>(sign | (round_off(bits & 0x7fffffff, 13) - (112 << 10)));
}

}  // namespace

u16 narrow(bool bf16, float x) { return bf16 ? narrow_to_bf16(x) : narrow_to_f16(x); }

float widen(bool bf16, u16 x) {
  if (!bf16) return f16_values()[x];
  const u32 bits = static_cast<u32>(x) << 16;
  return get<float>(&bits);
}

float widen_e4m3(u32 x) { return (x & 0x7f) == 0x7f ? NAN : decode(x, 4, 3); }

u32 narrow_to_e4m3(float x) {
  const u32 sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  u32 nearest = 0x7e;  // 448
  for (u32 candidate = 0; candidate < 0x7e; ++candidate) {
    const float size = std::fabs(x);
    const float below = size - widen_e4m3(candidate), above = widen_e4m3(candidate + 1) - size;
    if (below < above || (below == above && candidate % 2 == 0)) {
      nearest = candidate;
      break;
    }
  }
  return sign | nearest;
}

}  // namespace cusim
