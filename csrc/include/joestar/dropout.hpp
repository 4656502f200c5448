#pragma once
// Dropout masks as bits: 32 columns of a row per word, each bit set with probability q / 2^24. A bit is a function of
// (key, row, column) alone; one draw of 32 random bits per binary digit of q, so that a half needs one draw.

#include <algorithm>
#include <bit>
#include <type_traits>

#include "joestar/float16.hpp"
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
  if (dsts.empty()) {
    std::fill_n(out, edges * mask.words, 0U);
    return;
  }
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

namespace detail {

constexpr int kColumnsTogether = 64;

// x where `kept` is 1, +0 where it is 0: no branch, which masks would make a coin toss.
template <class T>
JOESTAR_INLINE T kept_or_zero(T x, std::uint32_t kept) {
  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  const auto mask = static_cast<Bits>(Bits{0} - static_cast<Bits>(kept));
  return std::bit_cast<T>(static_cast<Bits>(std::bit_cast<Bits>(x) & mask));
}

// Where the mask of a column is: bit c / W of word c % W of a row's W words. With columns taken `kColumnsTogether` at a
// time, and W a divisor of that and known, every lane has a word of its own and a shift that grows by the same amount.
template <bool Gated, class T>
JOESTAR_INLINE T masked(T x, T gate, std::uint32_t word, std::uint32_t shift, Accumulator<T> scale) {
  using A = Accumulator<T>;
  std::uint32_t kept = word >> shift & 1U;
  if constexpr (Gated) kept &= static_cast<std::uint32_t>(!(load(gate) <= A{0}));  // NaN passes ReLU
  return kept_or_zero(store<T>(load(x) * scale), kept);
}

// The first columns of a row, `kColumnsTogether` at a time, where a row has kWords words; returns their number.
template <bool Gated, int kWords, class T>
JOESTAR_INLINE std::int64_t mask_together(const T* JOESTAR_RESTRICT x, const std::uint32_t* JOESTAR_RESTRICT bits,
                                          const T* JOESTAR_RESTRICT gate, std::int64_t columns, Accumulator<T> scale,
                                          T* JOESTAR_RESTRICT y) {
  alignas(64) std::uint32_t word[kColumnsTogether];
  for (int lane = 0; lane < kColumnsTogether; ++lane) word[lane] = bits[lane % kWords];
  std::int64_t first = 0;
  for (std::uint32_t before = 0; first + kColumnsTogether <= columns; before += kColumnsTogether / kWords) {
    for (int lane = 0; lane < kColumnsTogether; ++lane) {
      y[first + lane] = masked<Gated>(x[first + lane], Gated ? gate[first + lane] : x[first + lane], word[lane],
                                      static_cast<std::uint32_t>(lane / kWords) + before, scale);
    }
    first += kColumnsTogether;
  }
  return first;
}

template <bool Gated, class T>
JOESTAR_INLINE void mask_row(const T* JOESTAR_RESTRICT x, const std::uint32_t* JOESTAR_RESTRICT bits,
                             const T* JOESTAR_RESTRICT gate, std::int64_t columns, std::int64_t words,
                             Accumulator<T> scale, T* JOESTAR_RESTRICT y) {
  std::int64_t first = 0;
  switch (words) {
    case 2: first = mask_together<Gated, 2>(x, bits, gate, columns, scale, y); break;
    case 4: first = mask_together<Gated, 4>(x, bits, gate, columns, scale, y); break;
    case 8: first = mask_together<Gated, 8>(x, bits, gate, columns, scale, y); break;
    case 16: first = mask_together<Gated, 16>(x, bits, gate, columns, scale, y); break;
    case 32: first = mask_together<Gated, 32>(x, bits, gate, columns, scale, y); break;
    default: break;
  }
  for (auto shift = static_cast<std::uint32_t>(first / words); first < columns; ++shift) {  // first % words is 0
    const std::int64_t last = std::min(columns, first + words);
    for (std::int64_t w = 0; first < last; ++w, ++first) {
      y[first] = masked<Gated>(x[first], Gated ? gate[first] : x[first], bits[w], shift, scale);
    }
  }
}

// Rows of a few columns, such as attention coefficients, as one run of entries: a word for every kColumns of them.
template <bool Gated, int kColumns, class T>
JOESTAR_CLONES void mask_narrow_rows(const T* JOESTAR_RESTRICT x, const std::uint32_t* JOESTAR_RESTRICT bits,
                                     const T* JOESTAR_RESTRICT gate, Accumulator<T> scale, T* JOESTAR_RESTRICT y,
                                     std::int64_t first, std::int64_t last) {
  for (std::int64_t i = first; i < last; ++i) {
    for (int c = 0; c < kColumns; ++c) {
      const std::int64_t j = i * kColumns + c;
      y[j] = masked<Gated>(x[j], Gated ? gate[j] : x[j], bits[i], static_cast<std::uint32_t>(c), scale);
    }
  }
}

template <bool Gated, class T>
JOESTAR_CLONES void mask_rows(const T* x, const std::uint32_t* bits, const T* gate, std::int64_t columns,
                              Accumulator<T> scale, T* y, std::int64_t first, std::int64_t last) {
  switch (columns) {
    case 1: return mask_narrow_rows<Gated, 1>(x, bits, gate, scale, y, first, last);
    case 2: return mask_narrow_rows<Gated, 2>(x, bits, gate, scale, y, first, last);
    case 4: return mask_narrow_rows<Gated, 4>(x, bits, gate, scale, y, first, last);
    case 8: return mask_narrow_rows<Gated, 8>(x, bits, gate, scale, y, first, last);
    default: break;
  }
  const std::int64_t words = (columns + 31) / 32;
  for (std::int64_t i = first; i < last; ++i) {
    mask_row<Gated>(x + i * columns, bits + i * words, Gated ? gate + i * columns : nullptr, columns, words, scale,
                    y + i * columns);
  }
}

}  // namespace detail

