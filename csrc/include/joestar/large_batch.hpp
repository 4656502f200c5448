#pragma once
// Neighbour sampling of all hops at once for very many seeds, straight to the union of the hops.
//
// A pick depends on (key, hop, node) alone, and the union of a node's picks is sorted: neither needs the order in which
// nodes were found. So nodes are visited ascending, level by level (a node's level is the first hop that found it), and
// each is visited once, for all hops from its level on. A pick of hop h puts its source into level h + 1.

#include "joestar/macro_batch.hpp"
#include "joestar/sampling.hpp"
#include "joestar/weighted.hpp"

namespace joestar {

// Uniform picks, or weighted ones by `weight`, which has a number for every edge of the graph.
struct LargeHop {
  Fanout fanout;
  HashState key;
};

template <IdType Id>
struct LargeBatchTask {
  Csc<Id> graph;
  std::span<const LargeHop> hops;  // from the seeds outwards, at most 255
  std::span<const float> weight;   // empty: uniform
  std::span<const std::int64_t> race;  // entries of the RaceTable; for weights
  bool want_eids;
};

namespace detail {

constexpr int kHopBits = 8;
constexpr int kLaneHopBits = 4;                        // in the sorted lanes of a batch, whose picks are 32 bits
constexpr std::int64_t kLargeAhead = 24;

// Edges picked in a block of rows, without gaps: position << kHopBits | hop.
using PackedPicks = std::vector<std::uint64_t>;

// Batcher's odd-even merge sort of the first n rows of `pick`, each lane for itself.
JOESTAR_CLONES inline void sort_lanes(int n, RowBatch& batch) {
  for (int p = 1; p < n; p *= 2) {
    for (int k = p; k >= 1; k /= 2) {
      for (int j = k % p; j + k < n; j += 2 * k) {
        for (int i = 0; i < std::min(k, n - j - k); ++i) {
          if ((i + j) / (2 * p) != (i + j + k) / (2 * p)) continue;
          std::uint32_t* JOESTAR_RESTRICT low = batch.pick[i + j];
          std::uint32_t* JOESTAR_RESTRICT high = batch.pick[i + j + k];
          for (int lane = 0; lane < kLanes; ++lane) {
            const std::uint32_t a = low[lane], b = high[lane];
            low[lane] = a < b ? a : b;
            high[lane] = a < b ? b : a;
          }
        }
      }
    }
  }
}

// to[j] = picks of the batch with their hop.
JOESTAR_CLONES inline void tag_lanes(const RowBatch& batch, int k, std::uint32_t hop, RowBatch& to, int at) {
  for (int j = 0; j < k; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) to.pick[at + j][lane] = batch.pick[j][lane] << kLaneHopBits | hop;
  }
}

// Picks of the rows of one level.
template <IdType Id>
class LevelPicker {
 public:
  LevelPicker(const LargeBatchTask<Id>& task, std::int64_t level, const Id* node, std::int64_t rows,
              const std::int64_t* start, const std::int32_t* degree)
      : task_(task), level_(level), hops_(static_cast<std::int64_t>(task.hops.size())), node_(node), start_(start),
        degree_(degree), rows_{task.graph.indptr, {node, static_cast<std::size_t>(rows)}, rows, false} {
    std::int64_t picks = 0;
    for (std::int64_t h = level; h < hops_; ++h) {
      in_lanes_ = in_lanes_ && fanout(h).k >= 0 && fanout(h).k <= kMaxSlots;
      picks += std::max<std::int64_t>(0, fanout(h).k);
    }
    in_lanes_ = in_lanes_ && picks <= kMaxSlots && hops_ < (1 << kLaneHopBits) && task.weight.empty();
  }

