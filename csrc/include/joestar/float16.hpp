#pragma once
// 16-bit storage types and their conversion to the type that sums are kept in.

#include <bit>
#include <cstdint>

#include "joestar/core.hpp"

namespace joestar {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// The type that values of T are accumulated in.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

JOESTAR_INLINE float load(float x) { return x; }
JOESTAR_INLINE double load(double x) { return x; }
JOESTAR_INLINE float load(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

// Shifts exponent and mantissa into place and rescales the exponent; branch-free, subnormals included.
JOESTAR_INLINE float load(Float16 x) {
  const std::uint32_t magnitude = (x.bits & 0x7FFFU) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const std::uint32_t special =
      magnitude >= 0x0F800000U ? magnitude | 0x7F800000U : std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(special | (static_cast<std::uint32_t>(x.bits & 0x8000U) << 16));
}

// Rounds to nearest, ties to even.
template <class T>
T store(Accumulator<T> x);

template <>
JOESTAR_INLINE float store<float>(float x) {
  return x;
}
template <>
JOESTAR_INLINE double store<double>(double x) {
  return x;
}
template <>
JOESTAR_INLINE BFloat16 store<BFloat16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return {static_cast<std::uint16_t>(x != x ? 0x7FC0U : rounded)};
}
template <>
JOESTAR_INLINE Float16 store<Float16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t half;
  if (magnitude > 0x7F800000U) {
    half = 0x7E00U;
  } else if (magnitude >= 0x477FF000U) {  // 65520 and above round to infinity
    half = 0x7C00U;
  } else if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 leaves the subnormal's bits at the bottom
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000U;
  } else {
    half = (magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

}  // namespace joestar
