#include <numeric>
#include <stdexcept>

#include "check.hpp"
#include "joestar/hidden_rows.hpp"
#include "joestar/place.hpp"
#include "joestar/rows.hpp"

using namespace joestar;

namespace {

template <class T>
RowTable table_of(std::vector<T>& values, std::int64_t width) {
  return {reinterpret_cast<char*>(values.data()), static_cast<std::int64_t>(values.size()) / width,
          width * static_cast<std::int64_t>(sizeof(T))};
}

std::vector<std::int32_t> random_ids(std::int64_t count, std::int64_t below, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  for (auto& id : ids) id = static_cast<std::int32_t>(random() % static_cast<unsigned>(below));
  return ids;
}

std::vector<std::int64_t> shuffled(std::int64_t count, unsigned seed) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

void rows_move() {
  for (std::int64_t width : {1, 5, 128, 3000}) {
    auto table = test::random_values<float>(300 * width, 1);
    const auto ids = random_ids(700, 300, 2);
    const auto slots = shuffled(800, 3);
    const auto gathered = test::for_thread_counts([&] {
      std::vector<float> out(static_cast<std::size_t>(700 * width), 9.0f);
      gather_rows<std::int32_t>(table_of(table, width), ids, table_of(out, width));
      return out;
    });
    const auto filled = test::for_thread_counts([&] {
      std::vector<float> out(static_cast<std::size_t>(800 * width), 9.0f);
      fill_rows<std::int32_t, std::int64_t>(table_of(table, width), ids, std::span(slots).first(700),
                                            table_of(out, width));
      return out;
    });
    bool right = true;
    for (std::size_t i = 0; i < 700; ++i) {
      for (std::size_t c = 0; c < static_cast<std::size_t>(width); ++c) {
        const float value = table[static_cast<std::size_t>(ids[i]) * static_cast<std::size_t>(width) + c];
        right = right && gathered[i * static_cast<std::size_t>(width) + c] == value &&
                filled[static_cast<std::size_t>(slots[i]) * static_cast<std::size_t>(width) + c] == value;
      }
    }
    CHECK(right);
  }
}

void cached_rows_come_from_the_cache() {
  auto table = test::random_values<float>(200 * 7, 1), cache = test::random_values<float>(20 * 7, 2);
  std::vector<std::int32_t> slot_of(200, -1);
  for (std::size_t slot = 0; slot < 20; ++slot) slot_of[slot * 9] = static_cast<std::int32_t>(slot);
  const auto ids = random_ids(900, 200, 3);
  std::vector<float> out(900 * 7);
  gather_cached<std::int32_t>(table_of(table, 7), table_of(cache, 7), slot_of, ids, table_of(out, 7));
  bool right = true;
  for (std::size_t i = 0; i < 900; ++i) {
    const auto id = static_cast<std::size_t>(ids[i]);
    const float* row = slot_of[id] < 0 ? &table[id * 7] : &cache[static_cast<std::size_t>(slot_of[id]) * 7];
    for (std::size_t c = 0; c < 7; ++c) right = right && out[i * 7 + c] == row[c];
  }
  CHECK(right);
}

void rows_that_are_not_there() {
  std::vector<float> table(12), out(12);
  const std::vector<std::int32_t> ids{0, 4}, fine{0, 1}, negative{0, -1};
  CHECK(test::throws([&] { gather_rows<std::int32_t>(table_of(table, 3), ids, table_of(out, 3)); }));
  CHECK(test::throws([&] { gather_rows<std::int32_t>(table_of(table, 3), negative, table_of(out, 3)); }));
  CHECK(test::throws([&] { fill_rows<std::int32_t, std::int32_t>(table_of(table, 3), fine, ids, table_of(out, 3)); }));
}

void hidden_rows_by_age() {
  constexpr std::int64_t width = 9;
  auto table = test::random_values<float>(500 * width, 1);
  std::vector<std::int32_t> stamps(500);
  for (std::size_t row = 0; row < 500; ++row) stamps[row] = static_cast<std::int32_t>(row % 8) - 1;
  const auto rows = random_ids(70000, 500, 2);
  std::vector<std::uint8_t> known(rows.size(), 1);
  for (std::size_t i = 0; i < rows.size(); i += 11) known[i] = 0;
  for (std::int32_t max_age : {-1, 0, 3}) {
    const auto [out, usable, age, counts] = test::for_thread_counts([&] {
      std::vector<float> values(rows.size() * width, 9.0f);
      std::vector<std::uint8_t> flags(rows.size(), 7);
      std::vector<std::int32_t> ages(rows.size(), 7);
      const auto c = pull_hidden<std::int32_t>(table_of(table, width), stamps, rows, known, 6, max_age,
                                               table_of(values, width), flags, ages);
      return std::tuple(values, flags, ages, std::vector<std::int64_t>{c.missing, c.too_old, c.ages, c.oldest});
    });
    bool right = true;
    std::vector<std::int64_t> expected(4, 0);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto row = static_cast<std::size_t>(rows[i]);
      const std::int32_t stamp = known[i] ? stamps[row] : -1, old = stamp < 0 ? -1 : 6 - stamp;
      const bool fresh = stamp >= 0 && (max_age < 0 || old <= max_age);
      expected[0] += stamp < 0;
      expected[1] += stamp >= 0 && !fresh;
      expected[2] += fresh ? old : 0;
      expected[3] = std::max<std::int64_t>(expected[3], fresh ? old : 0);
      right = right && usable[i] == fresh && age[i] == old;
      for (std::size_t c = 0; c < width; ++c) {
        right = right && out[i * width + c] == (fresh ? table[row * width + c] : 0.0f);
      }
    }
    CHECK(right);
    CHECK(counts == expected);
  }
  std::vector<float> one(width), to(width);
  std::vector<std::int32_t> stamp{0}, there{0}, beyond{1}, ages(1);
  std::vector<std::uint8_t> yes{1}, no{0}, flags(1);
  const auto pull = [&](const std::vector<std::int32_t>& wanted, const std::vector<std::uint8_t>& which) {
    pull_hidden<std::int32_t>(table_of(one, width), stamp, wanted, which, 0, -1, table_of(to, width), flags, ages);
  };
  CHECK(!test::throws([&] { pull(there, yes); }) && flags[0] == 1);
  CHECK(!test::throws([&] { pull(beyond, no); }) && flags[0] == 0);
  CHECK(test::throws([&] { pull(beyond, yes); }));
}

