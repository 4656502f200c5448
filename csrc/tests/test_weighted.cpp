#include <limits>

#include "check.hpp"
#include "joestar/weighted.hpp"
#include "race.hpp"

using namespace joestar;

namespace {

const std::vector<std::int64_t> kEntries = test::race_entries();
const RaceTable kTable{std::span<const std::int64_t>(kEntries)};
const SampleKey kKey{11, 2, 5, 3};

void keys_are_logarithms() {
  std::mt19937 random(1);
  std::int64_t before = std::numeric_limits<std::int64_t>::min();
  for (std::uint64_t word = 0; word < (std::uint64_t{1} << 32); word += 104729 * 31) {
    const std::int64_t time = race_time(kTable, static_cast<std::uint32_t>(word));
    CHECK(time >= before);
    before = time;
    const double v = (2.0 * static_cast<double>(word) + 1) / 0x1p33;
    const double exact = std::log2(v) + test::race_g(v);
    if (v < 1 - 1.0 / 256) CHECK(std::abs(static_cast<double>(time) / (1 << 24) - exact) < 1e-4);
  }
  for (float weight : {1.0f, 0.3f, 3e38f, 1.2e-38f, 1234.5f}) {
    CHECK(std::abs(static_cast<double>(race_weight(kTable, weight)) / (1 << 24) - std::log2(double{weight})) < 1e-6);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(race_weight(kTable, infinity) == race_weight(kTable, std::numeric_limits<float>::max()));
  CHECK(has_weight(infinity) && has_weight(1.2e-38f) && !has_weight(0.0f) && !has_weight(-1.0f));
  CHECK(!has_weight(1e-40f) && !has_weight(-infinity) && !has_weight(std::nanf("")));
  CHECK(race_key(kTable, 5, 0.0f) == kNever);
}

// From the definition: the k smallest (key, position) of a row, in ascending position.
std::vector<std::int64_t> naive(const float* weight, std::int64_t degree, std::int64_t k, HashState row) {
  std::vector<std::pair<std::int64_t, std::int64_t>> racers;
  for (std::int64_t p = 0; p < degree; ++p) {
    if (!has_weight(weight[p])) continue;
    racers.emplace_back(race_key(kTable, draw(row.a, row.b, static_cast<std::uint32_t>(p)), weight[p]), p);
  }
  std::sort(racers.begin(), racers.end());
  if (k >= 0 && static_cast<std::int64_t>(racers.size()) > k) racers.resize(static_cast<std::size_t>(k));
  std::vector<std::int64_t> positions;
  for (const auto& [key, position] : racers) positions.push_back(position);
  std::sort(positions.begin(), positions.end());
  return positions;
}

std::vector<std::int64_t> naive_with_replacement(const float* weight, std::int64_t degree, std::int64_t k,
                                                 HashState row) {
  std::vector<std::int64_t> picks;
  for (std::int64_t j = 0; j < k; ++j) {
    HashState state = row;
    state.absorb(static_cast<std::uint32_t>(j));
    const auto first = naive(weight, degree, 1, state);
    if (!first.empty()) picks.push_back(first[0]);
  }
  return picks;
}

template <IdType Id>
void picks_follow_the_definition(bool equal_weights, NodeKeys keys = {}) {
  const auto graph = test::random_graph<Id>(150, 150, 12, 5);
  auto weight = test::random_values<float>(graph.csc().edges(), 7);  // half of them negative
  if (equal_weights) std::fill(weight.begin(), weight.end(), 1.0f);
  std::vector<Id> nodes;
  for (int i = 0; i < 130; ++i) nodes.push_back(static_cast<Id>(i * 37 % 150));
  const SampleRows<Id> rows{graph.indptr, nodes, 120, false, keys};
  for (std::int64_t k : {-1, 0, 1, 5, 24, 25, 300}) {
    for (bool replace : {false, true}) {
      const WeightedRows<Id> task{rows, weight, Fanout{k, replace}};
      std::vector<std::int64_t> offsets(nodes.size() + 1);
      const std::int64_t total = weighted_offsets(task, -1, std::span(offsets));
      const auto eids = test::for_thread_counts([&] {
        std::vector<std::int64_t> out(static_cast<std::size_t>(total) + 4, -1);
        weighted_sample(task, kTable, kKey, std::span<const std::int64_t>(offsets), std::span(out));
        return out;
      });
      std::vector<std::int64_t> expected;
      for (std::int64_t i = 0; i < rows.count; ++i) {
        const HashState row = row_state(key_state(kKey), keys(nodes[static_cast<std::size_t>(i)]));
        const float* first = weight.data() + rows.start(i);
        const auto picks = replace && k >= 0 ? naive_with_replacement(first, rows.degree(i), k, row)
                                             : naive(first, rows.degree(i), k, row);
        for (const std::int64_t pick : picks) expected.push_back(rows.start(i) + pick);
        CHECK(offsets[static_cast<std::size_t>(i) + 1] == static_cast<std::int64_t>(expected.size()));
      }
      CHECK(total == static_cast<std::int64_t>(expected.size()) && offsets.back() == total);
      expected.insert(expected.end(), 4, 0);
      CHECK(eids == expected);
      const std::int64_t bound = total / 2;  // an overflow keeps a prefix
      CHECK(weighted_offsets(task, bound, std::span(offsets)) == total);
      std::vector<std::int64_t> cut(static_cast<std::size_t>(bound));
      weighted_sample(task, kTable, kKey, std::span<const std::int64_t>(offsets), std::span(cut));
      CHECK(std::equal(cut.begin(), cut.end(), expected.begin()));
    }
  }
}

}  // namespace

int main() {
  set_num_threads(4);
  keys_are_logarithms();
  picks_follow_the_definition<std::int32_t>(false);
  picks_follow_the_definition<std::int64_t>(true);
  std::vector<std::int64_t> ids(150);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = (std::int64_t{1} << 40) - static_cast<std::int64_t>(7 * i);
  picks_follow_the_definition<std::int32_t>(false, NodeKeys{.wide = ids.data()});
  return report("weighted");
}