// y [rows, columns] = x where its bit is set (and `gate`, if there is one, is positive or NaN), times `scale`; else 0.
template <class T>
void dropout_apply(const T* x, const std::uint32_t* bits, const T* gate, std::int64_t rows, std::int64_t columns,
                   double scale, T* y) {
  const auto s = static_cast<Accumulator<T>>(scale);
  parallel_ranges(rows, std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, columns)),
                  [&](std::int64_t first, std::int64_t last) {
                    if (gate != nullptr) {
                      detail::mask_rows<true>(x, bits, gate, columns, s, y, first, last);
                    } else {
                      detail::mask_rows<false>(x, bits, gate, columns, s, y, first, last);
                    }
                  });
}

namespace detail {

template <class T>
JOESTAR_CLONES void scale_where_positive(const T* JOESTAR_RESTRICT grad, const T* JOESTAR_RESTRICT y,
                                         Accumulator<T> scale, T* JOESTAR_RESTRICT out, std::int64_t first,
                                         std::int64_t last) {
  using A = Accumulator<T>;
  for (std::int64_t i = first; i < last; ++i) {
    out[i] = kept_or_zero(store<T>(load(grad[i]) * scale), static_cast<std::uint32_t>(!(load(y[i]) <= A{0})));
  }
}

}  // namespace detail

// out [n] = grad * scale where y > 0 or NaN, else 0: the gradient of dropout_apply with relu, whose result was y.
template <class T>
void relu_dropout_grad(const T* grad, const T* y, std::int64_t n, double scale, T* out) {
  parallel_ranges(n, 32768, [&](std::int64_t first, std::int64_t last) {
    detail::scale_where_positive(grad, y, static_cast<Accumulator<T>>(scale), out, first, last);
  });
}

}  // namespace joestar
