#pragma once
// Gradient of spmm with max or min: every edge whose message equals the result gets an even share.

#include <algorithm>

#include "joestar/sddmm.hpp"
#include "joestar/spmm_grad.hpp"

namespace joestar {

// What went into and came out of the forward pass; x and y rows hold heads * width numbers.
template <class T>
struct ExtremumGrad {
  const T* x;
  const T* y;
  const T* grad;
  WeightedShape<T> shape;
};

namespace detail {

// The message as the forward pass rounded it, to be compared with y.
template <bool weighted, class T, class A>
JOESTAR_INLINE A rounded_message(T x, A weight) {
  if constexpr (!weighted) return load(x);
  return load(store<T>(weight * load(x)));
}

template <bool weighted, class T>
JOESTAR_INLINE Accumulator<T> weight_at(const WeightedShape<T>& shape, std::int64_t e, std::int64_t h) {
  if constexpr (!weighted) return 1;
  return load(shape.weight[e * shape.heads + h]);
}

// share[row] = grad / number of edges that reach the result, for rows [first, last).
template <bool weighted, class T, IdType Id>
JOESTAR_CLONES void share_rows(const Csc<Id>& csc, const ExtremumGrad<T>& task, std::int64_t first, std::int64_t last,
                               Accumulator<T>* share) {
  using A = Accumulator<T>;
  const std::int64_t heads = task.shape.heads, width = task.shape.width, size = heads * width;
  const RowPrefetcher<T, const Id*> prefetcher(task.x, csc.indices.data(), size, csc.indptr[last]);
  for (std::int64_t i = first; i < last; ++i) {
    A* JOESTAR_RESTRICT ties = share + i * size;
    std::fill_n(ties, size, A{0});
    for (std::int64_t e = csc.indptr[i]; e < csc.indptr[i + 1]; ++e) {
      const T* x = task.x + static_cast<std::int64_t>(csc.indices[e]) * size;
      const T* y = task.y + i * size;
      prefetcher.at(e);
      for (std::int64_t h = 0; h < heads; ++h) {
        const A w = weight_at<weighted>(task.shape, e, h);
        for (std::int64_t d = h * width; d < (h + 1) * width; ++d) {
          ties[d] += rounded_message<weighted>(x[d], w) == load(y[d]) ? A{1} : A{0};
        }
      }
    }
    for (std::int64_t d = 0; d < size; ++d) {
      ties[d] = load(task.grad[i * size + d]) / (ties[d] > A{1} ? ties[d] : A{1});
    }
  }
}

// The edges of each source: destination row[t] and position edge[t] (t itself where edge is null).
template <IdType Id>
struct BySource {
  std::span<const std::int64_t> indptr;
  const Id* row;
  const std::int64_t* edge;
};

// grad_x of the sources [first, last), summed in edge order.
template <bool weighted, class T, IdType Id>
JOESTAR_CLONES void extremum_sources(const BySource<Id>& by_source, const ExtremumGrad<T>& task,
                                     const Accumulator<T>* share, std::int64_t first, std::int64_t last,
                                     Accumulator<T>* JOESTAR_RESTRICT acc, T* grad_x) {
  using A = Accumulator<T>;
  const std::int64_t heads = task.shape.heads, width = task.shape.width, size = heads * width;
  const std::int64_t limit = by_source.indptr[last];
  const RowPrefetcher<T, const Id*> prefetch_y(task.y, by_source.row, size, limit);
  const RowPrefetcher<A, const Id*> prefetch_share(share, by_source.row, size, limit);
  for (std::int64_t s = first; s < last; ++s) {
    const T* x = task.x + s * size;
    std::fill_n(acc, size, A{0});
    for (std::int64_t t = by_source.indptr[s]; t < by_source.indptr[s + 1]; ++t) {
      const std::int64_t row = static_cast<std::int64_t>(by_source.row[t]) * size;
      prefetch_y.at(t);
      prefetch_share.at(t);
      const std::int64_t e = by_source.edge != nullptr ? by_source.edge[t] : t;
      for (std::int64_t h = 0; h < heads; ++h) {
        const A w = weight_at<weighted>(task.shape, e, h);
        for (std::int64_t d = h * width; d < (h + 1) * width; ++d) {
          const A part = weighted ? share[row + d] * w : share[row + d];
          acc[d] += rounded_message<weighted>(x[d], w) == load(task.y[row + d]) ? part : A{0};
        }
      }
    }
    for (std::int64_t d = 0; d < size; ++d) grad_x[s * size + d] = store<T>(acc[d]);
  }
}

// grad_weight of the edges [first, last) of one row; `part` holds one row.
template <class T, IdType Id>
JOESTAR_CLONES void extremum_weights(const Csc<Id>& csc, const ExtremumGrad<T>& task, const Accumulator<T>* share,
                                     std::int64_t row, std::int64_t first, std::int64_t last,
                                     const RowPrefetcher<T, const Id*>& prefetcher,
                                     Accumulator<T>* JOESTAR_RESTRICT part, T* grad_weight) {
  using A = Accumulator<T>;
  const std::int64_t heads = task.shape.heads, width = task.shape.width, size = heads * width;
  for (std::int64_t e = first; e < last; ++e) {
    const T* x = task.x + static_cast<std::int64_t>(csc.indices[e]) * size;
    prefetcher.at(e);
    for (std::int64_t h = 0; h < heads; ++h) {
      const A w = weight_at<true>(task.shape, e, h);
      for (std::int64_t d = h * width; d < (h + 1) * width; ++d) {
        const bool chosen = rounded_message<true>(x[d], w) == load(task.y[row * size + d]);
        part[d] = chosen ? share[row * size + d] : A{0};
      }
      grad_weight[e * heads + h] = store<T>(dot(x + h * width, part + h * width, width));
    }
  }
}

template <bool weighted, class T, IdType Id>
void extremum_grad(const Csc<Id>& csc, std::int64_t num_src, const ExtremumGrad<T>& task, T* grad_x, T* grad_weight) {
  using A = Accumulator<T>;
  const std::int64_t size = task.shape.row_size(), grain = row_grain(size);
  const Scratch<A> share(csc.rows() * size);
  parallel_rows(csc.indptr, grain, [&](std::int64_t first, std::int64_t last) {
    share_rows<weighted>(csc, task, first, last, share.data());
  });
  const Transposed<Id> transposed = transpose(csc, num_src);
  const BySource<Id> by_source{transposed.indptr.span(), transposed.row.data(), transposed.edge.data()};
  parallel_rows(by_source.indptr, grain, [&](std::int64_t first, std::int64_t last) {
    const Scratch<A> acc(size);
    extremum_sources<weighted>(by_source, task, static_cast<const A*>(share.data()), first, last, acc.data(), grad_x);
  });
  if constexpr (weighted) {
    const RowPrefetcher<T, const Id*> prefetcher(task.x, csc.indices.data(), size, csc.edges());
    parallel_edges(csc.indptr, grain, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
      thread_local std::vector<A> part;
      part.resize(static_cast<std::size_t>(size));
      const A* shares = share.data();
      extremum_weights(csc, task, shares, row, first, last, prefetcher, part.data(), grad_weight);
    });
    fill_tail(csc, task.shape.heads, grad_weight);
  }
}

}  // namespace detail

// grad_x [num_src, heads * width]; grad_weight [edges, heads] where there are weights.
template <class T, IdType Id>
void spmm_extremum_grad(const Csc<Id>& csc, std::int64_t num_src, const ExtremumGrad<T>& task, T* grad_x,
                        T* grad_weight) {
  if (task.shape.weight == nullptr) {
    detail::extremum_grad<false>(csc, num_src, task, grad_x, grad_weight);
  } else {
    detail::extremum_grad<true>(csc, num_src, task, grad_x, grad_weight);
  }
}

}  // namespace joestar
