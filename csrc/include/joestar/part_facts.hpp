#pragma once
// What a partitioning costs: edges between parts, and halo nodes.

#include "joestar/parallel.hpp"

namespace joestar {

// The nodes of each part, ascending: part p has nodes[starts[p] .. starts[p + 1]).
template <IdType Id>
struct PartMembers {
  std::vector<std::int64_t> starts;
  Scratch<Id> nodes;

  std::span<const Id> of(std::int64_t part) const {
    const std::int64_t first = starts[static_cast<std::size_t>(part)];
    return nodes.span().subspan(static_cast<std::size_t>(first),
                                static_cast<std::size_t>(starts[static_cast<std::size_t>(part) + 1] - first));
  }
};

template <IdType Id>
PartMembers<Id> part_members(std::span<const std::int32_t> parts_of, std::int64_t parts) {
  PartMembers<Id> out{std::vector<std::int64_t>(static_cast<std::size_t>(parts) + 1, 0),
                      Scratch<Id>(static_cast<std::int64_t>(parts_of.size()))};
  for (const std::int32_t part : parts_of) ++out.starts[static_cast<std::size_t>(part) + 1];
  for (std::size_t part = 0; part < static_cast<std::size_t>(parts); ++part) out.starts[part + 1] += out.starts[part];
  std::vector<std::int64_t> next(out.starts.begin(), out.starts.end() - 1);
  for (std::size_t v = 0; v < parts_of.size(); ++v) {
    out.nodes[next[static_cast<std::size_t>(parts_of[v])]++] = static_cast<Id>(v);
  }
  return out;
}

namespace detail {

// f(source) for the in-edges of every node. The rows lie anywhere, so what is needed of those to come is fetched ahead:
// where they begin, then their sources, then `fetch(source)`.
template <IdType Id, class Fetch, class F>
void each_source(const Csc<Id>& graph, std::span<const Id> nodes, Fetch&& fetch, F&& f) {
  constexpr std::size_t kStarts = 24, kRows = 12, kSources = 3;
  const auto row = [&](std::size_t i) {
    const auto v = static_cast<std::size_t>(nodes[i]);
    const auto first = static_cast<std::size_t>(graph.indptr[v]);
    return graph.indices.subspan(first, static_cast<std::size_t>(graph.indptr[v + 1]) - first);
  };
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (i + kStarts < nodes.size()) prefetch(&graph.indptr[static_cast<std::size_t>(nodes[i + kStarts])]);
    if (i + kRows < nodes.size()) {
      const auto ids = reinterpret_cast<const char*>(row(i + kRows).data());
      prefetch(ids), prefetch(ids + 64);
    }
    if (i + kSources < nodes.size()) std::ranges::for_each(row(i + kSources), fetch);
    std::ranges::for_each(row(i), f);
  }
}

template <IdType Id>
std::int64_t edges_of(const Csc<Id>& graph, std::span<const Id> nodes) {
  std::int64_t edges = 0;
  for (const Id v : nodes) {
    edges += graph.indptr[static_cast<std::size_t>(v) + 1] - graph.indptr[static_cast<std::size_t>(v)];
  }
  return edges;
}

}  // namespace detail

// Of every part: in-edges that come from other parts, and the different nodes that they come from (its halo).
template <IdType Id>
void part_facts(const Csc<Id>& graph, std::span<const std::int32_t> parts_of, std::span<std::int64_t> cut,
                std::span<std::int64_t> halo) {
  const std::int64_t parts = static_cast<std::int64_t>(cut.size());
  const PartMembers<Id> members = part_members<Id>(parts_of, parts);
  const std::size_t words = parts_of.size() / 64 + 1;
  parallel_blocks(parts, [&](std::int64_t part) {
    // One bit per node, all clear between parts; kept by each thread.
    static thread_local std::vector<std::uint64_t> seen;
    if (seen.size() < words) seen.assign(words, 0);
    const std::span<const Id> nodes = members.of(part);
    Scratch<Id> found(std::min(graph.rows(), detail::edges_of(graph, nodes)) + 1);
    std::int64_t edges = 0, size = 0;
    const auto fetch = [&](Id u) {
      prefetch(&parts_of[static_cast<std::size_t>(u)]);
      prefetch(&seen[static_cast<std::size_t>(u) / 64]);
    };
    detail::each_source(graph, nodes, fetch, [&](Id id) {
      const auto u = static_cast<std::size_t>(id);
      if (parts_of[u] == part) return;
      ++edges;
      const std::uint64_t bit = u % 64;
      found[size] = id;
      size += (seen[u / 64] >> bit & 1) == 0;  // without a branch: whether it is new cannot be foretold
      seen[u / 64] |= std::uint64_t{1} << bit;
    });
    for (std::int64_t i = 0; i < size; ++i) seen[static_cast<std::size_t>(found[i]) / 64] = 0;
    cut[static_cast<std::size_t>(part)] = edges;
    halo[static_cast<std::size_t>(part)] = size;
  });
}

}  // namespace joestar
