#pragma once
// Sets of nodes as bitmaps, and local ids by rank: a third of a byte per node for both, so that looking up the local id
// of a node of a hundred-million-node graph stays within the last-level cache.

#include <atomic>
#include <bit>

#include "joestar/pages.hpp"

namespace joestar {

constexpr std::int64_t kLineWords = 3;                // words of a bitmap that a line of NodeNumbers covers
constexpr std::int64_t kLineNodes = 64 * kLineWords;  // nodes of a line
constexpr std::int64_t kWordGrain = 3 * 2048;         // words per block of work: whole lines

// A set of nodes in [0, num_nodes), one bit each, in whole lines.
class NodeBits {
 public:
  explicit NodeBits(std::int64_t num_nodes) : words_((num_nodes + kLineNodes - 1) / kLineNodes * kLineWords) {
    words_.fill(0);
  }

  std::int64_t num_words() const { return words_.size(); }
  std::uint64_t* words() const { return words_.data(); }

  JOESTAR_INLINE void touch(std::int64_t node) const { __builtin_prefetch(&words_[node >> 6], 1, 3); }

  // From any thread.
  JOESTAR_INLINE void insert(std::int64_t node) const {
    std::atomic_ref<std::uint64_t> word(words_[node >> 6]);
    const std::uint64_t bit = std::uint64_t{1} << (node & 63);
    if ((word.load(std::memory_order_relaxed) & bit) == 0) word.fetch_or(bit, std::memory_order_relaxed);
  }

  template <IdType Id>
  void insert_all(std::span<const Id> nodes) const {
    const auto n = static_cast<std::int64_t>(nodes.size());
    parallel_for(n, 8192, [&](std::int64_t i) {
      touch(nodes[static_cast<std::size_t>(std::min(i + 16, n - 1))]);
      insert(nodes[static_cast<std::size_t>(i)]);
    });
  }

 private:
  PageScratch<std::uint64_t> words_;
};

namespace detail {

JOESTAR_CLONES inline std::int64_t count_bits(const std::uint64_t* words, std::int64_t n) {
  std::int64_t count = 0;
  for (std::int64_t w = 0; w < n; ++w) count += std::popcount(words[w]);
  return count;
}

// fresh &= ~known; known |= fresh; returns what is left of fresh.
JOESTAR_CLONES inline std::int64_t keep_fresh(std::uint64_t* JOESTAR_RESTRICT fresh,
                                              std::uint64_t* JOESTAR_RESTRICT known, std::int64_t n) {
  std::int64_t count = 0;
  for (std::int64_t w = 0; w < n; ++w) {
    fresh[w] &= ~known[w];
    known[w] |= fresh[w];
    count += std::popcount(fresh[w]);
  }
  return count;
}

template <class T>
void write_members(const std::uint64_t* words, std::int64_t first, std::int64_t last, T* out) {
  for (std::int64_t w = first; w < last; ++w) {
    for (std::uint64_t left = words[w]; left != 0; left &= left - 1) {
      *out++ = static_cast<T>(w * 64 + std::countr_zero(left));
    }
  }
}

// Number of members before each block of words, and behind the last of all.
template <class Count>
std::vector<std::int64_t> block_bases(std::int64_t words, Count&& count) {
  const std::int64_t blocks = num_blocks(words, kWordGrain);
  std::vector<std::int64_t> base(static_cast<std::size_t>(blocks) + 1, 0);
  parallel_blocks(blocks, [&](std::int64_t block) {
    const std::int64_t first = block * kWordGrain, last = std::min(words, first + kWordGrain);
    base[static_cast<std::size_t>(block) + 1] = count(first, last);
  });
  for (std::size_t block = 1; block < base.size(); ++block) base[block] += base[block - 1];
  return base;
}

}  // namespace detail

// The members that are not known yet, ascending; then they are known, and `fresh` holds only them.
template <IdType Id>
PageScratch<Id> take_fresh(const NodeBits& fresh, const NodeBits& known) {
  const std::vector<std::int64_t> base =
      detail::block_bases(fresh.num_words(), [&](std::int64_t first, std::int64_t last) {
        return detail::keep_fresh(fresh.words() + first, known.words() + first, last - first);
      });
  PageScratch<Id> members(base.back());
  parallel_ranges(fresh.num_words(), kWordGrain, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t before = base[static_cast<std::size_t>(first / kWordGrain)];
    detail::write_members(fresh.words(), first, last, members.data() + before);
  });
  return members;
}

// Takes the members of `known` out of `set`.
inline void subtract(const NodeBits& set, const NodeBits& known) {
  parallel_for(set.num_words(), kWordGrain, [&](std::int64_t w) { set.words()[w] &= ~known.words()[w]; });
}

// One cache line: which of 192 nodes are rows (set 0) and which are leaves (set 1), and the local id of the first of
// either.
struct alignas(64) NodeLine {
  std::uint64_t set[2][kLineWords];
  std::uint32_t first[2];
};

