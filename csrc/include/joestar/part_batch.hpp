#pragma once
// The macro-batch of some parts of a graph (thesis 5.2.2): the in-edges of their nodes and of hubs, of which
// ahead-of-time sampling keeps what the seeds can reach. Rows that may hold all their edges are sampled as those of
// large batches.

#include "joestar/large_batch.hpp"

namespace joestar {

// Nodes that have rows: those of the chosen parts, and hubs.
struct PartNodes {
  NodeBits members, inside;  // inside: members and hubs

  static bool has(const NodeBits& set, std::int64_t node) { return (set.words()[node >> 6] >> (node & 63) & 1) != 0; }
};

template <IdType Id>
struct PartTask {
  Csc<Id> graph;
  const PartNodes& nodes;
  std::int64_t halo_fanout;        // most edges of a member from outside; negative: all
  HashState halo_key;
  std::span<const LargeHop> hops;  // from the seeds outwards; empty: all rows, whether reached or not
};

// Of local nodes, of which the first `rows` have rows: inner, members with a row, and halo, in-neighbours that are
// neither members nor hubs.
template <IdType Id>
void mark_nodes(const PartNodes& nodes, std::span<const Id> ids, std::int64_t rows, std::span<std::uint8_t> inner,
                std::span<std::uint8_t> halo) {
  parallel_for(static_cast<std::int64_t>(ids.size()), 16384, [&](std::int64_t i) {
    const auto at = static_cast<std::size_t>(i);
    inner[at] = i < rows && PartNodes::has(nodes.members, ids[at]);
    halo[at] = i >= rows && !PartNodes::has(nodes.inside, ids[at]);
  });
}

namespace detail {

// Which of 32 nodes are of chosen parts: narrow enough for vector instructions.
JOESTAR_INLINE std::uint32_t chosen_bits(const std::int32_t* part_of, const std::int32_t* chosen) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<std::uint32_t>(chosen[part_of[i]] != 0) << i;
  return bits;
}

// members = inside = which nodes of the words [first, last) are of chosen parts.
JOESTAR_CLONES inline void fill_members(std::span<const std::int32_t> part_of, const std::int32_t* chosen,
                                        std::int64_t first, std::int64_t last, std::uint64_t* JOESTAR_RESTRICT members,
                                        std::uint64_t* JOESTAR_RESTRICT inside) {
  const auto nodes = static_cast<std::int64_t>(part_of.size());
  for (std::int64_t w = first; w < last; ++w) {
    const std::int32_t* parts = part_of.data() + w * 64;
    std::uint64_t word = 0;
    if (w * 64 + 64 <= nodes) {
      word = chosen_bits(parts, chosen) | std::uint64_t{chosen_bits(parts + 32, chosen)} << 32;
    } else {
      for (std::int64_t i = 0; w * 64 + i < nodes; ++i) word |= std::uint64_t{chosen[parts[i]] != 0} << i;
    }
    members[w] = inside[w] = word;
  }
}

}  // namespace detail

// chosen[p] != 0 for the parts whose nodes are members.
template <IdType Id>
PartNodes part_nodes(std::span<const std::int32_t> part_of, std::span<const std::int32_t> chosen,
                     std::span<const Id> hubs) {
  const auto nodes = static_cast<std::int64_t>(part_of.size());
  PartNodes out{NodeBits(nodes), NodeBits(nodes)};
  parallel_ranges(num_blocks(nodes, 64), 1024, [&](std::int64_t first, std::int64_t last) {
    detail::fill_members(part_of, chosen.data(), first, last, out.members.words(), out.inside.words());
  });
  for (const Id hub : hubs) out.inside.insert(hub);
  return out;
}

namespace detail {

// The edges of one row that a macro-batch may hold, where it may not hold all, and picks among them: positions in the
// graph.
template <IdType Id>
class PartRow {
 public:
  explicit PartRow(const PartTask<Id>& task) : task_(task) {}

  // Finds the candidates of node v, ascending; their number.
  std::int64_t open(std::int64_t v) {
    node_ = v;
    const std::int64_t start = task_.graph.indptr[static_cast<std::size_t>(v)];
    const std::int64_t end = task_.graph.indptr[static_cast<std::size_t>(v) + 1];
    const bool member = PartNodes::has(task_.nodes.members, v);
    candidates_.clear();
    outside_.clear();
    for (std::int64_t e = start; e < end; ++e) {
      const bool inside = PartNodes::has(task_.nodes.inside, task_.graph.indices[static_cast<std::size_t>(e)]);
      if (inside) candidates_.push_back(e);
      if (!inside && member) outside_.push_back(e);
    }
    if (member) add_halo();
    return count_ = static_cast<std::int64_t>(candidates_.size());
  }

  // The picks of the hops from `level` on, each position once, ascending: f(position, earliest hop).
  template <class F>
  void pick(std::int64_t level, F&& f) {
    picks_.clear();
    for (auto h = static_cast<std::size_t>(level); h < task_.hops.size(); ++h) {
      const Fanout fanout = task_.hops[h].fanout;
      const bool all = fanout.takes_all(count_);
      if (!all) {
        draw_row(row_state(task_.hops[h].key, node_), count_, fanout, fanout.picks(count_), picked_,
                 [&](std::int64_t, std::uint32_t i) { picks_.emplace_back(i, h); });
        continue;
      }
      for (std::int64_t i = 0; i < count_; ++i) picks_.emplace_back(i, h);
      break;  // nothing is left for later hops
    }
    const bool first_takes_all = !picks_.empty() && static_cast<std::int64_t>(picks_.size()) == count_ &&
                                 picks_.back().second == static_cast<std::size_t>(level);
    if (!first_takes_all) std::sort(picks_.begin(), picks_.end());
    std::int64_t before = -1;
    for (const auto& [i, hop] : picks_) {
      if (i == before) continue;
      f(candidates_[i], static_cast<std::int64_t>(hop));
      before = i;
    }
  }

