#pragma once
// A macro-batch: rows of chosen edges, from global ids to one CSC with local ids.

#include <stdexcept>
#include <utility>

#include "joestar/node_sets.hpp"

namespace joestar {

constexpr std::int64_t kMacroGrain = 8192;  // rows and edges per block of work

// Rows of distinct nodes, ascending, and the edges chosen for them, in the order of the graph.
template <IdType Id>
struct ChosenRows {
  PageScratch<Id> node;
  PageScratch<std::int64_t> room;   // where a row's edges may be at most, [rows + 1]
  PageScratch<std::int32_t> count;  // edges that were chosen, at most as many as there is room for
  PageScratch<Id> source;           // of the edges, without gaps within each block of room's parallel_rows
  PageScratch<std::int64_t> eid;    // their positions; empty if nobody asked

  std::int64_t rows() const { return node.size(); }

  // f(first_row, last_row) over the blocks within which the edges stand without gaps, from room[first_row] on.
  template <class F>
  void each_block(F&& f) const {
    parallel_rows(room.span(), kMacroGrain, f);
  }
};

// The edges of some parts, all in all.
template <IdType Id>
std::int64_t edges_of_all(const std::vector<ChosenRows<Id>>& parts) {
  std::int64_t edges = 0;
  for (const auto& part : parts) {
    edges += parallel_reduce(part.rows(), 65536, std::int64_t{0},
                             [&](std::int64_t i) { return static_cast<std::int64_t>(part.count[i]); });
  }
  return edges;
}

// What a first stage picked, in the ids of the graph, for whoever has a table of all nodes: rows in the order in which
// they were visited; which other nodes there are is not known.
template <IdType Id>
class PickedParts {
 public:
  explicit PickedParts(std::vector<ChosenRows<Id>> parts) : parts_(std::move(parts)), num_edges_(edges_of_all(parts_)) {
    for (const auto& part : parts_) num_rows_ += part.rows();
  }

  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t num_edges() const { return num_edges_; }

  // rows[num_rows], indptr[num_rows + 1], sources[num_edges], eids[num_edges] or null.
  void write(Id* rows, std::span<std::int64_t> indptr, Id* sources, std::int64_t* eids) const {
    std::int64_t row = 0, edge = 0;
    indptr[0] = 0;
    for (const auto& part : parts_) {
      const auto ends = indptr.subspan(static_cast<std::size_t>(row), static_cast<std::size_t>(part.rows()) + 1);
      exclusive_scan(part.rows(), 65536, [&](std::int64_t i) { return static_cast<std::int64_t>(part.count[i]); }, ends);
      part.each_block([&](std::int64_t first, std::int64_t last) {
        const std::int64_t from = part.room[first], to = edge + ends[static_cast<std::size_t>(first)];
        const std::int64_t edges = edge + ends[static_cast<std::size_t>(last)] - to;
        std::copy(part.node.data() + first, part.node.data() + last, rows + row + first);
        std::copy_n(part.source.data() + from, edges, sources + to);
        if (eids != nullptr) std::copy_n(part.eid.data() + from, edges, eids + to);
      });
      const std::int64_t before = edge;
      edge += ends.back();
      if (before > 0) {
        parallel_for(part.rows() + 1, 65536, [&](std::int64_t i) { ends[static_cast<std::size_t>(i)] += before; });
      }
      row += part.rows();
    }
  }

 private:
  std::vector<ChosenRows<Id>> parts_;
  std::int64_t num_rows_ = 0, num_edges_;
};

// Everything that one first stage chose; sizes first, so that the caller can allocate, then write().
template <IdType Id>
class MacroParts {
 public:
  MacroParts(NodeBits rows, NodeBits leaves, std::vector<ChosenRows<Id>> parts)
      : rows_(std::move(rows)), leaves_(std::move(leaves)), numbers_(rows_, leaves_), parts_(std::move(parts)),
        num_edges_(edges_of_all(parts_)) {
    if (num_nodes() > 0x7FFFFFFF) throw std::overflow_error("a macro-batch holds fewer than 2^31 nodes");
  }

  std::int64_t num_rows() const { return numbers_.num_rows(); }
  std::int64_t num_nodes() const { return numbers_.num_rows() + numbers_.num_leaves(); }
  std::int64_t num_edges() const { return num_edges_; }
  const NodeNumbers& numbers() const { return numbers_; }

  // ids[num_nodes], indptr[num_rows + 1], indices[num_edges], eids[num_edges] or null.
  void write(Id* ids, std::span<std::int64_t> indptr, std::int32_t* indices, std::int64_t* eids) const {
    numbers_.write_ids(rows_, leaves_, ids);
    const auto local = write_offsets(indptr);
    for (std::size_t p = 0; p < parts_.size(); ++p) write_part(parts_[p], local[p], indptr, indices, eids);
  }

 private:
  // Also gives the local id of every row of the parts.
  std::vector<PageScratch<std::int32_t>> write_offsets(std::span<std::int64_t> indptr) const {
    PageScratch<std::int32_t> degree(num_rows());
    std::vector<PageScratch<std::int32_t>> local;
    for (const auto& part : parts_) {
      const auto& rows = local.emplace_back(part.rows());
      parallel_ranges(part.rows(), kMacroGrain, [&](std::int64_t first, std::int64_t last) {
        detail::local_ids(numbers_.lines(), part.node.data() + first, last - first, rows.data() + first);
        for (std::int64_t i = first; i < last; ++i) degree[rows[i]] = part.count[i];
      });
    }
    exclusive_scan(num_rows(), 65536, [&](std::int64_t i) { return static_cast<std::int64_t>(degree[i]); }, indptr);
    return local;
  }

  void write_part(const ChosenRows<Id>& part, const PageScratch<std::int32_t>& row,
                  std::span<const std::int64_t> indptr, std::int32_t* indices, std::int64_t* eids) const {
    part.each_block([&](std::int64_t first, std::int64_t last) {
      const std::int64_t edges = edges_of(part, first, last), from = part.room[first];
      const Scratch<std::int32_t> local(edges);
      detail::local_ids(numbers_.lines(), part.source.data() + from, edges, local.data());
      for (std::int64_t i = first, done = 0; i < last; done += part.count[i++]) {
        const std::int64_t to = indptr[static_cast<std::size_t>(row[i])];
        for (std::int64_t j = 0; j < part.count[i]; ++j) indices[to + j] = local[done + j];
        if (eids != nullptr) std::copy_n(part.eid.data() + from + done, part.count[i], eids + to);
      }
    });
  }

  static std::int64_t edges_of(const ChosenRows<Id>& part, std::int64_t first, std::int64_t last) {
    std::int64_t edges = 0;
    for (std::int64_t i = first; i < last; ++i) edges += part.count[i];
    return edges;
  }

  NodeBits rows_, leaves_;
  NodeNumbers numbers_;
  std::vector<ChosenRows<Id>> parts_;
  std::int64_t num_edges_;
};

}  // namespace joestar
