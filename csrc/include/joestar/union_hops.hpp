#pragma once
// The union of the hops of any sampler's blocks, whose edges are known by their positions in the graph.

#include "joestar/macro_batch.hpp"

namespace joestar {

// One block: row i is srcs[i]; `local` are positions in srcs.
template <IdType Id>
struct UnionHop {
  std::span<const std::int64_t> indptr;
  std::span<const Id> local;
  std::span<const Id> srcs;  // a node may stand several times
  std::span<const std::int64_t> eids;

  std::span<const Id> dsts() const { return srcs.first(indptr.size() - 1); }
};

template <IdType Id>
struct UnionTask {
  Csc<Id> graph;
  std::span<const Id> seeds;  // are rows, whatever the hops have
  std::span<const UnionHop<Id>> hops;
};

namespace detail {

constexpr std::int64_t kUnionAhead = 16;

// Whether position e is that of an edge from `source` into `row`.
template <IdType Id>
JOESTAR_INLINE bool is_edge(const Csc<Id>& graph, std::int64_t e, Id source, Id row) {
  const std::int64_t* ends = graph.indptr.data() + row;
  return e >= ends[0] && e < ends[1] && graph.indices[static_cast<std::size_t>(e)] == source;
}

// Local ids of every hop's destinations.
using RowsOfHops = std::vector<PageScratch<std::int32_t>>;

// Rows with room for every copy of their edges.
template <IdType Id>
ChosenRows<Id> rows_with_room(const UnionTask<Id>& task, const RowsOfHops& rows_of, std::int64_t num_rows) {
  PageScratch<std::int64_t> copies(num_rows);
  copies.fill(0);
  for (std::size_t h = 0; h < task.hops.size(); ++h) {
    const UnionHop<Id>& hop = task.hops[h];
    const PageScratch<std::int32_t>& row_of = rows_of[h];
    parallel_for(static_cast<std::int64_t>(hop.indptr.size()) - 1, kMacroGrain, [&](std::int64_t i) {
      const std::int64_t degree = hop.indptr[static_cast<std::size_t>(i) + 1] - hop.indptr[static_cast<std::size_t>(i)];
      std::atomic_ref<std::int64_t>(copies[row_of[i]]).fetch_add(degree, std::memory_order_relaxed);
    });
  }
  ChosenRows<Id> rows;
  rows.room = PageScratch<std::int64_t>(num_rows + 1);
  const std::int64_t room =
      exclusive_scan(num_rows, 65536, [&](std::int64_t i) { return copies[i]; }, rows.room.span());
  rows.count = PageScratch<std::int32_t>(num_rows);
  rows.source = PageScratch<Id>(room);
  rows.eid = PageScratch<std::int64_t>(room);
  return rows;
}

// Brings the edges of all hops into their rows, in any order; false if one is not an edge of the graph.
template <IdType Id>
bool collect_edges(const UnionTask<Id>& task, const RowsOfHops& rows_of, const ChosenRows<Id>& rows) {
  PageScratch<std::int64_t> next(rows.rows());
  parallel_for(rows.rows(), 65536, [&](std::int64_t i) { next[i] = rows.room[i]; });
  std::atomic<bool> good{true};
  const Id* indices = task.graph.indices.data();
  const std::int64_t edges = task.graph.edges();
  for (std::size_t h = 0; h < task.hops.size(); ++h) {
    const UnionHop<Id>& hop = task.hops[h];
    const PageScratch<std::int32_t>& row_of = rows_of[h];
    parallel_edges(hop.indptr, kMacroGrain, [&](std::int64_t i, std::int64_t first, std::int64_t last) {
      const Id row = hop.srcs[static_cast<std::size_t>(i)];
      std::int64_t to =
          std::atomic_ref<std::int64_t>(next[row_of[i]]).fetch_add(last - first, std::memory_order_relaxed);
      const auto total = static_cast<std::int64_t>(hop.eids.size());
      for (std::int64_t e = first; e < last; ++e) {
        const std::int64_t ahead = hop.eids[static_cast<std::size_t>(std::min(e + kUnionAhead, total - 1))];
        if (ahead >= 0 && ahead < edges) prefetch(indices + ahead);
        const std::int64_t eid = hop.eids[static_cast<std::size_t>(e)];
        const auto local = static_cast<std::size_t>(hop.local[static_cast<std::size_t>(e)]);
        if (local >= hop.srcs.size() || !is_edge(task.graph, eid, hop.srcs[local], row)) {
          good.store(false, std::memory_order_relaxed);
          return;
        }
        rows.eid[to++] = eid;
      }
    });
  }
  return good;
}

// Every edge once, in the order of the graph, without gaps within blocks.
template <IdType Id>
void settle_rows(const UnionTask<Id>& task, const ChosenRows<Id>& rows) {
  rows.each_block([&](std::int64_t first, std::int64_t last) {
    std::int64_t* out = rows.eid.data() + rows.room[first];
    std::int64_t* const begin = out;
    for (std::int64_t i = first; i < last; ++i) {
      std::int64_t* row = rows.eid.data() + rows.room[i];
      std::int64_t* end = rows.eid.data() + rows.room[i + 1];
      std::sort(row, end);
      end = std::unique(row, end);
      rows.count[i] = static_cast<std::int32_t>(end - row);
      out = std::copy(row, end, out);
    }
    Id* source = rows.source.data() + rows.room[first];
    for (const std::int64_t* e = begin; e < out; ++e) {
      prefetch(&task.graph.indices[static_cast<std::size_t>(*std::min<const std::int64_t*>(e + kUnionAhead, out - 1))]);
      *source++ = task.graph.indices[static_cast<std::size_t>(*e)];
    }
  });
}

}  // namespace detail

// Throws std::invalid_argument where an eid is not the position of the edge that the block has.
template <IdType Id>
MacroParts<Id> union_hops(const UnionTask<Id>& task) {
  const std::int64_t num_nodes = task.graph.rows();
  NodeBits rows(num_nodes), leaves(num_nodes), known(num_nodes);
  rows.insert_all(task.seeds);
  for (const UnionHop<Id>& hop : task.hops) {
    rows.insert_all(hop.dsts());
    leaves.insert_all(hop.srcs);
  }
  subtract(leaves, rows);
  const NodeNumbers numbers(rows, leaves);
  detail::RowsOfHops rows_of;
  for (const UnionHop<Id>& hop : task.hops) {
    numbers.look_up(hop.dsts(), rows_of.emplace_back(static_cast<std::int64_t>(hop.dsts().size())).data());
  }
  ChosenRows<Id> chosen = detail::rows_with_room(task, rows_of, numbers.num_rows());
  chosen.node = take_fresh<Id>(rows, known);
  if (!detail::collect_edges(task, rows_of, chosen)) {
    throw std::invalid_argument("union_hops: a block has eids that are not the positions of its edges in the graph");
  }
  detail::settle_rows(task, chosen);
  std::vector<ChosenRows<Id>> parts;
  parts.push_back(std::move(chosen));
  return MacroParts<Id>(std::move(rows), std::move(leaves), std::move(parts));
}

}  // namespace joestar