 private:
  void add_halo() {
    const auto degree = static_cast<std::int64_t>(outside_.size());
    const Fanout fanout{task_.halo_fanout, false};
    const std::size_t inside = candidates_.size();
    if (fanout.takes_all(degree)) {
      candidates_.insert(candidates_.end(), outside_.begin(), outside_.end());
    } else {
      draw_row(row_state(task_.halo_key, node_), degree, fanout, fanout.picks(degree), picked_,
               [&](std::int64_t, std::uint32_t i) { candidates_.push_back(outside_[i]); });
    }
    std::sort(candidates_.begin() + static_cast<std::ptrdiff_t>(inside), candidates_.end());
    std::inplace_merge(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(inside),
                       candidates_.end());
  }

  const PartTask<Id>& task_;
  std::int64_t node_ = 0, count_ = 0;
  std::vector<std::int64_t> candidates_, outside_;
  std::vector<std::pair<std::int64_t, std::size_t>> picks_;
  PickSet picked_;
};

// The rows of `node`, each with some of its edges only, with the picks of the hops from `level` on; their sources go
// into the levels.
template <IdType Id>
ChosenRows<Id> limited_level(const PartTask<Id>& task, std::int64_t level, PageScratch<Id> node,
                             const std::vector<NodeBits>& levels) {
  ChosenRows<Id> rows;
  const std::int64_t n = node.size();
  const auto& indptr = task.graph.indptr;
  rows.room = PageScratch<std::int64_t>(n + 1);
  const auto most = [&](std::int64_t i) {
    const auto v = static_cast<std::size_t>(node[i]);
    const std::int64_t degree = indptr[v + 1] - indptr[v];
    std::int64_t picks = 0;
    for (auto h = static_cast<std::size_t>(level); h < task.hops.size(); ++h) {
      picks += task.hops[h].fanout.picks(degree);
    }
    return std::min(picks, degree);
  };
  const std::int64_t room = exclusive_scan(n, kMacroGrain, most, rows.room.span());
  rows.count = PageScratch<std::int32_t>(n);
  rows.source = PageScratch<Id>(room);
  rows.node = std::move(node);
  rows.each_block([&](std::int64_t first, std::int64_t last) {
    PartRow<Id> row(task);
    PackedPicks picks;
    for (std::int64_t i = first; i < last; ++i) {
      const std::size_t before = picks.size();
      row.open(rows.node[i]);
      row.pick(level, [&](std::int64_t e, std::int64_t hop) {
        picks.push_back(static_cast<std::uint64_t>(e) << kHopBits | static_cast<std::uint64_t>(hop));
      });
      rows.count[i] = static_cast<std::int32_t>(picks.size() - before);
    }
    find_sources(task.graph.indices.data(), picks, levels, rows.source.data() + rows.room[first]);
  });
  return rows;
}

// What is outside of `inside` leaves `level` for `leaves`, and what has no whole row leaves it for `limited`: none but
// members have whole rows, and those only where nothing bounds their edges from outside.
inline void divide_level(const NodeBits& level, const PartNodes& nodes, bool bounded, const NodeBits& leaves,
                         const NodeBits& limited) {
  parallel_for(level.num_words(), kWordGrain, [&](std::int64_t w) {
    const std::uint64_t found = level.words()[w], rows = found & nodes.inside.words()[w];
    const std::uint64_t whole = bounded ? 0 : rows & nodes.members.words()[w];
    leaves.words()[w] |= found & ~rows;
    limited.words()[w] = rows & ~whole;
    level.words()[w] = whole;
  });
}

}  // namespace detail

// Rows: members and hubs, with hops those that fewer hops than all reach from the seeds. A member keeps its in-edges
// (of those from outside at most halo_fanout), a hub those from inside; with hops those that are picked among them, as
// neighbour sampling picks for all seeds at once. Leaves: the other ends.
template <IdType Id>
MacroParts<Id> part_batch(PartTask<Id> task, std::span<const Id> seeds) {
  const LargeHop all{Fanout{-1, false}, {}};
  const std::int64_t num_nodes = task.graph.rows();
  std::vector<NodeBits> levels;
  while (levels.size() <= std::max<std::size_t>(1, task.hops.size())) levels.emplace_back(num_nodes);
  if (task.hops.empty()) {
    std::copy_n(task.nodes.inside.words(), levels[0].num_words(), levels[0].words());
    task.hops = {&all, 1};
  } else {
    levels[0].insert_all(seeds);
  }
  const LargeBatchTask<Id> whole{task.graph, task.hops, {}, {}, false};
  NodeBits known(num_nodes), leaves(num_nodes), limited(num_nodes);
  leaves.insert_all(seeds);  // those that are rows leave it below
  std::vector<ChosenRows<Id>> parts;
  const auto hops = static_cast<std::int64_t>(task.hops.size());
  for (std::int64_t level = 0; level < hops; ++level) {
    const NodeBits& found = levels[static_cast<std::size_t>(level)];
    detail::divide_level(found, task.nodes, task.halo_fanout >= 0, leaves, limited);
    parts.push_back(detail::sample_level(whole, level, take_fresh<Id>(found, known), levels, true));
    parts.push_back(detail::limited_level(task, level, take_fresh<Id>(limited, known), levels));
  }
  parallel_for(leaves.num_words(), kWordGrain, [&](std::int64_t w) { leaves.words()[w] |= levels.back().words()[w]; });
  subtract(leaves, known);
  return MacroParts<Id>(std::move(known), std::move(leaves), std::move(parts));
}

}  // namespace joestar
