// The first stages on a planted graph with skewed degrees: large batches, straight to the union and hop by hop, and as
// many seeds of one of `groups` random groups of parts, picked ahead.
// Usage: bench_large_batch [--nodes n] [--degree n] [--seeds n] [--groups n] [--threads n] [--only part] [--seconds s].
// Edges are those that the hops pick, before the union: what a step-by-step sampler would draw.

#include <cmath>
#include <string>

#include "harness.hpp"
#include "joestar/compact.hpp"
#include "joestar/large_batch.hpp"
#include "joestar/part_batch.hpp"
#include "joestar/union_hops.hpp"

using namespace joestar;
using Id = std::int32_t;

namespace {

constexpr std::int64_t kFanouts[] = {15, 10, 5};

struct Setting {
  std::int64_t nodes = 5'000'000, degree = 29, seeds = 20'000, groups = 12;
};

struct Graph {
  PageScratch<std::int64_t> indptr;
  PageScratch<Id> indices;
  Csc<Id> csc() const { return {indptr.span(), indices.span()}; }
};

std::uint64_t scrambled(std::uint64_t x) {
  x = (x + 0x9E3779B97F4A7C15ULL) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 30)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

double uniform(std::uint64_t x) { return (static_cast<double>(scrambled(x) >> 11) + 0.5) * 0x1p-53; }

// Degrees by a power law, hubs anywhere; every second source is of a small popular part, the rest are uniform.
Graph planted(const Setting& setting) {
  const std::int64_t n = setting.nodes;
  Graph graph{PageScratch<std::int64_t>(n + 1), {}};
  const auto degree = [&](std::int64_t i) {
    const double mean = static_cast<double>(setting.degree), where = uniform(static_cast<std::uint64_t>(i));
    const double drawn = 0.4 * mean / std::pow(where, 0.6);
    return static_cast<std::int64_t>(std::min(static_cast<double>(n) / 10, drawn));
  };
  graph.indices = PageScratch<Id>(exclusive_scan(n, 8192, degree, graph.indptr.span()));
  parallel_for(graph.indices.size(), 1 << 16, [&](std::int64_t e) {
    const auto word = static_cast<std::uint64_t>(e);
    const double where = uniform(~word), skewed = word % 2 == 0 ? where * where * where : where;
    graph.indices[e] = static_cast<Id>(scrambled(static_cast<std::uint64_t>(skewed * static_cast<double>(n))) %
                                       static_cast<std::uint64_t>(n));
  });
  return graph;
}

std::vector<LargeHop> hops_of(const SampleKey& key) {
  std::vector<LargeHop> hops;
  for (std::int64_t h = 0; h < 3; ++h) {
    hops.push_back({Fanout{kFanouts[h], false}, key_state({key.seed, key.epoch, key.step, h})});
  }
  return hops;
}

// Where a caller would keep the result; touched once, as buffers that are used again.
struct Output {
  std::vector<Id> ids;
  std::vector<std::int64_t> indptr;
  std::vector<std::int32_t> indices;

  void take(const MacroParts<Id>& parts) {
    ids.resize(static_cast<std::size_t>(parts.num_nodes()));
    indptr.resize(static_cast<std::size_t>(parts.num_rows()) + 1);
    indices.resize(static_cast<std::size_t>(parts.num_edges()));
    parts.write(ids.data(), indptr, indices.data(), nullptr);
  }
};

struct Hop {
  std::vector<Id> dsts, picked, local, srcs;
  std::vector<std::int64_t> indptr, eids;
};

// One hop as a block: picks, local ids, and the picks' positions, drawn again.
Hop hop_of(const Graph& graph, std::vector<Id> dsts, std::int64_t k, const SampleKey& key) {
  Hop hop;
  hop.dsts = std::move(dsts);
  const SampleRows<Id> rows{graph.indptr.span(), hop.dsts, static_cast<std::int64_t>(hop.dsts.size()), false};
  hop.indptr.resize(hop.dsts.size() + 1);
  const auto total = static_cast<std::size_t>(sample_offsets(rows, Fanout{k, false}, -1, std::span(hop.indptr)));
  hop.picked.resize(total);
  hop.eids.resize(total);
  hop.local.resize(total);
  hop.srcs.resize(hop.dsts.size() + total);
  sample_neighbors(rows, std::span<const Id>(graph.indices.span()), Fanout{k, false}, key,
                   std::span<const std::int64_t>(hop.indptr), std::span(hop.picked));
  sample_edges(rows, Fanout{k, false}, key, std::span<const std::int64_t>(hop.indptr), std::span(hop.eids));
  const CompactTask<Id> task{hop.dsts, hop.picked, std::span(hop.srcs), std::span(hop.local)};
  hop.srcs.resize(static_cast<std::size_t>(compact(task, graph.csc().rows())));
  return hop;
}

std::vector<Hop> all_hops(const Graph& graph, const std::vector<Id>& seeds, const SampleKey& key) {
  std::vector<Hop> hops;
  for (std::int64_t h = 0; h < 3; ++h) {
    hops.push_back(hop_of(graph, h == 0 ? seeds : hops.back().srcs, kFanouts[h], {key.seed, key.epoch, key.step, h}));
  }
  return hops;
}

MacroParts<Id> hop_by_hop(const Graph& graph, const std::vector<Id>& seeds, const SampleKey& key) {
  const std::vector<Hop> hops = all_hops(graph, seeds, key);
  std::vector<UnionHop<Id>> blocks;
  for (const Hop& hop : hops) blocks.push_back({hop.indptr, hop.local, hop.srcs, hop.eids});
  return union_hops(UnionTask<Id>{graph.csc(), seeds, blocks});
}

// One of some groups of 1,024 parts, which any node may be in.
struct Group {
  static constexpr std::int64_t kParts = 1024;
  std::vector<std::int32_t> part_of, chosen;
  std::vector<Id> seeds;

