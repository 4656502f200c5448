#pragma once
// Weighted neighbour sampling as a pure function of (key, node): exponential races among the edges of a row.

#include <algorithm>
#include <vector>

#include "joestar/race.hpp"
#include "joestar/sampling.hpp"

namespace joestar {

constexpr std::int64_t kWeightedGrain = 64;  // rows per block of work

// Edge weights of the graph or slice that `rows` refer to, and what every edge draws by: of a part of a graph, its
// position in the row of the whole one; its position here if there is none.
template <IdType Id>
struct WeightedRows {
  SampleRows<Id> rows;
  std::span<const float> weight;
  Fanout fanout;
  std::span<const std::int32_t> rank = {};

  JOESTAR_INLINE const float* weights(std::int64_t i) const { return weight.data() + rows.start(i); }
  JOESTAR_INLINE const std::int32_t* ranks(std::int64_t i) const {
    return rank.empty() ? nullptr : rank.data() + rows.start(i);
  }
};

namespace detail {

// Edges that may be picked, counted up to a little over `enough`.
JOESTAR_CLONES inline std::int64_t count_weights(const float* weight, std::int64_t degree, std::int64_t enough) {
  std::int64_t count = 0;
  for (std::int64_t first = 0; first < degree && count < enough; first += 64) {
    const std::int64_t last = std::min(degree, first + 64);
    for (std::int64_t p = first; p < last; ++p) count += has_weight(weight[p]) ? 1 : 0;
  }
  return count;
}

template <IdType Id>
std::int64_t weighted_picks(const WeightedRows<Id>& task, std::int64_t i) {
  if (i >= task.rows.count) return 0;
  const std::int64_t k = task.fanout.k, degree = task.rows.degree(i);
  if (k < 0) return count_weights(task.weights(i), degree, degree);
  if (task.fanout.replace) return count_weights(task.weights(i), degree, 1) > 0 ? k : 0;
  return std::min(k, count_weights(task.weights(i), degree, k));
}

// The random words of edges that draw by ranks.
JOESTAR_CLONES inline void row_words(std::uint32_t a, std::uint32_t b, const std::int32_t* rank, std::int64_t degree,
                                     std::uint32_t* JOESTAR_RESTRICT word) {
  for (std::int64_t p = 0; p < degree; ++p) word[p] = draw(a, b, static_cast<std::uint32_t>(rank[p]));
}

JOESTAR_CLONES inline void row_keys(RaceTable table, std::uint32_t a, std::uint32_t b, const float* weight,
                                    std::int64_t degree, std::int64_t* JOESTAR_RESTRICT key) {
  for (std::int64_t p = 0; p < degree; ++p) {
    key[p] = race_key(table, draw(a, b, static_cast<std::uint32_t>(p)), weight[p]);
  }
}

JOESTAR_CLONES inline void row_keys_of(RaceTable table, const std::uint32_t* word, const float* weight,
                                       std::int64_t degree, std::int64_t* JOESTAR_RESTRICT key) {
  for (std::int64_t p = 0; p < degree; ++p) key[p] = race_key(table, word[p], weight[p]);
}

JOESTAR_CLONES inline void row_weight_logs(RaceTable table, const float* weight, std::int64_t degree,
                                           std::int64_t* JOESTAR_RESTRICT log) {
  for (std::int64_t p = 0; p < degree; ++p) log[p] = has_weight(weight[p]) ? race_weight(table, weight[p]) : kNever;
}

// Smallest key of a race whose weights have these logarithms; `key` holds all of them.
JOESTAR_CLONES inline std::int64_t race_again(RaceTable table, std::uint32_t a, std::uint32_t b,
                                              const std::int64_t* log, std::int64_t degree,
                                              std::int64_t* JOESTAR_RESTRICT key) {
  std::int64_t best = kNever;
  for (std::int64_t p = 0; p < degree; ++p) {
    const std::int64_t time = race_time(table, draw(a, b, static_cast<std::uint32_t>(p)));
    key[p] = log[p] == kNever ? kNever : time - log[p];
    best = std::min(best, key[p]);
  }
  return best;
}

// As `race_again`, of edges that draw by ranks.
JOESTAR_CLONES inline std::int64_t race_again_of(RaceTable table, const std::uint32_t* word, const std::int64_t* log,
                                                 std::int64_t degree, std::int64_t* JOESTAR_RESTRICT key) {
  std::int64_t best = kNever;
  for (std::int64_t p = 0; p < degree; ++p) {
    const std::int64_t time = race_time(table, word[p]);
    key[p] = log[p] == kNever ? kNever : time - log[p];
    best = std::min(best, key[p]);
  }
  return best;
}

constexpr std::int64_t kRaceLanes = 16;  // keys are padded to whole vectors

// Memory for the longest row so far.
struct RaceScratch {
  std::vector<std::int64_t> key, other;
  std::vector<std::uint32_t> word;  // of ranks

