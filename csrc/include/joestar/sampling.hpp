#pragma once
// Uniform neighbour sampling as a pure function of (key, node): Floyd's algorithm over a counter-based hash.

#include <algorithm>
#include <vector>

#include "joestar/hash.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

// How many neighbours of a row to take: all of them (fanout < 0), or `fanout`, with or without replacement.
struct Fanout {
  std::int64_t k;
  bool replace;

  JOESTAR_INLINE bool takes_all(std::int64_t degree) const { return k < 0 || (!replace && degree <= k); }
  JOESTAR_INLINE std::int64_t picks(std::int64_t degree) const {
    if (takes_all(degree)) return degree;
    return degree > 0 ? k : 0;
  }
};

// Rows to sample: row i is column nodes[i] of the graph, or column i (sliced before); it hashes as keys(nodes[i]).
// Rows from `count` on are padding and have degree 0.
template <IdType Id>
struct SampleRows {
  std::span<const std::int64_t> indptr;
  std::span<const Id> nodes;
  std::int64_t count;
  bool sliced;
  NodeKeys keys = {};

  JOESTAR_INLINE std::int64_t key(std::int64_t i) const { return keys(nodes[static_cast<std::size_t>(i)]); }
  JOESTAR_INLINE std::int64_t column(std::int64_t i) const {
    return sliced ? i : static_cast<std::int64_t>(nodes[static_cast<std::size_t>(i)]);
  }
  JOESTAR_INLINE std::int64_t start(std::int64_t i) const { return indptr[static_cast<std::size_t>(column(i))]; }
  JOESTAR_INLINE std::int64_t degree(std::int64_t i) const {
    const std::size_t c = static_cast<std::size_t>(column(i));
    return indptr[c + 1] - indptr[c];
  }
};

constexpr int kLanes = 32;                   // rows drawn together
constexpr int kMaxSlots = 64;                // largest fanout drawn that way
constexpr std::int64_t kSampleGrain = 8192;  // rows and picks per block of work

// Rows drawn together, one lane each, so that the hash and Floyd's comparisons run as vector instructions.
struct RowBatch {
  alignas(64) std::uint32_t a[kLanes];
  alignas(64) std::uint32_t b[kLanes];
  alignas(64) std::uint32_t degree[kLanes];
  alignas(64) std::uint32_t pick[kMaxSlots][kLanes];
  std::int64_t start[kLanes];
  std::uint32_t node_low[kLanes], node_high[kLanes];
};

namespace detail {

JOESTAR_CLONES inline void hash_rows(HashState key, RowBatch& batch) {
  for (int lane = 0; lane < kLanes; ++lane) {
    HashState state = key;
    state.absorb(batch.node_low[lane]);
    state.absorb(batch.node_high[lane]);
    batch.a[lane] = state.a;
    batch.b[lane] = state.b;
  }
}

// Floyd: slot j takes r = bounded(draw(j), t + 1), t = degree - k + j, or t if r was picked before.
// Lanes with degree <= k compute values that nobody reads.
JOESTAR_CLONES inline void floyd_rows(int k, RowBatch& batch) {
  for (int j = 0; j < k; ++j) {
    alignas(64) std::uint32_t r[kLanes];
    alignas(64) std::uint32_t repeated[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::uint32_t top = batch.degree[lane] - static_cast<std::uint32_t>(k - j);
      r[lane] = bounded(draw(batch.a[lane], batch.b[lane], static_cast<std::uint32_t>(j)), top + 1);
      repeated[lane] = 0;
    }
    for (int i = 0; i < j; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) repeated[lane] |= batch.pick[i][lane] == r[lane] ? ~0U : 0U;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::uint32_t top = batch.degree[lane] - static_cast<std::uint32_t>(k - j);
      batch.pick[j][lane] = repeated[lane] != 0 ? top : r[lane];
    }
  }
}

JOESTAR_CLONES inline void draw_rows_with_replacement(int k, RowBatch& batch) {
  for (int j = 0; j < k; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) {
      batch.pick[j][lane] =
          bounded(draw(batch.a[lane], batch.b[lane], static_cast<std::uint32_t>(j)), batch.degree[lane]);
    }
  }
}