  // Appends the picks of the rows [first, last) to `out`, each row's in ascending order, and notes how many they are.
  void pick(std::int64_t first, std::int64_t last, PackedPicks& out, std::int32_t* count) {
    out.clear();
    for (std::int64_t base = first; base < last; base += kLanes) {
      const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, last - base));
      if (in_lanes_ && any_drawn(base, lanes)) draw(base, lanes);
      for (int lane = 0; lane < lanes; ++lane) {
        const std::size_t before = out.size();
        pick_row(base + lane, lane, out);
        count[base + lane] = static_cast<std::int32_t>(out.size() - before);
      }
    }
  }

 private:
  const Fanout& fanout(std::int64_t hop) const { return task_.hops[static_cast<std::size_t>(hop)].fanout; }

  bool takes_all(std::int64_t hop, std::int64_t degree) const {
    return task_.weight.empty() && fanout(hop).takes_all(degree);
  }

  bool any_drawn(std::int64_t base, int lanes) const {
    for (int lane = 0; lane < lanes; ++lane) {
      if (!takes_all(level_, degree_[base + lane])) return true;
    }
    return false;
  }

  // The sorted picks of all hops into `sorted_`, a lane for each row.
  void draw(std::int64_t base, int lanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::int64_t i = base + std::min(lane, lanes - 1), node = node_[i];
      batch_.node_low[lane] = low_word(node);
      batch_.node_high[lane] = high_word(node);
      batch_.degree[lane] = static_cast<std::uint32_t>(degree_[i]);
    }
    drawn_ = 0;
    for (std::int64_t h = level_; h < hops_; ++h) {
      const int k = static_cast<int>(fanout(h).k);
      hash_rows(task_.hops[static_cast<std::size_t>(h)].key, batch_);
      fanout(h).replace ? draw_rows_with_replacement(k, batch_) : floyd_rows(k, batch_);
      tag_lanes(batch_, k, static_cast<std::uint32_t>(h), sorted_, drawn_);
      drawn_ += k;
    }
    sort_lanes(drawn_, sorted_);
  }

  void pick_row(std::int64_t i, int lane, PackedPicks& out) {
    const std::int64_t degree = degree_[i];
    if (degree == 0) return;
    if (takes_all(level_, degree)) return take_all(i, level_, out);
    std::int64_t all = level_ + 1;
    while (all < hops_ && !takes_all(all, degree)) ++all;
    const bool narrow = degree < std::int64_t{1} << (32 - kLaneHopBits);
    if (all < hops_ || !in_lanes_ || !narrow) return pick_slowly(i, all, out);
    std::uint32_t before = 0xFFFFFFFFU;
    const auto start = static_cast<std::uint64_t>(start_[i]);
    for (int j = 0; j < drawn_; ++j) {
      const std::uint32_t tagged = sorted_.pick[j][lane], pick = tagged >> kLaneHopBits;
      if (pick == before) continue;  // of a later hop
      out.push_back((start + pick) << kHopBits | (tagged & ((1U << kLaneHopBits) - 1)));
      before = pick;
    }
  }

  void take_all(std::int64_t i, std::int64_t hop, PackedPicks& out) const {
    const auto start = static_cast<std::uint64_t>(start_[i]);
    for (std::int64_t p = 0; p < degree_[i]; ++p) {
      out.push_back((start + static_cast<std::uint64_t>(p)) << kHopBits | static_cast<std::uint64_t>(hop));
    }
  }

  // Any fanouts and weights; hop `all`, if there is one, takes every edge that the hops before it have not.
  void pick_slowly(std::int64_t i, std::int64_t all, PackedPicks& out) {
    const std::size_t before = out.size();
    for (std::int64_t h = level_; h < all; ++h) draw_hop(i, h, out);
    if (all < hops_) take_all(i, all, out);
    std::sort(out.begin() + static_cast<std::ptrdiff_t>(before), out.end());
    const auto same = [](std::uint64_t a, std::uint64_t b) { return a >> kHopBits == b >> kHopBits; };
    out.erase(std::unique(out.begin() + static_cast<std::ptrdiff_t>(before), out.end(), same), out.end());
  }

  void draw_hop(std::int64_t i, std::int64_t hop, PackedPicks& out) {
    const auto start = static_cast<std::uint64_t>(start_[i]);
    const auto add = [&](std::int64_t p) {
      out.push_back((start + static_cast<std::uint64_t>(p)) << kHopBits | static_cast<std::uint64_t>(hop));
    };
    const HashState key = task_.hops[static_cast<std::size_t>(hop)].key;
    if (!task_.weight.empty()) {
      const WeightedRows<Id> weighted{rows_, task_.weight, fanout(hop)};
      race_row(weighted, RaceTable(task_.race), key, i, weighted_picks(weighted, i), race_, add);
      return;
    }
    draw_row(row_state(key, node_[i]), degree_[i], fanout(hop), fanout(hop).picks(degree_[i]), picked_,
             [&](std::int64_t, std::uint32_t pick) { add(pick); });
  }

  const LargeBatchTask<Id>& task_;
  std::int64_t level_, hops_;
  const Id* node_;
  const std::int64_t* start_;
  const std::int32_t* degree_;
  SampleRows<Id> rows_;
  bool in_lanes_ = true;
  int drawn_ = 0;
  RowBatch batch_, sorted_;
  PickSet picked_;
  RaceScratch race_;
};