void hidden_rows_are_written_and_what_was_there_is_kept() {
  constexpr std::int64_t width = 9, count = 90000;
  const auto table = test::random_values<float>(count * width, 1);
  auto values = test::random_values<float>(count * width, 2);
  std::vector<std::int32_t> stamps(count), rows(count);
  std::vector<std::uint8_t> stored(count);
  for (std::int32_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    stamps[at] = i % 5 - 1;
    rows[at] = static_cast<std::int32_t>(std::int64_t{i} * 7919 % count);  // every row once
    stored[at] = i % 3 != 0;
  }
  const auto [to, told, old, old_told, number] = test::for_thread_counts([&] {
    auto written = table;
    auto times = stamps;
    std::vector<float> before(table.size(), 9.0f);
    std::vector<std::int32_t> since(count, 9);
    const auto n = push_hidden<std::int32_t>(table_of(written, width), times, rows, stored, 6, table_of(values, width),
                                             Replaced{table_of(before, width), since});
    return std::tuple(written, times, before, since, n);
  });
  auto expected = table;
  auto times = stamps;
  std::int64_t n = 0;
  bool right = true;
  for (std::size_t i = 0; i < count; ++i) {
    const auto row = static_cast<std::size_t>(rows[i]);
    right = right && old_told[i] == (stored[i] ? stamps[row] : -1);
    for (std::size_t c = 0; c < width; ++c) {
      right = right && old[i * width + c] == (stored[i] ? table[row * width + c] : 0.0f);
      if (stored[i]) expected[row * width + c] = values[i * width + c];
    }
    if (stored[i]) times[row] = 6;
    n += stored[i];
  }
  CHECK(right);
  CHECK(to == expected);
  CHECK(told == times);
  CHECK(number == n);

  auto written = table;
  auto wrong = rows;
  wrong[50000] = count;
  stored[50000] = 1;
  CHECK(test::throws([&] {
    push_hidden<std::int32_t>(table_of(written, width), times, wrong, stored, 7, table_of(values, width), std::nullopt);
  }));
  CHECK(written == table);  // nothing was written
  stored[50000] = 0;
  push_hidden<std::int32_t>(table_of(written, width), times, wrong, stored, 6, table_of(values, width), std::nullopt);
}

