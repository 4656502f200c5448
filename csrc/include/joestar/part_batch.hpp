#pragma once
// The macro-batch of some parts of a graph (thesis 5.2.2): the in-edges of their nodes and of hubs, of which
// ahead-of-time sampling keeps what the seeds can reach.

#include "joestar/macro_batch.hpp"
#include "joestar/sampling.hpp"

namespace joestar {

struct PartHop {
  Fanout fanout;
  HashState key;
};

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
  std::span<const PartHop> hops;   // from the seeds outwards; empty: all rows, whether reached or not
};

// chosen[p] != 0 for the parts whose nodes are members.
template <IdType Id>
PartNodes part_nodes(std::span<const std::int32_t> part_of, std::span<const std::int32_t> chosen,
                     std::span<const Id> hubs) {
  const auto nodes = static_cast<std::int64_t>(part_of.size());
  PartNodes out{NodeBits(nodes), NodeBits(nodes)};
  parallel_ranges(num_blocks(nodes, 64), 1024, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t w = first; w < last; ++w) {
      std::uint64_t word = 0;
      for (std::int64_t v = w * 64; v < std::min(nodes, w * 64 + 64); ++v) {
        const bool member = chosen[static_cast<std::size_t>(part_of[static_cast<std::size_t>(v)])] != 0;
        word |= std::uint64_t{member} << (v & 63);
      }
      out.members.words()[w] = out.inside.words()[w] = word;
    }
  });
  for (const Id hub : hubs) out.inside.insert(hub);
  return out;
}

namespace detail {

// The edges of one row that a macro-batch may hold, and picks among them: positions in the graph.
template <IdType Id>
class PartRow {
 public:
  explicit PartRow(const PartTask<Id>& task) : task_(task) {}

  // Finds the candidates of node v, ascending; their number.
  std::int64_t open(std::int64_t v) {
    node_ = v;
    start_ = task_.graph.indptr[static_cast<std::size_t>(v)];
    const std::int64_t end = task_.graph.indptr[static_cast<std::size_t>(v) + 1];
    const bool member = PartNodes::has(task_.nodes.members, v);
    whole_ = member && task_.halo_fanout < 0;
    if (whole_) return count_ = end - start_;
    candidates_.clear();
    outside_.clear();
    for (std::int64_t e = start_; e < end; ++e) {
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
      f(at(i), static_cast<std::int64_t>(hop));
      before = i;
    }
  }

  // All candidates: f(position).
  template <class F>
  void all(F&& f) const {
    for (std::int64_t i = 0; i < count_; ++i) f(at(i));
  }

