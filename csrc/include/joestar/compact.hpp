#pragma once
// Relabelling of sampled ids: destinations first, then new nodes in order of first appearance.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

#include "joestar/fork.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

// One 64-bit slot per node: stamp << 32 | value. A slot with an older stamp is free, so nothing is cleared between
// uses.
class ClaimTable {
 public:
  explicit ClaimTable(std::int64_t num_nodes) : size_(num_nodes) {
    const std::size_t count = static_cast<std::size_t>(std::max<std::int64_t>(1, num_nodes));
    slots_.reset(static_cast<std::uint64_t*>(std::calloc(count, sizeof(std::uint64_t))));
    if (slots_ == nullptr) throw std::bad_alloc();
  }

  std::int64_t size() const { return size_; }
  std::uint64_t* slots() const { return slots_.get(); }

  // Frees every slot; returns the stamp of the new use, already shifted.
  std::uint64_t next_stamp() {
    if (++stamp_ == 0) {
      std::fill_n(slots_.get(), size_, std::uint64_t{0});
      stamp_ = 1;
    }
    return static_cast<std::uint64_t>(stamp_) << 32;
  }

 private:
  struct Free {
    void operator()(std::uint64_t* memory) const { std::free(memory); }
  };
  std::int64_t size_;
  std::uint32_t stamp_ = 0;
  std::unique_ptr<std::uint64_t, Free> slots_;
};

// Tables waiting to be used again, the most recent last.
class ClaimTableCache {
 public:
  std::unique_ptr<ClaimTable> take(std::int64_t num_nodes) {
    {
      std::lock_guard lock(mutex_);
      const auto fits = [&](const auto& table) { return table->size() == num_nodes; };
      const auto found = std::find_if(tables_.begin(), tables_.end(), fits);
      if (found != tables_.end()) {
        std::unique_ptr<ClaimTable> table = std::move(*found);
        tables_.erase(found);
        return table;
      }
    }
    return std::make_unique<ClaimTable>(num_nodes);
  }

  void give_back(std::unique_ptr<ClaimTable> table) {
    std::lock_guard lock(mutex_);
    tables_.push_back(std::move(table));
    if (tables_.size() > kKept) tables_.pop_front();
  }

 private:
  static constexpr std::size_t kKept = 4;
  std::mutex mutex_;
  std::deque<std::unique_ptr<ClaimTable>> tables_;
};

// A table from the cache for the length of a scope.
class BorrowedTable {
 public:
  explicit BorrowedTable(std::int64_t num_nodes) : table_(process_instance<ClaimTableCache>().take(num_nodes)) {}
  ~BorrowedTable() { process_instance<ClaimTableCache>().give_back(std::move(table_)); }
  BorrowedTable(const BorrowedTable&) = delete;
  BorrowedTable& operator=(const BorrowedTable&) = delete;
  ClaimTable& operator*() const { return *table_; }

 private:
  std::unique_ptr<ClaimTable> table_;
};

// What compact reads and writes. Local ids that do not fit into srcs become 0.
template <IdType Id>
struct CompactTask {
  std::span<const Id> dsts;     // true destinations only
  std::span<const Id> indices;  // true edges only
  std::span<Id> srcs;           // of any size
  std::span<Id> local;          // as long as indices
};

