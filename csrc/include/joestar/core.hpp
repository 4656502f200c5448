#pragma once
// Vocabulary shared by every kernel: portability macros, views and scratch memory.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

// One copy of a hot function per instruction set, chosen when the library is loaded. Sanitizers run before the
// resolvers are safe, musl has none, and -march=native makes them pointless.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12 && \
    !defined(JOESTAR_NO_CLONES)
#define JOESTAR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JOESTAR_CLONES
#endif

// Inlined into each clone, so that it is compiled for the clone's instruction set.
#define JOESTAR_INLINE inline __attribute__((always_inline))
#define JOESTAR_RESTRICT __restrict__
// The same for a lambda, between its parameters and its body.
#define JOESTAR_INLINE_LAMBDA __attribute__((always_inline))

namespace joestar {

// Ids of nodes are int32 or int64; offsets are int64.
template <class T>
concept IdType = std::is_same_v<T, std::int32_t> || std::is_same_v<T, std::int64_t>;

// In-neighbours of each destination, contiguous: row i holds indices[indptr[i] .. indptr[i + 1]).
template <IdType Id>
struct Csc {
  std::span<const std::int64_t> indptr;
  std::span<const Id> indices;

  std::int64_t rows() const { return indptr.empty() ? 0 : static_cast<std::int64_t>(indptr.size()) - 1; }
  std::int64_t edges() const { return indptr.empty() ? 0 : indptr.back(); }
};

// Memory that is not initialised.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(std::int64_t size)
      : data_(std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(size))), size_(size) {}

  T* data() const { return data_.get(); }
  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) const { return data_[static_cast<std::size_t>(i)]; }
  std::span<T> span() const { return {data_.get(), static_cast<std::size_t>(size_)}; }

 private:
  std::unique_ptr<T[]> data_;
  std::int64_t size_ = 0;
};

JOESTAR_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

// Prefetches the rows of `table` that the ids a little further on point to: about 6 KiB ahead, so that they survive in
// the first-level cache. Nothing is read past ids[limit - 1]. Of every row the numbers [first, last) are fetched.
template <class T, class Ids>
class RowPrefetcher {
 public:
  JOESTAR_INLINE RowPrefetcher(const T* table, Ids ids, std::int64_t row_size, std::int64_t limit)
      : RowPrefetcher(table, ids, row_size, limit, 0, row_size) {}
  JOESTAR_INLINE RowPrefetcher(const T* table, Ids ids, std::int64_t row_size, std::int64_t limit, std::int64_t first,
                               std::int64_t last)
      : table_(reinterpret_cast<const char*>(table + first)),
        ids_(ids),
        stride_(row_size * static_cast<std::int64_t>(sizeof(T))),
        bytes_((last - first) * static_cast<std::int64_t>(sizeof(T))),
        ahead_(std::clamp<std::int64_t>(6144 / (bytes_ + 1), 2, 16)),
        limit_(limit) {}

  // Before the first position: the rows that at() will not come to.
  JOESTAR_INLINE void start(std::int64_t first) const {
    for (std::int64_t e = first; e < std::min(first + ahead_, limit_); ++e) row(e);
  }
  JOESTAR_INLINE void at(std::int64_t e) const {
    if (e + ahead_ < limit_) row(e + ahead_);
  }
  // The same as at(e) ... at(e + N - 1), but for the last few rows.
  template <int N>
  JOESTAR_INLINE void at_each(std::int64_t e) const {
    if (e + N + ahead_ > limit_) return;
    for (int n = 0; n < N; ++n) row(e + n + ahead_);
  }

 private:
  JOESTAR_INLINE void row(std::int64_t e) const {
    const char* first = table_ + static_cast<std::int64_t>(ids_[e]) * stride_;
    for (std::int64_t offset = 0; offset < bytes_; offset += 64) prefetch(first + offset);
  }

  const char* table_;
  Ids ids_;
  std::int64_t stride_, bytes_, ahead_, limit_;
};

}  // namespace joestar
