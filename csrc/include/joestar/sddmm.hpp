#pragma once
// Edge values from the rows of an edge's two ends: out[e] = op(lhs[source(e)], rhs[destination(e)]).

#include <algorithm>

#include "joestar/spmm.hpp"

namespace joestar {

enum class EdgeOp { Add, Sub, Mul, Div, CopyLhs, CopyRhs };

// Operands of sddmm_dot: rows of heads * width numbers; of `width` in lhs if `shared`, one row for all heads. With
// `mean`, rows of rhs are divided by their degree first: the gradient of a mean for its edge weights.
template <class T>
struct DotRows {
  const T* lhs;
  const T* rhs;
  std::int64_t heads = 1, width = 1;
  bool shared = false, mean = false;
};

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

// The edges [first, last) of one row, whose destination has the row `rhs`.
template <EdgeOp op, class T, class Id>
JOESTAR_CLONES void edge_values(const Id* ids, const T* lhs, const T* rhs, std::int64_t size, std::int64_t first,
                                std::int64_t last, const RowPrefetcher<T, const Id*>& prefetcher, T* out) {
  using A = Accumulator<T>;
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
  for (int l = 0; l < 8; ++l) lane[l] += lane[l + 8];
  for (int l = 0; l < 4; ++l) lane[l] += lane[l + 4];
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

// out[e * heads + h] = <lhs[source(e), h], rhs[row(e), h]> for the edges [first, last). `wide` holds one row. `fixed`:
// the width, where it is known to the compiler; 0 otherwise.
template <int fixed, class T, IdType Id, class Out>
JOESTAR_CLONES void edge_dots(const Csc<Id>& csc, const DotRows<T>& rows, std::int64_t first, std::int64_t last,
                              Accumulator<T>* JOESTAR_RESTRICT wide, Out* JOESTAR_RESTRICT out) {
  using A = Accumulator<T>;
  const std::int64_t heads = rows.heads, width = fixed > 0 ? fixed : rows.width, size = heads * width;
  const std::int64_t left_size = rows.shared ? width : size, step = rows.shared ? 0 : width;
  const std::int64_t* indptr = csc.indptr.data();
  const Id* ids = csc.indices.data();
  const RowPrefetcher<T, const Id*> prefetcher(rows.lhs, ids, left_size, last);
  prefetcher.start(first);
  std::int64_t row = std::upper_bound(indptr, indptr + csc.rows() + 1, first) - indptr - 1;
  for (std::int64_t e = first; e < last; ++row) {
    const T* right = rows.rhs + row * size;
    const A* y = wide;
    if constexpr (std::is_same_v<A, T>) y = rows.mean ? wide : right;
    if (y == wide) {
      const A degree = rows.mean ? static_cast<A>(indptr[row + 1] - indptr[row]) : A{1};
      for (std::int64_t d = 0; d < size; ++d) wide[d] = load(right[d]) / degree;
    }
    for (const std::int64_t end = std::min(last, indptr[row + 1]); e < end; ++e) {
      const T* left = rows.lhs + static_cast<std::int64_t>(ids[e]) * left_size;
      prefetcher.at(e);
      for (std::int64_t h = 0; h < heads; ++h) {
        out[e * heads + h] = store<Out>(dot(left + h * step, y + h * width, width));
      }
    }
  }
}

// Runs f(the width as a constant, 0 for an unusual one or other types than float).
template <class T, class F>
void with_width(std::int64_t width, F&& f) {
  switch (std::is_same_v<T, float> ? width : 0) {
    case 16:
      return f(std::integral_constant<int, 16>{});
    case 32:
      return f(std::integral_constant<int, 32>{});
    case 64:
      return f(std::integral_constant<int, 64>{});
    case 128:
      return f(std::integral_constant<int, 128>{});
    default:
      return f(std::integral_constant<int, 0>{});
  }
}

template <EdgeOp op, class T, IdType Id>
void elementwise(const Csc<Id>& csc, const T* lhs, const T* rhs, std::int64_t size, T* out) {
  const Id* ids = csc.indices.data();
  const RowPrefetcher<T, const Id*> prefetcher(lhs, ids, size, op == EdgeOp::CopyRhs ? 0 : csc.edges());
  parallel_edges(csc.indptr, row_grain(size), [&](std::int64_t row, std::int64_t first, std::int64_t last) {
    edge_values<op>(ids, lhs, rhs == nullptr ? nullptr : rhs + row * size, size, first, last, prefetcher, out);
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
template <class T, IdType Id>
void sddmm_dot(const Csc<Id>& csc, const DotRows<T>& rows, T* out) {
  detail::with_width<T>(rows.width, [&]<int fixed>(std::integral_constant<int, fixed>) {
    const std::int64_t size = rows.heads * rows.width;
    parallel_ranges(csc.edges(), row_grain(size), [&](std::int64_t first, std::int64_t last) {
      const Scratch<Accumulator<T>> wide(size);
      detail::edge_dots<fixed>(csc, rows, first, last, wide.data(), out);
    });
  });
  detail::fill_tail(csc, rows.heads, out);
}

}  // namespace joestar