// The picks made so far, as an open-addressing set of at most half its capacity.
class PickSet {
 public:
  void reset(std::int64_t expected) {
    std::size_t capacity = 16;
    while (capacity < 2 * static_cast<std::size_t>(expected)) capacity *= 2;
    slots_.assign(capacity, kFree);
  }

  // False if x was there already.
  bool insert(std::uint32_t x) {
    std::size_t slot = mix32(x) & (slots_.size() - 1);
    for (; slots_[slot] != kFree; slot = (slot + 1) & (slots_.size() - 1)) {
      if (slots_[slot] == x) return false;
    }
    slots_[slot] = x;
    return true;
  }

 private:
  static constexpr std::uint32_t kFree = 0xFFFFFFFFU;
  std::vector<std::uint32_t> slots_;
};

// One row with any fanout: emit(j, pick) for the first `slots` slots.
template <class Emit>
void draw_row(HashState state, std::int64_t degree, Fanout fanout, std::int64_t slots, PickSet& picked, Emit&& emit) {
  if (fanout.replace) {
    for (std::int64_t j = 0; j < slots; ++j) {
      const auto word = draw(state.a, state.b, static_cast<std::uint32_t>(j));
      emit(j, bounded(word, static_cast<std::uint32_t>(degree)));
    }
    return;
  }
  picked.reset(fanout.k);
  for (std::int64_t j = 0; j < slots; ++j) {
    const auto top = static_cast<std::uint32_t>(degree - fanout.k + j);
    const std::uint32_t r = bounded(draw(state.a, state.b, static_cast<std::uint32_t>(j)), top + 1);
    const bool fresh = picked.insert(r);
    if (!fresh) picked.insert(top);
    emit(j, fresh ? r : top);
  }
}

template <IdType Id>
void load_batch(const SampleRows<Id>& rows, std::int64_t first, int lanes, RowBatch& batch) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const std::int64_t i = first + std::min(lane, lanes - 1);
    const std::int64_t node = rows.key(i);
    batch.node_low[lane] = low_word(node);
    batch.node_high[lane] = high_word(node);
    batch.start[lane] = rows.start(i);
    batch.degree[lane] = static_cast<std::uint32_t>(rows.degree(i));
  }
}

// Draws the rows [first, first + lanes) into the batch.
template <IdType Id>
void draw_batch(const SampleRows<Id>& rows, Fanout fanout, HashState key, std::int64_t first, int lanes,
                RowBatch& batch) {
  load_batch(rows, first, lanes, batch);
  hash_rows(key, batch);
  const int k = static_cast<int>(fanout.k);
  fanout.replace ? draw_rows_with_replacement(k, batch) : floyd_rows(k, batch);
}

template <IdType Id>
void prefetch_rows(const SampleRows<Id>& rows, std::int64_t first, std::int64_t last) {
  if (rows.sliced) return;
  for (std::int64_t i = first; i < std::min(last, first + kLanes); ++i) prefetch(&rows.indptr[rows.column(i)]);
}

}  // namespace detail

// What a pick becomes: the neighbour's id, or the edge's position.
template <IdType Id>
struct NeighborOf {
  const Id* indices;
  JOESTAR_INLINE void touch(std::int64_t position) const { prefetch(indices + position); }
  JOESTAR_INLINE Id operator()(std::int64_t position) const { return indices[position]; }
};
struct PositionOf {
  JOESTAR_INLINE void touch(std::int64_t) const {}
  JOESTAR_INLINE std::int64_t operator()(std::int64_t position) const { return position; }
};

namespace detail {

// Rows of at most kMaxSlots picks: positions of a batch first, so that the cache misses of its ids overlap.
template <IdType Id, class Offsets, class Value, class T>
void sample_batches(const SampleRows<Id>& rows, Fanout fanout, HashState key, const Offsets& offsets,
                    std::int64_t first, std::int64_t last, const Value& value, T* out) {
  RowBatch batch;
  std::int64_t position[kLanes * kMaxSlots];
  for (std::int64_t base = first; base < last; base += kLanes) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, last - base));
    prefetch_rows(rows, base + kLanes, last);
    draw_batch(rows, fanout, key, base, lanes, batch);
    std::int64_t filled = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const std::int64_t slots = offsets[base + lane + 1] - offsets[base + lane], start = batch.start[lane];
      const bool all = fanout.takes_all(batch.degree[lane]);
      for (std::int64_t j = 0; j < slots; ++j) {
        position[filled] = start + (all ? j : batch.pick[j][lane]);
        value.touch(position[filled++]);
      }
    }
    T* target = out + offsets[base];
    for (std::int64_t i = 0; i < filled; ++i) target[i] = value(position[i]);
  }
}

