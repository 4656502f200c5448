#pragma once
// Sampling and aggregation in one pass over the full feature table: the picks of a few rows at a time live in a small
// buffer, nothing is stored per edge. The same bits as spmm over sample_neighbors.

#include <algorithm>
#include <utility>
#include <vector>

#include "joestar/sampling.hpp"
#include "joestar/spmm.hpp"

namespace joestar {
namespace detail {

constexpr std::int64_t kAggregateRows = 4 * kLanes;  // rows per unit of parallel work

// Offsets of the rows from `base` on, indexed by row.
struct OffsetsFrom {
  std::int64_t base;
  const std::int64_t* data;
  std::int64_t operator[](std::int64_t i) const { return data[i - base]; }
};

// The picks of at most kLanes rows.
template <IdType Id>
struct PickedRows {
  std::int64_t first = 0, last = 0;
  std::int64_t offsets[kLanes + 1] = {};
  std::vector<Id> ids;
};

template <IdType Id>
void pick_rows(const SampleRows<Id>& rows, std::span<const Id> indices, Fanout fanout, HashState key,
               std::int64_t first, std::int64_t last, PickedRows<Id>& out) {
  out.first = first;
  out.last = last;
  for (std::int64_t i = first; i < last; ++i) {
    out.offsets[i - first + 1] = out.offsets[i - first] + (i < rows.count ? fanout.picks(rows.degree(i)) : 0);
  }
  const std::int64_t total = out.offsets[last - first];
  if (static_cast<std::int64_t>(out.ids.size()) < total) out.ids.resize(static_cast<std::size_t>(total));
  sample_range(rows, fanout, key, OffsetsFrom{first, out.offsets}, first, std::min(last, rows.count),
               NeighborOf<Id>{indices.data()}, out.ids.data());
}

template <class T, IdType Id>
Messages<T, const Id*> messages_of(const PickedRows<Id>& picked, const T* x, std::int64_t width) {
  const std::span<const std::int64_t> indptr(picked.offsets, static_cast<std::size_t>(picked.last - picked.first) + 1);
  return {.indptr = indptr, .ids = picked.ids.data(), .x = x, .width = width};
}

// The rows [first, last), `together` at a time. While one batch is summed, the first rows of x of the next are on
// their way.
template <class Op, class T, IdType Id>
void aggregate_sampled(const SampleRows<Id>& rows, std::span<const Id> indices, Fanout fanout, HashState key,
                       const T* x, std::int64_t width, bool mean, std::int64_t first, std::int64_t last,
                       Accumulator<T>* acc, T* y) {
  const std::int64_t together = fanout.k > kMaxSlots ? 1 : kLanes;
  PickedRows<Id> current, next;
  pick_rows(rows, indices, fanout, key, first, std::min(last, first + together), current);
  while (current.first < last) {
    pick_rows(rows, indices, fanout, key, current.last, std::min(last, current.last + together), next);
    RowPrefetcher<T, const Id*>(x, next.ids.data(), width, next.offsets[next.last - next.first]).start(0);
    reduce_rows<Op, Weighting::None>(messages_of(current, x, width), y + current.first * width, acc, mean, 0,
                                     current.last - current.first);
    std::swap(current, next);
  }
}

// Row i with all its neighbours, straight from the graph.
template <class Op, class T, IdType Id>
void aggregate_whole(const SampleRows<Id>& rows, std::span<const Id> indices, const T* x, std::int64_t width, bool mean,
                     std::int64_t i, Accumulator<T>* acc, T* y) {
  static constexpr std::int64_t kNothing[2] = {0, 0};
  std::span<const std::int64_t> indptr(kNothing);
  if (i < rows.count) indptr = rows.indptr.subspan(static_cast<std::size_t>(rows.column(i)), 2);
  const Messages<T, const Id*> m{.indptr = indptr, .ids = indices.data(), .x = x, .width = width};
  reduce_rows<Op, Weighting::None>(m, y + i * width, acc, mean, 0, 1);
}

}  // namespace detail

// y [number of rows, width] from x [number of nodes, width]; returns the number of sampled edges.
template <class T, IdType Id>
std::int64_t sample_aggregate(const SampleRows<Id>& rows, std::span<const Id> indices, Fanout fanout,
                              const SampleKey& key, const T* x, std::int64_t width, Reduce reduce, T* y) {
  const HashState state = key_state(key);
  const std::int64_t n = static_cast<std::int64_t>(rows.nodes.size());
  const bool mean = reduce == Reduce::Mean;
  detail::with_op(reduce, [&]<class Op>(Op) {
    parallel_ranges(n, detail::kAggregateRows, [&](std::int64_t first, std::int64_t last) {
      const Scratch<Accumulator<T>> acc(width);
      if (fanout.k >= 0) {
        detail::aggregate_sampled<Op>(rows, indices, fanout, state, x, width, mean, first, last, acc.data(), y);
        return;
      }
      for (std::int64_t i = first; i < last; ++i) {
        detail::aggregate_whole<Op>(rows, indices, x, width, mean, i, acc.data(), y);
      }
    });
  });
  return parallel_reduce(rows.count, kSampleGrain, std::int64_t{0},
                         [&](std::int64_t i) { return fanout.picks(rows.degree(i)); });
}

}  // namespace joestar
