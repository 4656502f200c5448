#pragma once
// Sparse-dense product, CSR scatter: row s holds the destinations of source s, and y[dst] reduces over weight[e] * x[s],
// in edge order. The result is cut into tiles of destinations and columns, one task each, which read all edges and
// write only their own: no atomics, and the same bits however many tiles there are.

#include <vector>

#include "joestar/semiring.hpp"
#include "joestar/structure.hpp"

namespace joestar {

// The part [first, last) of the destinations and [first_column, last_column) of the columns of every head.
struct ScatterTile {
  std::int64_t first, last, first_column, last_column;
};

namespace detail {

constexpr std::int64_t kHits = 512;            // edges collected at a time
constexpr std::int64_t kColumnBytes = 256;     // least width of a tile that is cut by columns

// One tile per thread: cut by columns as long as they are wide, else by destinations.
inline std::vector<ScatterTile> scatter_tiles(std::int64_t num_dst, std::int64_t width, std::int64_t element) {
  const std::int64_t threads = std::min<std::int64_t>(num_threads(), std::max<std::int64_t>(1, num_dst / 16));
  const std::int64_t by_column = std::clamp<std::int64_t>(width * element / kColumnBytes, 1, threads);
  const std::int64_t by_row = (threads + by_column - 1) / by_column, lane = std::max<std::int64_t>(1, 64 / element);
  const auto column = [&](std::int64_t c) {
    return c == by_column ? width : width * c / by_column / lane * lane;
  };
  std::vector<ScatterTile> tiles;
  for (std::int64_t r = 0; r < by_row; ++r) {
    for (std::int64_t c = 0; c < by_column; ++c) {
      tiles.push_back({num_dst * r / by_row, num_dst * (r + 1) / by_row, column(c), column(c + 1)});
    }
  }
  return tiles;
}

// Edges that end in a tile, in edge order.
template <IdType Id>
struct Hits {
  Id source[kHits], destination[kHits];
  std::int64_t edge[kHits];
  std::int64_t count;
};

// f(hits) for all edges with a destination in [first, last), a few hundred at a time.
template <IdType Id, class F>
JOESTAR_INLINE void for_hits(const Csc<Id>& csr, std::int64_t first, std::int64_t last, F&& f) {
  Hits<Id> hits;
  hits.count = 0;
  const auto width = static_cast<std::uint64_t>(last - first);
  for (std::int64_t s = 0; s < csr.rows(); ++s) {
    for (std::int64_t e = csr.indptr[s]; e < csr.indptr[s + 1]; ++e) {
      const Id destination = csr.indices[static_cast<std::size_t>(e)];
      hits.source[hits.count] = static_cast<Id>(s);
      hits.destination[hits.count] = destination;
      hits.edge[hits.count] = e;
      hits.count += static_cast<std::uint64_t>(destination - first) < width ? 1 : 0;
      if (hits.count < kHits) continue;
      f(hits);
      hits.count = 0;
    }
  }
  f(hits);
}

// f(first number, last number) for the numbers of row `row` that are in the tile, head by head.
template <class F>
JOESTAR_INLINE void for_heads(const ScatterTile& tile, std::int64_t row, std::int64_t heads, std::int64_t width,
                              F&& f) {
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t head = (row * heads + h) * width;
    f(head + tile.first_column, head + tile.last_column);
  }
}

template <class Op, Weighting weighting, class T, IdType Id, class A>
JOESTAR_INLINE void scatter_hits(const Hits<Id>& hits, const Messages<T, EdgeOrder>& all, const ScatterTile& tile,
                                 A* acc) {
  const std::int64_t size = all.row_size();
  const Messages<T, const Id*> m{
      all.indptr, static_cast<const Id*>(hits.source), all.x, all.weight, static_cast<const std::int64_t*>(hits.edge),
      all.heads,  all.width};
  const std::int64_t last = all.heads == 1 ? tile.last_column : size;
  const RowPrefetcher<A, const Id*> prefetcher(acc, hits.destination, size, hits.count, tile.first_column, last);
  prefetcher.start(0);
  for (std::int64_t i = 0; i < hits.count; ++i) {
    prefetcher.at(i);
    fold<Op, weighting, 1>(acc + static_cast<std::int64_t>(hits.destination[i]) * size, m, i, tile.first_column,
                                  tile.last_column);
  }
}

// acc = reduction of the edges of a tile; rows without edges keep the identity.
template <class Op, Weighting weighting, class T, IdType Id, class A>
JOESTAR_CLONES void scatter_tile(const Csc<Id>& csr, const Messages<T, EdgeOrder>& m, const ScatterTile& tile, A* acc) {
  for (std::int64_t d = tile.first; d < tile.last; ++d) {
    for_heads(tile, d, m.heads, m.width, [&](std::int64_t first, std::int64_t last) JOESTAR_INLINE_LAMBDA {
      std::fill(acc + first, acc + last, Op::template identity<A>);
    });
  }
  for_hits(csr, tile.first, tile.last, [&](const Hits<Id>& hits) JOESTAR_INLINE_LAMBDA {
    scatter_hits<Op, weighting>(hits, m, tile, acc);
  });
}

// y = acc in a tile: 0 where there are no edges, divided by the degree for a mean. degree is not read for a sum.
template <class A, class Out>
JOESTAR_CLONES void finish_tile(A* acc, const ScatterTile& tile, std::int64_t heads, std::int64_t width, Reduce reduce,
                                const std::int64_t* degree, Out* y) {
  if (reduce == Reduce::Sum && std::is_same_v<A, Out>) return;
  for (std::int64_t d = tile.first; d < tile.last; ++d) {
    const bool empty = reduce != Reduce::Sum && degree[d] == 0;
    const A divisor = reduce == Reduce::Mean && !empty ? static_cast<A>(degree[d]) : A{1};
    for_heads(tile, d, heads, width, [&](std::int64_t first, std::int64_t last) JOESTAR_INLINE_LAMBDA {
      for (std::int64_t i = first; i < last; ++i) y[i] = store<Out>(empty ? A{0} : acc[i] / divisor);
    });
  }
}

template <class Op, Weighting weighting, class T, IdType Id, class Out>
void scatter_reduce(const Csc<Id>& csr, const Messages<T, EdgeOrder>& m, std::int64_t num_dst, Reduce reduce, Out* y) {
  using A = Accumulator<Out>;
  const Scratch<std::int64_t> degree(reduce == Reduce::Sum ? 0 : num_dst);
  if (reduce != Reduce::Sum) out_degrees(csr, degree.span());
  const Scratch<A> wide(std::is_same_v<A, Out> ? 0 : num_dst * m.row_size());
  A* acc = wide.data();
  if constexpr (std::is_same_v<A, Out>) acc = y;
  const std::vector<ScatterTile> tiles = scatter_tiles(num_dst, m.width, sizeof(A));
  parallel_blocks(static_cast<std::int64_t>(tiles.size()), [&](std::int64_t t) {
    const ScatterTile& tile = tiles[static_cast<std::size_t>(t)];
    scatter_tile<Op, weighting>(csr, m, tile, acc);
    finish_tile(acc, tile, m.heads, m.width, reduce, static_cast<const std::int64_t*>(degree.data()), y);
  });
}

}  // namespace detail

// y [num_dst, heads * width] from csr over the sources, whose indices are destinations, and the messages of its edges
// (x, weight, heads and width; a message's source is its row). Destinations without edges give 0.
template <class T, IdType Id, class Out>
void spmm_csr(const Csc<Id>& csr, const Messages<T, EdgeOrder>& m, std::int64_t num_dst, Reduce reduce, Out* y) {
  detail::with_op(reduce, [&]<class Op>(Op) {
    detail::with_weighting(
        m, [&]<Weighting weighting>() { detail::scatter_reduce<Op, weighting>(csr, m, num_dst, reduce, y); });
  });
}

}  // namespace joestar
