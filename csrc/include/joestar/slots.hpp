#pragma once
// Slots of an arena for the nodes of a macro-batch: hot nodes have theirs, the others take free ones in order.

#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "joestar/parallel.hpp"

namespace joestar {

constexpr std::int64_t kSlotGrain = 1 << 15;
constexpr std::int64_t kSlotAhead = 24;  // nodes whose table entry is on its way

// slots[i] = slot_of[ids[i]] where that is not negative; the other nodes get first, first + 1, ... in their order and
// are listed in `cold`, which has room for all. Returns how many there are.
template <IdType Id>
std::int64_t assign_slots(std::span<const Id> ids, std::span<const std::int32_t> slot_of, std::int32_t first,
                          std::span<std::int32_t> slots, std::span<Id> cold) {
  const auto n = static_cast<std::int64_t>(ids.size());
  const std::int64_t blocks = num_blocks(n, kSlotGrain);
  std::vector<std::int64_t> before(static_cast<std::size_t>(blocks) + 1, 0);
  parallel_ranges(n, kSlotGrain, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + kSlotAhead < end) {
        const auto ahead = static_cast<std::size_t>(ids[static_cast<std::size_t>(i + kSlotAhead)]);
        if (ahead < slot_of.size()) prefetch(&slot_of[ahead]);
      }
      const auto id = static_cast<std::size_t>(ids[static_cast<std::size_t>(i)]);
      if (id >= slot_of.size()) throw std::out_of_range("assign_slots: a node that is not in the graph");
      const std::int32_t slot = slot_of[id];
      slots[static_cast<std::size_t>(i)] = slot;
      count += slot < 0;
    }
    before[static_cast<std::size_t>(begin / kSlotGrain) + 1] = count;
  });
  for (std::size_t block = 1; block < before.size(); ++block) before[block] += before[block - 1];
  parallel_ranges(n, kSlotGrain, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t at = before[static_cast<std::size_t>(begin / kSlotGrain)];
    for (std::int64_t i = begin; i < end; ++i) {
      std::int32_t& slot = slots[static_cast<std::size_t>(i)];
      if (slot >= 0) continue;
      cold[static_cast<std::size_t>(at)] = ids[static_cast<std::size_t>(i)];
      slot = first + static_cast<std::int32_t>(at++);
    }
  });
  return before.back();
}

}  // namespace joestar