// Rows of any number of picks, one after the other.
template <IdType Id, class Offsets, class Value, class T>
void sample_singly(const SampleRows<Id>& rows, Fanout fanout, HashState key, const Offsets& offsets, std::int64_t first,
                   std::int64_t last, const Value& value, T* out) {
  PickSet picked;
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t degree = rows.degree(i), start = rows.start(i), slots = offsets[i + 1] - offsets[i];
    T* target = out + offsets[i];
    if (fanout.takes_all(degree)) {
      for (std::int64_t j = 0; j < slots; ++j) target[j] = value(start + j);
    } else {
      draw_row(row_state(key, rows.key(i)), degree, fanout, slots, picked,
               [&](std::int64_t j, std::uint32_t pick) { target[j] = value(start + pick); });
    }
  }
}

}  // namespace detail

// out[slot] = value(edge position) for the picks of the rows [first, last). Row i has the slots offsets[i] ..
// offsets[i + 1], which a bound may have cut short.
template <IdType Id, class Offsets, class Value, class T>
void sample_range(const SampleRows<Id>& rows, Fanout fanout, HashState key, const Offsets& offsets, std::int64_t first,
                  std::int64_t last, const Value& value, T* out) {
  if (fanout.k >= 0 && fanout.k <= kMaxSlots) {
    detail::sample_batches(rows, fanout, key, offsets, first, last, value, out);
  } else {
    detail::sample_singly(rows, fanout, key, offsets, first, last, value, out);
  }
}

// Offsets of the sampled rows; returns the true number of picks. With bound >= 0 the offsets stop there.
template <IdType Id>
std::int64_t sample_offsets(const SampleRows<Id>& rows, Fanout fanout, std::int64_t bound,
                            std::span<std::int64_t> offsets) {
  const std::int64_t n = static_cast<std::int64_t>(offsets.size()) - 1;
  const auto picks = [&](std::int64_t i) { return i < rows.count ? fanout.picks(rows.degree(i)) : 0; };
  const std::int64_t total = exclusive_scan(n, kSampleGrain, picks, offsets);
  if (bound >= 0 && total > bound) {
    parallel_for(n + 1, 4 * kSampleGrain, [&](std::int64_t i) { offsets[i] = std::min(offsets[i], bound); });
  }
  return total;
}

// out[slot] = value(position) for every pick, `pad` behind the last.
template <IdType Id, class Value, class T>
void sample_fill(const SampleRows<Id>& rows, Fanout fanout, const SampleKey& key, std::span<const std::int64_t> offsets,
                 const Value& value, std::span<T> out, T pad) {
  const HashState state = key_state(key);
  parallel_rows(offsets.first(static_cast<std::size_t>(rows.count) + 1), kSampleGrain,
                [&](std::int64_t first, std::int64_t last) {
                  sample_range(rows, fanout, state, offsets, first, last, value, out.data());
                });
  std::fill(out.begin() + offsets.back(), out.end(), pad);
}

// out = the sampled neighbours (global ids).
template <IdType Id>
void sample_neighbors(const SampleRows<Id>& rows, std::span<const Id> indices, Fanout fanout, const SampleKey& key,
                      std::span<const std::int64_t> offsets, std::span<Id> out) {
  const Id pad = rows.nodes.empty() ? Id{0} : rows.nodes[0];
  sample_fill(rows, fanout, key, offsets, NeighborOf<Id>{indices.data()}, out, pad);
}

// out = the sampled edges' positions in the graph.
template <IdType Id>
void sample_edges(const SampleRows<Id>& rows, Fanout fanout, const SampleKey& key,
                  std::span<const std::int64_t> offsets, std::span<std::int64_t> out) {
  sample_fill(rows, fanout, key, offsets, PositionOf{}, out, std::int64_t{0});
}

}  // namespace joestar
