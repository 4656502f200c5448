#pragma once
// Sparse-dense product, CSC gather: y[row] = reduce over the row's edges of weight[edge] * x[id[edge]], summed in edge
// order.

#include "joestar/semiring.hpp"

namespace joestar {
namespace detail {

// y[i] = reduction of row i, for rows [first, last). `buffer` holds one row of accumulators. `fixed`: the width, where
// it is known to the compiler and there is one head; 0 otherwise.
template <int fixed, class Op, Weighting weighting, class T, class Ids, class Out>
JOESTAR_CLONES void reduce_rows_of(const Messages<T, Ids>& any, Out* y, Accumulator<Out>* buffer, bool mean,
                                   std::int64_t first, std::int64_t last, std::int64_t stride) {
  Messages<T, Ids> m = any;
  if constexpr (fixed > 0) {
    m.heads = 1;
    m.width = fixed;
  }
  const std::int64_t size = m.row_size();
  const std::int64_t* indptr = m.indptr.data();
  const RowPrefetcher<T, Ids> prefetcher(m.x, m.ids, size, indptr[last]);
  prefetcher.start(indptr[first]);
  for (std::int64_t i = first; i < last; ++i) {
    reduce_row<Op, weighting>(m, indptr[i], indptr[i + 1], mean, prefetcher, buffer, y + i * stride);
  }
}

// The same with the width as a constant where rows are narrow: their sums then stay in registers. `stride`: numbers
// from a row of y to the next, 0 where nothing is in between.
template <class Op, Weighting weighting, class T, class Ids, class Out>
void reduce_rows(const Messages<T, Ids>& m, Out* y, Accumulator<Out>* buffer, bool mean, std::int64_t first,
                 std::int64_t last, std::int64_t stride = 0) {
  const std::int64_t next = stride == 0 ? m.row_size() : stride;
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Out, float>) {
    if (m.heads == 1 && m.width == 16) return reduce_rows_of<16, Op, weighting>(m, y, buffer, mean, first, last, next);
    if (m.heads == 1 && m.width == 32) return reduce_rows_of<32, Op, weighting>(m, y, buffer, mean, first, last, next);
    if (m.heads == 1 && m.width == 64) return reduce_rows_of<64, Op, weighting>(m, y, buffer, mean, first, last, next);
  }
  reduce_rows_of<0, Op, weighting>(m, y, buffer, mean, first, last, next);
}

template <class Op, Weighting weighting, class T, class Ids, class Out>
void gather_reduce(const Messages<T, Ids>& m, Out* y, bool mean, std::int64_t stride = 0) {
  parallel_rows(m.indptr, row_grain(m.row_size()), [&](std::int64_t first, std::int64_t last) {
    const auto buffer = row_buffer<Out>(m.row_size());
    reduce_rows<Op, weighting>(m, y, buffer.data(), mean, first, last, stride);
  });
}

}  // namespace detail

// y [rows, heads * width], or the first columns of rows of `stride` numbers; empty rows give 0.
template <class T, class Ids, class Out>
void spmm(const Messages<T, Ids>& m, Reduce reduce, Out* y, std::int64_t stride = 0) {
  detail::with_op(reduce, [&]<class Op>(Op) {
    detail::with_weighting(
        m, [&]<Weighting weighting>() { detail::gather_reduce<Op, weighting>(m, y, reduce == Reduce::Mean, stride); });
  });
}

// The sum alone: less code to compile where nothing else is needed.
template <class T, class Ids, class Out>
void spmm_sum(const Messages<T, Ids>& m, Out* y) {
  detail::with_weighting(m, [&]<Weighting weighting>() { detail::gather_reduce<detail::Add, weighting>(m, y, false); });
}

}  // namespace joestar
