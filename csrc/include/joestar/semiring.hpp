#pragma once
// What all forms of sparse-dense product share: messages weight[e] * x[source(e)], and their reduction in edge order.

#include <algorithm>
#include <limits>

#include "joestar/float16.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

enum class Reduce { Sum, Mean, Max, Min };

// None: messages are rows of x. Scaled: one weight per edge and head.
enum class Weighting { None, Scaled };

// Stands for the ids 0, 1, 2, ...: message e is row e of x.
struct EdgeOrder {
  JOESTAR_INLINE std::int64_t operator[](std::int64_t e) const { return e; }
};

// Rows of x [*, heads * width], reached through ids (a pointer or EdgeOrder); weights of edge e are at weight[(edge_id
// ? edge_id[e] : e) * heads]. heads is 1 unless weights are per head. indptr holds the edges of every row, where the
// form of the product has rows.
template <class T, class Ids>
struct Messages {
  std::span<const std::int64_t> indptr;
  Ids ids;
  const T* x;
  const T* weight = nullptr;
  const std::int64_t* edge_id = nullptr;
  std::int64_t heads = 1;
  std::int64_t width = 1;

  std::int64_t row_size() const { return heads * width; }
  std::int64_t rows() const { return static_cast<std::int64_t>(indptr.size()) - 1; }
  JOESTAR_INLINE const T* row(std::int64_t e) const { return x + static_cast<std::int64_t>(ids[e]) * heads * width; }
  JOESTAR_INLINE const T* weights(std::int64_t e) const {
    return weight + (edge_id != nullptr ? edge_id[e] : e) * heads;
  }
};

// Edges per block of work, for rows of `row_size` numbers: about 32768 numbers.
inline std::int64_t row_grain(std::int64_t row_size) { return std::max<std::int64_t>(1, 32768 / (row_size + 8)); }

