#pragma once
// How far a race among many goes until k have finished, by the sizes of weights alone: a guess, for speed.

#include <cmath>

#include "joestar/race.hpp"

namespace joestar {

// How many racers there are of every binary exponent of a weight; those that cannot win count for nothing.
class RaceSizes {
 public:
  // `there` is 1, or 0 for nobody.
  JOESTAR_INLINE void count(float weight, std::uint8_t there) {
    counts_[turn_++ % kTurns][std::bit_cast<std::uint32_t>(weight) >> 23 & 0xFF] += there & has_weight(weight);
  }

  void add(const RaceSizes& other) {
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int exponent = 0; exponent < 256; ++exponent) counts_[turn][exponent] += other.counts_[turn][exponent];
    }
  }

  // A key that more than k racers are not behind, by all odds; kNever where that may be all. Weights count as the least
  // of their exponent, so that it is too large rather than too small.
  std::int64_t bound(std::int64_t k) const {
    double there[256], all = 0;
    for (int exponent = 1; exponent < 256; ++exponent) {
      there[exponent] = 0;
      for (int turn = 0; turn < kTurns; ++turn) there[exponent] += static_cast<double>(counts_[turn][exponent]);
      all += there[exponent];
    }
    const double wanted = static_cast<double>(k) + 6 * std::sqrt(static_cast<double>(k)) + 32;
    if (all <= 2 * wanted) return kNever;
    double low = -200, high = 200;  // log2 of a time
    for (int round = 0; round < 20; ++round) {
      const double middle = (low + high) / 2;
      double finished = 0;
      for (int exponent = 1; exponent < 256; ++exponent) {
        if (there[exponent] == 0) continue;
        finished += there[exponent] * (1 - std::exp2(-std::exp2(exponent - 127 + middle)));
      }
      (finished < wanted ? low : high) = middle;
    }
    return static_cast<std::int64_t>(std::ceil(high * (1 << 24)));
  }

 private:
  static constexpr int kTurns = 4;  // of additions to the same number, one waits for the other
  std::uint32_t turn_ = 0;
  std::uint32_t counts_[kTurns][256] = {};
};

}  // namespace joestar
