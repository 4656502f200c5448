#pragma once
// What a partitioning costs: edges between parts, and halo nodes.

#include "joestar/parallel.hpp"

namespace joestar {

// The nodes of each part, ascending: part p has nodes[starts[p] .. starts[p + 1]).
template <IdType Id>
struct PartMembers {
  std::vector<std::int64_t> starts;
  Scratch<Id> nodes;
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
    const auto each_outside = [&](auto&& f) {
      for (std::int64_t i = members.starts[static_cast<std::size_t>(part)];
           i < members.starts[static_cast<std::size_t>(part) + 1]; ++i) {
        const auto v = static_cast<std::size_t>(members.nodes[i]);
        for (std::int64_t e = graph.indptr[v]; e < graph.indptr[v + 1]; ++e) {
          const auto u = static_cast<std::size_t>(graph.indices[static_cast<std::size_t>(e)]);
          if (parts_of[u] != part) f(u);
        }
      }
    };
    std::int64_t edges = 0, nodes = 0;
    each_outside([&](std::size_t u) {
      const std::uint64_t bit = std::uint64_t{1} << (u % 64);
      ++edges;
      nodes += (seen[u / 64] & bit) == 0;
      seen[u / 64] |= bit;
    });
    each_outside([&](std::size_t u) { seen[u / 64] = 0; });
    cut[static_cast<std::size_t>(part)] = edges;
    halo[static_cast<std::size_t>(part)] = nodes;
  });
}

}  // namespace joestar
