#pragma once
// Slots of an arena for the nodes of a macro-batch. Hot nodes have theirs for good. The other slots are a pool: a node
// keeps the one that it got until another node takes it, so that macro-batches find rows that earlier ones loaded.

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "joestar/pages.hpp"

namespace joestar {

constexpr std::int64_t kSlotGrain = 1 << 15;
constexpr std::int64_t kPoolGrain = 1 << 17;
constexpr std::int64_t kSlotAhead = 24;  // nodes whose table entry is on its way

// The pool's slots are first, first + 1, ...; everything is indexed from 0 here.
template <IdType Id>
struct SlotPool {
  std::span<std::int32_t> slot_of;  // of every node of the graph, else -1
  std::int32_t first;
  std::span<Id> owner;              // the node in each slot, or -1
  std::span<std::int32_t> since;    // the turn in which it got there
  std::span<const std::uint8_t> keep;  // whether the macro-batch before needs the slot
  std::span<std::uint8_t> used;     // written: whether this one does
  bool reuse;  // else nobody finds a row of earlier ones, and slots are taken in ascending order

  auto size() const { return static_cast<std::int64_t>(owner.size()); }
};

// What a macro-batch got: `cold` nodes are not hot, `fresh` of them have to be loaded.
struct SlotCounts {
  std::int64_t cold = 0, fresh = 0;
  std::int64_t hand = 0;  // where the search for free slots goes on
  bool fits = true;
};

namespace detail {

// The first `count` slots that nobody needs, from `hand` on and around; false if there are fewer.
template <IdType Id>
bool free_slots(const SlotPool<Id>& pool, std::int64_t hand, std::int64_t count, std::int32_t* out) {
  struct Range {
    std::int64_t first, last, before, free;
  };
  std::vector<Range> ranges;
  for (const auto& [from, to] : {std::pair{hand, pool.size()}, std::pair{std::int64_t{0}, hand}}) {
    for (std::int64_t at = from; at < to; at += kPoolGrain) ranges.push_back({at, std::min(to, at + kPoolGrain), 0, 0});
  }
  const std::uint8_t *keep = pool.keep.data(), *used = pool.used.data();
  const auto blocks = static_cast<std::int64_t>(ranges.size());
  parallel_blocks(blocks, [&](std::int64_t block) {
    Range& range = ranges[static_cast<std::size_t>(block)];
    std::int64_t free = 0;
    for (std::int64_t s = range.first; s < range.last; ++s) free += (keep[s] | used[s]) == 0;
    range.free = free;
  });
  std::int64_t total = 0;
  for (Range& range : ranges) range.before = std::exchange(total, total + range.free);
  if (total < count) return false;
  parallel_blocks(blocks, [&](std::int64_t block) {
    const Range& range = ranges[static_cast<std::size_t>(block)];
    const std::int64_t end = std::min(count, range.before + range.free);  // what follows is the next block's
    for (std::int64_t s = range.first, at = range.before; at < end; ++s) {  // without a branch on what is random
      out[at] = static_cast<std::int32_t>(s);
      at += (keep[s] | used[s]) == 0;
    }
  });
  return true;
}

}  // namespace detail

// slots[i] = slot of ids[i], which are distinct. Those that have to be loaded are listed, in their order, in `fresh` with
// their slots in `fresh_slots`; both have room for all. Where the pool has too few free slots, nothing of it changes.
template <IdType Id>
SlotCounts take_slots(std::span<const Id> ids, const SlotPool<Id>& pool, std::int64_t hand, std::int32_t turn,
                      std::span<std::int32_t> slots, std::span<Id> fresh, std::span<std::int32_t> fresh_slots) {
  const auto n = static_cast<std::int64_t>(ids.size());
  parallel_ranges(pool.size(), 8 * kPoolGrain, [&](std::int64_t begin, std::int64_t end) {
    std::fill(pool.used.begin() + begin, pool.used.begin() + end, std::uint8_t{0});
  });
  struct Before {
    std::int64_t cold = 0, fresh = 0;
  };
  std::vector<Before> before(static_cast<std::size_t>(num_blocks(n, kSlotGrain)) + 1);
  parallel_ranges(n, kSlotGrain, [&](std::int64_t begin, std::int64_t end) {
    Before found;
    for (std::int64_t i = begin; i < end; ++i) {
      if (i + kSlotAhead < end) {
        const auto ahead = static_cast<std::size_t>(ids[static_cast<std::size_t>(i + kSlotAhead)]);
        if (ahead < pool.slot_of.size()) prefetch(&pool.slot_of[ahead]);
      }
      const auto id = static_cast<std::size_t>(ids[static_cast<std::size_t>(i)]);
      if (id >= pool.slot_of.size()) throw std::out_of_range("take_slots: a node that is not in the graph");
      const std::int32_t slot = pool.slot_of[id];
      slots[static_cast<std::size_t>(i)] = slot;
      found.fresh += slot < 0;
      found.cold += slot < 0 || slot >= pool.first;
      if (slot >= pool.first) pool.used[static_cast<std::size_t>(slot - pool.first)] = 1;
    }
    before[static_cast<std::size_t>(begin / kSlotGrain) + 1] = found;
  });
  for (std::size_t block = 1; block < before.size(); ++block) {
    before[block].cold += before[block - 1].cold;
    before[block].fresh += before[block - 1].fresh;
  }
  SlotCounts counts{before.back().cold, before.back().fresh, hand, true};
  const PageScratch<std::int32_t> free(counts.fresh);
  counts.fits = counts.fresh <= pool.size() &&
                detail::free_slots(pool, pool.reuse ? hand : 0, counts.fresh, free.data());
  if (!counts.fits) return counts;
  parallel_ranges(n, kSlotGrain, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t at = before[static_cast<std::size_t>(begin / kSlotGrain)].fresh;
    for (std::int64_t i = begin; i < end; ++i) {
      std::int32_t& slot = slots[static_cast<std::size_t>(i)];
      if (slot >= 0) continue;
      const Id id = ids[static_cast<std::size_t>(i)];
      const std::int32_t place = free[at];
      if (pool.reuse && at + kSlotAhead < counts.fresh) {  // owners are in any order
        const Id leaving = pool.owner[static_cast<std::size_t>(free[at + kSlotAhead])];
        if (leaving >= 0) __builtin_prefetch(&pool.slot_of[static_cast<std::size_t>(leaving)], 1, 3);
      }
      const auto place_at = static_cast<std::size_t>(place);
      fresh[static_cast<std::size_t>(at)] = id;
      fresh_slots[static_cast<std::size_t>(at++)] = slot = pool.first + place;
      pool.used[place_at] = 1;
      if (!pool.reuse) continue;
      // Whoever was here is not in this macro-batch, or its slot would be in use.
      if (pool.owner[place_at] >= 0) pool.slot_of[static_cast<std::size_t>(pool.owner[place_at])] = -1;
      pool.owner[place_at] = id;
      pool.since[place_at] = turn;
      pool.slot_of[static_cast<std::size_t>(id)] = slot;
    }
  });
  if (counts.fresh > 0) counts.hand = (free[counts.fresh - 1] + std::int64_t{1}) % pool.size();
  return counts;
}

}  // namespace joestar
