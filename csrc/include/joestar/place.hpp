#pragma once
// The structure of a macro-batch among the slots of an arena, and sums over out-edges of values that rows have.

#include <atomic>
#include <span>
#include <stdexcept>
#include <string>

#include "joestar/core.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

namespace detail {

inline constexpr std::int64_t kPlaceGrain = 1 << 14;

template <IdType Slot>
std::size_t checked_slot(std::span<const Slot> slots, std::size_t node, std::int64_t count) {
  const auto slot = static_cast<std::int64_t>(slots[node]);
  if (slot < 0 || slot >= count) {
    throw std::out_of_range("slot " + std::to_string(slot) + " of an arena of " + std::to_string(count) + " slots");
  }
  return static_cast<std::size_t>(slot);
}

}  // namespace detail

// Row slots[i] of the arena gets the edges of row i, in their order, with their sources' slots: table[source]. Slots
// without a row get none. Entries of out_indices past the last edge are 0: a slot that exists.
template <IdType Local, IdType Slot, IdType Id>
void place_structure(Csc<Local> local, std::span<const Slot> slots, std::span<const Slot> table,
                     std::span<std::int64_t> out_indptr, std::span<Id> out_indices) {
  const std::int64_t count = static_cast<std::int64_t>(out_indptr.size()) - 1;
  const auto& indptr = local.indptr;
  parallel_for(count + 1, detail::kPlaceGrain, [&](std::int64_t i) { out_indptr[static_cast<std::size_t>(i)] = 0; });
  parallel_for(local.rows(), detail::kPlaceGrain, [&](std::int64_t i) {
    const auto row = static_cast<std::size_t>(i);
    out_indptr[detail::checked_slot(slots, row, count) + 1] = indptr[row + 1] - indptr[row];
  });
  const std::int64_t edges = exclusive_scan(
      count, detail::kPlaceGrain, [&](std::int64_t i) { return out_indptr[static_cast<std::size_t>(i) + 1]; },
      out_indptr);
  if (edges != local.edges()) throw std::invalid_argument("slots: expected every slot once; two rows have the same");
  parallel_edges(indptr, detail::kPlaceGrain, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
    const auto i = static_cast<std::size_t>(row);
    auto place = static_cast<std::size_t>(out_indptr[static_cast<std::size_t>(slots[i])] + first - indptr[i]);
    for (std::int64_t e = first; e < last; ++e, ++place) {
      const auto source = static_cast<std::size_t>(local.indices[static_cast<std::size_t>(e)]);
      if (source >= table.size()) throw std::out_of_range("a source that has no slot");
      out_indices[place] = static_cast<Id>(detail::checked_slot(table, source, count));
    }
  });
  const auto filled = static_cast<std::size_t>(edges);
  parallel_for(static_cast<std::int64_t>(out_indices.size() - filled), detail::kPlaceGrain,
               [&](std::int64_t i) { out_indices[filled + static_cast<std::size_t>(i)] = 0; });
}

// out[e] = position of edge eids[e] in its row of the whole graph, whose offsets are `whole`; row i of the part is that
// of the node rows[i].
template <IdType Id>
void edge_ranks(std::span<const std::int64_t> whole, std::span<const Id> rows, std::span<const std::int64_t> indptr,
                std::span<const std::int64_t> eids, std::span<std::int32_t> out) {
  parallel_edges(indptr, detail::kPlaceGrain, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
    const auto node = static_cast<std::size_t>(rows[static_cast<std::size_t>(row)]);
    if (node + 1 >= whole.size()) throw std::out_of_range("a row that is not a node of the graph");
    const std::int64_t start = whole[node];
    for (auto e = static_cast<std::size_t>(first); e < static_cast<std::size_t>(last); ++e) {
      out[e] = static_cast<std::int32_t>(eids[e] - start);
    }
  });
}

// out[source] += value[row] for every edge. Integers: the sums are the same in any order.
template <IdType Id>
void add_row_values(Csc<Id> graph, std::span<const std::int64_t> value, std::span<std::int64_t> out) {
  parallel_edges(graph.indptr, detail::kPlaceGrain, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
    const std::int64_t added = value[static_cast<std::size_t>(row)];
    if (added == 0) return;
    for (std::int64_t e = first; e < last; ++e) {
      const auto source = static_cast<std::size_t>(graph.indices[static_cast<std::size_t>(e)]);
      if (source >= out.size()) throw std::out_of_range("a source that is not a node of the graph");
      std::atomic_ref<std::int64_t>(out[source]).fetch_add(added, std::memory_order_relaxed);
    }
  });
}

}  // namespace joestar
