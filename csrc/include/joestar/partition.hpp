#pragma once
// GAP, the GNN-aware streaming partitioner of the thesis (4.3.2, algorithm 2): O(edges + nodes log parts) a pass, space
// O(nodes + parts x labels). Nodes are placed one after the other where the most in-neighbours are, less a cost that
// grows with the number of nodes of the same label there (eq. 4.2). Parts never exceed a hard cap.

#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "joestar/hash.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

struct PartitionOptions {
  std::int32_t parts = 1;
  std::int32_t labels = 0;    // classes; every other node counts as one more label
  std::int64_t cap = 0;       // most nodes of a part; parts * cap >= nodes
  std::int64_t block = 8192;  // nodes whose neighbours are counted together; no matter for the result
};

namespace detail {

constexpr std::int32_t kUnplaced = -1;
constexpr std::int64_t kPartitionBlockEdges = std::int64_t{1} << 20;
constexpr std::int64_t kPartitionAhead = 48;

// Nodes per part, in all and by label, with the emptiest part of every label at hand: the heaps of algorithm 2. The
// cost grows with the count, so the order within a label is that of counts; a tournament tree keeps it, which is
// updated along one path. A full part leaves the tree of a label when it wins there, and comes back when it has room.
class LabelBalance {
 public:
  // `label(v)` of node v, in [0, labels); parts_of[v] is its part or kUnplaced.
  template <class Label>
  LabelBalance(std::int32_t parts, std::int64_t labels, std::int64_t cap, std::span<const std::int32_t> parts_of,
               Label&& label)
      : parts_(parts),
        cap_(cap),
        leaves_(static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint32_t>(parts)))),
        per_node_(static_cast<std::size_t>(labels)),
        sizes_(static_cast<std::size_t>(parts), 0),
        counts_(static_cast<std::size_t>(labels * parts), 0),
        costs_(counts_.size(), 0.0),
        hidden_(counts_.size(), 0),
        hidden_in_(static_cast<std::size_t>(parts)),
        winners_(static_cast<std::size_t>(labels * leaves_)) {
    std::vector<std::int64_t> nodes(static_cast<std::size_t>(labels), 0);
    for (std::size_t v = 0; v < parts_of.size(); ++v) {
      const std::int64_t of = label(static_cast<std::int64_t>(v));
      ++nodes[static_cast<std::size_t>(of)];
      if (parts_of[v] == kUnplaced) continue;
      ++sizes_[static_cast<std::size_t>(parts_of[v])];
      ++counts_[at(of, parts_of[v])];
    }
    for (std::int64_t of = 0; of < labels; ++of) {
      // |V_i^l| / mu_l over the mean size of a part: parts * count / (nodes of the label).
      per_node_[static_cast<std::size_t>(of)] =
          parts / static_cast<double>(std::max<std::int64_t>(1, nodes[static_cast<std::size_t>(of)]));
      for (std::int32_t part = 0; part < parts; ++part) settle(of, part);
      for (std::int64_t slot = leaves_ - 1; slot >= 1; --slot) replay(of, slot);
    }
  }

  std::int64_t size(std::int32_t part) const { return sizes_[static_cast<std::size_t>(part)]; }

  // Term 2 of eq. 4.2 up to a factor: the derivative of x^1.5 at the part's share of the label, 1 where it is even.
  double cost(std::int64_t label, std::int32_t part) const { return costs_[at(label, part)]; }

  void move(std::int64_t label, std::int32_t part, std::int32_t by) {
    sizes_[static_cast<std::size_t>(part)] += by;
    counts_[at(label, part)] += by;
    settle(label, part);
    replay_path(label, part);
    if (size(part) < cap_) show(part);
  }

  // The part with room that has the fewest nodes of the label; of several the first. -1 if all are full.
  std::int32_t emptiest(std::int64_t label) {
    for (;;) {
      const std::int32_t best = winner(label, 1);
      if (best < 0 || size(best) < cap_) return best;
      hidden_[at(label, best)] = 1;
      hidden_in_[static_cast<std::size_t>(best)].push_back(label);
      replay_path(label, best);
    }
  }

 private:
  std::size_t at(std::int64_t label, std::int32_t part) const {
    return static_cast<std::size_t>(label * parts_ + part);
  }
  void settle(std::int64_t label, std::int32_t part) {
    const std::size_t place = at(label, part);
    costs_[place] = std::sqrt(counts_[place] * per_node_[static_cast<std::size_t>(label)]);
  }
  std::int32_t winner(std::int64_t label, std::int64_t slot) const {
    if (slot < leaves_) return winners_[static_cast<std::size_t>(label * leaves_ + slot)];
    const auto part = static_cast<std::int32_t>(slot - leaves_);
    return part < parts_ && hidden_[at(label, part)] == 0 ? part : -1;
  }
  // The better of two parts, a < b, either of which may be missing (-1).
  std::int32_t better(std::int64_t label, std::int32_t a, std::int32_t b) const {
    if (a < 0 || b < 0) return std::max(a, b);
    return counts_[at(label, b)] < counts_[at(label, a)] ? b : a;
  }
  // Returns whether another part wins there than before.
  bool replay(std::int64_t label, std::int64_t slot) {
    const std::int32_t now = better(label, winner(label, 2 * slot), winner(label, 2 * slot + 1));
    return std::exchange(winners_[static_cast<std::size_t>(label * leaves_ + slot)], now) != now;
  }
  // Ends where the same other part wins as before: all above depends on that part alone.
  void replay_path(std::int64_t label, std::int32_t part) {
    for (std::int64_t slot = (leaves_ + part) / 2; slot >= 1; slot /= 2) {
      if (!replay(label, slot) && winner(label, slot) != part) return;
    }
  }
  // Puts a part back into the trees that it has left.
  void show(std::int32_t part) {
    for (const std::int64_t label : hidden_in_[static_cast<std::size_t>(part)]) {
      hidden_[at(label, part)] = 0;
      replay_path(label, part);
    }
    hidden_in_[static_cast<std::size_t>(part)].clear();
  }

  std::int64_t parts_, cap_, leaves_;
  std::vector<double> per_node_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int32_t> counts_;
  std::vector<double> costs_;
  std::vector<std::uint8_t> hidden_;                  // by label and part
  std::vector<std::vector<std::int64_t>> hidden_in_;  // labels, by part
  std::vector<std::int32_t> winners_;
};

