#pragma once
// Sums of rows that several heads share, each head with a weight of its own per edge: x [*, width] and weights
// [*, heads] give [rows, heads * width]. A row is read once for all heads.

#include <algorithm>

#include "joestar/spmm_grad.hpp"

namespace joestar {

// Rows of x [*, width] at ids, weights [*, heads] in edge order.
template <class T, IdType Id>
struct SharedMessages {
  std::span<const std::int64_t> indptr;
  const Id* ids;
  const T* x;
  const T* weight;
  std::int64_t heads, width;
};

namespace detail {

// acc[h * width + d] += sum over the N edges, in this order, of weight[n * heads + h] * x[ids[n] * width + d] for h in
// [0, H).
template <int H, int N, class T, class W, class Id, class A>
JOESTAR_INLINE void fold_heads(A* JOESTAR_RESTRICT acc, const T* x, const Id* ids, const W* weight, std::int64_t heads,
                               std::int64_t width) {
  const T* row[N];
  A scale[N][H];
  for (int n = 0; n < N; ++n) {
    row[n] = x + static_cast<std::int64_t>(ids[n]) * width;
    for (int h = 0; h < H; ++h) scale[n][h] = load(weight[n * heads + h]);
  }
#pragma GCC ivdep
  for (std::int64_t d = 0; d < width; ++d) {
    A value[N];
    for (int n = 0; n < N; ++n) value[n] = load(row[n][d]);
    for (int h = 0; h < H; ++h) {
      A sum = acc[h * width + d];
      for (int n = 0; n < N; ++n) sum += scale[n][h] * value[n];
      acc[h * width + d] = sum;
    }
  }
}

// The same for any number of heads.
template <int N, class T, class W, class Id, class A>
JOESTAR_INLINE void fold_all_heads(A* JOESTAR_RESTRICT acc, const T* x, const Id* ids, const W* weight,
                                   std::int64_t heads, std::int64_t width) {
  std::int64_t h = 0;
  for (; h + 4 <= heads; h += 4) fold_heads<4, N>(acc + h * width, x, ids, weight + h, heads, width);
  for (; h + 2 <= heads; h += 2) fold_heads<2, N>(acc + h * width, x, ids, weight + h, heads, width);
  if (h < heads) fold_heads<1, N>(acc + h * width, x, ids, weight + h, heads, width);
}

// Prefetches what the edges behind those of one row, which begin at `start`, point to.
template <class T, class Id>
struct RowsAhead {
  const RowPrefetcher<T, const Id*>& prefetcher;
  std::int64_t start;

