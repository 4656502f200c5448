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
                                   std::int64_t first, std::int64_t last) {
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
    reduce_row<Op, weighting>(m, indptr[i], indptr[i + 1], mean, prefetcher, buffer, y + i * size);
  }
}

// The same with the width as a constant where rows are narrow: their sums then stay in registers.
template <class Op, Weighting weighting, class T, class Ids, class Out>
void reduce_rows(const Messages<T, Ids>& m, Out* y, Accumulator<Out>* buffer, bool mean, std::int64_t first,
                 std::int64_t last) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<Out, float>) {
    if (m.heads == 1 && m.width == 16) return reduce_rows_of<16, Op, weighting>(m, y, buffer, mean, first, last);
    if (m.heads == 1 && m.width == 32) return reduce_rows_of<32, Op, weighting>(m, y, buffer, mean, first, last);
    if (m.heads == 1 && m.width == 64) return reduce_rows_of<64, Op, weighting>(m, y, buffer, mean, first, last);
  }
  reduce_rows_of<0, Op, weighting>(m, y, buffer, mean, first, last);
}

template <class Op, Weighting weighting, class T, class Ids, class Out>
void gather_reduce(const Messages<T, Ids>& m, Out* y, bool mean) {
  parallel_rows(m.indptr, row_grain(m.row_size()), [&](std::int64_t first, std::int64_t last) {
    const auto buffer = row_buffer<Out>(m.row_size());
    reduce_rows<Op, weighting>(m, y, buffer.data(), mean, first, last);
  });
}

}  // namespace detail

// y [rows, heads * width]; empty rows give 0.
template <class T, class Ids, class Out>
void spmm(const Messages<T, Ids>& m, Reduce reduce, Out* y) {
  detail::with_op(reduce, [&]<class Op>(Op) {
    detail::with_weighting(
        m, [&]<Weighting weighting>() { detail::gather_reduce<Op, weighting>(m, y, reduce == Reduce::Mean); });
  });
}

// The sum alone: less code to compile where nothing else is needed.
template <class T, class Ids, class Out>
void spmm_sum(const Messages<T, Ids>& m, Out* y) {
  detail::with_weighting(m, [&]<Weighting weighting>() { detail::gather_reduce<detail::Add, weighting>(m, y, false); });
}

}  // namespace joestar
