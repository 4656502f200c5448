#pragma once
// Which ids occur in a list: a byte for each, and walks over those that do.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "joestar/parallel.hpp"

namespace joestar {

template <IdType Id>
class Marks {
 public:
  // Of ids in [0, limit).
  Marks(std::span<const Id> ids, std::int64_t limit) : limit_(limit) {
    const auto count = static_cast<std::int64_t>(ids.size());
    copies_ = own_copies(count, limit);
    bytes_.reset(static_cast<std::uint8_t*>(std::calloc(static_cast<std::size_t>(copies_ * limit + 8), 1)));
    if (bytes_ == nullptr) throw std::bad_alloc();
    if (copies_ > 1) {
      parallel_copies(count, copies_, [&](std::int64_t copy, std::int64_t first, std::int64_t last) {
        std::uint8_t* const own = bytes_.get() + copy * limit;
        for (std::int64_t e = first; e < last; ++e) own[ids[static_cast<std::size_t>(e)]] = 1;
      });
      return;
    }
    parallel_for(count, 16384, [&](std::int64_t e) {
      std::atomic_ref<std::uint8_t>(bytes_[ids[static_cast<std::size_t>(e)]]).store(1, std::memory_order_relaxed);
    });
  }

  // Makes the marks of [first, last) whole: before they are walked over, by one thread.
  void join(std::int64_t first, std::int64_t last) {
    std::uint8_t* const JOESTAR_RESTRICT all = bytes_.get();
    for (std::int64_t copy = 1; copy < copies_; ++copy) {
      const std::uint8_t* const JOESTAR_RESTRICT own = bytes_.get() + copy * limit_;
      for (std::int64_t id = first; id < last; ++id) all[id] |= own[id];
    }
  }

  // f(id, there) for the ids of [first, last), ascending, without many that are not there; `there` is 1 or 0.
  template <class F>
  JOESTAR_INLINE void walk(std::int64_t first, std::int64_t last, F&& f) const {
    const std::uint8_t* const marks = bytes_.get();
    for (std::int64_t id = first; id < last; id += 8) {
      std::uint64_t eight;
      std::memcpy(&eight, marks + id, 8);  // the memory goes on for as many
      if (eight == 0) continue;
      const std::int64_t end = std::min(last, id + 8);
      for (std::int64_t each = id; each < end; ++each) f(each, marks[each]);
    }
  }

 private:
  struct Free {
    void operator()(std::uint8_t* memory) const { std::free(memory); }
  };
  std::int64_t limit_, copies_ = 1;
  std::unique_ptr<std::uint8_t[], Free> bytes_;
};

}  // namespace joestar
