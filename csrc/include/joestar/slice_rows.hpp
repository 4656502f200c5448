#pragma once
// A[sources, :] of a slice: the edges whose source is in a set.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "joestar/parallel.hpp"

namespace joestar {

// A set of ids >= 0, one bit for each up to the largest.
template <IdType Id>
class IdSet {
 public:
  explicit IdSet(std::span<const Id> ids) {
    for (const Id id : ids) limit_ = std::max(limit_, static_cast<std::int64_t>(id) + 1);
    words_.reset(static_cast<std::uint64_t*>(std::calloc(static_cast<std::size_t>(limit_ / 64 + 1), 8)));
    if (words_ == nullptr) throw std::bad_alloc();
    parallel_for(static_cast<std::int64_t>(ids.size()), 32768, [&](std::int64_t i) {
      const auto id = static_cast<std::uint64_t>(ids[static_cast<std::size_t>(i)]);
      std::atomic_ref<std::uint64_t>(words_[id / 64]).fetch_or(std::uint64_t{1} << id % 64, std::memory_order_relaxed);
    });
  }

  // 1 if the id is in the set, else 0; any id may be asked for, without a branch.
  JOESTAR_INLINE std::int64_t holds(Id id) const {
    const auto bit = static_cast<std::uint64_t>(std::min(static_cast<std::int64_t>(id), limit_));
    return static_cast<std::int64_t>(words_[bit / 64] >> bit % 64 & 1);
  }

 private:
  struct Free {
    void operator()(std::uint64_t* memory) const { std::free(memory); }
  };
  std::int64_t limit_ = 0;  // above the largest id; its bit is 0
  std::unique_ptr<std::uint64_t[], Free> words_;
};

namespace detail {

constexpr std::int64_t kSliceGrain = 16384;
constexpr std::int64_t kSliceBuffer = 512;

// eids[slot ...] = positions of the kept edges of [first, last), as far as eids reaches.
template <IdType Id>
void write_kept(const Csc<Id>& csc, const IdSet<Id>& set, std::int64_t first, std::int64_t last, std::int64_t slot,
                std::span<std::int64_t> eids) {
  std::int64_t kept[kSliceBuffer];
  for (std::int64_t base = first; base < last; base += kSliceBuffer) {
    const std::int64_t end = std::min(last, base + kSliceBuffer);
    std::int64_t count = 0;
    for (std::int64_t e = base; e < end; ++e) {
      kept[count] = e;
      count += set.holds(csc.indices[static_cast<std::size_t>(e)]);
    }
    const std::int64_t room = std::max<std::int64_t>(0, static_cast<std::int64_t>(eids.size()) - slot);
    std::copy_n(kept, std::min(count, room), eids.data() + slot);
    slot += count;
  }
}

}  // namespace detail

// eids = positions of the edges whose source is in the set, 0 behind the last; indptr = their offsets, cut at
// eids.size(). Returns how many there are.
template <IdType Id>
std::int64_t slice_rows(const Csc<Id>& csc, const IdSet<Id>& set, std::span<std::int64_t> indptr,
                        std::span<std::int64_t> eids) {
  const std::int64_t bound = static_cast<std::int64_t>(eids.size());
  const auto kept = [&](std::int64_t i) {
    std::int64_t count = 0;
    for (std::int64_t e = csc.indptr[i]; e < csc.indptr[i + 1]; ++e) count += set.holds(csc.indices[e]);
    return count;
  };
  const std::int64_t total = exclusive_scan(csc.rows(), 512, kept, indptr);
  parallel_rows(csc.indptr, detail::kSliceGrain, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t slot = indptr[static_cast<std::size_t>(first)];
    if (slot < bound) detail::write_kept(csc, set, csc.indptr[first], csc.indptr[last], slot, eids);
  });
  if (total > bound) {
    for (std::int64_t& offset : indptr) offset = std::min(offset, bound);
  }
  std::fill(eids.begin() + std::min(total, bound), eids.end(), std::int64_t{0});
  return total;
}

}  // namespace joestar