// The sources of the picks, into `source` and into the level that each belongs to.
template <IdType Id>
void find_sources(const Id* indices, const PackedPicks& picks, const std::vector<NodeBits>& levels, Id* source) {
  const auto n = static_cast<std::int64_t>(picks.size());
  const std::uint64_t* pick = picks.data();
  const auto found_by = [&](std::int64_t e) -> const NodeBits& {
    return levels[(pick[e] & ((1U << kHopBits) - 1)) + 1];
  };
  const auto look = [&](std::int64_t e) {
    source[e] = indices[pick[e] >> kHopBits];
    found_by(e).touch(source[e]);
  };
  for (std::int64_t e = 0; e < std::min(n, 2 * kLargeAhead); ++e) prefetch(indices + (pick[e] >> kHopBits));
  for (std::int64_t e = 0; e < std::min(n, kLargeAhead); ++e) look(e);
  const std::int64_t full = std::max<std::int64_t>(0, n - 2 * kLargeAhead);
  for (std::int64_t e = 0; e < full; ++e) {
    prefetch(indices + (pick[e + 2 * kLargeAhead] >> kHopBits));
    look(e + kLargeAhead);
    found_by(e).insert(source[e]);
  }
  for (std::int64_t e = full; e < n; ++e) {
    if (e + kLargeAhead < n) look(e + kLargeAhead);
    found_by(e).insert(source[e]);
  }
}

// The sources of the picks alone.
template <IdType Id>
void read_sources(const Id* indices, const PackedPicks& picks, Id* source) {
  const auto n = static_cast<std::int64_t>(picks.size());
  const std::uint64_t* pick = picks.data();
  for (std::int64_t e = 0; e < std::min(n, 2 * kLargeAhead); ++e) prefetch(indices + (pick[e] >> kHopBits));
  const std::int64_t full = std::max<std::int64_t>(0, n - 2 * kLargeAhead);
  for (std::int64_t e = 0; e < full; ++e) {
    prefetch(indices + (pick[e + 2 * kLargeAhead] >> kHopBits));
    source[e] = indices[pick[e] >> kHopBits];
  }
  for (std::int64_t e = full; e < n; ++e) source[e] = indices[pick[e] >> kHopBits];
}

