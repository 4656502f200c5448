#include <map>
#include <set>

#include "check.hpp"
#include "joestar/compact.hpp"
#include "joestar/large_batch.hpp"
#include "joestar/union_hops.hpp"
#include "race.hpp"

using namespace joestar;

namespace {

template <IdType Id>
struct Macro {
  std::vector<Id> ids;
  std::vector<std::int64_t> indptr;
  std::vector<std::int32_t> indices;
  std::vector<std::int64_t> eids;
  bool operator==(const Macro&) const = default;
};

template <IdType Id>
Macro<Id> written(const MacroParts<Id>& parts) {
  const auto edges = static_cast<std::size_t>(parts.num_edges());
  Macro<Id> macro;
  macro.ids.resize(static_cast<std::size_t>(parts.num_nodes()));
  macro.indptr.resize(static_cast<std::size_t>(parts.num_rows()) + 1);
  macro.indices.resize(edges);
  macro.eids.resize(edges);
  parts.write(macro.ids.data(), macro.indptr, macro.indices.data(), macro.eids.data());
  return macro;
}

template <IdType Id>
struct Hop {
  std::vector<Id> dsts, srcs, local;
  std::vector<std::int64_t> indptr, eids;
};

struct Sampler {
  std::vector<std::int64_t> fanouts;
  bool replace = false;
  std::vector<float> weight = {};
};

constexpr std::int64_t kSite = 1 << 24;


template <IdType Id>
Hop<Id> hop_of(const test::Graph<Id>& graph, const std::vector<Id>& dsts, const Sampler& sampler, std::int64_t k,
               std::int64_t site) {
  static const std::vector<std::int64_t> entries = test::race_entries();
  const SampleKey key{5, 1, 2, site};
  Hop<Id> hop{dsts, {}, {}, std::vector<std::int64_t>(dsts.size() + 1), {}};
  const SampleRows<Id> rows{graph.indptr, hop.dsts, static_cast<std::int64_t>(dsts.size()), false};
  const Fanout fanout{k, sampler.replace};
  if (sampler.weight.empty()) {
    hop.eids.resize(static_cast<std::size_t>(sample_offsets(rows, fanout, -1, std::span(hop.indptr))));
    sample_edges(rows, fanout, key, std::span<const std::int64_t>(hop.indptr), std::span(hop.eids));
  } else {
    const WeightedRows<Id> weighted{rows, sampler.weight, fanout};
    hop.eids.resize(static_cast<std::size_t>(weighted_offsets(weighted, -1, std::span(hop.indptr))));
    weighted_sample(weighted, RaceTable(entries), key, std::span<const std::int64_t>(hop.indptr), std::span(hop.eids));
  }
  std::vector<Id> picked;
  for (const auto e : hop.eids) picked.push_back(graph.indices[static_cast<std::size_t>(e)]);
  hop.local.resize(picked.size());
  hop.srcs.resize(dsts.size() + picked.size());
  const CompactTask<Id> task{hop.dsts, picked, std::span(hop.srcs), std::span(hop.local)};
  hop.srcs.resize(static_cast<std::size_t>(compact(task, graph.rows())));
  return hop;
}

template <IdType Id>
std::vector<Hop<Id>> hops_of(const test::Graph<Id>& graph, const std::vector<Id>& seeds, const Sampler& sampler) {
  std::vector<Hop<Id>> hops;
  for (std::size_t h = 0; h < sampler.fanouts.size(); ++h) {
    hops.push_back(hop_of(graph, h == 0 ? seeds : hops.back().srcs, sampler, sampler.fanouts[h],
                          kSite + static_cast<std::int64_t>(h)));
  }
  return hops;
}

template <IdType Id>
Macro<Id> by_sets(const test::Graph<Id>& graph, const std::vector<Hop<Id>>& hops) {
  std::map<Id, std::set<std::int64_t>> rows;
  for (const auto& hop : hops) {
    for (std::size_t i = 0; i < hop.dsts.size(); ++i) {
      rows[hop.dsts[i]].insert(hop.eids.begin() + hop.indptr[i], hop.eids.begin() + hop.indptr[i + 1]);
    }
  }
  std::set<Id> leaves(hops.back().srcs.begin(), hops.back().srcs.end());
  Macro<Id> macro{{}, {0}, {}, {}};
  std::map<Id, std::int32_t> local;
  for (const auto& row : rows) macro.ids.push_back(row.first), leaves.erase(row.first);
  macro.ids.insert(macro.ids.end(), leaves.begin(), leaves.end());
  for (const Id id : macro.ids) local.emplace(id, static_cast<std::int32_t>(local.size()));
  for (const auto& row : rows) {
    for (const auto e : row.second) {
      macro.eids.push_back(e);
      macro.indices.push_back(local.at(graph.indices[static_cast<std::size_t>(e)]));
    }
    macro.indptr.push_back(static_cast<std::int64_t>(macro.eids.size()));
  }
  return macro;
}

template <IdType Id>
Macro<Id> straight(const test::Graph<Id>& graph, const std::vector<Id>& seeds, const Sampler& sampler) {
  static const std::vector<std::int64_t> entries = test::race_entries();
  std::vector<LargeHop> hops;
  for (std::size_t h = 0; h < sampler.fanouts.size(); ++h) {
    const SampleKey key{5, 1, 2, kSite + static_cast<std::int64_t>(h)};
    hops.push_back({Fanout{sampler.fanouts[h], sampler.replace}, key_state(key)});
  }
  const LargeBatchTask<Id> task{graph.csc(), hops, sampler.weight, entries, true};
  return written(sample_large_batch<Id>(task, seeds));
}

template <IdType Id>
Macro<Id> united(const test::Graph<Id>& graph, const std::vector<Hop<Id>>& hops) {
  std::vector<UnionHop<Id>> blocks;
  for (const auto& hop : hops) blocks.push_back({hop.indptr, hop.local, hop.srcs, hop.eids});
  return written(union_hops(UnionTask<Id>{graph.csc(), hops[0].dsts, blocks}));
}

template <IdType Id>
void all_ways_agree() {
  const auto graph = test::random_graph<Id>(6000, 6000, 12, 3);
  std::vector<Id> seeds;
  for (int i = 0; i < 400; ++i) seeds.push_back(static_cast<Id>((i * 61) % 6000));
  seeds.insert(seeds.end(), {1, 1, seeds[7]});
  std::vector<float> weight = test::random_values<float>(static_cast<std::int64_t>(graph.indices.size()), 4);
  for (float& w : weight) w = std::max(w, 0.0F);
  const std::vector<Sampler> samplers = {
      {{15, 10, 5}}, {{5, 4}}, {{3, 8}, true}, {{-1, -1}}, {{2, -1, 3}}, {{2, 2, -1}}, {{40, 40}}, {{100, 3}},
      {{4, 3}, false, weight}, {{2, -1}, false, weight}, {{4, 2}, true, weight}};
  for (const Sampler& sampler : samplers) {
    const auto hops = hops_of(graph, seeds, sampler);
    const auto expected = by_sets(graph, hops);
    CHECK(test::for_thread_counts([&] { return straight(graph, seeds, sampler); }) == expected);
    CHECK(test::for_thread_counts([&] { return united(graph, hops); }) == expected);
  }
}

void wrong_positions_are_refused() {
  const auto graph = test::random_graph<std::int32_t>(300, 300, 9, 6);
  auto hops = hops_of<std::int32_t>(graph, {3, 5, 7}, {{4, 4}});
  hops[1].eids[2] += 1;
  bool refused = false;
  try {
    united(graph, hops);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void numbers_are_ranks() {
  const NodeBits rows(1000), leaves(1000), known(1000);
  std::vector<std::int32_t> nodes;
  for (std::int32_t node = 0; node < 1000; node += 3) {
    (node % 2 == 0 ? rows : leaves).insert(node);
    nodes.push_back(node);
  }
  const NodeNumbers numbers(rows, leaves);
  std::vector<std::int32_t> local(nodes.size()), ids(nodes.size());
  numbers.look_up(std::span<const std::int32_t>(nodes), local.data());
  numbers.write_ids(rows, leaves, ids.data());
  CHECK(numbers.num_rows() == 167 && numbers.num_leaves() == 167);
  for (std::size_t i = 0; i < nodes.size(); ++i) CHECK(ids[static_cast<std::size_t>(local[i])] == nodes[i]);
  CHECK(take_fresh<std::int32_t>(rows, known).size() == 167);
  CHECK(take_fresh<std::int32_t>(rows, known).size() == 0);
}

void pages_are_used_again() {
  const void* first = nullptr;
  {
    const PageScratch<std::int64_t> pages(1 << 20);
    first = pages.data();
  }
  const PageScratch<std::int32_t> again((2 << 20) - 100000);
  CHECK(again.data() == first);
  const PageScratch<std::int32_t> other(2 << 20);
  CHECK(other.data() != first);
  process_instance<PageCache>().clear();
}

}  // namespace

int main() {
  set_num_threads(4);
  numbers_are_ranks();
  pages_are_used_again();
  wrong_positions_are_refused();
  all_ways_agree<std::int32_t>();
  all_ways_agree<std::int64_t>();
  return report("macro_batch");
}