 private:
  std::int64_t at(std::int64_t i) const { return whole_ ? start_ + i : candidates_[static_cast<std::size_t>(i)]; }

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
  std::int64_t node_ = 0, start_ = 0, count_ = 0;
  bool whole_ = false;
  std::vector<std::int64_t> candidates_, outside_;
  std::vector<std::pair<std::int64_t, std::size_t>> picks_;
  PickSet picked_;
};

constexpr std::int64_t kPartAhead = 24;

// Puts the sources into the levels that the hops lead to (with no hops: into levels[0]).
template <IdType Id>
void note_sources(const Id* sources, std::span<const std::uint8_t> hops, const std::vector<NodeBits>& levels) {
  const auto n = static_cast<std::int64_t>(hops.size());
  for (std::int64_t e = 0; e < n; ++e) {
    const std::int64_t ahead = std::min(e + kPartAhead, n - 1);
    levels[hops[static_cast<std::size_t>(ahead)]].touch(sources[ahead]);
    levels[hops[static_cast<std::size_t>(e)]].insert(sources[e]);
  }
}

// The rows of `node`, with the picks of the hops from `level` on; their sources go into the levels.
template <IdType Id>
ChosenRows<Id> part_level(const PartTask<Id>& task, std::int64_t level, PageScratch<Id> node,
                          const std::vector<NodeBits>& levels) {
  ChosenRows<Id> rows;
  const std::int64_t n = node.size();
  const auto& indptr = task.graph.indptr;
  rows.room = PageScratch<std::int64_t>(n + 1);
  const auto most = [&](std::int64_t i) {
    const auto v = static_cast<std::size_t>(node[i]);
    const std::int64_t degree = indptr[v + 1] - indptr[v];
    std::int64_t picks = task.hops.empty() ? degree : 0;
    for (auto h = static_cast<std::size_t>(level); h < task.hops.size(); ++h) picks += task.hops[h].fanout.picks(degree);
    return std::min(picks, degree);
  };
  const std::int64_t room = exclusive_scan(n, kMacroGrain, most, rows.room.span());
  rows.count = PageScratch<std::int32_t>(n);
  rows.source = PageScratch<Id>(room);
  rows.node = std::move(node);
  rows.each_block([&](std::int64_t first, std::int64_t last) {
    PartRow<Id> row(task);
    std::vector<std::uint8_t> hops;
    Id* const out = rows.source.data() + rows.room[first];
    const auto add = [&](std::int64_t e, std::int64_t to) {
      out[hops.size()] = task.graph.indices[static_cast<std::size_t>(e)];
      hops.push_back(static_cast<std::uint8_t>(to));
    };
    for (std::int64_t i = first; i < last; ++i) {
      const std::size_t before = hops.size();
      row.open(rows.node[i]);
      if (task.hops.empty()) {
        row.all([&](std::int64_t e) { add(e, 0); });
      } else {
        row.pick(level, [&](std::int64_t e, std::int64_t hop) { add(e, hop + 1); });
      }
      rows.count[i] = static_cast<std::int32_t>(hops.size() - before);
    }
    note_sources(out, hops, levels);
  });
  return rows;
}

// What is outside of `inside` leaves `level` for `leaves`.
inline void part_from(const NodeBits& level, const NodeBits& inside, const NodeBits& leaves) {
  parallel_for(level.num_words(), kWordGrain, [&](std::int64_t w) {
    leaves.words()[w] |= level.words()[w] & ~inside.words()[w];
    level.words()[w] &= inside.words()[w];
  });
}

}  // namespace detail

// Rows: members and hubs, with hops those that fewer hops than all reach from the seeds. A member keeps its in-edges
// (of those from outside at most halo_fanout), a hub those from inside; with hops those that are picked among them, as
// neighbour sampling picks for all seeds at once. Leaves: the other ends.
template <IdType Id>
MacroParts<Id> part_batch(const PartTask<Id>& task, std::span<const Id> seeds) {
  const std::int64_t num_nodes = task.graph.rows(), hops = static_cast<std::int64_t>(task.hops.size());
  NodeBits known(num_nodes), leaves(num_nodes);
  std::vector<NodeBits> levels;
  for (std::int64_t level = 0; level <= hops; ++level) levels.emplace_back(num_nodes);
  std::vector<ChosenRows<Id>> parts;
  if (hops == 0) {
    NodeBits rows(num_nodes);
    std::copy_n(task.nodes.inside.words(), rows.num_words(), rows.words());
    parts.push_back(detail::part_level(task, 0, take_fresh<Id>(rows, known), levels));
  }
  for (const Id seed : seeds) levels[0].insert(seed);
  for (std::int64_t level = 0; level < hops; ++level) {
    detail::part_from(levels[level], task.nodes.inside, leaves);
    parts.push_back(detail::part_level(task, level, take_fresh<Id>(levels[level], known), levels));
  }
  parallel_for(leaves.num_words(), kWordGrain, [&](std::int64_t w) { leaves.words()[w] |= levels.back().words()[w]; });
  subtract(leaves, known);
  return MacroParts<Id>(std::move(known), std::move(leaves), std::move(parts));
}

}  // namespace joestar
