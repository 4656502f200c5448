#pragma once
// Transformations of the structure alone: transposition, degrees, self-loops, rows of edges.

#include <algorithm>
#include <atomic>
#include <bit>

#include "joestar/parallel.hpp"

namespace joestar {

// The edges of each source, in edge order: source s has the entries indptr[s] .. indptr[s + 1) of `row` (the edge's
// destination) and `edge` (its position).
template <IdType Id>
struct Transposed {
  Scratch<std::int64_t> indptr;
  Scratch<Id> row;
  Scratch<std::int64_t> edge;
};

namespace detail {

constexpr std::int64_t kEdgeGrain = 16384;
constexpr int kMaxBuckets = 512;

template <IdType Id>
struct SourceEdge {
  Id source, row;
  std::int64_t edge;
};

// f(source, row, edge) for the edges of rows [first, last).
template <IdType Id, class F>
JOESTAR_INLINE void for_edges(const Csc<Id>& csc, std::int64_t first, std::int64_t last, F&& f) {
  for (std::int64_t i = first; i < last; ++i) {
    for (std::int64_t e = csc.indptr[i]; e < csc.indptr[i + 1]; ++e) f(csc.indices[e], static_cast<Id>(i), e);
  }
}

// Stable counting sort of one bucket: sources [low, high), entries from `base` on. `visit(f)` calls f(source, row,
// edge) for the bucket's edges in edge order.
template <IdType Id, class Visit>
void sort_bucket(std::int64_t low, std::int64_t high, std::int64_t base, Visit&& visit, Transposed<Id>& out) {
  std::vector<std::int64_t> cursor(static_cast<std::size_t>(high - low), 0);
  visit([&](Id source, Id, std::int64_t) { ++cursor[static_cast<std::size_t>(source - low)]; });
  for (std::int64_t s = low; s < high; ++s) {
    out.indptr[s] = base;
    base += std::exchange(cursor[static_cast<std::size_t>(s - low)], base);
  }
  visit([&](Id source, Id row, std::int64_t edge) {
    const std::int64_t slot = cursor[static_cast<std::size_t>(source - low)]++;
    out.row[slot] = row;
    out.edge[slot] = edge;
  });
}

}  // namespace detail

// Transposition by a stable radix partition of the sources followed by a counting sort of each part.
template <IdType Id>
Transposed<Id> transpose(const Csc<Id>& csc, std::int64_t num_src) {
  const std::int64_t edges = csc.edges(), rows = csc.rows();
  Transposed<Id> out{Scratch<std::int64_t>(num_src + 1), Scratch<Id>(edges), Scratch<std::int64_t>(edges)};
  out.indptr[num_src] = edges;
  const bool small = edges < 4 * detail::kEdgeGrain || num_src <= detail::kMaxBuckets;
  if (small) {
    const auto visit = [&](auto&& f) { detail::for_edges(csc, 0, rows, f); };
    detail::sort_bucket(0, num_src, 0, visit, out);
    return out;
  }

  const int shift = std::max(0, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(num_src - 1))) - 8);
  const std::int64_t buckets = ((num_src - 1) >> shift) + 1;
  const std::int64_t blocks = std::min<std::int64_t>(num_blocks(edges + rows, detail::kEdgeGrain), 128);
  const auto row_at = [&](std::int64_t block) { return balanced_row(csc.indptr, block, blocks); };
  Scratch<std::int64_t> cursor(buckets * blocks);  // cursor[bucket * blocks + block]
  std::fill_n(cursor.data(), cursor.size(), std::int64_t{0});
  parallel_blocks(blocks, [&](std::int64_t block) {
    std::int64_t count[detail::kMaxBuckets] = {};
    detail::for_edges(csc, row_at(block), row_at(block + 1), [&](Id s, Id, std::int64_t) { ++count[s >> shift]; });
    for (std::int64_t b = 0; b < buckets; ++b) cursor[b * blocks + block] = count[b];
  });
  Scratch<std::int64_t> start(buckets * blocks + 1);
  exclusive_scan(buckets * blocks, 1 << 14, [&](std::int64_t i) { return cursor[i]; }, start.span());

  Scratch<detail::SourceEdge<Id>> sorted(edges);
  parallel_blocks(blocks, [&](std::int64_t block) {
    std::int64_t slot[detail::kMaxBuckets];
    for (std::int64_t b = 0; b < buckets; ++b) slot[b] = start[b * blocks + block];
    detail::for_edges(csc, row_at(block), row_at(block + 1),
                      [&](Id s, Id row, std::int64_t e) { sorted[slot[s >> shift]++] = {s, row, e}; });
  });
  parallel_blocks(buckets, [&](std::int64_t b) {
    const std::int64_t first = start[b * blocks], last = start[(b + 1) * blocks];
    const auto visit = [&](auto&& f) {
      for (std::int64_t i = first; i < last; ++i) f(sorted[i].source, sorted[i].row, sorted[i].edge);
    };
    detail::sort_bucket(b << shift, std::min(num_src, (b + 1) << shift), first, visit, out);
  });
  return out;
}

