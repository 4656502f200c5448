#pragma once
// Edge values from the rows of an edge's two ends: out[e] = op(lhs[source(e)], rhs[destination(e)]).

#include <algorithm>

#include "joestar/spmm.hpp"

namespace joestar {

enum class EdgeOp { Add, Sub, Mul, Div, CopyLhs, CopyRhs };

namespace detail {

template <EdgeOp op, class A>
JOESTAR_INLINE A edge_value(A lhs, A rhs) {
  if constexpr (op == EdgeOp::Add) return lhs + rhs;
  if constexpr (op == EdgeOp::Sub) return lhs - rhs;
  if constexpr (op == EdgeOp::Mul) return lhs * rhs;
  if constexpr (op == EdgeOp::Div) return lhs / rhs;
  if constexpr (op == EdgeOp::CopyLhs) return lhs;
  return rhs;
}

// The edges [first, last) of one row, whose destination has the row `rhs`; there are `limit` edges in all.
template <EdgeOp op, class T, class Id>
JOESTAR_CLONES void edge_values(const Id* ids, const T* lhs, const T* rhs, std::int64_t size, std::int64_t first,
                                std::int64_t last, std::int64_t limit, T* out) {
  using A = Accumulator<T>;
  const RowPrefetcher<T, const Id*> prefetcher(lhs, ids, size, op == EdgeOp::CopyRhs ? 0 : limit);
  for (std::int64_t e = first; e < last; ++e) {
    prefetcher.at(e);
    const T* JOESTAR_RESTRICT left = op == EdgeOp::CopyRhs ? rhs : lhs + static_cast<std::int64_t>(ids[e]) * size;
    const T* JOESTAR_RESTRICT right = op == EdgeOp::CopyLhs ? left : rhs;
    T* JOESTAR_RESTRICT target = out + e * size;
    for (std::int64_t d = 0; d < size; ++d) {
      target[d] = store<T>(edge_value<op, A>(load(left[d]), load(right[d])));
    }
  }
}

// Sixteen partial sums, added as a tree: the same bits for every instruction set.
template <class T, class A>
JOESTAR_INLINE A dot(const T* JOESTAR_RESTRICT x, const A* JOESTAR_RESTRICT y, std::int64_t size) {
  A lane[16] = {};
  std::int64_t d = 0;
  for (; d + 16 <= size; d += 16) {
    for (int l = 0; l < 16; ++l) lane[l] += load(x[d + l]) * y[d + l];
  }
  for (int l = 0; d < size; ++d, ++l) lane[l] += load(x[d]) * y[d];
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

// out[e * heads + h] = <x[source(e), h], y[h]> for the edges [first, last) of one row; there are `limit` edges in all.
template <class T, class Id>
JOESTAR_CLONES void edge_dots(const Id* ids, const T* x, const Accumulator<T>* y, std::int64_t heads,
                              std::int64_t width, std::int64_t first, std::int64_t last, std::int64_t limit, T* out) {
  const std::int64_t size = heads * width;
  const RowPrefetcher<T, const Id*> prefetcher(x, ids, size, limit);
  for (std::int64_t e = first; e < last; ++e) {
    const T* row = x + static_cast<std::int64_t>(ids[e]) * size;
    prefetcher.at(e);
    for (std::int64_t h = 0; h < heads; ++h) {
      out[e * heads + h] = store<T>(dot(row + h * width, y + h * width, width));
    }
  }
}

template <EdgeOp op, class T, IdType Id>
void elementwise(const Csc<Id>& csc, const T* lhs, const T* rhs, std::int64_t size, T* out) {
  parallel_edges(csc.indptr, row_grain(size), [&](std::int64_t row, std::int64_t first, std::int64_t last) {
    edge_values<op>(csc.indices.data(), lhs, rhs == nullptr ? nullptr : rhs + row * size, size, first, last,
                    csc.edges(), out);
  });
}

template <class T, IdType Id>
void fill_tail(const Csc<Id>& csc, std::int64_t size, T* out) {
  const std::int64_t edges = static_cast<std::int64_t>(csc.indices.size());
  std::fill(out + csc.edges() * size, out + edges * size, T{});
}

}  // namespace detail

// lhs [num_src, size] and rhs [rows, size] -> out [edges, size]; 0 behind the last edge.
template <class T, IdType Id>
void sddmm(const Csc<Id>& csc, const T* lhs, const T* rhs, std::int64_t size, EdgeOp op, T* out) {
  switch (op) {
    case EdgeOp::Add:
      detail::elementwise<EdgeOp::Add>(csc, lhs, rhs, size, out);
      break;
    case EdgeOp::Sub:
      detail::elementwise<EdgeOp::Sub>(csc, lhs, rhs, size, out);
      break;
    case EdgeOp::Mul:
      detail::elementwise<EdgeOp::Mul>(csc, lhs, rhs, size, out);
      break;
    case EdgeOp::Div:
      detail::elementwise<EdgeOp::Div>(csc, lhs, rhs, size, out);
      break;
    case EdgeOp::CopyLhs:
      detail::elementwise<EdgeOp::CopyLhs>(csc, lhs, rhs, size, out);
      break;
    case EdgeOp::CopyRhs:
      detail::elementwise<EdgeOp::CopyRhs>(csc, lhs, rhs, size, out);
      break;
  }
  detail::fill_tail(csc, size, out);
}

// lhs [num_src, heads * width] and rhs [rows, heads * width] -> inner products [edges, heads]; 0 behind the last edge.
// With `mean`, rows of rhs are divided by their degree first: the gradient of a mean for its edge weights.
template <class T, IdType Id>
void sddmm_dot(const Csc<Id>& csc, const T* lhs, const T* rhs, std::int64_t heads, std::int64_t width, bool mean,
               T* out) {
  using A = Accumulator<T>;
  const std::int64_t size = heads * width;
  parallel_edges(csc.indptr, row_grain(size), [&](std::int64_t row, std::int64_t first, std::int64_t last) {
    thread_local std::vector<A> wide;
    wide.resize(static_cast<std::size_t>(size));
    const A degree = mean ? static_cast<A>(csc.indptr[row + 1] - csc.indptr[row]) : A{1};
    for (std::int64_t d = 0; d < size; ++d) wide[d] = load(rhs[row * size + d]) / degree;
    detail::edge_dots(csc.indices.data(), lhs, wide.data(), heads, width, first, last, csc.edges(), out);
  });
  detail::fill_tail(csc, heads, out);
}

}  // namespace joestar
