#include <limits>

#include "check.hpp"
#include "joestar/place.hpp"
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

// Parts of rows that hold the winners have the picks of the whole rows, if their edges draw by their positions in these.
template <IdType Id>
void parts_of_rows_have_their_picks(bool replace) {
  const auto graph = test::random_graph<Id>(150, 150, 40, 5);
  auto weight = test::random_values<float>(graph.csc().edges(), 7);
  for (float& value : weight) value += 0.4f;  // some are negative
  std::vector<Id> nodes(150);
  for (std::size_t i = 0; i < nodes.size(); ++i) nodes[i] = static_cast<Id>(i);
  for (std::int64_t k : {1, 3, 30}) {
    const WeightedRows<Id> task{{graph.indptr, nodes, 150, false, {}}, weight, Fanout{k, replace}};
    const auto sampled = [&](const WeightedRows<Id>& rows) {
      std::vector<std::int64_t> offsets(nodes.size() + 1);
      std::vector<std::int64_t> out(static_cast<std::size_t>(weighted_offsets(rows, -1, std::span(offsets))));
      weighted_sample(rows, kTable, kKey, std::span<const std::int64_t>(offsets), std::span(out));
      return out;
    };
    const auto whole = sampled(task);
    std::vector<bool> kept(weight.size());
    std::mt19937 random(static_cast<std::uint32_t>(k));
    for (std::size_t e = 0; e < kept.size(); ++e) kept[e] = random() % 3 == 0;
    for (const std::int64_t pick : whole) kept[static_cast<std::size_t>(pick)] = true;
    std::vector<std::int64_t> indptr{0}, eids;
    std::vector<float> part_weight;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (auto e = static_cast<std::size_t>(graph.indptr[i]); e < static_cast<std::size_t>(graph.indptr[i + 1]); ++e) {
        if (!kept[e]) continue;
        eids.push_back(static_cast<std::int64_t>(e));
        part_weight.push_back(weight[e]);
      }
      indptr.push_back(static_cast<std::int64_t>(eids.size()));
    }
    CHECK(eids.size() < weight.size());
    std::vector<std::int32_t> ranks(eids.size());
    test::for_thread_counts([&] {
      edge_ranks<Id>(graph.indptr, nodes, indptr, eids, ranks);
      return ranks;
    });
    const auto picks = test::for_thread_counts([&] {
      return sampled({{indptr, nodes, 150, false, {}}, part_weight, Fanout{k, replace}, ranks});
    });
    std::vector<std::int64_t> found;
    for (const std::int64_t pick : picks) found.push_back(eids[static_cast<std::size_t>(pick)]);
    CHECK(found == whole);
  }
}

// Rows of some nodes, in any order, and nodes that the graph does not have.
void ranks_are_positions_in_rows() {
  const std::vector<std::int64_t> whole{0, 3, 3, 8}, indptr{0, 2, 2, 5}, eids{4, 7, 0, 1, 2};
  const std::vector<std::int32_t> rows{2, 1, 0};
  std::vector<std::int32_t> ranks(eids.size(), -1);
  edge_ranks<std::int32_t>(whole, rows, indptr, eids, ranks);
  CHECK((ranks == std::vector<std::int32_t>{1, 4, 0, 1, 2}));
  const std::vector<std::int32_t> wrong{3, 1, 0};
  bool thrown = false;
  try {
    edge_ranks<std::int32_t>(whole, wrong, indptr, eids, ranks);
  } catch (const std::out_of_range&) {
    thrown = true;
  }
  CHECK(thrown);
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
  for (const bool replace : {false, true}) {
    parts_of_rows_have_their_picks<std::int32_t>(replace);
    parts_of_rows_have_their_picks<std::int64_t>(replace);
  }
  ranks_are_positions_in_rows();
  return report("weighted");
}