  template <int N>
  JOESTAR_INLINE void at_each(std::int64_t e) const {
    prefetcher.template at_each<N>(start + e);
  }
};

// acc [heads * width] = weighted sums of the rows of `degree` edges; weight holds [degree, heads].
template <class T, class W, class Id, class A>
JOESTAR_INLINE void sum_shared(A* JOESTAR_RESTRICT acc, const T* x, const Id* ids, const W* weight,
                               std::int64_t degree, std::int64_t heads, std::int64_t width,
                               const RowsAhead<T, Id>& ahead) {
  std::fill_n(acc, heads * width, A{0});
  std::int64_t e = 0;
  for (; e + 4 <= degree; e += 4) {
    ahead.template at_each<4>(e);
    fold_all_heads<4>(acc, x, ids + e, weight + e * heads, heads, width);
  }
  for (; e < degree; ++e) {
    ahead.template at_each<1>(e);
    fold_all_heads<1>(acc, x, ids + e, weight + e * heads, heads, width);
  }
}

template <class T, class Id>
JOESTAR_CLONES void shared_rows(const SharedMessages<T, Id>& m, bool mean, std::int64_t first, std::int64_t last,
                                Accumulator<T>* buffer, T* y) {
  using A = Accumulator<T>;
  const std::int64_t size = m.heads * m.width;
  const RowPrefetcher<T, const Id*> prefetcher(m.x, m.ids, m.width, m.indptr[last]);
  prefetcher.start(m.indptr[first]);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = m.indptr[i], degree = m.indptr[i + 1] - start;
    A* acc = buffer;
    if constexpr (std::is_same_v<A, T>) acc = y + i * size;
    sum_shared(acc, m.x, m.ids + start, m.weight + start * m.heads, degree, m.heads, m.width,
               RowsAhead<T, Id>{prefetcher, start});
    finish_row(acc, y + i * size, size, std::max<std::int64_t>(1, degree), mean);
  }
}

// Rows whose messages are summed over heads: grad [*, heads * width] at `row`, weights [*, heads] at `edge`.
template <class V, class W, class Id>
struct HeadSums {
  const Transposed<Id>& by_source;
  const V* grad;
  const W* weight;
  std::int64_t heads, width;
};

// out[s] = sum over the edges of s and the heads, in this order, of weight * grad, for sources [first, last).
template <class T, class V, class W, class Id>
JOESTAR_CLONES void head_sums(const HeadSums<V, W, Id>& m, std::int64_t first, std::int64_t last,
                              Accumulator<T>* buffer, T* out) {
  using A = Accumulator<T>;
  const Transposed<Id>& t = m.by_source;
  const std::int64_t size = m.heads * m.width;
  const RowPrefetcher<V, const Id*> prefetcher(m.grad, t.row.data(), size, t.indptr[last]);
  prefetcher.start(t.indptr[first]);
  for (std::int64_t s = first; s < last; ++s) {
    A* acc = buffer;
    if constexpr (std::is_same_v<A, T>) acc = out + s * m.width;
    std::fill_n(acc, m.width, A{0});
    const V* x[8];
    A scale[8];
    int held = 0;
    for (std::int64_t k = t.indptr[s]; k < t.indptr[s + 1]; ++k) {
      prefetcher.at(k);
      const V* row = m.grad + static_cast<std::int64_t>(t.row[k]) * size;
      const W* weight = m.weight + t.edge[k] * m.heads;
      for (std::int64_t h = 0; h < m.heads; ++h) {
        x[held] = row + h * m.width;
        scale[held] = load(weight[h]);
        if (++held == 8) {
          fold_columns<Add, Weighting::Scaled, 8>(acc, x, scale, m.width);
          held = 0;
        }
      }
    }
    int done = 0;
    for (; done + 4 <= held; done += 4) fold_columns<Add, Weighting::Scaled, 4>(acc, x + done, scale + done, m.width);
    for (; done < held; ++done) fold_columns<Add, Weighting::Scaled, 1>(acc, x + done, scale + done, m.width);
    finish_row(acc, out + s * m.width, m.width, 1, false);
  }
}

template <class T, class V, class W, class Id>
void all_head_sums(const HeadSums<V, W, Id>& m, T* out) {
  parallel_rows(m.by_source.indptr.span(), row_grain(m.heads * m.width), [&](std::int64_t first, std::int64_t last) {
    const auto buffer = row_buffer<T>(m.width);
    head_sums(m, first, last, buffer.data(), out);
  });
}

}  // namespace detail

// y[i, h] = sum (mean) over the edges e of i of weight[e, h] * x[ids[e]].
template <class T, IdType Id>
void spmm_shared(const SharedMessages<T, Id>& m, bool mean, T* y) {
  parallel_rows(m.indptr, row_grain(m.heads * m.width), [&](std::int64_t first, std::int64_t last) {
    const auto buffer = detail::row_buffer<T>(m.heads * m.width);
    detail::shared_rows(m, mean, first, last, buffer.data(), y);
  });
}

// grad_x[s] = sum over the edges e of s and the heads h of weight[e, h] * grad[row(e), h] (/ degree(row(e)) for a mean).
template <class T, IdType Id>
void spmm_shared_grad_x(const Csc<Id>& csc, std::int64_t num_src, const T* grad, const WeightedShape<T>& shape,
                        bool mean, T* grad_x) {
  const Transposed<Id> by_source = transpose(csc, num_src);
  if (!mean) {
    return detail::all_head_sums(
        detail::HeadSums<T, T, Id>{by_source, grad, shape.weight, shape.heads, shape.width}, grad_x);
  }
  const auto scaled = detail::divide_by_degree(csc.indptr, grad, shape.row_size());
  detail::all_head_sums(
      detail::HeadSums<Accumulator<T>, T, Id>{by_source, scaled.data(), shape.weight, shape.heads, shape.width},
      grad_x);
}

}  // namespace joestar
