#pragma once
// Gather and reduce: y[row] = reduce over the row's edges of weight[edge] * x[id[edge]], summed in edge order.

#include <algorithm>
#include <limits>

#include "joestar/float16.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

enum class Reduce { Sum, Mean, Max, Min };

// None: messages are rows of x. Edge: one weight per edge. Head: one weight per edge and head.
enum class Weighting { None, Edge, Head };

// Stands for the ids 0, 1, 2, ...: message e is row e of x.
struct EdgeOrder {
  JOESTAR_INLINE std::int64_t operator[](std::int64_t e) const { return e; }
};

// Rows of x [*, heads * width], reached through ids (a pointer or EdgeOrder); weights of edge e are at weight[(edge_id
// ? edge_id[e] : e) * heads]. heads is 1 unless weights are per head.
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

struct Add {
  template <class A>
  static constexpr A identity = A{0};
  template <class A>
  static JOESTAR_INLINE A combine(A a, A v) {
    return a + v;
  }
};
// NaN wins, as in torch.amax.
struct Largest {
  template <class A>
  static constexpr A identity = -std::numeric_limits<A>::infinity();
  template <class A>
  static JOESTAR_INLINE A combine(A a, A v) {
    return ((v > a) | (v != v)) ? v : a;
  }
};
struct Smallest {
  template <class A>
  static constexpr A identity = std::numeric_limits<A>::infinity();
  template <class A>
  static JOESTAR_INLINE A combine(A a, A v) {
    return ((v < a) | (v != v)) ? v : a;
  }
};

constexpr std::int64_t kTogether = 4;  // edges folded into one pass over the accumulators

// acc = combine(acc, messages of the N edges from e on), edge after edge.
template <class Op, Weighting weighting, int N, class T, class Ids, class A>
JOESTAR_INLINE void fold(A* JOESTAR_RESTRICT acc, const Messages<T, Ids>& m, std::int64_t e) {
  const T* x[N];
  const T* w[N];
  for (int n = 0; n < N; ++n) {
    x[n] = m.row(e + n);
    w[n] = weighting == Weighting::None ? nullptr : m.weights(e + n);
  }
  for (std::int64_t h = 0; h < m.heads; ++h) {
    A scale[N];
    for (int n = 0; n < N; ++n) scale[n] = weighting == Weighting::None ? A{1} : A(load(w[n][h]));
    A* JOESTAR_RESTRICT head = acc + h * m.width;
    for (std::int64_t d = 0; d < m.width; ++d) {
      A value = head[d];
      for (int n = 0; n < N; ++n) {
        const A v = load(x[n][h * m.width + d]);
        value = Op::combine(value, weighting == Weighting::None ? v : scale[n] * v);
      }
      head[d] = value;
    }
  }
}

// acc = reduction of the edges [first, last).
template <class Op, Weighting weighting, class T, class Ids, class A>
JOESTAR_INLINE void fold_row(A* JOESTAR_RESTRICT acc, const Messages<T, Ids>& m, std::int64_t first, std::int64_t last,
                             const RowPrefetcher<T, Ids>& prefetcher) {
  std::fill_n(acc, m.row_size(), Op::template identity<A>);
  std::int64_t e = first;
  for (; e + kTogether <= last; e += kTogether) {
    for (std::int64_t n = 0; n < kTogether; ++n) prefetcher.at(e + n);
    fold<Op, weighting, kTogether>(acc, m, e);
  }
  for (; e < last; ++e) {
    prefetcher.at(e);
    fold<Op, weighting, 1>(acc, m, e);
  }
}

// y[i] = reduction of row i, for rows [first, last). `buffer` holds one row of accumulators.
template <class Op, Weighting weighting, class T, class Ids, class Out>
JOESTAR_CLONES void reduce_rows(const Messages<T, Ids>& m, Out* y, Accumulator<Out>* buffer, bool mean,
                                std::int64_t first, std::int64_t last) {
  using A = Accumulator<Out>;
  const std::int64_t size = m.row_size();
  const RowPrefetcher<T, Ids> prefetcher(m.x, m.ids, size, m.indptr[static_cast<std::size_t>(last)]);
  prefetcher.start(m.indptr[static_cast<std::size_t>(first)]);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t begin = m.indptr[static_cast<std::size_t>(i)], end = m.indptr[static_cast<std::size_t>(i) + 1];
    Out* out = y + i * size;
    if (begin == end) {
      for (std::int64_t d = 0; d < size; ++d) out[d] = store<Out>(A{0});
      continue;
    }
    A* acc = buffer;
    if constexpr (std::is_same_v<A, Out>) acc = out;
    fold_row<Op, weighting>(acc, m, begin, end, prefetcher);
    const A degree = static_cast<A>(end - begin);
    if (mean) {
      for (std::int64_t d = 0; d < size; ++d) acc[d] /= degree;
    }
    if constexpr (!std::is_same_v<A, Out>) {
      for (std::int64_t d = 0; d < size; ++d) out[d] = store<Out>(acc[d]);
    }
  }
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

template <class Op, Weighting weighting, class T, class Ids, class Out>
void gather_reduce(const Messages<T, Ids>& m, Out* y, bool mean) {
  parallel_rows(m.indptr, row_grain(m.row_size()), [&](std::int64_t first, std::int64_t last) {
    Scratch<Accumulator<Out>> buffer(std::is_same_v<Accumulator<Out>, Out> ? 0 : m.row_size());
    reduce_rows<Op, weighting>(m, y, buffer.data(), mean, first, last);
  });
}

}  // namespace detail

// y [rows, heads * width]; empty rows give 0.
template <class T, class Ids, class Out>
void spmm(const Messages<T, Ids>& m, Reduce reduce, Out* y) {
  const bool mean = reduce == Reduce::Mean;
  detail::with_op(reduce, [&]<class Op>(Op) {
    if (m.weight == nullptr) {
      detail::gather_reduce<Op, Weighting::None>(m, y, mean);
    } else if (m.heads == 1) {
      detail::gather_reduce<Op, Weighting::Edge>(m, y, mean);
    } else {
      detail::gather_reduce<Op, Weighting::Head>(m, y, mean);
    }
  });
}

}  // namespace joestar
