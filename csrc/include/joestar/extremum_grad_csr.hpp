#pragma once
// Gradient of spmm_csr with max or min: every edge whose message equals the result gets an even share.

#include "joestar/extremum_grad.hpp"
#include "joestar/spmm_csr.hpp"

namespace joestar {
namespace detail {

// ties[dst] += 1 for every message of the hits that equals the result, in the columns of a tile.
template <bool weighted, class T, IdType Id, class A>
JOESTAR_INLINE void count_ties(const Hits<Id>& hits, const ExtremumGrad<T>& task, const ScatterTile& tile, A* ties) {
  const std::int64_t heads = task.shape.heads, width = task.shape.width, size = heads * width;
  const RowPrefetcher<T, const Id*> prefetcher(task.y, hits.destination, size, hits.count);
  for (std::int64_t i = 0; i < hits.count; ++i) {
    const T* x = task.x + static_cast<std::int64_t>(hits.source[i]) * size;
    const std::int64_t row = static_cast<std::int64_t>(hits.destination[i]) * size;
    prefetcher.at(i);
    for (std::int64_t h = 0; h < heads; ++h) {
      const A w = weight_at<weighted>(task.shape, hits.edge[i], h);
      for (std::int64_t d = h * width + tile.first_column; d < h * width + tile.last_column; ++d) {
        ties[row + d] += rounded_message<weighted>(x[d], w) == load(task.y[row + d]) ? A{1} : A{0};
      }
    }
  }
}

// share = grad / number of edges that reach the result, in a tile.
template <bool weighted, class T, IdType Id>
JOESTAR_CLONES void share_tile(const Csc<Id>& csr, const ExtremumGrad<T>& task, const ScatterTile& tile,
                               Accumulator<T>* share) {
  using A = Accumulator<T>;
  const std::int64_t heads = task.shape.heads, width = task.shape.width;
  for (std::int64_t d = tile.first; d < tile.last; ++d) {
    for_heads(tile, d, heads, width, [&](std::int64_t first, std::int64_t last) JOESTAR_INLINE_LAMBDA {
      std::fill(share + first, share + last, A{0});
    });
  }
  for_hits(csr, tile.first, tile.last, [&](const Hits<Id>& hits) JOESTAR_INLINE_LAMBDA {
    count_ties<weighted>(hits, task, tile, share);
  });
  for (std::int64_t d = tile.first; d < tile.last; ++d) {
    for_heads(tile, d, heads, width, [&](std::int64_t first, std::int64_t last) JOESTAR_INLINE_LAMBDA {
      for (std::int64_t i = first; i < last; ++i) {
        share[i] = load(task.grad[i]) / (share[i] > A{1} ? share[i] : A{1});
      }
    });
  }
}

// grad_weight of the edges [first, last) of source s; `part` holds one row.
template <class T, IdType Id>
JOESTAR_CLONES void extremum_weights_csr(const Csc<Id>& csr, const ExtremumGrad<T>& task, const Accumulator<T>* share,
                                         std::int64_t s, std::int64_t first, std::int64_t last,
                                         const RowPrefetcher<T, const Id*>& prefetch_y,
                                         const RowPrefetcher<Accumulator<T>, const Id*>& prefetch_share,
                                         Accumulator<T>* JOESTAR_RESTRICT part, T* grad_weight) {
  using A = Accumulator<T>;
  const std::int64_t heads = task.shape.heads, width = task.shape.width, size = heads * width;
  const T* x = task.x + s * size;
  for (std::int64_t e = first; e < last; ++e) {
    const std::int64_t row = static_cast<std::int64_t>(csr.indices[static_cast<std::size_t>(e)]) * size;
    prefetch_y.at(e);
    prefetch_share.at(e);
    for (std::int64_t h = 0; h < heads; ++h) {
      const A w = weight_at<true>(task.shape, e, h);
      for (std::int64_t d = h * width; d < (h + 1) * width; ++d) {
        part[d] = rounded_message<true>(x[d], w) == load(task.y[row + d]) ? share[row + d] : A{0};
      }
      grad_weight[e * heads + h] = store<T>(dot(x + h * width, part + h * width, width));
    }
  }
}

template <bool weighted, class T, IdType Id>
void extremum_grad_csr(const Csc<Id>& csr, std::int64_t num_dst, const ExtremumGrad<T>& task, T* grad_x,
                       T* grad_weight) {
  using A = Accumulator<T>;
  const std::int64_t size = task.shape.row_size(), grain = row_grain(size);
  const Scratch<A> share(num_dst * size);
  const std::vector<ScatterTile> tiles = scatter_tiles(num_dst, task.shape.width, sizeof(A));
  parallel_blocks(static_cast<std::int64_t>(tiles.size()), [&](std::int64_t t) {
    share_tile<weighted>(csr, task, tiles[static_cast<std::size_t>(t)], share.data());
  });
  const BySource<Id> by_source{csr.indptr, csr.indices.data(), nullptr};
  parallel_rows(csr.indptr, grain, [&](std::int64_t first, std::int64_t last) {
    const Scratch<A> acc(size);
    extremum_sources<weighted>(by_source, task, static_cast<const A*>(share.data()), first, last, acc.data(), grad_x);
  });
  if constexpr (weighted) {
    const A* shares = share.data();
    const RowPrefetcher<T, const Id*> prefetch_y(task.y, csr.indices.data(), size, csr.edges());
    const RowPrefetcher<A, const Id*> prefetch_share(shares, csr.indices.data(), size, csr.edges());
    parallel_edges(csr.indptr, grain, [&](std::int64_t s, std::int64_t first, std::int64_t last) {
      thread_local std::vector<A> part;
      part.resize(static_cast<std::size_t>(size));
      extremum_weights_csr(csr, task, shares, s, first, last, prefetch_y, prefetch_share, part.data(), grad_weight);
    });
    fill_tail(csr, task.shape.heads, grad_weight);
  }
}

}  // namespace detail

// grad_x [rows, heads * width]; grad_weight [edges, heads] where there are weights. csr has a row per source.
template <class T, IdType Id>
void spmm_csr_extremum_grad(const Csc<Id>& csr, std::int64_t num_dst, const ExtremumGrad<T>& task, T* grad_x,
                            T* grad_weight) {
  if (task.shape.weight == nullptr) {
    detail::extremum_grad_csr<false>(csr, num_dst, task, grad_x, grad_weight);
  } else {
    detail::extremum_grad_csr<true>(csr, num_dst, task, grad_x, grad_weight);
  }
}

}  // namespace joestar
