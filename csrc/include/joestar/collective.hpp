#pragma once
// Layer-wise sampling: the sources of a slice race against each other, and k of them win (thesis table 5.3).

#include <algorithm>
#include <atomic>
#include <vector>

#include "joestar/compact.hpp"
#include "joestar/race.hpp"

namespace joestar {

template <IdType Id>
struct CollectiveTask {
  std::span<const Id> sources;  // of the true edges
  const float* weight;          // per node; none: all alike
  std::int64_t num_nodes;
};

namespace detail {

template <IdType Id>
struct Racer {
  std::int64_t key;
  Id node;
  friend bool operator<(const Racer& x, const Racer& y) {
    return x.key < y.key || (x.key == y.key && x.node < y.node);
  }
};

constexpr int kRacersTogether = 64;

// key[i] for the nodes given as two words each; weights are all 1 where there are none.
struct RacerBatch {
  alignas(64) std::uint32_t low[kRacersTogether];
  alignas(64) std::uint32_t high[kRacersTogether];
  alignas(64) float weight[kRacersTogether];
  alignas(64) std::int64_t key[kRacersTogether];
};

JOESTAR_CLONES inline void race_nodes(RaceTable table, HashState key, RacerBatch& batch) {
  for (int lane = 0; lane < kRacersTogether; ++lane) {
    HashState state = key;
    state.absorb(batch.low[lane]);
    state.absorb(batch.high[lane]);
    batch.key[lane] = race_key(table, draw(state.a, state.b, 0), batch.weight[lane]);
  }
}

// Fills in the keys of racers[first ..].
template <IdType Id>
void race(const CollectiveTask<Id>& task, RaceTable table, HashState key, std::vector<Racer<Id>>& racers) {
  RacerBatch batch;
  for (std::size_t first = 0; first < racers.size(); first += kRacersTogether) {
    const std::size_t lanes = std::min<std::size_t>(kRacersTogether, racers.size() - first);
    for (std::size_t lane = 0; lane < kRacersTogether; ++lane) {
      const std::int64_t node = racers[first + std::min(lane, lanes - 1)].node;
      batch.low[lane] = low_word(node);
      batch.high[lane] = high_word(node);
      batch.weight[lane] = task.weight == nullptr ? 1.0f : task.weight[node];
    }
    race_nodes(table, key, batch);
    for (std::size_t lane = 0; lane < lanes; ++lane) racers[first + lane].key = batch.key[lane];
  }
}

// Leaves the k smallest that can be picked, in any order.
template <IdType Id>
void keep_smallest(std::vector<Racer<Id>>& racers, std::int64_t k) {
  std::erase_if(racers, [](const Racer<Id>& racer) { return racer.key == kNever; });
  if (static_cast<std::int64_t>(racers.size()) <= k) return;
  std::nth_element(racers.begin(), racers.begin() + k, racers.end());
  racers.resize(static_cast<std::size_t>(k));
}

// The first edge of a node to claim its slot brings the node into the race; which one it is does not show.
template <IdType Id>
std::vector<Racer<Id>> distinct_sources(const CollectiveTask<Id>& task, std::uint64_t* slots, std::uint64_t stamp,
                                        std::int64_t first, std::int64_t last) {
  std::vector<Racer<Id>> racers;
  const std::int64_t edges = static_cast<std::int64_t>(task.sources.size());
  for (std::int64_t e = first; e < last; ++e) {
    prefetch(&slots[task.sources[std::min(e + kCompactAhead, edges - 1)]]);
    const Id node = task.sources[e];
    std::atomic_ref<std::uint64_t> slot(slots[node]);
    if (slot.load(std::memory_order_relaxed) == stamp) continue;
    if (slot.exchange(stamp, std::memory_order_relaxed) != stamp) racers.push_back({0, node});
  }
  return racers;
}

}  // namespace detail

// nodes = up to nodes.size() winners, ascending, padded with the first; returns their number.
template <IdType Id>
std::int64_t collective_sample(const CollectiveTask<Id>& task, RaceTable table, const SampleKey& key,
                               std::span<Id> nodes) {
  const std::int64_t edges = static_cast<std::int64_t>(task.sources.size());
  const std::int64_t k = static_cast<std::int64_t>(nodes.size()), grain = 8 * detail::kCompactGrain;
  const HashState state = key_state(key);
  BorrowedTable claims(task.num_nodes);
  const std::uint64_t stamp = (*claims).next_stamp();
  std::vector<std::vector<detail::Racer<Id>>> parts(static_cast<std::size_t>(num_blocks(edges, grain)));
  parallel_ranges(edges, grain, [&](std::int64_t first, std::int64_t last) {
    auto racers = detail::distinct_sources(task, (*claims).slots(), stamp, first, last);
    detail::race(task, table, state, racers);
    detail::keep_smallest(racers, k);
    parts[static_cast<std::size_t>(first / grain)] = std::move(racers);
  });
  std::vector<detail::Racer<Id>> winners;
  for (const auto& part : parts) winners.insert(winners.end(), part.begin(), part.end());
  detail::keep_smallest(winners, k);
  std::sort(winners.begin(), winners.end(), [](const auto& x, const auto& y) { return x.node < y.node; });
  std::transform(winners.begin(), winners.end(), nodes.begin(), [](const auto& winner) { return winner.node; });
  std::fill(nodes.begin() + static_cast<std::int64_t>(winners.size()), nodes.end(),
            winners.empty() ? Id{0} : winners.front().node);
  return static_cast<std::int64_t>(winners.size());
}

}  // namespace joestar
