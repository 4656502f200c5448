#pragma once
// Large memory in huge pages where the system has them: random accesses miss the TLB less, and far fewer pages are faulted
// in.

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>

#include "joestar/parallel.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace joestar {

constexpr std::size_t kHugePage = std::size_t{1} << 21;

namespace detail {

// Gives the huge pages within [data, data + bytes) this advice; false if there are none, or the system does not take it.
inline bool advise(void* data, std::size_t bytes, int advice) {
#if defined(__linux__)
  const auto first = (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto last = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  return first < last && madvise(reinterpret_cast<void*>(first), last - first, advice) == 0;
#else
  return (void)data, (void)bytes, (void)advice, false;
#endif
}

// Whether memory belongs to no file: the pages of a file would be read from disk first.
inline bool is_anonymous(const void* data) {
  bool found = false;
  if (std::FILE* maps = std::fopen("/proc/self/maps", "r")) {
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    char line[512];
    std::uintptr_t first = 0, last = 0;
    unsigned long inode = 1;
    while (!found && std::fgets(line, sizeof line, maps) != nullptr) {
      const int read = std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %lu", &first, &last, &inode);
      found = read == 3 && first <= at && at < last && inode == 0;
    }
    std::fclose(maps);
  }
  return found;
}

}  // namespace detail

// Asks for huge pages within [data, data + bytes), which must not have been touched yet to gain from it.
inline void advise_huge(void* data, std::size_t bytes) {
#if defined(__linux__)
  detail::advise(data, bytes, MADV_HUGEPAGE);  // a hint: may fail
#endif
}

// Moves what has been written into huge pages now (Linux 6.1; page-locked memory and that of files stay as they are).
// Contents and addresses do not change. Whether it was done.
inline bool collapse_huge(void* data, std::size_t bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack
  return detail::is_anonymous(data) && detail::advise(data, bytes, kCollapse);
}

// Blocks of whole huge pages that wait to be used again: clearing new pages took half the time of a macro-batch.
class PageCache {
 public:
  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  // A block of at least so many bytes: the smallest that waits, unless it is more than a quarter too large.
  Block take(std::size_t bytes) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    {
      std::lock_guard lock(mutex_);
      auto best = waiting_.end();
      for (auto block = waiting_.begin(); block != waiting_.end(); ++block) {
        const bool fits = block->bytes >= bytes && block->bytes <= bytes + bytes / 4 + kHugePage;
        if (fits && (best == waiting_.end() || block->bytes < best->bytes)) best = block;
      }
      if (best != waiting_.end()) {
        const Block found = *best;
        held_ -= found.bytes;
        waiting_.erase(best);
        return found;
      }
    }
    const Block made{std::aligned_alloc(kHugePage, bytes), bytes};
    if (made.data == nullptr) throw std::bad_alloc();
    advise_huge(made.data, bytes);
    return made;
  }

  void give_back(Block block) {
    std::deque<Block> old;
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(block);
      held_ += block.bytes;
      while (held_ > kMost) {
        held_ -= waiting_.front().bytes;
        old.push_back(waiting_.front());
        waiting_.pop_front();
      }
    }
    for (const Block& dropped : old) std::free(dropped.data);
  }

  // Frees what waits.
  void clear() {
    std::lock_guard lock(mutex_);
    for (const Block& block : waiting_) std::free(block.data);
    waiting_.clear();
    held_ = 0;
  }

 private:
  static constexpr std::size_t kMost = std::size_t{2} << 30;
  std::mutex mutex_;
  std::deque<Block> waiting_;  // the longest first
  std::size_t held_ = 0;
};

// Memory that is not initialised. What is smaller than a huge page is not kept for reuse.
template <class T>
class PageScratch {
 public:
  PageScratch() = default;
  explicit PageScratch(std::int64_t size) : size_(size) {
    const std::size_t bytes = std::max<std::size_t>(64, static_cast<std::size_t>(size) * sizeof(T));
    if (bytes >= kHugePage) {
      const PageCache::Block block = process_instance<PageCache>().take(bytes);
      data_ = {static_cast<T*>(block.data), Free{block.bytes}};
    } else {
      data_ = {static_cast<T*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), Free{0}};
      if (data_ == nullptr) throw std::bad_alloc();
    }
  }

  T* data() const { return data_.get(); }
  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) const { return data_.get()[i]; }
  std::span<T> span() const { return {data_.get(), static_cast<std::size_t>(size_)}; }

  void fill(T value) const {
    parallel_ranges(size_, std::int64_t{1} << 17,
                    [&](std::int64_t first, std::int64_t last) { std::fill(data() + first, data() + last, value); });
  }

 private:
  struct Free {
    std::size_t cached = 0;  // bytes of the block, if it goes back to the cache
    void operator()(T* memory) const {
      if (cached == 0) return std::free(memory);
      process_instance<PageCache>().give_back({memory, cached});
    }
  };
  std::unique_ptr<T, Free> data_;
  std::int64_t size_ = 0;
};

}  // namespace joestar
