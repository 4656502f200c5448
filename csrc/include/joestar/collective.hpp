#pragma once
// Layer-wise sampling: the sources of a slice race against each other, and k of them win (thesis table 5.3).

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "joestar/compact.hpp"
#include "joestar/marks.hpp"
#include "joestar/race.hpp"
#include "joestar/race_bound.hpp"
#include "joestar/sort_ids.hpp"

namespace joestar {

template <IdType Id>
struct CollectiveTask {
  std::span<const Id> sources;  // of the true edges
  const float* weight;          // per node; none: all alike
  std::int64_t num_nodes;
  NodeKeys keys = {};
};

namespace detail {

template <IdType Id>
struct Racer {
  std::int64_t key;
  Id node, hashed;  // the node, and what it hashes as, which settles ties
  friend bool operator<(const Racer& x, const Racer& y) {
    return x.key < y.key || (x.key == y.key && x.hashed < y.hashed);
  }
};

constexpr int kRacersTogether = 64;

// Random words of the nodes given as two words each.
struct RacerBatch {
  alignas(64) std::uint32_t low[kRacersTogether];
  alignas(64) std::uint32_t high[kRacersTogether];
  alignas(64) std::uint32_t word[kRacersTogether];
};

JOESTAR_CLONES inline void draw_words(HashState key, RacerBatch& batch) {
  for (int lane = 0; lane < kRacersTogether; ++lane) {
    HashState state = key;
    state.absorb(batch.low[lane]);
    state.absorb(batch.high[lane]);
    batch.word[lane] = draw(state.a, state.b, 0);
  }
}

// The k smallest racers that a thread has met so far, and a few more. Whoever is behind `bound` has been beaten by k
// others; the pools share it.
template <IdType Id>
class Pool {
 public:
  Pool(std::int64_t k, std::atomic<std::int64_t>& bound)
      : k_(static_cast<std::size_t>(k)), most_(2 * k_ + kRacersTogether), bound_(bound) {}

  // Brings nodes[0 .. count) into the race; the batch is room for their keys.
  void enter(const CollectiveTask<Id>& task, RaceTable table, HashState key, const Id* nodes, int count,
             RacerBatch& batch) {
    for (int lane = 0; lane < kRacersTogether; ++lane) {
      const std::int64_t node = task.keys(nodes[std::min(lane, count - 1)]);
      batch.low[lane] = low_word(node);
      batch.high[lane] = high_word(node);
    }
    draw_words(key, batch);
    const std::int64_t bound = bound_.load(std::memory_order_relaxed);
    for (int lane = 0; lane < count; ++lane) {
      const float weight = task.weight == nullptr ? 1.0f : task.weight[nodes[lane]];
      if (race_key_at_least(batch.word[lane], weight) > bound) continue;
      const std::int64_t made = race_key(table, batch.word[lane], weight);
      if (made > bound || made == kNever) continue;
      racers_.push_back({made, nodes[lane], static_cast<Id>(task.keys(nodes[lane]))});
    }
    if (racers_.size() >= most_) shrink();
  }

  // Leaves the k smallest.
  void shrink() {
    if (racers_.size() <= k_) return;
    std::nth_element(racers_.begin(), racers_.begin() + static_cast<std::ptrdiff_t>(k_ - 1), racers_.end());
    racers_.resize(k_);
    const std::int64_t last = racers_.back().key;
    std::int64_t bound = bound_.load(std::memory_order_relaxed);
    while (last < bound && !bound_.compare_exchange_weak(bound, last, std::memory_order_relaxed)) {
    }
  }

  std::vector<Racer<Id>>& racers() { return racers_; }

 private:
  std::size_t k_, most_;
  std::atomic<std::int64_t>& bound_;
  std::vector<Racer<Id>> racers_;
};

// Pools that blocks of edges borrow one after the other: as many as there are threads at work.
template <IdType Id>
class Pools {
 public:
  // Whoever is behind `bound` is left out from the start.
  Pools(std::int64_t k, std::int64_t bound) : k_(k), bound_(bound) {}

  std::unique_ptr<Pool<Id>> take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Pool<Id>>(k_, bound_);
    auto pool = std::move(idle_.back());
    idle_.pop_back();
    return pool;
  }

  void give(std::unique_ptr<Pool<Id>> pool) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(pool));
  }

  // The k smallest of all pools, once all are back.
  std::vector<Racer<Id>> winners() {
    Pool<Id> all(k_, bound_);
    for (const auto& pool : idle_) {
      all.racers().insert(all.racers().end(), pool->racers().begin(), pool->racers().end());
    }
    all.shrink();
    return std::move(all.racers());
  }

 private:
  std::int64_t k_;
  std::atomic<std::int64_t> bound_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Pool<Id>>> idle_;
};

