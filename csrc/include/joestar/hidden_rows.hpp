#pragma once
// Hidden rows of a macro-batch and their table (thesis 5.2.2), each in one pass over the rows. What is read: rows that
// were pushed, and not too long ago, are copied, the others are 0. What is pushed: rows are written, and what was there
// is kept, so that it can be put back.

#include <atomic>
#include <optional>

#include "joestar/rows.hpp"

namespace joestar {

// Rows that were never pushed, or have none; that are over the bound; the sum and the largest of the others' ages.
struct HiddenCounts {
  std::int64_t missing = 0, too_old = 0, ages = 0, oldest = 0;

  friend HiddenCounts operator+(const HiddenCounts& a, const HiddenCounts& b) {
    return {a.missing + b.missing, a.too_old + b.too_old, a.ages + b.ages, std::max(a.oldest, b.oldest)};
  }
};

// out[i] = table[rows[i]] where known[i] (all, if that is empty) and that row's stamp is `now - age` with an age of at most
// `max_age` (negative: no bound), else 0. usable[i] says which; age[i] is -1 without a stamp, which is negative itself.
template <IdType Id>
HiddenCounts pull_hidden(RowTable table, std::span<const std::int32_t> stamps, std::span<const Id> rows,
                         std::span<const std::uint8_t> known, std::int32_t now, std::int32_t max_age, RowTable out,
                         std::span<std::uint8_t> usable, std::span<std::int32_t> age) {
  const auto n = static_cast<std::int64_t>(rows.size());
  const std::int64_t ahead = detail::rows_ahead(table.bytes), grain = detail::rows_per_block(table.bytes);
  std::vector<HiddenCounts> found(static_cast<std::size_t>(num_blocks(n, grain)));
  const auto there = [&](std::size_t at) { return known.empty() || known[at] != 0; };
  const auto expect = [&](std::int64_t i) {
    const auto at = static_cast<std::size_t>(i);
    if (!there(at)) return;
    const auto row = static_cast<std::int64_t>(rows[at]);
    table.expect(row);
    if (row >= 0 && row < table.count) prefetch(stamps.data() + row);
  };
  parallel_ranges(n, grain, [&](std::int64_t first, std::int64_t last) {
    HiddenCounts counts;
    for (std::int64_t i = first; i < std::min(first + ahead, last); ++i) expect(i);
    for (std::int64_t i = first; i < last; ++i) {
      if (i + ahead < last) expect(i + ahead);
      const auto at = static_cast<std::size_t>(i);
      const char* row = there(at) ? table.row(rows[at]) : nullptr;
      const std::int32_t stamp = row == nullptr ? -1 : stamps[static_cast<std::size_t>(rows[at])];
      const std::int32_t old = stamp < 0 ? -1 : now - stamp;
      const bool fresh = stamp >= 0 && (max_age < 0 || old <= max_age);
      age[at] = old;
      usable[at] = fresh;
      if (fresh) {
        std::memcpy(out.row(i), row, static_cast<std::size_t>(table.bytes));
        counts = counts + HiddenCounts{0, 0, old, old};
      } else {
        std::memset(out.row(i), 0, static_cast<std::size_t>(table.bytes));
        ++(stamp < 0 ? counts.missing : counts.too_old);
      }
    }
    found[static_cast<std::size_t>(first / grain)] = counts;
  });
  HiddenCounts total;
  for (const HiddenCounts& counts : found) total = total + counts;
  return total;
}

// What a push writes over: rows and stamps, 0 and -1 where nothing is pushed.
struct Replaced {
  RowTable values;
  std::span<std::int32_t> stamps;
};

// table[rows[i]] = values[i] and its stamp `now` where stored[i], whose rows are distinct. How many these are.
template <IdType Id>
std::int64_t push_hidden(RowTable table, std::span<std::int32_t> stamps, std::span<const Id> rows,
                         std::span<const std::uint8_t> stored, std::int32_t now, RowTable values,
                         const std::optional<Replaced>& replaced) {
  const auto n = static_cast<std::int64_t>(rows.size());
  const auto bytes = static_cast<std::size_t>(table.bytes);
  const std::int64_t ahead = detail::rows_ahead(table.bytes), grain = detail::rows_per_block(table.bytes);
  std::vector<std::int64_t> found(static_cast<std::size_t>(num_blocks(n, grain)));
  const auto expect = [&](std::int64_t i) {
    const auto at = static_cast<std::size_t>(i);
    if (!stored[at]) return;
    const auto row = static_cast<std::int64_t>(rows[at]);
    table.expect(row);
    if (row >= 0 && row < table.count) prefetch(stamps.data() + row);
  };
  parallel_ranges(n, std::int64_t{1} << 16, [&](std::int64_t first, std::int64_t last) {  // before anything is written
    for (auto at = static_cast<std::size_t>(first); at < static_cast<std::size_t>(last); ++at) {
      if (stored[at]) table.row(rows[at]);
    }
  });
  parallel_ranges(n, grain, [&](std::int64_t first, std::int64_t last) {
    std::int64_t count = 0;
    for (std::int64_t i = first; i < std::min(first + ahead, last); ++i) expect(i);
    for (std::int64_t i = first; i < last; ++i) {
      if (i + ahead < last) expect(i + ahead);
      const auto at = static_cast<std::size_t>(i);
      if (!stored[at]) {
        if (replaced) {
          std::memset(replaced->values.row(i), 0, bytes);
          replaced->stamps[at] = -1;
        }
        continue;
      }
      char* row = table.row(rows[at]);
      std::int32_t& stamp = stamps[static_cast<std::size_t>(rows[at])];
      if (replaced) {
        std::memcpy(replaced->values.row(i), row, bytes);
        replaced->stamps[at] = stamp;
      }
      std::memcpy(row, values.row(i), bytes);
      stamp = now;
      ++count;
    }
    found[static_cast<std::size_t>(first / grain)] = count;
  });
  std::int64_t total = 0;
  for (const std::int64_t count : found) total += count;
  return total;
}

// The first i whose row another one has, too, of those that are stored; -1 if there is none. `place` has an entry per row,
// which may hold anything.
template <IdType Id>
std::int64_t row_twice(std::span<const Id> rows, std::span<const std::uint8_t> stored,
                       std::span<std::int32_t> place) {
  const auto n = static_cast<std::int64_t>(rows.size());
  constexpr std::int64_t kGrain = 1 << 14;
  const auto place_of = [&](std::size_t at) {
    const auto row = static_cast<std::int64_t>(rows[at]);
    if (row < 0 || row >= static_cast<std::int64_t>(place.size())) {
      throw std::out_of_range("row " + std::to_string(row) + " of a table of " + std::to_string(place.size()) + " rows");
    }
    return std::atomic_ref(place[static_cast<std::size_t>(row)]);
  };
  parallel_ranges(n, kGrain, [&](std::int64_t first, std::int64_t last) {
    for (auto at = static_cast<std::size_t>(first); at < static_cast<std::size_t>(last); ++at) {
      if (stored[at]) place_of(at).store(static_cast<std::int32_t>(at), std::memory_order_relaxed);
    }
  });
  std::vector<std::int64_t> found(static_cast<std::size_t>(num_blocks(n, kGrain)), -1);
  parallel_ranges(n, kGrain, [&](std::int64_t first, std::int64_t last) {
    for (auto at = static_cast<std::size_t>(first); at < static_cast<std::size_t>(last); ++at) {
      if (!stored[at] || place_of(at).load(std::memory_order_relaxed) == static_cast<std::int32_t>(at)) continue;
      found[static_cast<std::size_t>(first / kGrain)] = static_cast<std::int64_t>(at);
      return;
    }
  });
  for (const std::int64_t at : found) {
    if (at >= 0) return at;
  }
  return -1;
}

}  // namespace joestar