  explicit Group(const Setting& setting) : chosen(kParts) {
    for (std::int64_t p = 0; p < kParts; ++p) chosen[static_cast<std::size_t>(p)] = p % setting.groups == 0 ? 1 : 0;
    for (std::uint64_t v = 0; v < static_cast<std::uint64_t>(setting.nodes); ++v) {
      part_of.push_back(static_cast<std::int32_t>(scrambled(v ^ 77) % kParts));
    }
    for (std::uint64_t i = 0; static_cast<std::int64_t>(seeds.size()) < setting.seeds; ++i) {
      const auto node = scrambled(i) % static_cast<std::uint64_t>(setting.nodes);
      if (chosen[static_cast<std::size_t>(part_of[node])] != 0) seeds.push_back(static_cast<Id>(node));
    }
  }

  PartNodes nodes() const { return part_nodes<Id>(part_of, chosen, {}); }

  MacroParts<Id> batch(const Graph& graph, const PartNodes& nodes, const std::vector<LargeHop>& hops) const {
    return part_batch<Id>({graph.csc(), nodes, -1, {}, hops}, seeds);
  }
};

bench::Options parse(int argc, char** argv, Setting& setting) {
  bench::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--nodes") setting.nodes = std::stoll(value);
    if (flag == "--degree") setting.degree = std::stoll(value);
    if (flag == "--seeds") setting.seeds = std::stoll(value);
    if (flag == "--groups") setting.groups = std::stoll(value);
    if (flag == "--threads") set_num_threads(std::stoi(value));
    if (flag == "--only") options.only = value;
    if (flag == "--seconds") options.seconds = std::stod(value);
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Setting setting;
  const bench::Options options = parse(argc, argv, setting);
  const Graph graph = planted(setting);
  std::vector<Id> seeds;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(setting.seeds); ++i) {
    seeds.push_back(static_cast<Id>(scrambled(i) % static_cast<std::uint64_t>(setting.nodes)));
  }
  const SampleKey key{1, 0, 0, 0};
  std::int64_t picked = 0;
  for (const Hop& hop : all_hops(graph, seeds, key)) picked += hop.indptr.back();
  Output output;
  const auto straight = [&] {
    const std::vector<LargeHop> hops = hops_of(key);
    const LargeBatchTask<Id> task{graph.csc(), hops, {}, {}, false};
    return sample_large_batch<Id>(task, seeds);
  };
  const MacroParts<Id> parts = straight();
  std::printf("%lld nodes, %lld edges; %zu seeds: %lld picks; union of %lld rows, %lld nodes, %lld edges; %d threads\n",
              static_cast<long long>(graph.csc().rows()), static_cast<long long>(graph.indices.size()), seeds.size(),
              static_cast<long long>(picked), static_cast<long long>(parts.num_rows()),
              static_cast<long long>(parts.num_nodes()), static_cast<long long>(parts.num_edges()), num_threads());
  const double bytes = 12.0 * static_cast<double>(picked);
  std::vector<bench::Case> cases;
  cases.push_back({"large batch: sample", picked, bytes, [&] { straight(); }});
  cases.push_back({"large batch: write", picked, bytes, [&] { output.take(parts); }});
  cases.push_back({"large batch: both", picked, bytes, [&] { output.take(straight()); }});
  cases.push_back({"hop by hop: blocks", picked, bytes, [&] { all_hops(graph, seeds, key); }});
  cases.push_back({"hop by hop: both", picked, bytes, [&] { output.take(hop_by_hop(graph, seeds, key)); }});
  const Group group(setting);
  const PartNodes nodes = group.nodes();
  const std::vector<LargeHop> ahead = hops_of(key);
  const MacroParts<Id> reached = group.batch(graph, nodes, ahead), whole = group.batch(graph, nodes, {});
  std::printf("parts: %lld rows, %lld nodes, %lld edges reached; %lld rows, %lld nodes, %lld edges in all\n",
              static_cast<long long>(reached.num_rows()), static_cast<long long>(reached.num_nodes()),
              static_cast<long long>(reached.num_edges()), static_cast<long long>(whole.num_rows()),
              static_cast<long long>(whole.num_nodes()), static_cast<long long>(whole.num_edges()));
  cases.push_back({"parts: nodes", setting.nodes, 4.0 * static_cast<double>(setting.nodes), [&] { group.nodes(); }});
  cases.push_back({"parts: ahead", reached.num_edges(), bytes, [&] { group.batch(graph, nodes, ahead); }});
  cases.push_back({"parts: ahead, both", reached.num_edges(), bytes,
                   [&] { output.take(group.batch(graph, nodes, ahead)); }});
  cases.push_back({"parts: whole", whole.num_edges(), bytes, [&] { group.batch(graph, nodes, {}); }});
  cases.push_back({"parts: whole, both", whole.num_edges(), bytes,
                   [&] { output.take(group.batch(graph, nodes, {})); }});
  return bench::run(cases, options);
}
