#pragma once

#include <algorithm>
#include <bit>
#include <span>
#include <utility>

#include "joestar/core.hpp"

namespace joestar {

// Sorts ids of [0, limit), ascending: by digits, where those are few, without a comparison that nobody can foresee.
template <IdType Id>
void sort_ids(std::span<Id> ids, std::int64_t limit) {
  constexpr int kDigit = 11;
  const auto bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(1, limit) - 1)));
  const auto size = static_cast<std::int64_t>(ids.size());
  if (size < 512 || bits > 3 * kDigit) {
    std::sort(ids.begin(), ids.end());
    return;
  }
  const Scratch<Id> other(size);
  std::span<Id> from = ids, to = other.span();
  for (int shift = 0; shift < bits; shift += kDigit) {
    std::int64_t slot[1 << kDigit] = {};
    const auto digit = [&](Id id) { return static_cast<std::uint64_t>(id) >> shift & ((1 << kDigit) - 1); };
    for (const Id id : from) ++slot[digit(id)];
    std::int64_t sum = 0;
    for (std::int64_t& each : slot) sum += std::exchange(each, sum);
    for (const Id id : from) to[static_cast<std::size_t>(slot[digit(id)]++)] = id;
    std::swap(from, to);
  }
  if (from.data() != ids.data()) std::copy(from.begin(), from.end(), ids.begin());
}

}  // namespace joestar
