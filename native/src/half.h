// Exact conversions between fp32 and the two 16-bit formats, rounding to nearest even. Portable, free of branches where
// a compiler is to vectorise them.
#pragma once

#include <cstdint>
#include <cstring>

namespace offloadd {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float from_bf16(std::uint16_t half) { return float_of(static_cast<std::uint32_t>(half) << 16); }

inline std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  // Adding just under half of the last place kept, plus that place's own bit, rounds ties to even; a carry into the
  // exponent is the right answer, up to infinity. NaN would carry too, so it becomes the quiet NaN.
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(nan ? 0x7fc0u : rounded);
}

inline float from_f16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t rest = half & 0x7fffu;
  // Subnormal: an integer multiple of 2^-24, exact in fp32.
  if (rest < 0x0400u) return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
  if (rest >= 0x7c00u)
    return float_of(sign | 0x7f800000u | ((rest & 0x03ffu) << 13) | (rest > 0x7c00u ? 0x400000u : 0));
  return float_of(sign | ((rest << 13) + 0x38000000u));  // exponent bias 127 instead of 15
}

inline std::uint16_t to_f16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 makes the fp32 adder itself round to a multiple of 2^-24, ties to even.
    const std::uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<std::uint16_t>(sign | rounded);
  }
  const std::uint32_t rebased = magnitude - 0x38000000u;
  return static_cast<std::uint16_t>(sign | ((rebased + 0x0fffu + ((rebased >> 13) & 1u)) >> 13));
}

}  // namespace offloadd
