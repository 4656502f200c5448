#pragma once
// Several reductions of the same rows over the same edges: rows are read from memory once for all of them. The gradient
// goes by source, over the transposed structure, in edge order.

#include <array>

#include "joestar/spmm_grad.hpp"

namespace joestar {

// Where the reductions go, [rows, width] each; null: not asked for. `ties`: how many edges attain an extremum.
template <class T>
struct MultiResults {
  T *sum, *mean, *max, *min, *square_sum, *square_mean;
  std::int32_t *max_ties, *min_ties;

  bool total() const { return sum != nullptr || mean != nullptr; }
  bool squares() const { return square_sum != nullptr || square_mean != nullptr; }
};

// What destinations pass on, [rows, width] each; null: nothing. `plain` to every source, `square` times 2 x, and a
// share of every extremum to the sources whose row is equal to it.
template <class T>
struct MultiGrad {
  const Accumulator<T>*plain, *square;
  std::array<const T*, 2> extreme;
  std::array<const Accumulator<T>*, 2> share;
};

namespace detail {

template <int N, class T, class A>
JOESTAR_INLINE void fold_squares(A* JOESTAR_RESTRICT acc, const T* const* x, std::int64_t width) {
#pragma GCC ivdep
  for (std::int64_t d = 0; d < width; ++d) {
    A value = acc[d];
    for (int n = 0; n < N; ++n) {
      const A v = load(x[n][d]);
      value += load(store<T>(v * v));  // as if squares were stored: differences of what is rounded alike are small
    }
    acc[d] = value;
  }
}

// Accumulators of one row of destinations: sums, sums of squares, largest, smallest.
template <class A>
struct MultiRow {
  A *total, *squares, *top, *low;
};

template <int N, class T, class Ids, class A>
JOESTAR_INLINE std::int64_t fold_multi(const MultiRow<A>& acc, const MultiResults<T>& out, const Messages<T, Ids>& m,
                                       std::int64_t e, std::int64_t last, const RowPrefetcher<T, Ids>& prefetcher) {
  const A one[N] = {};
  for (; e + N <= last; e += N) {
    prefetcher.template at_each<N>(e);
    const T* x[N];
    for (int n = 0; n < N; ++n) x[n] = m.row(e + n);
    if (out.total()) fold_columns<Add, Weighting::None, N>(acc.total, x, one, m.width);
    if (out.squares()) fold_squares<N>(acc.squares, x, m.width);
    if (out.max != nullptr) fold_columns<Largest, Weighting::None, N>(acc.top, x, one, m.width);
    if (out.min != nullptr) fold_columns<Smallest, Weighting::None, N>(acc.low, x, one, m.width);
  }
  return e;
}

template <class T, class A>
JOESTAR_INLINE void store_row(const A* JOESTAR_RESTRICT acc, std::int64_t width, A divisor, T* JOESTAR_RESTRICT out) {
  if (out == nullptr) return;
  for (std::int64_t d = 0; d < width; ++d) out[d] = store<T>(acc[d] / divisor);
}

template <class T, class Ids, class A>
JOESTAR_INLINE void count_ties(const Messages<T, Ids>& m, std::int64_t first, std::int64_t last, const A* extreme,
                               std::int32_t* JOESTAR_RESTRICT ties) {
  std::fill_n(ties, m.width, 0);
  for (std::int64_t e = first; e < last; ++e) {
    const T* x = m.row(e);
    for (std::int64_t d = 0; d < m.width; ++d) ties[d] += load(x[d]) == extreme[d] ? 1 : 0;
  }
}

// The rows [first, last); `memory` holds four rows.
template <class T, class Ids>
JOESTAR_CLONES void multi_rows(const Messages<T, Ids>& m, const MultiResults<T>& out, Accumulator<T>* memory,
                               std::int64_t first, std::int64_t last) {
  using A = Accumulator<T>;
  const std::int64_t width = m.width;
  const std::int64_t* indptr = m.indptr.data();
  const MultiRow<A> acc{memory, memory + width, memory + 2 * width, memory + 3 * width};
  const RowPrefetcher<T, Ids> prefetcher(m.x, m.ids, width, indptr[last]);
  prefetcher.start(indptr[first]);
  const auto row_of = [&](auto* table, std::int64_t i) { return table == nullptr ? nullptr : table + i * width; };
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t begin = indptr[i], end = indptr[i + 1];
    std::fill_n(acc.total, 2 * width, A{0});
    std::fill_n(acc.top, width, begin == end ? A{0} : Largest::identity<A>);
    std::fill_n(acc.low, width, begin == end ? A{0} : Smallest::identity<A>);
    const std::int64_t e = fold_multi<4>(acc, out, m, begin, end, prefetcher);
    fold_multi<1>(acc, out, m, e, end, prefetcher);
    const A degree = static_cast<A>(std::max<std::int64_t>(1, end - begin));
    store_row(acc.total, width, A{1}, row_of(out.sum, i));
    store_row(acc.total, width, degree, row_of(out.mean, i));
    store_row(acc.squares, width, A{1}, row_of(out.square_sum, i));
    store_row(acc.squares, width, degree, row_of(out.square_mean, i));
    store_row(acc.top, width, A{1}, row_of(out.max, i));
    store_row(acc.low, width, A{1}, row_of(out.min, i));
    if (out.max_ties != nullptr) count_ties(m, begin, end, static_cast<const A*>(acc.top), out.max_ties + i * width);
    if (out.min_ties != nullptr) count_ties(m, begin, end, static_cast<const A*>(acc.low), out.min_ties + i * width);
  }
}

// grad_x of the sources [first, last); `memory` holds two rows.
template <class T, IdType Id>
JOESTAR_CLONES void multi_sources(std::span<const std::int64_t> indptr, const Id* rows, const MultiGrad<T>& grad,
                                  const T* x, std::int64_t width, Accumulator<T>* memory, std::int64_t first,
                                  std::int64_t last, T* grad_x) {
  using A = Accumulator<T>;
  A* JOESTAR_RESTRICT total = memory;
  A* JOESTAR_RESTRICT scale = memory + width;
  const auto ahead = [&]<class V>(const V* table) {
    return RowPrefetcher<V, const Id*>(table, rows, table == nullptr ? 0 : width, indptr[last]);
  };
  const auto plain = ahead(grad.plain), square = ahead(grad.square);
  const auto extreme0 = ahead(grad.extreme[0]), extreme1 = ahead(grad.extreme[1]);
  const auto share0 = ahead(grad.share[0]), share1 = ahead(grad.share[1]);
  for (std::int64_t s = first; s < last; ++s) {
    const T* own = x + s * width;
    std::fill_n(total, 2 * width, A{0});
    for (std::int64_t t = indptr[s]; t < indptr[s + 1]; ++t) {
      const std::int64_t row = static_cast<std::int64_t>(rows[t]) * width;
      plain.at(t), square.at(t), extreme0.at(t), extreme1.at(t), share0.at(t), share1.at(t);
      if (grad.plain != nullptr) {
        for (std::int64_t d = 0; d < width; ++d) total[d] += grad.plain[row + d];
      }
      if (grad.square != nullptr) {
        for (std::int64_t d = 0; d < width; ++d) scale[d] += grad.square[row + d];
      }
      for (std::size_t k = 0; k < 2 && grad.extreme[k] != nullptr; ++k) {
        const T* y = grad.extreme[k] + row;
        const A* share = grad.share[k] + row;
        for (std::int64_t d = 0; d < width; ++d) total[d] += load(own[d]) == load(y[d]) ? share[d] : A{0};
      }
    }
    T* JOESTAR_RESTRICT out = grad_x + s * width;
    for (std::int64_t d = 0; d < width; ++d) {
      const A value = load(own[d]), squares = grad.square == nullptr ? A{0} : (value + value) * scale[d];
      out[d] = store<T>(total[d] + squares);
    }
  }
}

}  // namespace detail

// Every reduction that is asked for; 0 for rows without edges.
template <class T, class Ids>
void multi_aggregate(const Messages<T, Ids>& m, const MultiResults<T>& out) {
  parallel_rows(m.indptr, row_grain(m.width), [&](std::int64_t first, std::int64_t last) {
    const Scratch<Accumulator<T>> memory(4 * m.width);
    detail::multi_rows(m, out, memory.data(), first, last);
  });
}

// grad_x [num_src, width].
template <class T, IdType Id>
void multi_aggregate_grad(const Csc<Id>& csc, std::int64_t num_src, const MultiGrad<T>& grad, const T* x,
                          std::int64_t width, T* grad_x) {
  const Transposed<Id> by_source = transpose(csc, num_src);
  const std::span<const std::int64_t> indptr = by_source.indptr.span();
  parallel_rows(indptr, row_grain(width), [&](std::int64_t first, std::int64_t last) {
    const Scratch<Accumulator<T>> memory(2 * width);
    detail::multi_sources(indptr, static_cast<const Id*>(by_source.row.data()), grad, x, width, memory.data(), first,
                          last, grad_x);
  });
}

}  // namespace joestar