  void reserve(std::int64_t degree, bool ranked) {
    const auto size = static_cast<std::size_t>(degree + kRaceLanes);
    if (ranked && word.size() < size) word.resize(size);
    if (key.size() >= size) return;
    key.resize(size);
    other.resize(size);
  }
};

constexpr std::int64_t kMaxSweeps = 24;  // largest k that is found by sweeping over the keys

// The k-th smallest key, and how many keys equal to it are among the k smallest.
struct Threshold {
  std::int64_t key, ties;
};

// One sweep for each distinct key up to the k-th: straight-line vector code, faster than partitioning for small k.
// Overwrites the keys, which are padded with kNever to whole vectors.
JOESTAR_CLONES inline Threshold sweep_threshold(std::int64_t* JOESTAR_RESTRICT key, std::int64_t padded,
                                                std::int64_t k) {
  for (std::int64_t taken = 0;;) {
    std::int64_t next = kNever, count = 0;
    for (std::int64_t p = 0; p < padded; ++p) next = key[p] < next ? key[p] : next;
    for (std::int64_t p = 0; p < padded; ++p) {
      const bool equal = key[p] == next;
      count += equal ? 1 : 0;
      key[p] = equal ? kNever : key[p];
    }
    if (taken + count >= k) return {next, k - taken};
    taken += count;
  }
}

inline Threshold threshold_of(RaceScratch& scratch, std::int64_t degree, std::int64_t k) {
  const auto begin = scratch.other.begin();
  std::copy_n(scratch.key.begin(), degree, begin);
  if (k <= kMaxSweeps) {
    const std::int64_t padded = (degree + kRaceLanes - 1) / kRaceLanes * kRaceLanes;
    std::fill(begin + degree, begin + padded, kNever);
    return sweep_threshold(scratch.other.data(), padded, k);
  }
  std::nth_element(begin, begin + (k - 1), begin + degree);
  const std::int64_t last = scratch.other[static_cast<std::size_t>(k) - 1];
  return {last, k - std::count_if(begin, begin + (k - 1), [&](std::int64_t other) { return other < last; })};
}

// The k smallest of the keys, of which more than k are possible: emit(position) in ascending order, at most `slots`.
template <class Emit>
void take_smallest(RaceScratch& scratch, std::int64_t degree, std::int64_t k, std::int64_t slots, Emit&& emit) {
  const Threshold threshold = threshold_of(scratch, degree, k);
  const std::int64_t* key = scratch.key.data();
  std::int64_t* position = scratch.other.data();
  std::int64_t taken = 0, ties = threshold.ties;
  for (std::int64_t p = 0; p < degree; ++p) {
    const bool tie = key[p] == threshold.key;
    position[taken] = p;
    taken += (key[p] < threshold.key) | (tie & (ties > 0));
    ties -= tie;
  }
  for (std::int64_t j = 0; j < slots; ++j) emit(position[j]);
}

// Row i with replacement: one race per pick.
template <IdType Id, class Emit>
void race_with_replacement(const WeightedRows<Id>& task, RaceTable table, HashState state, std::int64_t i,
                           std::int64_t slots, RaceScratch& scratch, Emit&& emit) {
  const std::int64_t degree = task.rows.degree(i);
  const std::int32_t* rank = task.ranks(i);
  row_weight_logs(table, task.weights(i), degree, scratch.other.data());
  std::int64_t* key = scratch.key.data();
  for (std::int64_t j = 0; j < slots; ++j) {
    HashState pick = state;
    pick.absorb(static_cast<std::uint32_t>(j));
    std::int64_t best;
    if (rank == nullptr) {
      best = race_again(table, pick.a, pick.b, scratch.other.data(), degree, key);
    } else {
      row_words(pick.a, pick.b, rank, degree, scratch.word.data());
      best = race_again_of(table, scratch.word.data(), scratch.other.data(), degree, key);
    }
    emit(std::find(key, key + degree, best) - key);
  }
}

// emit(position in the row) for the first `slots` picks of row i.
template <IdType Id, class Emit>
void race_row(const WeightedRows<Id>& task, RaceTable table, HashState key, std::int64_t i, std::int64_t slots,
              RaceScratch& scratch, Emit&& emit) {
  const std::int64_t degree = task.rows.degree(i), k = task.fanout.k;
  const float* weight = task.weights(i);
  const HashState state = row_state(key, task.rows.key(i));
  const std::int32_t* rank = task.ranks(i);
  scratch.reserve(degree, rank != nullptr);
  if (task.fanout.replace && k >= 0) return race_with_replacement(task, table, state, i, slots, scratch, emit);
  if (k < 0 || count_weights(weight, degree, k + 1) <= k) {
    for (std::int64_t p = 0; p < degree && slots > 0; ++p) {
      if (!has_weight(weight[p])) continue;
      emit(p);
      --slots;
    }
    return;
  }
  if (rank == nullptr) {
    row_keys(table, state.a, state.b, weight, degree, scratch.key.data());
  } else {
    row_words(state.a, state.b, rank, degree, scratch.word.data());
    row_keys_of(table, scratch.word.data(), weight, degree, scratch.key.data());
  }
  take_smallest(scratch, degree, k, slots, emit);
}

}  // namespace detail

// Offsets of the sampled rows; returns the true number of picks. With bound >= 0 the offsets stop there.
template <IdType Id>
std::int64_t weighted_offsets(const WeightedRows<Id>& task, std::int64_t bound, std::span<std::int64_t> offsets) {
  const std::int64_t n = static_cast<std::int64_t>(offsets.size()) - 1;
  const auto picks = [&](std::int64_t i) { return detail::weighted_picks(task, i); };
  const std::int64_t total = exclusive_scan(n, 8 * kWeightedGrain, picks, offsets);
  if (bound >= 0 && total > bound) {
    for (std::int64_t& offset : offsets) offset = std::min(offset, bound);
  }
  return total;
}

// out[slot] = position of the picked edge among all edges, 0 behind the last.
template <IdType Id>
void weighted_sample(const WeightedRows<Id>& task, RaceTable table, const SampleKey& key,
                     std::span<const std::int64_t> offsets, std::span<std::int64_t> out) {
  const HashState state = key_state(key);
  parallel_ranges(task.rows.count, kWeightedGrain, [&](std::int64_t first, std::int64_t last) {
    detail::RaceScratch scratch;
    for (std::int64_t i = first; i < last; ++i) {
      std::int64_t slot = offsets[static_cast<std::size_t>(i)];
      const std::int64_t slots = offsets[static_cast<std::size_t>(i) + 1] - slot, start = task.rows.start(i);
      if (slots == 0) continue;
      detail::race_row(task, table, state, i, slots, scratch,
                       [&](std::int64_t p) { out[static_cast<std::size_t>(slot++)] = start + p; });
    }
  });
  std::fill(out.begin() + offsets.back(), out.end(), std::int64_t{0});
}

}  // namespace joestar
