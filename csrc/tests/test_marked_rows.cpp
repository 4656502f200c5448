#include "joestar/marked_rows.hpp"

#include <utility>

#include "check.hpp"

using namespace joestar;

namespace {

template <IdType Id>
struct Case {
  std::vector<Id> ids;
  std::vector<std::uint8_t> marks;
  std::vector<std::int32_t> some;
  std::vector<std::int16_t> hosts;

  explicit Case(std::int64_t n) : some(static_cast<std::size_t>(2 * n + 3), -1), hosts(some.size(), -1) {
    std::mt19937 random(static_cast<unsigned>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      ids.push_back(static_cast<Id>(2 * i + static_cast<std::int64_t>(random() % 2)));
      marks.push_back(random() % 3 == 0 ? 1 : 0);
    }
    for (std::size_t v = 0; v < some.size(); ++v) {
      if (random() % 2 != 0) some[v] = static_cast<std::int32_t>(random() % 100000);
      if (random() % 5 == 0) hosts[v] = static_cast<std::int16_t>(random() % 3);
    }
  }

  std::vector<Places> layers() const {
    return {{some.data(), nullptr, static_cast<std::int64_t>(some.size())},
            {nullptr, hosts.data(), static_cast<std::int64_t>(hosts.size())}};
  }
};

struct Found {
  std::vector<std::int32_t> values;
  std::vector<std::vector<std::uint8_t>> flags;
  std::vector<std::vector<std::int64_t>> ids;
  std::vector<std::vector<std::int32_t>> places;
  bool operator==(const Found&) const = default;
};

template <IdType Id>
Found found(const Case<Id>& c, const std::vector<Places>& layers, bool placed) {
  const MarkedRows<Id> rows(std::span(c.ids), std::span(c.marks), std::span(layers), placed);
  const auto count = static_cast<std::size_t>(rows.count());
  std::vector<std::int32_t> values(c.ids.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(7 * i);
  Found out{std::vector<std::int32_t>(count), {}, {}, {}};
  rows.write(values, out.values.data());
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const auto some = static_cast<std::size_t>(rows.counts()[layer]);
    std::vector<Id> ids(some);
    auto& flags = out.flags.emplace_back(count);
    auto& places = out.places.emplace_back(some);
    rows.write_layer(layer, std::span(c.ids), flags.data(), ids.data(), places.data());
    out.ids.emplace_back(ids.begin(), ids.end());
  }
  return out;
}

template <IdType Id>
void they_are_those_that_a_loop_finds(std::int64_t n, bool placed) {
  const Case<Id> c(n);
  const auto layers = c.layers();
  Found expected{{}, std::vector<std::vector<std::uint8_t>>(2), std::vector<std::vector<std::int64_t>>(2),
                 std::vector<std::vector<std::int32_t>>(2)};
  for (std::size_t i = 0; i < c.ids.size(); ++i) {
    const auto v = static_cast<std::size_t>(c.ids[i]);
    const std::int32_t places[] = {c.some[v], c.hosts[v]};
    if (c.marks[i] == 0 || (placed && places[0] < 0 && places[1] < 0)) continue;
    expected.values.push_back(static_cast<std::int32_t>(7 * i));
    for (std::size_t layer = 0; layer < 2; ++layer) {
      expected.flags[layer].push_back(places[layer] >= 0);
      if (places[layer] < 0) continue;
      expected.ids[layer].push_back(static_cast<std::int64_t>(v));
      expected.places[layer].push_back(places[layer]);
    }
  }
  CHECK(test::for_thread_counts([&] { return found(c, layers, placed); }) == expected);
}

void without_a_table_places_are_the_nodes() {
  const Case<std::int32_t> c(500);
  const Found got = found(c, {Places{}}, true);
  for (std::size_t i = 0; i < got.ids[0].size(); ++i) CHECK(got.ids[0][i] == got.places[0][i]);
  CHECK(!got.ids[0].empty() && got.ids[0].size() == got.values.size());
}

void what_is_no_node_is_an_error() {
  Case<std::int64_t> c(40000);
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{1} << 40, std::int64_t{80003}}) {
    c.ids[39999] = wrong;
    c.marks[39999] = 1;
    CHECK(test::throws<std::out_of_range>([&] { found(c, c.layers(), false); }));
    c.marks[39999] = 0;  // nobody asks
    CHECK(!test::throws<std::out_of_range>([&] { found(c, c.layers(), false); }));
  }
  c.ids[39999] = std::int64_t{1} << 40;
  c.marks[39999] = 1;
  CHECK(test::throws<std::out_of_range>([&] { found(c, {Places{}}, false); }));
}

}  // namespace

int main() {
  for (const std::int64_t n : {0, 1, 1000, 16384, 50000}) {
    for (const bool placed : {false, true}) {
      they_are_those_that_a_loop_finds<std::int32_t>(n, placed);
      they_are_those_that_a_loop_finds<std::int64_t>(n, placed);
    }
  }
  without_a_table_places_are_the_nodes();
  what_is_no_node_is_an_error();
  return report("marked_rows");
}
