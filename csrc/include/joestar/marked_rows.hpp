#pragma once
// Which nodes of a macro-batch read or keep hidden rows, and where these are (thesis 5.2.2): found once for all layers,
// in one pass over the nodes.

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "joestar/pages.hpp"

namespace joestar {

// Where the row of every node is, negative without one; with neither table every node has its own number.
struct Places {
  const std::int32_t* wide = nullptr;
  const std::int16_t* narrow = nullptr;
  std::int64_t count = std::numeric_limits<std::int32_t>::max();

  std::int32_t at(std::int64_t node) const {
    if (node < 0 || node >= count) {
      throw std::out_of_range("node " + std::to_string(node) + " of a graph of " + std::to_string(count) + " nodes");
    }
    if (wide != nullptr) return wide[node];
    return narrow != nullptr ? narrow[node] : static_cast<std::int32_t>(node);
  }
  // Asks for a place that will be looked at soon.
  void expect(std::int64_t node) const {
    if (node < 0 || node >= count) return;
    if (wide != nullptr) prefetch(wide + node);
    if (narrow != nullptr) prefetch(narrow + node);
  }
};

// The marked nodes of a macro-batch, in its order, and their places in the tables of all layers.
template <IdType Id>
class MarkedRows {
 public:
  // marks[i] != 0: node ids[i] is meant. placed: nodes without a place in any layer are left out.
  MarkedRows(std::span<const Id> ids, std::span<const std::uint8_t> marks, std::span<const Places> layers, bool placed)
      : node_(static_cast<std::int64_t>(ids.size())),
        blocks_(static_cast<std::size_t>(num_blocks(node_.size(), kGrain))), counts_(layers.size(), 0) {
    for (std::size_t layer = 0; layer < layers.size(); ++layer) places_.emplace_back(node_.size());
    parallel_ranges(node_.size(), kGrain, [&](std::int64_t first, std::int64_t last) {
      find(ids, marks, layers, placed, first, last, blocks_[static_cast<std::size_t>(first / kGrain)]);
    });
    for (Block& block : blocks_) {
      block.start = count_;
      block.starts = counts_;
      count_ += block.count;
      for (std::size_t layer = 0; layer < counts_.size(); ++layer) counts_[layer] += block.counts[layer];
    }
  }

  std::int64_t count() const { return count_; }
  const std::vector<std::int64_t>& counts() const { return counts_; }  // of those with a place, per layer

  // out[count()]: what `values` has of them.
  void write(std::span<const std::int32_t> values, std::int32_t* out) const {
    each_block([&](const Block& block, std::int64_t from) {
      for (std::int64_t i = 0; i < block.count; ++i) {
        out[block.start + i] = values[static_cast<std::size_t>(node_[from + i])];
      }
    });
  }

  // flags[count()]: which have a place in a layer's table; their ids, as given before, and places [counts()[layer]].
  void write_layer(std::size_t layer, std::span<const Id> given, std::uint8_t* flags, Id* ids,
                   std::int32_t* places) const {
    each_block([&](const Block& block, std::int64_t from) {
      std::int64_t at = block.starts[layer];
      for (std::int64_t i = 0; i < block.count; ++i) {
        const std::int32_t place = places_[layer][from + i];
        flags[block.start + i] = place >= 0;
        if (place < 0) continue;
        ids[at] = given[static_cast<std::size_t>(node_[from + i])];
        places[at++] = place;
      }
    });
  }

 private:
  static constexpr std::int64_t kGrain = 1 << 14, kAhead = 24;

  struct Block {
    std::int64_t count = 0, start = 0;
    std::vector<std::int64_t> counts, starts;  // per layer
  };

  void find(std::span<const Id> ids, std::span<const std::uint8_t> marks, std::span<const Places> layers, bool placed,
            std::int64_t first, std::int64_t last, Block& block) {
    block.counts.assign(layers.size(), 0);
    for (std::int64_t i = first; i < last; ++i) {
      const Id ahead = ids[static_cast<std::size_t>(std::min(i + kAhead, last - 1))];
      for (const Places& layer : layers) layer.expect(ahead);
      if (marks[static_cast<std::size_t>(i)] == 0) continue;
      const std::int64_t to = first + block.count;
      bool any = !placed;
      for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        const std::int32_t place = layers[layer].at(ids[static_cast<std::size_t>(i)]);
        places_[layer][to] = place;
        block.counts[layer] += place >= 0;
        any = any || place >= 0;
      }
      node_[to] = static_cast<std::int32_t>(i);
      block.count += any;
    }
  }

  template <class F>
  void each_block(F&& f) const {
    parallel_blocks(static_cast<std::int64_t>(blocks_.size()), [&](std::int64_t block) {
      f(blocks_[static_cast<std::size_t>(block)], block * kGrain);
    });
  }

  PageScratch<std::int32_t> node_;                // without gaps within each block
  std::vector<PageScratch<std::int32_t>> places_;  // likewise, per layer
  std::vector<Block> blocks_;
  std::int64_t count_ = 0;
  std::vector<std::int64_t> counts_;
};

}  // namespace joestar