// Rows of a level: where they start, their degrees, and room for their edges.
template <IdType Id>
ChosenRows<Id> open_rows(const LargeBatchTask<Id>& task, std::int64_t level, PageScratch<Id> node,
                         PageScratch<std::int64_t>& start, PageScratch<std::int32_t>& degree) {
  ChosenRows<Id> rows;
  const std::int64_t n = node.size();
  start = PageScratch<std::int64_t>(n);
  degree = PageScratch<std::int32_t>(n);
  rows.room = PageScratch<std::int64_t>(n + 1);
  rows.count = PageScratch<std::int32_t>(n);
  const std::int64_t* indptr = task.graph.indptr.data();
  const auto most = [&](std::int64_t i) {
    prefetch(indptr + node[std::min(i + kLargeAhead, n - 1)]);
    start[i] = indptr[node[i]];
    degree[i] = static_cast<std::int32_t>(indptr[node[i] + 1] - start[i]);
    std::int64_t picks = 0;
    for (std::size_t h = static_cast<std::size_t>(level); h < task.hops.size(); ++h) {
      picks += task.hops[h].fanout.picks(degree[i]);
    }
    return std::min<std::int64_t>(picks, degree[i]);
  };
  const std::int64_t room = exclusive_scan(n, kMacroGrain, most, rows.room.span());
  rows.source = PageScratch<Id>(room);
  rows.eid = PageScratch<std::int64_t>(task.want_eids ? room : 0);
  rows.node = std::move(node);
  return rows;
}

// `noting`: whether sources are put into the levels that they belong to.
template <IdType Id>
ChosenRows<Id> sample_level(const LargeBatchTask<Id>& task, std::int64_t level, PageScratch<Id> node,
                            const std::vector<NodeBits>& levels, bool noting) {
  PageScratch<std::int64_t> start;
  PageScratch<std::int32_t> degree;
  ChosenRows<Id> rows = open_rows(task, level, std::move(node), start, degree);
  rows.each_block([&](std::int64_t first, std::int64_t last) {
    LevelPicker<Id> picker(task, level, rows.node.data(), rows.rows(), start.data(), degree.data());
    PackedPicks picks;
    picks.reserve(static_cast<std::size_t>(rows.room[last] - rows.room[first]));
    picker.pick(first, last, picks, rows.count.data());
    Id* const source = rows.source.data() + rows.room[first];
    if (noting) {
      find_sources(task.graph.indices.data(), picks, levels, source);
    } else {
      read_sources(task.graph.indices.data(), picks, source);
    }
    if (!task.want_eids) return;
    for (std::size_t e = 0; e < picks.size(); ++e) {
      rows.eid[rows.room[first] + static_cast<std::int64_t>(e)] = static_cast<std::int64_t>(picks[e] >> kHopBits);
    }
  });
  return rows;
}

// Rows of all levels, of which the members are then known. levels[h]: what hop h - 1 finds; the last level has no rows,
// and what only rows of the level before it find is left out of it unless `leaves` are wanted.
template <IdType Id>
std::vector<ChosenRows<Id>> sample_levels(const LargeBatchTask<Id>& task, std::span<const Id> seeds,
                                          std::vector<NodeBits>& levels, const NodeBits& known, bool leaves) {
  const auto hops = static_cast<std::int64_t>(task.hops.size());
  for (std::int64_t level = 0; level <= hops; ++level) levels.emplace_back(task.graph.rows());
  levels[0].insert_all(seeds);
  std::vector<ChosenRows<Id>> parts;
  for (std::int64_t level = 0; level < hops; ++level) {
    const bool noting = leaves || level + 1 < hops;
    parts.push_back(sample_level(task, level, take_fresh<Id>(levels[static_cast<std::size_t>(level)], known), levels,
                                 noting));
  }
  return parts;
}

}  // namespace detail

// The union of all hops from `seeds`, in any order, duplicates allowed.
template <IdType Id>
MacroParts<Id> sample_large_batch(const LargeBatchTask<Id>& task, std::span<const Id> seeds) {
  std::vector<NodeBits> levels;
  NodeBits known(task.graph.rows());
  std::vector<ChosenRows<Id>> parts = detail::sample_levels(task, seeds, levels, known, true);
  subtract(levels.back(), known);
  return MacroParts<Id>(std::move(known), std::move(levels.back()), std::move(parts));
}

// The same edges, in the ids of the graph: about half of the work.
template <IdType Id>
PickedParts<Id> pick_large_batch(const LargeBatchTask<Id>& task, std::span<const Id> seeds) {
  std::vector<NodeBits> levels;
  const NodeBits known(task.graph.rows());
  return PickedParts<Id>(detail::sample_levels(task, seeds, levels, known, false));
}

}  // namespace joestar
