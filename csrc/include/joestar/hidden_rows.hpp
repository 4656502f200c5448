#pragma once
// Hidden rows that a macro-batch reads from their table (thesis 5.2.2): those that were pushed, and not too long ago,
// are copied, the others are 0; in one pass over what is asked for.

#include "joestar/rows.hpp"

namespace joestar {

// Rows that were never pushed, or have none; that are over the bound; the sum and the largest of the others' ages.
struct HiddenCounts {
  std::int64_t missing = 0, too_old = 0, ages = 0, oldest = 0;

  friend HiddenCounts operator+(const HiddenCounts& a, const HiddenCounts& b) {
    return {a.missing + b.missing, a.too_old + b.too_old, a.ages + b.ages, std::max(a.oldest, b.oldest)};
  }
};

// out[i] = table[rows[i]] where known[i] and that row's stamp is `now - age` with an age of at most `max_age` (negative:
// no bound), else 0. usable[i] says which; age[i] is -1 without a stamp, which is negative itself.
template <IdType Id>
HiddenCounts pull_hidden(RowTable table, std::span<const std::int32_t> stamps, std::span<const Id> rows,
                         std::span<const std::uint8_t> known, std::int32_t now, std::int32_t max_age, RowTable out,
                         std::span<std::uint8_t> usable, std::span<std::int32_t> age) {
  const auto n = static_cast<std::int64_t>(rows.size());
  const std::int64_t ahead = detail::rows_ahead(table.bytes), grain = detail::rows_per_block(table.bytes);
  std::vector<HiddenCounts> found(static_cast<std::size_t>(num_blocks(n, grain)));
  const auto expect = [&](std::int64_t i) {
    const auto at = static_cast<std::size_t>(i);
    if (!known[at]) return;
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
      const char* row = known[at] ? table.row(rows[at]) : nullptr;
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

}  // namespace joestar