// The first edge of a node to claim its slot brings the node into the race; which one it is does not show.
template <IdType Id>
void race_sources(const CollectiveTask<Id>& task, RaceTable table, HashState key, std::uint64_t* slots,
                  std::uint64_t stamp, std::int64_t first, std::int64_t last, Pool<Id>& pool) {
  Id nodes[kRacersTogether];
  RacerBatch batch;
  int count = 0;
  const std::int64_t edges = static_cast<std::int64_t>(task.sources.size());
  for (std::int64_t e = first; e < last; ++e) {
    prefetch(&slots[task.sources[std::min(e + kCompactAhead, edges - 1)]]);
    const Id node = task.sources[e];
    std::atomic_ref<std::uint64_t> slot(slots[node]);
    if (slot.load(std::memory_order_relaxed) == stamp) continue;
    if (slot.exchange(stamp, std::memory_order_relaxed) == stamp) continue;
    nodes[count++] = node;
    if (count == kRacersTogether) {
      pool.enter(task, table, key, nodes, count, batch);
      count = 0;
    }
  }
  if (count > 0) pool.enter(task, table, key, nodes, count, batch);
}

// With at least an edge for so many nodes of the graph, marking nodes and racing them in order beats claiming slots.
constexpr std::int64_t kNodesPerEdge = 16;
constexpr std::int64_t kMarkedGrain = 16384;

// The nodes [first, last) that are marked, in order: their weights and marks are read in order, too.
template <IdType Id>
void race_marked(const CollectiveTask<Id>& task, RaceTable table, HashState key, const Marks<Id>& marks,
                 std::int64_t first, std::int64_t last, Pool<Id>& pool) {
  Id nodes[kRacersTogether];
  RacerBatch batch;
  int count = 0;
  marks.walk(first, last, [&](std::int64_t node, std::uint8_t there) {
    nodes[count] = static_cast<Id>(node);
    count += there;
    if (count == kRacersTogether) {
      pool.enter(task, table, key, nodes, count, batch);
      count = 0;
    }
  });
  if (count > 0) pool.enter(task, table, key, nodes, count, batch);
}

// How large weights of marked nodes are; makes the marks whole.
template <IdType Id>
RaceSizes marked_sizes(const CollectiveTask<Id>& task, Marks<Id>& marks) {
  RaceSizes sizes;
  std::mutex mutex;
  parallel_ranges(task.num_nodes, kMarkedGrain, [&](std::int64_t first, std::int64_t last) {
    marks.join(first, last);
    RaceSizes own;
    marks.walk(first, last, [&](std::int64_t node, std::uint8_t there) {
      own.count(task.weight == nullptr ? 1.0f : task.weight[node], there);
    });
    const std::lock_guard lock(mutex);
    sizes.add(own);
  });
  return sizes;
}

// The k first of the marked nodes, found among those that are not behind `bound`, or, if these are fewer, among all.
template <IdType Id>
std::vector<Racer<Id>> winners_of_marked(const CollectiveTask<Id>& task, RaceTable table, HashState key,
                                         std::int64_t k, const Marks<Id>& marks, std::int64_t bound) {
  Pools<Id> pools(k, bound);
  parallel_ranges(task.num_nodes, kMarkedGrain, [&](std::int64_t first, std::int64_t last) {
    auto pool = pools.take();
    race_marked(task, table, key, marks, first, last, *pool);
    pools.give(std::move(pool));
  });
  std::vector<Racer<Id>> winners = pools.winners();
  if (static_cast<std::int64_t>(winners.size()) == k || bound == kNever) return winners;
  return winners_of_marked(task, table, key, k, marks, kNever);
}

template <IdType Id>
std::vector<Racer<Id>> winners_of_marked(const CollectiveTask<Id>& task, RaceTable table, HashState key,
                                         std::int64_t k) {
  Marks<Id> marks(task.sources, task.num_nodes);
  const std::int64_t bound = marked_sizes(task, marks).bound(k);
  return winners_of_marked(task, table, key, k, marks, bound);
}

template <IdType Id>
std::vector<Racer<Id>> winners_of_claims(const CollectiveTask<Id>& task, RaceTable table, HashState key,
                                         std::int64_t k) {
  BorrowedTable claims(task.num_nodes);
  const std::uint64_t stamp = (*claims).next_stamp();
  Pools<Id> pools(k, kNever);
  parallel_ranges(static_cast<std::int64_t>(task.sources.size()), 2 * kCompactGrain,
                  [&](std::int64_t first, std::int64_t last) {
                    auto pool = pools.take();
                    race_sources(task, table, key, (*claims).slots(), stamp, first, last, *pool);
                    pools.give(std::move(pool));
                  });
  return pools.winners();
}

}  // namespace detail

// nodes = up to nodes.size() winners, ascending, padded with the first; returns their number.
template <IdType Id>
std::int64_t collective_sample(const CollectiveTask<Id>& task, RaceTable table, const SampleKey& key,
                               std::span<Id> nodes) {
  const std::int64_t edges = static_cast<std::int64_t>(task.sources.size());
  const std::int64_t k = static_cast<std::int64_t>(nodes.size());
  if (k == 0) return 0;
  const HashState state = key_state(key);
  const bool marked = edges >= task.num_nodes / detail::kNodesPerEdge;
  const auto winners = marked ? detail::winners_of_marked(task, table, state, k)
                              : detail::winners_of_claims(task, table, state, k);
  std::transform(winners.begin(), winners.end(), nodes.begin(), [](const auto& winner) { return winner.node; });
  sort_ids(nodes.first(winners.size()), task.num_nodes);
  std::fill(nodes.begin() + static_cast<std::int64_t>(winners.size()), nodes.end(),
            winners.empty() ? Id{0} : nodes.front());
  return static_cast<std::int64_t>(winners.size());
}

}  // namespace joestar