// Counts how often each part was seen; forgets them in time proportional to the parts seen.
class PartCounter {
 public:
  void reserve(std::int32_t parts) {
    if (counts_.size() >= static_cast<std::size_t>(parts)) return;
    counts_.resize(static_cast<std::size_t>(parts), 0);
    seen_.resize(counts_.size() + 1);
  }
  // Without a branch: whether a part is new cannot be foretold.
  void add(std::int32_t part, std::int32_t count) {
    std::int32_t& before = counts_[static_cast<std::size_t>(part)];
    seen_[size_] = part;
    size_ += before == 0;
    before += count;
  }
  // f(part, count) for the parts seen, in the order of their first sight; forgets them.
  template <class F>
  void drain(F&& f) {
    for (std::size_t i = 0; i < size_; ++i) f(seen_[i], std::exchange(counts_[static_cast<std::size_t>(seen_[i])], 0));
    size_ = 0;
  }

 private:
  std::vector<std::int32_t> counts_, seen_;
  std::size_t size_ = 0;
};

// What the counting of a block leaves for the placing of a node: in its share of the sights first its in-neighbours by
// part, and at the end, one by one, those that are placed in the same block.
struct Sight {
  std::int32_t part, count;
};
struct Sights {
  std::int64_t parts, near;
};

}  // namespace detail

// Places a stream of nodes, in place: `parts_of` holds the assignment so far, -1 for nodes that have none; `labels` are
// the class ids of the training nodes, -1 elsewhere, or empty. All views stay valid as long as the stream.
//
// Neighbours outside of a block of nodes do not move while the block is placed: all threads count them at once, and
// one thread places the nodes in order, which looks the neighbours inside up. So the result is that of one node after
// the other, whatever the blocks and the threads.
template <IdType Id>
class GapStream {
 public:
  GapStream(const Csc<Id>& graph, std::span<const std::int32_t> labels, const PartitionOptions& options,
            std::span<std::int32_t> parts_of)
      : graph_(graph),
        labels_(labels),
        options_(options),
        parts_(parts_of),
        balance_(options.parts, options.labels + std::int64_t{1}, options.cap, parts_of,
                 [&](std::int64_t v) { return label(v); }) {
    if (options.parts < 1 || options.cap < 1 || (graph.rows() - 1) / options.parts >= options.cap) {
      throw std::invalid_argument("partition: expected parts >= 1 and parts * cap >= nodes");
    }
    counter_.reserve(options.parts);
  }

  // Streams the nodes [first, last), where an even share of a label costs as much as `strength` neighbours. Returns how
  // many nodes changed their part.
  std::int64_t place(std::int64_t first, std::int64_t last, double strength) {
    std::int64_t moved = 0;
    for (std::int64_t begin = first; begin < last;) {
      const std::int64_t end = block_end(begin, last);
      count_block(begin, end);
      for (std::int64_t v = begin; v < end; ++v) moved += place_node(v, begin, strength);
      begin = end;
    }
    return moved;
  }

 private:
  std::int64_t label(std::int64_t v) const {
    const std::int32_t own = labels_.empty() ? -1 : labels_[static_cast<std::size_t>(v)];
    return own < 0 ? options_.labels : own;
  }

  std::int64_t block_end(std::int64_t begin, std::int64_t last) const {
    std::int64_t end = begin + 1;
    const std::int64_t edges = graph_.indptr[static_cast<std::size_t>(begin)] + detail::kPartitionBlockEdges;
    last = std::min(last, begin + std::clamp<std::int64_t>(options_.block, 1, std::int64_t{1} << 30));
    while (end < last && graph_.indptr[static_cast<std::size_t>(end) + 1] <= edges) ++end;
    return end;
  }

