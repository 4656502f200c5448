#pragma once
// Sampling and aggregation in one pass over the full feature table: the picks of a few rows at a time live in a small
// buffer, nothing is stored per edge. The same bits as spmm over sample_neighbors.

#include <algorithm>
#include <vector>

#include "joestar/sampling.hpp"
#include "joestar/spmm.hpp"

namespace joestar {
namespace detail {

constexpr std::int64_t kAggregateRows = 256;   // rows per unit of parallel work
constexpr std::int64_t kPicksTogether = 2048;  // picks held at a time, as far as whole batches of rows allow

// How many rows to sample before they are reduced.
inline std::int64_t rows_together(std::int64_t k) {
  if (k < 0 || k > kMaxSlots) return 1;
  return std::clamp(kPicksTogether / std::max<std::int64_t>(1, k) / kLanes * kLanes, std::int64_t{kLanes},
                    kAggregateRows);
}

// Offsets of the rows from `base` on, indexed by row.
struct OffsetsFrom {
  std::int64_t base;
  const std::int64_t* data;
  std::int64_t operator[](std::int64_t i) const { return data[i - base]; }
};

// Rows [first, last), sampled into `ids` and then reduced; row `first` goes to y.
template <class Op, class T, IdType Id>
void aggregate_batch(const SampleRows<Id>& rows, std::span<const Id> indices, Fanout fanout, HashState key, const T* x,
                     std::int64_t width, bool mean, std::int64_t first, std::int64_t last, std::vector<Id>& ids,
                     Accumulator<T>* acc, T* y) {
  std::int64_t offsets[kAggregateRows + 1] = {};
  for (std::int64_t i = first; i < last; ++i) {
    offsets[i - first + 1] = offsets[i - first] + (i < rows.count ? fanout.picks(rows.degree(i)) : 0);
  }
  const std::int64_t total = offsets[last - first];
  if (static_cast<std::int64_t>(ids.size()) < total) ids.resize(static_cast<std::size_t>(total));
  sample_range(rows, fanout, key, OffsetsFrom{first, offsets}, first, std::min(last, rows.count),
               NeighborOf<Id>{indices.data()}, ids.data());
  const std::span<const std::int64_t> indptr(offsets, static_cast<std::size_t>(last - first) + 1);
  const Messages<T, const Id*> m{.indptr = indptr, .ids = ids.data(), .x = x, .width = width};
  reduce_rows<Op, Weighting::None>(m, y, acc, mean, 0, last - first);
}

// Row i with all its neighbours, straight from the graph, to y.
template <class Op, class T, IdType Id>
void aggregate_whole(const SampleRows<Id>& rows, std::span<const Id> indices, const T* x, std::int64_t width, bool mean,
                     std::int64_t i, Accumulator<T>* acc, T* y) {
  static constexpr std::int64_t kNothing[2] = {0, 0};
  std::span<const std::int64_t> indptr(kNothing);
  if (i < rows.count) indptr = rows.indptr.subspan(static_cast<std::size_t>(rows.column(i)), 2);
  const Messages<T, const Id*> m{.indptr = indptr, .ids = indices.data(), .x = x, .width = width};
  reduce_rows<Op, Weighting::None>(m, y, acc, mean, 0, 1);
}

// joined[i] = [aggregated row, x[nodes[i]], 1, 0, ...] for the rows [first, last), `stride` apart.
template <class T, IdType Id>
void join_rows(std::span<const Id> nodes, const T* x, const T* aggregated, std::int64_t width, std::int64_t first,
               std::int64_t last, std::int64_t stride, T* joined) {
  const RowPrefetcher<T, const Id*> prefetcher(x, nodes.data(), width, last);
  prefetcher.start(first);
  for (std::int64_t i = first; i < last; ++i) {
    prefetcher.at(i);
    T* row = std::copy_n(aggregated + (i - first) * width, width, joined + i * stride);
    row = std::copy_n(x + static_cast<std::int64_t>(nodes[static_cast<std::size_t>(i)]) * width, width, row);
    std::fill(row, joined + (i + 1) * stride, T{});
    *row = store<T>(Accumulator<T>{1});
  }
}

}  // namespace detail

// y [number of rows, width] from x [number of nodes, width]; returns the number of sampled edges. With a stride (more
// than 2 * width), y is [number of rows, stride]: aggregated row, own row, 1 and zeros side by side.
template <class T, IdType Id>
std::int64_t sample_aggregate(const SampleRows<Id>& rows, std::span<const Id> indices, Fanout fanout,
                              const SampleKey& key, const T* x, std::int64_t width, Reduce reduce, T* y,
                              std::int64_t stride = 0) {
  const HashState state = key_state(key);
  const std::int64_t n = static_cast<std::int64_t>(rows.nodes.size());
  const bool mean = reduce == Reduce::Mean;
  const std::int64_t together = detail::rows_together(fanout.k);
  detail::with_op(reduce, [&]<class Op>(Op) {
    parallel_ranges(n, detail::kAggregateRows, [&](std::int64_t first, std::int64_t last) {
      const Scratch<Accumulator<T>> acc(width);
      const Scratch<T> batch(stride > 0 ? together * width : 0);
      std::vector<Id> ids;
      for (std::int64_t i = first; i < last; i += together) {
        const std::int64_t end = std::min(last, i + together);
        T* out = stride > 0 ? batch.data() : y + i * width;
        if (fanout.k < 0) {
          detail::aggregate_whole<Op>(rows, indices, x, width, mean, i, acc.data(), out);
        } else {
          detail::aggregate_batch<Op>(rows, indices, fanout, state, x, width, mean, i, end, ids, acc.data(), out);
        }
        if (stride > 0) detail::join_rows(rows.nodes, x, batch.data(), width, i, end, stride, y);
      }
    });
  });
  return parallel_reduce(rows.count, kSampleGrain, std::int64_t{0},
                         [&](std::int64_t i) { return fanout.picks(rows.degree(i)); });
}

}  // namespace joestar
