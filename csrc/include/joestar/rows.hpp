#pragma once
// Rows of a table as plain bytes: gathered, scattered, or taken from one of two tables. The type of their numbers plays
// no part. Ids are checked: a row that is not there is an error, never a read of foreign memory.

#include <cstring>
#include <stdexcept>
#include <string>

#include "joestar/core.hpp"
#include "joestar/parallel.hpp"

namespace joestar {

// `count` rows of `bytes` bytes each.
struct RowTable {
  char* data;
  std::int64_t count, bytes;

  char* row(std::int64_t id) const {
    if (id < 0 || id >= count) {
      throw std::out_of_range("row " + std::to_string(id) + " of a table of " + std::to_string(count) + " rows");
    }
    return data + id * bytes;
  }
  // Asks for a row that will be copied soon.
  void expect(std::int64_t id) const {
    if (id < 0 || id >= count) return;
    for (std::int64_t offset = 0; offset < std::min<std::int64_t>(bytes, 1024); offset += 64) {
      prefetch(data + id * bytes + offset);
    }
  }
};

namespace detail {

inline std::int64_t rows_per_block(std::int64_t bytes) {
  return std::clamp<std::int64_t>((1 << 18) / (bytes + 1), 1, 4096);
}

// Rows to ask for ahead of the one being copied: some 4 KiB.
inline std::int64_t rows_ahead(std::int64_t bytes) { return std::clamp<std::int64_t>(4096 / (bytes + 1), 2, 16); }

// to(i) = from(i) for i in [0, n); expect(i) is called some rows before.
template <class From, class To, class Expect>
void copy_each(std::int64_t n, std::int64_t bytes, From from, To to, Expect expect) {
  const std::int64_t ahead = rows_ahead(bytes);
  parallel_ranges(n, rows_per_block(bytes), [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < std::min(first + ahead, last); ++i) expect(i);
    for (std::int64_t i = first; i < last; ++i) {
      if (i + ahead < last) expect(i + ahead);
      std::memcpy(to(i), from(i), static_cast<std::size_t>(bytes));
    }
  });
}

}  // namespace detail

// out[i] = table[ids[i]]
template <IdType Id>
void gather_rows(RowTable table, std::span<const Id> ids, RowTable out) {
  detail::copy_each(
      static_cast<std::int64_t>(ids.size()), table.bytes,
      [&](std::int64_t i) { return table.row(ids[static_cast<std::size_t>(i)]); },
      [&](std::int64_t i) { return out.row(i); },
      [&](std::int64_t i) { table.expect(ids[static_cast<std::size_t>(i)]); });
}

// out[slots[i]] = table[ids[i]]; no slot may occur twice.
template <IdType Id, IdType Slot>
void fill_rows(RowTable table, std::span<const Id> ids, std::span<const Slot> slots, RowTable out) {
  detail::copy_each(
      static_cast<std::int64_t>(ids.size()), table.bytes,
      [&](std::int64_t i) { return table.row(ids[static_cast<std::size_t>(i)]); },
      [&](std::int64_t i) { return out.row(slots[static_cast<std::size_t>(i)]); },
      [&](std::int64_t i) { table.expect(ids[static_cast<std::size_t>(i)]); });
}

// out[i] = cache[slot] where slot = slot_of[ids[i]] is not negative, else table[ids[i]]
template <IdType Id>
void gather_cached(RowTable table, RowTable cache, std::span<const std::int32_t> slot_of, std::span<const Id> ids,
                   RowTable out) {
  const auto source = [&](std::int64_t i) -> const char* {
    const auto id = static_cast<std::int64_t>(ids[static_cast<std::size_t>(i)]);
    const char* row = table.row(id);
    const std::int32_t slot = slot_of[static_cast<std::size_t>(id)];
    return slot < 0 ? row : cache.row(slot);
  };
  detail::copy_each(static_cast<std::int64_t>(ids.size()), table.bytes, source,
                    [&](std::int64_t i) { return out.row(i); }, [](std::int64_t) {});
}

}  // namespace joestar