  void count_block(std::int64_t begin, std::int64_t end) {
    const std::int64_t edges =
        graph_.indptr[static_cast<std::size_t>(end)] - graph_.indptr[static_cast<std::size_t>(begin)];
    if (edges > sights_.size()) sights_ = Scratch<detail::Sight>(edges);
    if (end - begin > lengths_.size()) lengths_ = Scratch<detail::Sights>(end - begin);
    parallel_rows(graph_.indptr.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin) + 1),
                  16384, [&](std::int64_t first, std::int64_t last) {
                    static thread_local detail::PartCounter counter;
                    counter.reserve(options_.parts);
                    const std::int64_t end_edge = graph_.indptr[static_cast<std::size_t>(begin + last)];
                    for (std::int64_t v = begin + first; v < begin + last; ++v) {
                      count_node(v, begin, end, end_edge, counter);
                    }
                  });
  }

  // `end_edge` is where the edges of the thread end: up to there parts are fetched ahead.
  void count_node(std::int64_t v, std::int64_t begin, std::int64_t end, std::int64_t end_edge,
                  detail::PartCounter& counter) {
    const std::int64_t first = graph_.indptr[static_cast<std::size_t>(v)];
    const std::int64_t last = graph_.indptr[static_cast<std::size_t>(v) + 1];
    const Id* const sources = graph_.indices.data();
    const std::int64_t base = graph_.indptr[static_cast<std::size_t>(begin)];
    detail::Sight* seen = sights_.data() + (first - base);
    detail::Sight* const back = sights_.data() + (last - base);
    detail::Sight* near = back;
    for (std::int64_t e = first; e < last; ++e) {
      prefetch(&parts_[static_cast<std::size_t>(sources[std::min(e + detail::kPartitionAhead, end_edge - 1)])]);
      const std::int64_t u = sources[e];
      if (u >= begin && u < end) {
        if (u != v) *--near = {static_cast<std::int32_t>(u - begin), 1};
      } else if (const std::int32_t part = parts_[static_cast<std::size_t>(u)]; part != detail::kUnplaced) {
        counter.add(part, 1);
      }
    }
    detail::Sight* const start = seen;
    counter.drain([&](std::int32_t part, std::int32_t count) { *seen++ = {part, count}; });
    lengths_[v - begin] = {seen - start, back - near};
  }

  // Lines 15 to 35 of algorithm 2. Where scores are equal the node stays, or goes to the part with the lowest number.
  bool place_node(std::int64_t v, std::int64_t begin, double strength) {
    std::int32_t& own = parts_[static_cast<std::size_t>(v)];
    const std::int32_t before = own;
    const std::int64_t of = label(v);
    if (before != detail::kUnplaced) balance_.move(of, before, -1);
    std::int32_t best = balance_.emptiest(of);
    const bool stays = before != detail::kUnplaced && balance_.size(before) < options_.cap &&
                       balance_.cost(of, before) == balance_.cost(of, best);
    if (stays) best = before;
    double best_score = -strength * balance_.cost(of, best);
    for_neighbours(v, begin, [&](std::int32_t part, std::int32_t count) {
      const double score = count - strength * balance_.cost(of, part);
      if (score < best_score || balance_.size(part) >= options_.cap) return;
      const bool first = part == before || (best != before && part < best);
      if (score > best_score || first) best = part, best_score = score;
    });
    own = best;
    balance_.move(of, best, 1);
    return best != before;
  }

  // f(part, in-neighbours there) for the parts that have any, once each.
  template <class F>
  void for_neighbours(std::int64_t v, std::int64_t begin, F&& f) {
    const auto [parts, near] = lengths_[v - begin];
    const std::int64_t base = graph_.indptr[static_cast<std::size_t>(begin)];
    const detail::Sight* const sight = sights_.data() + (graph_.indptr[static_cast<std::size_t>(v)] - base);
    const detail::Sight* const back = sights_.data() + (graph_.indptr[static_cast<std::size_t>(v) + 1] - base);
    if (near == 0) {
      for (std::int64_t i = 0; i < parts; ++i) f(sight[i].part, sight[i].count);
      return;
    }
    for (std::int64_t i = 0; i < parts; ++i) counter_.add(sight[i].part, sight[i].count);
    for (std::int64_t i = 1; i <= near; ++i) {
      const std::int32_t part = parts_[static_cast<std::size_t>(begin + back[-i].part)];
      if (part != detail::kUnplaced) counter_.add(part, 1);
    }
    counter_.drain(f);
  }

  Csc<Id> graph_;
  std::span<const std::int32_t> labels_;
  PartitionOptions options_;
  std::span<std::int32_t> parts_;
  detail::LabelBalance balance_;
  detail::PartCounter counter_;
  Scratch<detail::Sight> sights_;
  Scratch<detail::Sights> lengths_;
};

}  // namespace joestar
