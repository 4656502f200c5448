#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "check.hpp"
#include "joestar/collective.hpp"
#include "joestar/slice_rows.hpp"
#include "race.hpp"

using namespace joestar;

namespace {

const std::vector<std::int64_t> kEntries = test::race_entries();
const RaceTable kTable{std::span<const std::int64_t>(kEntries)};
const SampleKey kKey{3, 1, 4, 1};

template <IdType Id>
std::vector<Id> naive(const std::vector<Id>& sources, const std::vector<float>& weight, std::int64_t k,
                      NodeKeys keys = {}) {
  std::set<std::tuple<std::int64_t, std::int64_t, Id>> racers;
  for (const Id node : sources) {
    const HashState row = row_state(key_state(kKey), keys(node));
    const float w = weight.empty() ? 1.0f : weight[static_cast<std::size_t>(node)];
    if (has_weight(w)) racers.emplace(race_key(kTable, draw(row.a, row.b, 0), w), keys(node), node);
  }
  std::vector<Id> nodes;
  for (const auto& [key, hashed, node] : racers) {
    if (static_cast<std::int64_t>(nodes.size()) < k) nodes.push_back(node);
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

template <IdType Id>
void winners_follow_the_definition(std::int64_t edges, std::int64_t num_nodes, NodeKeys keys = {}) {
  std::mt19937 random(7);
  std::vector<Id> sources(static_cast<std::size_t>(edges));
  for (Id& source : sources) source = static_cast<Id>(random() % static_cast<unsigned>(num_nodes));
  for (bool weighted : {false, true}) {
    const auto weight = weighted ? test::random_values<float>(num_nodes, 3) : std::vector<float>{};
    for (std::int64_t k : {std::int64_t{0}, std::int64_t{1}, std::int64_t{40}, num_nodes, num_nodes + 9}) {
      std::int64_t count = -1;
      const auto nodes = test::for_thread_counts([&] {
        std::vector<Id> out(static_cast<std::size_t>(k), Id{-1});
        const CollectiveTask<Id> task{sources, weighted ? weight.data() : nullptr, num_nodes, keys};
        count = collective_sample(task, kTable, kKey, std::span(out));
        return out;
      });
      auto expected = naive(sources, weight, k, keys);
      CHECK(count == static_cast<std::int64_t>(expected.size()));
      expected.resize(static_cast<std::size_t>(k), expected.empty() ? Id{0} : expected[0]);
      CHECK(nodes == expected);
    }
  }
}

template <IdType Id>
void rows_keep_the_edges_of_a_set(std::int64_t rows, std::int64_t mean) {
  const auto graph = test::random_graph<Id>(rows, 300, mean, 9);
  std::vector<Id> chosen;
  for (int i = 0; i < 300; i += 3) chosen.push_back(static_cast<Id>(i * 7 % 300));
  const IdSet<Id> set{std::span<const Id>(chosen)};
  for (Id id = 0; id < 500; ++id) {
    CHECK(set.holds(id) == (std::find(chosen.begin(), chosen.end(), id) != chosen.end()));
  }
  std::vector<std::int64_t> expected, offsets{0};
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t e = graph.indptr[i]; e < graph.indptr[i + 1]; ++e) {
      if (set.holds(graph.indices[e])) expected.push_back(e);
    }
    offsets.push_back(static_cast<std::int64_t>(expected.size()));
  }
  const auto total = static_cast<std::int64_t>(expected.size());
  for (std::int64_t bound : {std::int64_t{0}, total / 3, total, total + 5}) {
    const auto result = test::for_thread_counts([&] {
      std::vector<std::int64_t> indptr(static_cast<std::size_t>(rows) + 1, -1);
      std::vector<std::int64_t> eids(static_cast<std::size_t>(bound), -1);
      CHECK(slice_rows(graph.csc(), set, std::span(indptr), std::span(eids)) == total);
      return std::pair(indptr, eids);
    });
    auto cut = offsets;
    for (std::int64_t& offset : cut) offset = std::min(offset, bound);
    auto kept = expected;
    kept.resize(static_cast<std::size_t>(bound), 0);
    CHECK(result.first == cut && result.second == kept);
  }
}

// What is left out before its key is known could not have won.
void bounds_of_keys_hold() {
  std::mt19937 random(11);
  std::vector<std::uint32_t> words{0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF};
  for (int shift = 0; shift < 32; ++shift) {
    for (int i = 0; i < 20; ++i) words.push_back(static_cast<std::uint32_t>(random()) >> shift);
  }
  std::vector<float> weights{0x1p-126f, 0.5f, 1.0f, 1.9999999f, 2.0f, 3e38f, std::numeric_limits<float>::infinity()};
  for (int i = 0; i < 40; ++i) weights.push_back(std::ldexp(1.0f + static_cast<float>(random() % 999) / 999, i * 6 - 120));
  for (const float weight : weights) {
    CHECK(has_weight(weight));
    for (const std::uint32_t word : words) {
      const std::int64_t least = race_key_at_least(word, weight), key = race_key(kTable, word, weight);
      CHECK(least <= key);
      CHECK(word > 0x7FFFFFFF || key - least < std::int64_t{4} << 24);
    }
  }
}

// As the definition has it, whatever weights are; with a bound that many winners are behind, too.
void any_weights() {
  constexpr std::int64_t kNodes = 40'000;
  std::mt19937 random(5);
  std::vector<std::int32_t> sources(60'000);
  for (auto& source : sources) source = static_cast<std::int32_t>(random() % kNodes);
  const auto uniform = test::random_values<float>(kNodes, 4);
  std::vector<std::vector<float>> kinds(5, std::vector<float>(kNodes));
  for (std::size_t i = 0; i < kNodes; ++i) {
    kinds[0][i] = 1.0f;
    kinds[1][i] = std::ldexp(1.0f + std::abs(uniform[i]), static_cast<int>(random() % 200) - 100);
    kinds[2][i] = i % 3 == 0 ? 0.0f : std::exp(4 * uniform[i]);
    kinds[3][i] = i % 100 == 0 ? std::numeric_limits<float>::infinity() : 0x1p-126f;
    kinds[4][i] = i % 50 == 0 ? uniform[i] : std::numeric_limits<float>::quiet_NaN();  // half of them negative
  }
  for (const auto& weight : kinds) {
    for (std::int64_t k : {1, 300, 5'000, 30'000}) {
      const auto expected = naive(sources, weight, k);
      const CollectiveTask<std::int32_t> task{sources, weight.data(), kNodes};
      const auto nodes = test::for_thread_counts([&] {
        std::vector<std::int32_t> out(static_cast<std::size_t>(k));
        out.resize(static_cast<std::size_t>(collective_sample(task, kTable, kKey, std::span(out))));
        return out;
      });
      CHECK(nodes == expected);
      Marks<std::int32_t> marks(task.sources, kNodes);
      detail::marked_sizes(task, marks);
      const std::int64_t missed = std::numeric_limits<std::int64_t>::min();
      std::vector<std::int32_t> again;
      for (const auto& each : detail::winners_of_marked(task, kTable, key_state(kKey), k, marks, missed)) {
        again.push_back(each.node);
      }
      std::sort(again.begin(), again.end());
      CHECK(again == expected);
    }
  }
}

// More than k are there, and not many times as many.
void bounds_of_races_are_near() {
  std::mt19937 random(3);
  for (const double spread : {0.0, 1.0, 6.0}) {
    RaceSizes sizes;
    std::vector<std::int64_t> keys;
    for (int i = 0; i < 100'000; ++i) {
      const auto weight = static_cast<float>(std::exp(spread * std::normal_distribution<double>()(random)));
      sizes.count(weight, 1);
      sizes.count(weight, 0);
      keys.push_back(race_key(kTable, static_cast<std::uint32_t>(random()), weight));
    }
    for (std::int64_t k : {1, 100, 10'000}) {
      const std::int64_t bound = sizes.bound(k);
      const auto there = std::count_if(keys.begin(), keys.end(), [&](std::int64_t key) { return key <= bound; });
      CHECK(there >= k && there <= 2 * k + 200);
    }
    CHECK(sizes.bound(60'000) == kNever && sizes.bound(200'000) == kNever);
  }
}

void ids_are_sorted() {
  std::mt19937_64 random(2);
  for (std::int64_t limit : {std::int64_t{1}, std::int64_t{2048}, std::int64_t{2049}, std::int64_t{1} << 33}) {
    for (std::size_t size : {0U, 1U, 511U, 3000U}) {
      std::vector<std::int64_t> ids(size);
      for (auto& id : ids) id = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
      auto expected = ids;
      std::sort(expected.begin(), expected.end());
      sort_ids(std::span(ids), limit);
      CHECK(ids == expected);
    }
  }
}

void nothing_to_choose_from() {
  std::vector<std::int32_t> nodes(3, 9);
  const CollectiveTask<std::int32_t> task{{}, nullptr, 10};
  CHECK(collective_sample(task, kTable, kKey, std::span(nodes)) == 0);
  CHECK(nodes == std::vector<std::int32_t>(3, 0));
  const IdSet<std::int64_t> empty{std::span<const std::int64_t>()};
  CHECK(empty.holds(0) == 0 && empty.holds(std::int64_t{1} << 40) == 0);
}

}  // namespace

int main() {
  set_num_threads(4);
  winners_follow_the_definition<std::int32_t>(500, 90);
  winners_follow_the_definition<std::int64_t>(200'000, 30'000);
  std::vector<std::int32_t> ids(90);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = 1'000'000 - static_cast<std::int32_t>(3 * i);
  winners_follow_the_definition<std::int32_t>(500, 90, NodeKeys{.narrow = ids.data()});
  rows_keep_the_edges_of_a_set<std::int32_t>(200, 5);
  rows_keep_the_edges_of_a_set<std::int64_t>(3000, 30);
  bounds_of_keys_hold();
  any_weights();
  bounds_of_races_are_near();
  ids_are_sorted();
  nothing_to_choose_from();
  return report("layers");
}