namespace detail {

// `together`: edges folded into one pass over the accumulators.
struct Add {
  static constexpr int together = 8;
  template <class A>
  static constexpr A identity = A{0};
  template <class A>
  static JOESTAR_INLINE A combine(A a, A v) {
    return a + v;
  }
};
// NaN wins, as in torch.amax.
struct Largest {
  static constexpr int together = 4;
  template <class A>
  static constexpr A identity = -std::numeric_limits<A>::infinity();
  template <class A>
  static JOESTAR_INLINE A combine(A a, A v) {
    return ((v > a) | (v != v)) ? v : a;
  }
};
struct Smallest {
  static constexpr int together = 4;
  template <class A>
  static constexpr A identity = std::numeric_limits<A>::infinity();
  template <class A>
  static JOESTAR_INLINE A combine(A a, A v) {
    return ((v < a) | (v != v)) ? v : a;
  }
};

// head[d] = combine(head[d], scale[n] * x[n][d]) for d in [0, columns) and n in [0, N), in this order for every d.
template <class Op, Weighting weighting, int N, class T, class A>
JOESTAR_INLINE void fold_columns(A* JOESTAR_RESTRICT head, const T* const* x, const A* scale, std::int64_t columns) {
#pragma GCC ivdep
  for (std::int64_t d = 0; d < columns; ++d) {
    A value = head[d];
    for (int n = 0; n < N; ++n) {
      const A v = load(x[n][d]);
      value = Op::combine(value, weighting == Weighting::None ? v : scale[n] * v);
    }
    head[d] = value;
  }
}

// acc = combine(acc, messages of the N edges from e on), edge after edge, in the columns [first, last) of every head.
template <class Op, Weighting weighting, int N, class T, class Ids, class A>
JOESTAR_INLINE void fold(A* JOESTAR_RESTRICT acc, const Messages<T, Ids>& m, std::int64_t e, std::int64_t first,
                         std::int64_t last) {
  const T* x[N];
  const T* w[N];
  for (int n = 0; n < N; ++n) {
    x[n] = m.row(e + n) + first;
    w[n] = weighting == Weighting::None ? nullptr : m.weights(e + n);
  }
  for (std::int64_t h = 0; h < m.heads; ++h) {
    A scale[N];
    for (int n = 0; n < N; ++n) scale[n] = weighting == Weighting::None ? A{1} : A(load(w[n][h]));
    A* head = acc + first + h * m.width;
    fold_columns<Op, weighting, N>(head, x, scale, last - first);
    for (int n = 0; n < N; ++n) x[n] += m.width;
  }
}

// The same for as many edges of [e, last) as are a multiple of N, prefetching rows; returns the next edge.
template <int N, class Op, Weighting weighting, class T, class Ids, class A>
JOESTAR_INLINE std::int64_t fold_by(A* JOESTAR_RESTRICT acc, const Messages<T, Ids>& m, std::int64_t e,
                                    std::int64_t last, const RowPrefetcher<T, Ids>& prefetcher) {
  for (; e + N <= last; e += N) {
    prefetcher.template at_each<N>(e);
    fold<Op, weighting, N>(acc, m, e, 0, m.width);
  }
  return e;
}

// acc = reduction of the edges [first, last).
template <class Op, Weighting weighting, class T, class Ids, class A>
JOESTAR_INLINE void fold_row(A* JOESTAR_RESTRICT acc, const Messages<T, Ids>& m, std::int64_t first, std::int64_t last,
                             const RowPrefetcher<T, Ids>& prefetcher) {
  std::fill_n(acc, m.row_size(), Op::template identity<A>);
  std::int64_t e = fold_by<Op::together, Op, weighting>(acc, m, first, last, prefetcher);
  if constexpr (Op::together > 4) e = fold_by<4, Op, weighting>(acc, m, e, last, prefetcher);
  e = fold_by<2, Op, weighting>(acc, m, e, last, prefetcher);
  fold_by<1, Op, weighting>(acc, m, e, last, prefetcher);
}

// out = acc, divided by the degree of a mean; acc may be out itself.
template <class Out>
JOESTAR_INLINE void finish_row(Accumulator<Out>* acc, Out* out, std::int64_t size, std::int64_t degree, bool mean) {
  using A = Accumulator<Out>;
  if (mean) {
    const A divisor = static_cast<A>(degree);
    for (std::int64_t d = 0; d < size; ++d) acc[d] /= divisor;
  }
  if constexpr (!std::is_same_v<A, Out>) {
    for (std::int64_t d = 0; d < size; ++d) out[d] = store<Out>(acc[d]);
  }
}

// out = reduction of the edges [first, last), 0 if there are none. `buffer` holds a row of accumulators.
template <class Op, Weighting weighting, class T, class Ids, class Out>
JOESTAR_INLINE void reduce_row(const Messages<T, Ids>& m, std::int64_t first, std::int64_t last, bool mean,
                               const RowPrefetcher<T, Ids>& prefetcher, Accumulator<Out>* buffer, Out* out) {
  using A = Accumulator<Out>;
  const std::int64_t size = m.row_size();
  if (first == last) {
    for (std::int64_t d = 0; d < size; ++d) out[d] = store<Out>(A{0});
    return;
  }
  A* acc = buffer;
  if constexpr (std::is_same_v<A, Out>) acc = out;
  fold_row<Op, weighting>(acc, m, first, last, prefetcher);
  finish_row(acc, out, size, last - first, mean);
}

// Runs f(Op) for the operation of `reduce`.
template <class F>
void with_op(Reduce reduce, F&& f) {
  switch (reduce) {
    case Reduce::Max:
      return f(Largest{});
    case Reduce::Min:
      return f(Smallest{});
    default:
      return f(Add{});
  }
}

// Runs f.operator()<weighting>() for messages with or without weights.
template <class T, class Ids, class F>
void with_weighting(const Messages<T, Ids>& m, F&& f) {
  if (m.weight == nullptr) {
    f.template operator()<Weighting::None>();
  } else {
    f.template operator()<Weighting::Scaled>();
  }
}

// Memory for one row of accumulators, where results are narrower than sums.
template <class Out>
Scratch<Accumulator<Out>> row_buffer(std::int64_t size) {
  return Scratch<Accumulator<Out>>(std::is_same_v<Accumulator<Out>, Out> ? 0 : size);
}

}  // namespace detail
}  // namespace joestar