namespace detail {

// Without a branch: neither the set nor the word of a node can be predicted.
JOESTAR_INLINE std::int32_t local_id(const NodeLine* lines, std::uint64_t node) {
  const NodeLine& line = lines[node / kLineNodes];
  const std::uint64_t at = node % kLineNodes, word = at / 64;
  const std::uint64_t below = (std::uint64_t{1} << at % 64) - 1;
  const std::uint64_t side = 1 ^ (line.set[0][word] >> at % 64 & 1);
  const std::uint64_t* words = line.set[side];
  int rank = 0;
  for (std::uint64_t w = 0; w < kLineWords; ++w) {
    const std::uint64_t whole = -static_cast<std::uint64_t>(w < word), part = -static_cast<std::uint64_t>(w == word);
    rank += std::popcount(words[w] & (whole | (part & below)));
  }
  return static_cast<std::int32_t>(line.first[side]) + rank;
}

constexpr std::int64_t kNumberAhead = 24;

template <IdType Id>
JOESTAR_INLINE void local_ids_of(const NodeLine* lines, const Id* nodes, std::int64_t n, std::int32_t* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    prefetch(&lines[static_cast<std::uint64_t>(nodes[std::min(i + kNumberAhead, n - 1)]) / kLineNodes]);
    out[i] = local_id(lines, static_cast<std::uint64_t>(nodes[i]));
  }
}

JOESTAR_CLONES inline void local_ids(const NodeLine* lines, const std::int32_t* nodes, std::int64_t n,
                                     std::int32_t* out) {
  local_ids_of(lines, nodes, n, out);
}
JOESTAR_CLONES inline void local_ids(const NodeLine* lines, const std::int64_t* nodes, std::int64_t n,
                                     std::int32_t* out) {
  local_ids_of(lines, nodes, n, out);
}

// Lines of the words [first, last), whose first row and leaf have these local ids.
JOESTAR_CLONES inline void fill_lines(const std::uint64_t* rows, const std::uint64_t* leaves, std::int64_t first,
                                      std::int64_t last, std::int64_t row, std::int64_t leaf, NodeLine* lines) {
  for (std::int64_t w = first; w < last; w += kLineWords) {
    NodeLine& line = lines[w / kLineWords];
    line.first[0] = static_cast<std::uint32_t>(row);
    line.first[1] = static_cast<std::uint32_t>(leaf);
    for (std::int64_t i = 0; i < kLineWords; ++i) {
      line.set[0][i] = rows[w + i];
      line.set[1][i] = leaves[w + i];
      row += std::popcount(rows[w + i]);
      leaf += std::popcount(leaves[w + i]);
    }
  }
}

}  // namespace detail

// Local ids: the rows ascending, then the leaves ascending. The sets must have no member in common.
class NodeNumbers {
 public:
  NodeNumbers(const NodeBits& rows, const NodeBits& leaves)
      : row_base_(bases(rows)), leaf_base_(bases(leaves)), lines_(rows.num_words() / kLineWords) {
    parallel_ranges(rows.num_words(), kWordGrain, [&](std::int64_t first, std::int64_t last) {
      const auto block = static_cast<std::size_t>(first / kWordGrain);
      detail::fill_lines(rows.words(), leaves.words(), first, last, row_base_[block], num_rows() + leaf_base_[block],
                         lines_.data());
    });
  }

  std::int64_t num_rows() const { return row_base_.back(); }
  std::int64_t num_leaves() const { return leaf_base_.back(); }
  const NodeLine* lines() const { return lines_.data(); }

  // out = local ids of nodes of either set.
  template <IdType Id>
  void look_up(std::span<const Id> nodes, std::int32_t* out) const {
    parallel_ranges(static_cast<std::int64_t>(nodes.size()), 16384, [&](std::int64_t first, std::int64_t last) {
      detail::local_ids(lines(), nodes.data() + first, last - first, out + first);
    });
  }

  // ids = the node of every local id; the sets are those that the numbers are of.
  template <IdType Id>
  void write_ids(const NodeBits& rows, const NodeBits& leaves, Id* ids) const {
    parallel_ranges(rows.num_words(), kWordGrain, [&](std::int64_t first, std::int64_t last) {
      const auto block = static_cast<std::size_t>(first / kWordGrain);
      detail::write_members(rows.words(), first, last, ids + row_base_[block]);
      detail::write_members(leaves.words(), first, last, ids + num_rows() + leaf_base_[block]);
    });
  }

 private:
  static std::vector<std::int64_t> bases(const NodeBits& set) {
    return detail::block_bases(set.num_words(), [&](std::int64_t first, std::int64_t last) {
      return detail::count_bits(set.words() + first, last - first);
    });
  }

  std::vector<std::int64_t> row_base_, leaf_base_;
  PageScratch<NodeLine> lines_;
};

}  // namespace joestar
