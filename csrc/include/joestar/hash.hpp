#pragma once
// The counter-based hash behind every random choice: the same bits in C++, in the PyTorch reference and on the GPU.

#include <cstdint>

#include "joestar/core.hpp"

namespace joestar {

// A full-avalanche mixer of 32 bits (constants found by hash-prospector's search).
JOESTAR_INLINE std::uint32_t mix32(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x21f0aaadU;
  x ^= x >> 15;
  x *= 0x735a2d97U;
  x ^= x >> 15;
  return x;
}

// 64 bits of hash state in two independent halves.
struct HashState {
  std::uint32_t a = 0x243F6A88U;
  std::uint32_t b = 0x85A308D3U;

  JOESTAR_INLINE void absorb(std::uint32_t word) {
    a = mix32((a ^ word) + 0x9E3779B9U);
    b = mix32((b ^ word) + 0x7F4A7C15U);
  }
};

JOESTAR_INLINE std::uint32_t low_word(std::int64_t x) { return static_cast<std::uint32_t>(x); }
JOESTAR_INLINE std::uint32_t high_word(std::int64_t x) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x) >> 32);
}

// Where in a run a choice is made.
struct SampleKey {
  std::int64_t seed, epoch, step, site;
};

inline HashState key_state(const SampleKey& key) {
  HashState state;
  for (std::uint32_t word : {low_word(key.seed), high_word(key.seed), low_word(key.epoch), low_word(key.step),
                             high_word(key.step), low_word(key.site)}) {
    state.absorb(word);
  }
  return state;
}

JOESTAR_INLINE HashState row_state(HashState key, std::int64_t node) {
  key.absorb(low_word(node));
  key.absorb(high_word(node));
  return key;
}

// What nodes hash as: themselves, or their entries in a table of ids of either width.
struct NodeKeys {
  const std::int32_t* narrow = nullptr;
  const std::int64_t* wide = nullptr;

  JOESTAR_INLINE std::int64_t operator()(std::int64_t node) const {
    if (narrow != nullptr) return narrow[node];
    return wide != nullptr ? wide[node] : node;
  }
};

// The j-th random word of a row.
JOESTAR_INLINE std::uint32_t draw(std::uint32_t a, std::uint32_t b, std::uint32_t j) {
  return mix32(mix32(a ^ (j * 0x9E3779B9U)) + b);
}

// A random word scaled to [0, n), n < 2^31.
JOESTAR_INLINE std::uint32_t bounded(std::uint32_t r, std::uint32_t n) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(r) * n) >> 32);
}

}  // namespace joestar