namespace detail {

constexpr std::int64_t kCompactGrain = 8192;
constexpr std::int64_t kCompactAhead = 24;

// Writes src number `id` if it fits.
template <IdType Id>
JOESTAR_INLINE void put(std::span<Id> srcs, std::int64_t id, Id node) {
  if (id < static_cast<std::int64_t>(srcs.size())) srcs[static_cast<std::size_t>(id)] = node;
}

// Claims edges [first, last), one after the other. With `roomy`, srcs has room for all of them and nothing branches.
template <bool roomy, IdType Id>
std::int64_t claim_range(const CompactTask<Id>& task, std::uint64_t* slots, std::uint64_t stamp, std::int64_t first,
                         std::int64_t last, std::int64_t next) {
  const std::int64_t edges = static_cast<std::int64_t>(task.indices.size());
  const std::int64_t room = static_cast<std::int64_t>(task.srcs.size());
  for (std::int64_t e = first; e < last; ++e) {
    prefetch(&slots[task.indices[std::min(e + kCompactAhead, edges - 1)]]);
    const Id node = task.indices[e];
    const std::uint64_t slot = slots[node];
    const bool fresh = (slot & ~0xFFFFFFFFULL) != stamp;
    const std::uint64_t id = fresh ? static_cast<std::uint64_t>(next) : slot & 0xFFFFFFFFULL;
    slots[node] = stamp | id;
    if constexpr (roomy) {
      task.srcs[next] = node;
      task.local[e] = static_cast<Id>(id);
    } else {
      if (fresh) put(task.srcs, next, node);
      task.local[e] = static_cast<std::int64_t>(id) < room ? static_cast<Id>(id) : Id{0};
    }
    next += fresh;
  }
  return next;
}

template <IdType Id>
std::int64_t compact_sequential(const CompactTask<Id>& task, ClaimTable& table) {
  std::uint64_t* slots = table.slots();
  const std::uint64_t stamp = table.next_stamp();
  std::int64_t next = 0;
  for (const Id node : task.dsts) {
    if ((slots[node] & ~0xFFFFFFFFULL) != stamp) slots[node] = stamp | static_cast<std::uint64_t>(next);
    put(task.srcs, next++, node);
  }
  const std::int64_t edges = static_cast<std::int64_t>(task.indices.size());
  for (std::int64_t first = 0; first < edges; first += kCompactGrain) {
    const std::int64_t last = std::min(edges, first + kCompactGrain);
    const bool roomy = next + (last - first) < static_cast<std::int64_t>(task.srcs.size());
    next = roomy ? claim_range<true>(task, slots, stamp, first, last, next)
                 : claim_range<false>(task, slots, stamp, first, last, next);
  }
  return next;
}

// First comes first served: the slot keeps the largest value, and earlier positions are larger.
JOESTAR_INLINE std::uint64_t claim_of(std::uint64_t stamp, std::int64_t position) {
  return stamp | (0xFFFFFFFFULL - static_cast<std::uint64_t>(position));
}

inline void claim(std::uint64_t& slot, std::uint64_t wanted) {
  std::atomic_ref<std::uint64_t> shared(slot);
  std::uint64_t seen = shared.load(std::memory_order_relaxed);
  while (seen < wanted && !shared.compare_exchange_weak(seen, wanted, std::memory_order_relaxed)) {
  }
}

// In three sweeps: claim by position, number the winners, look the numbers up. Positions and numbers stay below 2^31,
// so that the upper bit of a slot's value tells a claim from a number.
template <IdType Id>
std::int64_t compact_parallel(const CompactTask<Id>& task, ClaimTable& table) {
  std::uint64_t* slots = table.slots();
  const std::uint64_t stamp = table.next_stamp();
  const std::int64_t dsts = static_cast<std::int64_t>(task.dsts.size());
  const std::int64_t edges = static_cast<std::int64_t>(task.indices.size());
  const std::int64_t room = static_cast<std::int64_t>(task.srcs.size());

  parallel_for(dsts, kCompactGrain, [&](std::int64_t i) {
    claim(slots[task.dsts[i]], claim_of(stamp, i));
    put(task.srcs, i, task.dsts[i]);
  });
  parallel_for(edges, kCompactGrain, [&](std::int64_t e) {
    prefetch(&slots[task.indices[std::min(e + kCompactAhead, edges - 1)]]);
    claim(slots[task.indices[e]], claim_of(stamp, dsts + e));
  });

  const std::int64_t blocks = num_blocks(edges, kCompactGrain);
  Scratch<std::int64_t> base(blocks + 1);
  const auto first_of = [&](std::int64_t block) { return block * kCompactGrain; };
  const auto last_of = [&](std::int64_t block) { return std::min(edges, (block + 1) * kCompactGrain); };
  const std::int64_t fresh_total = exclusive_scan(
      blocks, 1,
      [&](std::int64_t block) {
        std::int64_t winners = 0;
        for (std::int64_t e = first_of(block); e < last_of(block); ++e) {
          prefetch(&slots[task.indices[std::min(e + kCompactAhead, edges - 1)]]);
          const bool won = slots[task.indices[e]] == claim_of(stamp, dsts + e);
          task.local[e] = won;
          winners += won;
        }
        return winners;
      },
      base.span());
  parallel_blocks(blocks, [&](std::int64_t block) {
    std::int64_t next = dsts + base[block];
    for (std::int64_t e = first_of(block); e < last_of(block); ++e) {
      if (task.local[e] == 0) continue;
      slots[task.indices[e]] = stamp | static_cast<std::uint64_t>(next);
      put(task.srcs, next++, task.indices[e]);
    }
  });
  parallel_for(edges, kCompactGrain, [&](std::int64_t e) {
    prefetch(&slots[task.indices[std::min(e + kCompactAhead, edges - 1)]]);
    const auto value = static_cast<std::uint32_t>(slots[task.indices[e]]);
    const std::int64_t id = (value >> 31) != 0 ? 0xFFFFFFFFU - value : value;
    task.local[e] = id < room ? static_cast<Id>(id) : Id{0};
  });
  return dsts + fresh_total;
}

}  // namespace detail

// Returns the true number of sources; srcs keeps as many as fit and is padded with srcs[0].
template <IdType Id>
std::int64_t compact(const CompactTask<Id>& task, std::int64_t num_nodes) {
  const std::int64_t positions = static_cast<std::int64_t>(task.dsts.size() + task.indices.size());
  if (positions > 0xFFFFFFFFLL) throw std::length_error("compact: more than 2^32 ids in one call");
  const bool parallel =
      num_threads() >= 4 && positions >= 16 * detail::kCompactGrain && positions < (std::int64_t{1} << 31);
  BorrowedTable table(num_nodes);
  const std::int64_t count =
      parallel ? detail::compact_parallel(task, *table) : detail::compact_sequential(task, *table);
  const std::int64_t room = static_cast<std::int64_t>(task.srcs.size());
  if (count < room) {
    const Id pad = count > 0 ? task.srcs[0] : Id{0};
    std::fill(task.srcs.begin() + count, task.srcs.end(), pad);
  }
  return count;
}

}  // namespace joestar