// out[e] = row of edge e, 0 behind the last edge.
template <class Out>
void edge_rows(std::span<const std::int64_t> indptr, std::span<Out> out) {
  parallel_edges(indptr, detail::kEdgeGrain, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
    std::fill(out.begin() + first, out.begin() + last, static_cast<Out>(row));
  });
  const std::int64_t edges = indptr.empty() ? 0 : indptr.back();
  std::fill(out.begin() + edges, out.end(), Out{0});
}

// out[s] = number of edges with source s.
template <IdType Id>
void out_degrees(const Csc<Id>& csc, std::span<std::int64_t> out) {
  const std::int64_t edges = csc.edges(), sources = static_cast<std::int64_t>(out.size());
  const std::int64_t copies = edges >> 32 ? 1 : own_copies(edges, 4 * sources);
  if (edges < 4 * detail::kEdgeGrain || num_threads() == 1) {
    std::fill(out.begin(), out.end(), std::int64_t{0});
    for (std::int64_t e = 0; e < edges; ++e) ++out[csc.indices[e]];
    return;
  }
  if (copies == 1) {
    std::fill(out.begin(), out.end(), std::int64_t{0});
    parallel_for(edges, detail::kEdgeGrain, [&](std::int64_t e) {
      std::atomic_ref<std::int64_t>(out[csc.indices[e]]).fetch_add(1, std::memory_order_relaxed);
    });
    return;
  }
  const Scratch<std::uint32_t> counts(copies * sources);
  parallel_copies(edges, copies, [&](std::int64_t copy, std::int64_t first, std::int64_t last) {
    std::uint32_t* const own = counts.data() + copy * sources;
    std::fill_n(own, sources, 0U);
    for (std::int64_t e = first; e < last; ++e) ++own[csc.indices[e]];
  });
  parallel_ranges(sources, detail::kEdgeGrain, [&](std::int64_t first, std::int64_t last) {
    std::copy_n(counts.data() + first, last - first, out.begin() + first);
    for (std::int64_t copy = 1; copy < copies; ++copy) {
      const std::uint32_t* const own = counts.data() + copy * sources;
      for (std::int64_t s = first; s < last; ++s) out[s] += own[s];
    }
  });
}

// Replaces the self-loops of the first `num_dst` rows by one at the row's end; later rows are padding and stay empty.
// `indices` holds edges + rows ids, 0 behind the last edge.
template <IdType Id>
void add_self_loops(const Csc<Id>& csc, std::int64_t num_dst, std::span<std::int64_t> indptr, std::span<Id> indices) {
  const auto kept = [&](std::int64_t i) {
    std::int64_t count = i < num_dst;
    for (std::int64_t e = csc.indptr[i]; e < csc.indptr[i + 1]; ++e) count += csc.indices[e] != static_cast<Id>(i);
    return count;
  };
  const std::int64_t edges = exclusive_scan(csc.rows(), 2048, kept, indptr);
  parallel_rows(csc.indptr, detail::kEdgeGrain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      std::int64_t slot = indptr[i];
      for (std::int64_t e = csc.indptr[i]; e < csc.indptr[i + 1]; ++e) {
        if (csc.indices[e] != static_cast<Id>(i)) indices[slot++] = csc.indices[e];
      }
      if (i < num_dst) indices[slot] = static_cast<Id>(i);
    }
  });
  std::fill(indices.begin() + edges, indices.end(), Id{0});
}

}  // namespace joestar
