#include <algorithm>
#include <set>

#include "check.hpp"
#include "joestar/sample_aggregate.hpp"
#include "joestar/sampling.hpp"

using namespace joestar;

namespace {

constexpr SampleKey kKey{7, 1, 42, 3};

template <IdType Id>
struct Sampled {
  std::vector<std::int64_t> offsets;
  std::vector<Id> ids;
  std::int64_t count;
  bool operator==(const Sampled&) const = default;
};

template <IdType Id>
Sampled<Id> sample(const test::Graph<Id>& graph, const std::vector<Id>& nodes, std::int64_t rows, Fanout fanout,
                   const SampleKey& key, std::int64_t bound = -1, NodeKeys keys = {}) {
  const SampleRows<Id> task{graph.indptr, nodes, rows, false, keys};
  Sampled<Id> out{std::vector<std::int64_t>(nodes.size() + 1), {}, 0};
  out.count = sample_offsets(task, fanout, bound, out.offsets);
  out.ids.resize(static_cast<std::size_t>(bound < 0 ? out.count : bound));
  sample_neighbors<Id>(task, graph.indices, fanout, key, out.offsets, out.ids);
  return out;
}

// The definition, one row at a time.
template <IdType Id>
std::vector<Id> expected_row(const test::Graph<Id>& graph, Id node, Fanout fanout, const SampleKey& key,
                             NodeKeys keys = {}) {
  const auto start = graph.indptr[static_cast<std::size_t>(node)];
  const auto degree = graph.indptr[static_cast<std::size_t>(node) + 1] - start;
  const HashState state = row_state(key_state(key), keys(node));
  std::vector<std::uint32_t> picks;
  for (std::int64_t j = 0; j < fanout.picks(degree); ++j) {
    const auto word = draw(state.a, state.b, static_cast<std::uint32_t>(j));
    std::uint32_t pick = static_cast<std::uint32_t>(j);
    if (fanout.replace && fanout.k >= 0) {
      pick = bounded(word, static_cast<std::uint32_t>(degree));
    } else if (!fanout.takes_all(degree)) {
      const auto top = static_cast<std::uint32_t>(degree - fanout.k + j);
      pick = bounded(word, top + 1);
      if (std::find(picks.begin(), picks.end(), pick) != picks.end()) pick = top;
    }
    picks.push_back(pick);
  }
  std::vector<Id> row;
  for (const auto pick : picks) row.push_back(graph.indices[static_cast<std::size_t>(start + pick)]);
  return row;
}

template <IdType Id>
void matches_the_definition() {
  const auto graph = test::random_graph<Id>(700, 700, 20, 5);
  std::vector<Id> nodes;
  for (int i = 0; i < 333; ++i) nodes.push_back(static_cast<Id>((i * 61) % 700));
  for (std::int64_t k : {-1, 0, 1, 5, 15, 64, 65, 200}) {
    for (bool replace : {false, true}) {
      const Fanout fanout{k, replace};
      const auto got = test::for_thread_counts([&] { return sample(graph, nodes, 333, fanout, kKey); });
      for (std::size_t i = 0; i < nodes.size(); ++i) {
        const std::vector<Id> row(got.ids.begin() + got.offsets[i], got.ids.begin() + got.offsets[i + 1]);
        CHECK(row == expected_row(graph, nodes[i], fanout, kKey));
      }
    }
  }
}

// Rows hash as what their nodes are known by, in a table of either width, and read their own columns.
void rows_hash_as_other_ids() {
  const auto graph = test::random_graph<std::int32_t>(200, 200, 20, 5);
  std::vector<std::int32_t> nodes(90), narrow(200);
  std::vector<std::int64_t> wide(200);
  for (int i = 0; i < 90; ++i) nodes[static_cast<std::size_t>(i)] = i * 61 % 200;
  for (int i = 0; i < 200; ++i) {
    narrow[static_cast<std::size_t>(i)] = 1000 - 3 * i;
    wide[static_cast<std::size_t>(i)] = (std::int64_t{1} << 40) + 7 * i;
  }
  for (const NodeKeys keys : {NodeKeys{.narrow = narrow.data()}, NodeKeys{.wide = wide.data()}}) {
    for (std::int64_t k : {5, 65}) {
      for (bool replace : {false, true}) {
        const Fanout fanout{k, replace};
        const auto got = sample(graph, nodes, 90, fanout, kKey, -1, keys);
        CHECK(got != sample(graph, nodes, 90, fanout, kKey) || (k == 65 && !replace));
        for (std::size_t i = 0; i < nodes.size(); ++i) {
          const std::vector<std::int32_t> row(got.ids.begin() + got.offsets[i], got.ids.begin() + got.offsets[i + 1]);
          CHECK(row == expected_row(graph, nodes[i], fanout, kKey, keys));
        }
      }
    }
  }
}

void bounds_cut_and_pad() {
  const auto graph = test::random_graph<std::int32_t>(300, 300, 9, 6);
  std::vector<std::int32_t> nodes(100);
  for (int i = 0; i < 100; ++i) nodes[static_cast<std::size_t>(i)] = i + 50;
  const Fanout fanout{5, false};
  const auto whole = sample(graph, nodes, 80, fanout, kKey);
  CHECK(whole.offsets[100] == whole.offsets[80]);
  for (std::int64_t bound : {std::int64_t{0}, std::int64_t{13}, whole.count, whole.count + 9}) {
    const auto cut = sample(graph, nodes, 80, fanout, kKey, bound);
    CHECK(cut.count == whole.count);
    CHECK(cut.offsets.back() == std::min(bound, whole.count));
    for (std::int64_t e = 0; e < bound; ++e) {
      CHECK(cut.ids[static_cast<std::size_t>(e)] == (e < whole.count ? whole.ids[static_cast<std::size_t>(e)] : 50));
    }
  }
}

// Chi-square of picks and of ordered pairs of picks over many steps.
void picks_are_uniform() {
  test::Graph<std::int32_t> graph{{0, 8}, {0, 1, 2, 3, 4, 5, 6, 7}};
  const std::vector<std::int32_t> nodes{0};
  constexpr int kSteps = 56000;
  std::vector<double> single(8), pair(64);
  for (int step = 0; step < kSteps; ++step) {
    const auto got = sample(graph, nodes, 1, Fanout{3, false}, SampleKey{1, 0, step, 0});
    CHECK(std::set<std::int32_t>(got.ids.begin(), got.ids.end()).size() == 3);
    for (const auto a : got.ids) {
      ++single[static_cast<std::size_t>(a)];
      for (const auto b : got.ids) pair[static_cast<std::size_t>(a * 8 + b)] += a != b;
    }
  }
  double chi_single = 0, chi_pair = 0;
  for (double seen : single) chi_single += std::pow(seen - kSteps * 3.0 / 8, 2) / (kSteps * 3.0 / 8);
  for (int a = 0; a < 8; ++a) {
    for (int b = a + 1; b < 8; ++b) {
      chi_pair += std::pow(pair[static_cast<std::size_t>(a * 8 + b)] - kSteps * 6.0 / 56, 2) / (kSteps * 6.0 / 56);
    }
  }
  CHECK(chi_single < 24.3);  // 0.1 % of chi-square with 7 degrees of freedom
  CHECK(chi_pair < 55.5);    // 27 degrees of freedom
}

template <class T>
void fused_equals_sample_then_spmm() {
  const auto graph = test::random_graph<std::int64_t>(500, 500, 12, 8);
  const auto x = test::random_values<T>(500 * 37, 9);
  std::vector<std::int64_t> nodes(301);
  for (int i = 0; i < 301; ++i) nodes[static_cast<std::size_t>(i)] = (i * 7) % 500;
  for (std::int64_t k : {-1, 0, 5, 64, 80}) {
    for (Reduce reduce : {Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min}) {
      const Fanout fanout{k, false};
      const auto picked = sample(graph, nodes, 290, fanout, kKey);
      std::vector<T> expected(301 * 37), got(301 * 37, T{77});
      spmm(
          Messages<T, const std::int64_t*>{
              .indptr = picked.offsets, .ids = picked.ids.data(), .x = x.data(), .width = 37},
          reduce, expected.data());
      const SampleRows<std::int64_t> rows{graph.indptr, nodes, 290, false};
      const auto count =
          sample_aggregate<T, std::int64_t>(rows, graph.indices, fanout, kKey, x.data(), 37, reduce, got.data());
      CHECK(count == picked.count);
      CHECK(got == expected);
    }
  }
}

}  // namespace

int main() {
  set_num_threads(4);
  CHECK(mix32(0) == 0);
  matches_the_definition<std::int32_t>();
  matches_the_definition<std::int64_t>();
  rows_hash_as_other_ids();
  bounds_cut_and_pad();
  picks_are_uniform();
  fused_equals_sample_then_spmm<float>();
  fused_equals_sample_then_spmm<double>();
  return report("sampling");
}
