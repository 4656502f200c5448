#pragma once
// Dropout masks as bits: 32 columns of a row per word, each bit set with probability q / 2^24. A bit is a function of
// (key, row, column) alone; one draw of 32 random bits per binary digit of q, so that a half needs one draw.

#include <algorithm>
#include <bit>

#include "joestar/hash.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

constexpr int kKeepDigits = 24;

// Probability q / 2^24 of keeping an entry (0 < q < 2^24), and the 32-bit words that a row needs.
struct KeepMask {
  std::uint32_t q;
  std::int64_t words;
};

namespace detail {

constexpr int kMaskLanes = 64;                   // rows drawn together
constexpr std::int64_t kMaskGrain = 16384;       // words per block of work

// Hash states of rows drawn together, one lane each, so that everything below runs as vector instructions.
struct MaskBatch {
  alignas(64) std::uint32_t a[kMaskLanes];
  alignas(64) std::uint32_t b[kMaskLanes];
  alignas(64) std::uint32_t low[kMaskLanes];
  alignas(64) std::uint32_t high[kMaskLanes];
};

// States of the rows with ids (low, high).
JOESTAR_CLONES inline void hash_mask_rows(HashState key, MaskBatch& batch) {
  for (int lane = 0; lane < kMaskLanes; ++lane) {
    HashState state = key;
    state.absorb(batch.low[lane]);
    state.absorb(batch.high[lane]);
    batch.a[lane] = state.a;
    batch.b[lane] = state.b;
  }
}

// States of edges: those of their rows, with the rank (in low) absorbed.
JOESTAR_CLONES inline void hash_mask_edges(MaskBatch& batch) {
  for (int lane = 0; lane < kMaskLanes; ++lane) {
    HashState state{batch.a[lane], batch.b[lane]};
    state.absorb(batch.low[lane]);
    batch.a[lane] = state.a;
    batch.b[lane] = state.b;
  }
}

// out[lane * words + w] for the first `lanes` rows. A random word compared with q digit by digit, the least
// significant first: m is the comparison of the digits so far, 32 columns at once.
JOESTAR_CLONES inline void keep_bits(const MaskBatch& batch, KeepMask mask, int lanes, std::uint32_t* out) {
  const int lowest = std::countr_zero(mask.q);
  for (std::int64_t w = 0; w < mask.words; ++w) {
    alignas(64) std::uint32_t m[kMaskLanes] = {};
    for (int i = lowest; i < kKeepDigits; ++i) {
      const auto j = static_cast<std::uint32_t>(w * 32 + i);
      if ((mask.q >> i & 1U) != 0) {
        for (int lane = 0; lane < kMaskLanes; ++lane) m[lane] |= draw(batch.a[lane], batch.b[lane], j);
      } else {
        for (int lane = 0; lane < kMaskLanes; ++lane) m[lane] &= draw(batch.a[lane], batch.b[lane], j);
      }
    }
    if (mask.words == 1) {
      std::copy_n(m, lanes, out);
    } else {
      for (int lane = 0; lane < lanes; ++lane) out[lane * mask.words + w] = m[lane];
    }
  }
}

inline std::int64_t mask_grain(std::int64_t words) {
  return kMaskLanes * std::max<std::int64_t>(1, kMaskGrain / (kMaskLanes * std::max<std::int64_t>(1, words)));
}

}  // namespace detail

// out [rows, words]: the mask of the rows with these ids.
template <IdType Id>
void dropout_bits(std::span<const Id> ids, const SampleKey& key, KeepMask mask, std::uint32_t* out) {
  const HashState state = key_state(key);
  const std::int64_t rows = static_cast<std::int64_t>(ids.size());
  parallel_ranges(rows, detail::mask_grain(mask.words), [&](std::int64_t first, std::int64_t last) {
    detail::MaskBatch batch;
    for (std::int64_t base = first; base < last; base += detail::kMaskLanes) {
      const int lanes = static_cast<int>(std::min<std::int64_t>(detail::kMaskLanes, last - base));
      for (int lane = 0; lane < detail::kMaskLanes; ++lane) {
        const std::int64_t id = ids[static_cast<std::size_t>(base + std::min(lane, lanes - 1))];
        batch.low[lane] = low_word(id);
        batch.high[lane] = high_word(id);
      }
      detail::hash_mask_rows(state, batch);
      detail::keep_bits(batch, mask, lanes, out + base * mask.words);
    }
  });
}

// out [edges, words]: the mask of edges, which are known by (destination's id, rank in its row). Edges behind the last
// count as the following ones of row 0.
template <IdType Id>
void edge_dropout_bits(std::span<const std::int64_t> indptr, std::int64_t edges, std::span<const Id> dsts,
                       const SampleKey& key, KeepMask mask, std::uint32_t* out) {
  if (dsts.empty()) return std::fill_n(out, edges * mask.words, 0U);
  const HashState state = key_state(key);
  const std::int64_t valid = std::min(indptr.back(), edges);
  parallel_ranges(edges, detail::mask_grain(mask.words), [&](std::int64_t first, std::int64_t last) {
    detail::MaskBatch batch{};
    std::int64_t row = std::upper_bound(indptr.begin(), indptr.end(), first) - indptr.begin() - 1;
    if (first >= valid) row = 0;
    HashState of_row = row_state(state, dsts[static_cast<std::size_t>(row)]);
    for (std::int64_t base = first; base < last; base += detail::kMaskLanes) {
      const int lanes = static_cast<int>(std::min<std::int64_t>(detail::kMaskLanes, last - base));
      for (int lane = 0; lane < lanes; ++lane) {
        const std::int64_t e = base + lane, before = row;
        if (e >= valid) {
          row = 0;
        } else {
          while (indptr[static_cast<std::size_t>(row) + 1] <= e) ++row;
        }
        if (row != before) of_row = row_state(state, dsts[static_cast<std::size_t>(row)]);
        batch.a[lane] = of_row.a;
        batch.b[lane] = of_row.b;
        batch.low[lane] = low_word(e - indptr[static_cast<std::size_t>(row)]);
      }
      detail::hash_mask_edges(batch);
      detail::keep_bits(batch, mask, lanes, out + base * mask.words);
    }
  });
}

}  // namespace joestar
