#pragma once
// Weighted choice by exponential races, in integers: every candidate gets a key, and the smallest keys win. The tables
// are made once, in Python (joestar/kernels/race.py, which has the formula), so that all implementations share them.

#include <bit>
#include <limits>

#include "joestar/hash.hpp"

namespace joestar {

constexpr std::int64_t kRaceTableSize = 2 * 4097;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();  // key of what cannot be picked

// log2(1 + i / 4096) and g(i / 4096) with 24 fraction bits.
struct RaceTable {
  const std::int64_t* log;
  const std::int64_t* g;

  explicit RaceTable(std::span<const std::int64_t> entries) : log(entries.data()), g(entries.data() + 4097) {}
};

// Positive, finite or infinite, and not subnormal.
JOESTAR_INLINE bool has_weight(float weight) {
  return std::bit_cast<std::uint32_t>(weight) - 0x00800000U <= 0x7F000000U;
}

namespace detail {

JOESTAR_INLINE std::int64_t interpolate(const std::int64_t* table, std::uint64_t cell, std::uint64_t part, int bits) {
  const std::int64_t low = table[cell];
  return low + (((table[cell + 1] - low) * static_cast<std::int64_t>(part)) >> bits);
}

// log2 of an integer 1 <= x < 2^33. Below 2^52 a double holds it exactly: exponent and mantissa are the digits wanted.
JOESTAR_INLINE std::int64_t log2_fixed(const RaceTable& table, std::uint64_t x) {
  const double exact = std::bit_cast<double>(x | 0x4330000000000000ULL) - 0x1p52;
  const auto bits = std::bit_cast<std::uint64_t>(exact);
  const std::int64_t exponent = static_cast<std::int64_t>(bits >> 52) - 1023;
  return exponent * (1 << 24) + interpolate(table.log, bits >> 40 & 0xFFF, bits >> 19 & 0x1FFFFF, 21);
}

}  // namespace detail

// log2 of an exponential time made of a random word, up to a constant.
JOESTAR_INLINE std::int64_t race_time(const RaceTable& table, std::uint32_t word) {
  const std::int64_t log_v = detail::log2_fixed(table, 2 * std::uint64_t{word} + 1) - (std::int64_t{33} << 24);
  return log_v + detail::interpolate(table.g, word >> 20, word & 0xFFFFF, 20);
}

// log2 of a weight that has_weight; infinity counts as the largest finite number.
JOESTAR_INLINE std::int64_t race_weight(const RaceTable& table, float weight) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(weight);
  bits = bits < 0x7F7FFFFFU ? bits : 0x7F7FFFFFU;
  const std::int64_t exponent = static_cast<std::int64_t>(bits >> 23 & 0xFF) - 127;
  return exponent * (1 << 24) + detail::interpolate(table.log, bits >> 11 & 0xFFF, bits & 0x7FF, 11);
}

JOESTAR_INLINE std::int64_t race_key(const RaceTable& table, std::uint32_t word, float weight) {
  const std::int64_t key = race_time(table, word) - race_weight(table, weight);
  return has_weight(weight) ? key : kNever;
}

// No key of this word and weight is smaller. Digits in front of the point alone, no table: most racers lose by these.
JOESTAR_INLINE std::int64_t race_key_at_least(std::uint32_t word, float weight) {
  const std::int64_t time = 32 - std::countl_zero(word) - 33;
  const std::int64_t speed = static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(weight) >> 23 & 0xFF) - 126;
  return (time - speed) * (1 << 24);
}

}  // namespace joestar