void rows_that_stand_twice() {
  std::vector<std::int64_t> rows(100000);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int64_t>(i);
  std::vector<std::uint8_t> stored(rows.size(), 1);
  std::vector<std::int32_t> place(rows.size(), 3);
  const auto found = [&] { return row_twice<std::int64_t>(rows, stored, place); };
  CHECK(found() == -1);
  rows[70000] = rows[30];
  const auto at = found();
  CHECK(at == 30 || at == 70000);
  stored[30] = 0;
  CHECK(found() == -1);
  rows[5] = 100000;
  CHECK(test::throws(found));
  stored[5] = 0;
  CHECK(found() == -1);
}

void structure_among_slots() {
  auto graph = test::random_graph<std::int32_t>(3000, 4000, 6, 4);
  const auto order = shuffled(5000, 5);
  const auto slots = std::span(order).first(4000);
  const auto [indptr, indices] = test::for_thread_counts([&] {
    std::vector<std::int64_t> offsets(5001, 7);
    std::vector<std::int32_t> sources(graph.indices.size() + 3, 7);
    place_structure<std::int32_t, std::int64_t, std::int32_t>(graph.csc(), slots, slots, offsets, sources);
    return std::pair(offsets, sources);
  });
  bool right = indptr[0] == 0 && indptr[5000] == graph.indptr.back();
  for (std::size_t i = 0; i < 3000; ++i) {
    const auto slot = static_cast<std::size_t>(slots[i]);
    const auto begin = graph.indptr[i], degree = graph.indptr[i + 1] - begin;
    right = right && indptr[slot + 1] - indptr[slot] == degree;
    for (std::int64_t j = 0; right && j < degree; ++j) {
      const auto source = graph.indices[static_cast<std::size_t>(begin + j)];
      right = indices[static_cast<std::size_t>(indptr[slot] + j)] == slots[static_cast<std::size_t>(source)];
    }
  }
  CHECK(right);
  for (std::size_t e = graph.indices.size(); e < indices.size(); ++e) CHECK(indices[e] == 0);
  std::vector<std::int64_t> twice(4000, 1), offsets(5001);
  std::vector<std::int32_t> sources(graph.indices.size());
  CHECK(test::throws([&] {
    place_structure<std::int32_t, std::int64_t, std::int32_t>(graph.csc(), twice, twice, offsets, sources);
  }));
}

void values_of_rows_are_added_at_sources() {
  auto graph = test::random_graph<std::int32_t>(2000, 300, 6, 6);
  std::vector<std::int64_t> value(2000);
  for (std::size_t i = 0; i < 2000; ++i) value[i] = static_cast<std::int64_t>(i % 3) << 40;
  std::vector<std::int64_t> expected(300, 1);
  for (std::size_t i = 0; i < 2000; ++i) {
    for (auto e = graph.indptr[i]; e < graph.indptr[i + 1]; ++e) {
      expected[static_cast<std::size_t>(graph.indices[static_cast<std::size_t>(e)])] += value[i];
    }
  }
  const auto got = test::for_thread_counts([&] {
    std::vector<std::int64_t> out(300, 1);
    add_row_values<std::int32_t>(graph.csc(), value, out);
    return out;
  });
  CHECK(got == expected);
}

}  // namespace

int main() {
  set_num_threads(4);
  rows_move();
  cached_rows_come_from_the_cache();
  rows_that_are_not_there();
  hidden_rows_by_age();
  hidden_rows_are_written_and_what_was_there_is_kept();
  rows_that_stand_twice();
  structure_among_slots();
  values_of_rows_are_added_at_sources();
  return report("store");
}
