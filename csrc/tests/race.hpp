#pragma once
// The tables of joestar/kernels/race.py in floating point: near enough to test what is made of them.

#include <cmath>
#include <vector>

#include "joestar/race.hpp"

namespace test {

inline double race_g(double v) { return std::log2(-std::log1p(-v) / std::log(2.0) / v); }

inline std::vector<std::int64_t> race_entries() {
  std::vector<std::int64_t> entries;
  for (int i = 0; i <= 4096; ++i) entries.push_back(std::llround(std::log2(1 + i / 4096.0) * (1 << 24)));
  entries.push_back(std::llround(-std::log2(std::log(2.0)) * (1 << 24)));
  for (int i = 1; i < 4096; ++i) entries.push_back(std::llround(race_g(i / 4096.0) * (1 << 24)));
  entries.push_back(std::llround(std::log2(33.0) * (1 << 24)));
  return entries;
}

}  // namespace test
