#pragma once
// Parallel primitives. Work is cut into blocks by its size alone, never by the number of threads, so every result is
// the same for any number of threads. Nested calls run sequentially; exceptions reach the caller.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "joestar/core.hpp"
#include "joestar/fork.hpp"

#if defined(JOESTAR_USE_PARLAY)
#include <parlay/parallel.h>
#else
#include "joestar/thread_pool.hpp"
#endif

namespace joestar {
namespace detail {

inline int default_threads() {
  for (const char* name : {"JOESTAR_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(name);
    if (text != nullptr && std::atoi(text) > 0) return std::atoi(text);
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

inline std::atomic<int>& thread_count() {
  static std::atomic<int> count{default_threads()};
  return count;
}

inline bool& inside_parallel() {
  static thread_local bool inside = false;
  return inside;
}

class ParallelScope {
 public:
  ParallelScope() : outer_(std::exchange(inside_parallel(), true)) {}
  ~ParallelScope() { inside_parallel() = outer_; }
  ParallelScope(const ParallelScope&) = delete;
  ParallelScope& operator=(const ParallelScope&) = delete;

 private:
  bool outer_;
};

#if defined(JOESTAR_USE_PARLAY)
// Created anew in a forked child, where the workers of the scheduler are missing.
struct ParlayGate {
  std::mutex mutex;
  bool forked = std::exchange(created(), true);

  static bool& created() {
    static bool before = false;
    return before;
  }
};

// ParlayLib starts a scheduler for every outside thread. One at a time may use its own, so that there are not more
// busy threads than cores; the others, and forked children, do their work alone.
template <class F>
void run_lanes(int lanes, F& lane) {
  ParlayGate& gate = process_instance<ParlayGate>();
  std::unique_lock lock(gate.mutex, std::try_to_lock);
  if (gate.forked || !lock.owns_lock()) return lane();
  parlay::parallel_for(0, static_cast<std::size_t>(lanes), [&](std::size_t) { lane(); }, 1);
}
#else
template <class F>
void run_lanes(int lanes, F& lane) {
  process_instance<ThreadPool>().run(lanes - 1, TaskRef(lane));
}
#endif

}  // namespace detail

inline const char* parallel_backend() {
#if defined(JOESTAR_USE_PARLAY)
  return "parlay";
#else
  return "jthread";
#endif
}

inline int num_threads() { return detail::thread_count().load(std::memory_order_relaxed); }
inline void set_num_threads(int threads) { detail::thread_count().store(std::max(1, threads)); }

// f(block) for every block in [0, blocks), each a unit of work taken by the next free thread.
template <class F>
void parallel_blocks(std::int64_t blocks, F&& f) {
  const int lanes = static_cast<int>(std::min<std::int64_t>(num_threads(), blocks));
  if (lanes <= 1 || detail::inside_parallel()) {
    for (std::int64_t block = 0; block < blocks; ++block) f(block);
    return;
  }
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  auto lane = [&]() noexcept {
    detail::ParallelScope scope;
    for (;;) {
      const std::int64_t block = next.fetch_add(1, std::memory_order_relaxed);
      if (block >= blocks) return;
      try {
        f(block);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        next.store(blocks, std::memory_order_relaxed);
      }
    }
  };
  detail::run_lanes(lanes, lane);
  if (error) std::rethrow_exception(error);
}

inline std::int64_t num_blocks(std::int64_t n, std::int64_t grain) { return n <= 0 ? 0 : (n + grain - 1) / grain; }

// f(first, last) over consecutive ranges of at most `grain` items.
template <class F>
void parallel_ranges(std::int64_t n, std::int64_t grain, F&& f) {
  parallel_blocks(num_blocks(n, grain),
                  [&](std::int64_t block) { f(block * grain, std::min(n, (block + 1) * grain)); });
}

// f(i) for i in [0, n).
template <class F>
void parallel_for(std::int64_t n, std::int64_t grain, F&& f) {
  parallel_ranges(n, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) f(i);
  });
}

// combine(... combine(identity, f(0)) ..., f(n - 1)), bracketed by blocks of `grain`.
template <class T, class F, class Combine = std::plus<>>
T parallel_reduce(std::int64_t n, std::int64_t grain, T identity, F&& f, Combine combine = {}) {
  std::vector<T> partial(static_cast<std::size_t>(num_blocks(n, grain)), identity);
  parallel_ranges(n, grain, [&](std::int64_t first, std::int64_t last) {
    T sum = identity;
    for (std::int64_t i = first; i < last; ++i) sum = combine(sum, f(i));
    partial[static_cast<std::size_t>(first / grain)] = sum;
  });
  T total = identity;
  for (const T& part : partial) total = combine(total, part);
  return total;
}

// out[i] = f(0) + ... + f(i - 1) for i in [0, n]; returns out[n]. `out` holds n + 1 items. f is called once per i.
template <class F>
std::int64_t exclusive_scan(std::int64_t n, std::int64_t grain, F&& f, std::span<std::int64_t> out) {
  const std::int64_t blocks = num_blocks(n, grain);
  std::vector<std::int64_t> base(static_cast<std::size_t>(blocks) + 1, 0);
  out[0] = 0;
  parallel_ranges(n, grain, [&](std::int64_t first, std::int64_t last) {
    std::int64_t sum = 0;
    for (std::int64_t i = first; i < last; ++i) out[static_cast<std::size_t>(i) + 1] = sum += f(i);
    base[static_cast<std::size_t>(first / grain) + 1] = sum;
  });
  for (std::size_t block = 1; block < base.size(); ++block) base[block] += base[block - 1];
  parallel_ranges(n, grain, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t shift = base[static_cast<std::size_t>(first / grain)];
    if (shift == 0) return;
    for (std::int64_t i = first; i < last; ++i) out[static_cast<std::size_t>(i) + 1] += shift;
  });
  return base.back();
}

// Row boundary before block `block` of `blocks`, so that blocks hold about equally many rows + edges.
inline std::int64_t balanced_row(std::span<const std::int64_t> indptr, std::int64_t block, std::int64_t blocks) {
  const std::int64_t rows = static_cast<std::int64_t>(indptr.size()) - 1;
  const std::int64_t work = indptr[static_cast<std::size_t>(rows)] - indptr[0] + rows;
  const std::int64_t target = work / blocks * block + work % blocks * block / blocks;
  if (block >= blocks) return rows;
  std::int64_t low = 0, high = rows;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (indptr[static_cast<std::size_t>(middle)] - indptr[0] + middle < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// f(first_row, last_row) over ranges of rows with about `grain` rows + edges each.
template <class F>
void parallel_rows(std::span<const std::int64_t> indptr, std::int64_t grain, F&& f) {
  if (indptr.size() <= 1) return;
  const std::int64_t work = indptr.back() - indptr.front() + static_cast<std::int64_t>(indptr.size()) - 1;
  const std::int64_t blocks = num_blocks(work, std::max<std::int64_t>(1, grain));
  parallel_blocks(blocks, [&](std::int64_t block) {
    const std::int64_t first = balanced_row(indptr, block, blocks), last = balanced_row(indptr, block + 1, blocks);
    if (first < last) f(first, last);
  });
}

// f(row, first_edge, last_edge) over consecutive edges of one row, at most `grain` edges per block: balanced even where
// one row holds most of the edges.
template <class F>
void parallel_edges(std::span<const std::int64_t> indptr, std::int64_t grain, F&& f) {
  if (indptr.size() <= 1) return;
  parallel_ranges(indptr.back(), std::max<std::int64_t>(1, grain), [&](std::int64_t first, std::int64_t last) {
    std::int64_t row = std::upper_bound(indptr.begin(), indptr.end(), first) - indptr.begin() - 1;
    for (std::int64_t e = first; e < last; ++row) {
      const std::int64_t end = std::min(last, indptr[static_cast<std::size_t>(row) + 1]);
      if (e < end) f(row, e, end);
      e = end;
    }
  });
}

// Threads that write to the same lines wait for one another. So many of them get memory of `bytes` of their own to
// write `items` things to anywhere in it, if clearing and joining it is less work than that; else all share one.
inline std::int64_t own_copies(std::int64_t items, std::int64_t bytes) {
  const std::int64_t most = 8 * items / std::max<std::int64_t>(1, bytes);
  return std::max<std::int64_t>(1, std::min<std::int64_t>(num_threads(), most));
}

// f(copy, first, last) for consecutive parts of `items`, one for every copy.
template <class F>
void parallel_copies(std::int64_t items, std::int64_t copies, F&& f) {
  parallel_blocks(copies, [&](std::int64_t copy) {
    f(copy, items / copies * copy + std::min(copy, items % copies),
      items / copies * (copy + 1) + std::min(copy + 1, items % copies));
  });
}

}  // namespace joestar
