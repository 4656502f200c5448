// Micro-benchmarks of the kernels on a planted graph: a batch of 1,000 seeds with fanouts 15, 10, 5 and what is
// computed on its two outer hops. Usage: bench [--nodes n] [--threads n] [--only part] [--seconds s] [--calls n]
// [--json file].

#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "harness.hpp"
#include "joestar/collective.hpp"
#include "joestar/compact.hpp"
#include "joestar/dropout.hpp"
#include "joestar/extremum_grad_csr.hpp"
#include "joestar/sample_aggregate.hpp"
#include "joestar/slice_rows.hpp"
#include "joestar/spmm_coo.hpp"
#include "joestar/weighted.hpp"

using namespace joestar;
using Id = std::int32_t;
using Offsets = std::vector<std::int64_t>;
using Ids = std::vector<Id>;
using Floats = std::vector<float>;

namespace {

constexpr std::int64_t kDegree = 50;         // average in-degree
constexpr std::int64_t kCommunity = 1000;    // half of a node's in-neighbours are of its community
constexpr std::int64_t kBatch = 1000;
constexpr std::int64_t kFanouts[] = {15, 10, 5};
constexpr std::int64_t kWidth = 128;

struct Graph {
  Offsets indptr{0};
  Ids indices;
  std::int64_t nodes() const { return static_cast<std::int64_t>(indptr.size()) - 1; }
};

// A small generator of our own: the same graph everywhere, and cheap under valgrind.
struct Random {
  std::uint64_t state;
  std::uint64_t below(std::uint64_t n) {
    state += 0x9E3779B97F4A7C15ULL;
    std::uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return ((x ^ (x >> 31)) >> 32) * n >> 32;
  }
};

Graph planted(std::int64_t nodes) {
  Random random{1};
  Graph graph;
  graph.indices.reserve(static_cast<std::size_t>(nodes * kDegree + nodes));
  for (std::int64_t i = 0; i < nodes; ++i) {
    const auto degree = kDegree / 2 + static_cast<std::int64_t>(random.below(kDegree + 1));
    const std::int64_t home = i / kCommunity * kCommunity, size = std::min(kCommunity, nodes - home);
    for (std::int64_t e = 0; e < degree; ++e) {
      const bool inside = e % 2 == 0;
      const auto range = static_cast<std::uint64_t>(inside ? size : nodes);
      graph.indices.push_back(static_cast<Id>((inside ? home : 0) + static_cast<std::int64_t>(random.below(range))));
    }
    graph.indptr.push_back(static_cast<std::int64_t>(graph.indices.size()));
  }
  return graph;
}

// One sampled hop: global ids of its destinations and picks, and local ids of the sources.
struct Hop {
  Ids dsts;
  Offsets indptr;
  Ids picked, local, srcs;
  std::int64_t edges() const { return indptr.back(); }
};

SampleKey key_of(int hop) { return {1, 0, 0, hop}; }

void sample(const Graph& graph, Hop& hop, std::int64_t k, int site) {
  const SampleRows<Id> rows{graph.indptr, hop.dsts, static_cast<std::int64_t>(hop.dsts.size()), false};
  hop.indptr.resize(hop.dsts.size() + 1);
  const std::int64_t total = sample_offsets(rows, Fanout{k, false}, -1, std::span(hop.indptr));
  hop.picked.resize(static_cast<std::size_t>(total));
  sample_neighbors(rows, std::span<const Id>(graph.indices), Fanout{k, false}, key_of(site),
                   std::span<const std::int64_t>(hop.indptr), std::span(hop.picked));
}

void relabel(const Graph& graph, Hop& hop) {
  hop.local.resize(hop.picked.size());
  hop.srcs.resize(hop.dsts.size() + hop.picked.size());
  const CompactTask<Id> task{hop.dsts, hop.picked, std::span(hop.srcs), std::span(hop.local)};
  hop.srcs.resize(static_cast<std::size_t>(compact(task, graph.nodes())));
}

std::vector<Hop> sampled_batch(const Graph& graph) {
  std::vector<Hop> hops;
  Ids dsts(kBatch);
  for (std::int64_t i = 0; i < kBatch; ++i) dsts[i] = static_cast<Id>(i * (graph.nodes() / kBatch));
  for (const std::int64_t k : kFanouts) {
    hops.push_back({dsts, {}, {}, {}, {}});
    sample(graph, hops.back(), k, static_cast<int>(hops.size()));
    relabel(graph, hops.back());
    dsts = hops.back().srcs;
  }
  return hops;
}

Floats values(std::int64_t count) {
  Random random{2};
  Floats out(static_cast<std::size_t>(count));
  for (float& value : out) value = static_cast<float>(random.below(1 << 20)) * 0x1p-20f;
  return out;
}

// The tables of joestar/kernels/race.py, near enough for timing.
std::vector<std::int64_t> race_entries() {
  std::vector<std::int64_t> out;
  for (int i = 0; i <= 4096; ++i) out.push_back(std::llround(std::log2(1 + i / 4096.0) * (1 << 24)));
  for (int i = 0; i <= 4096; ++i) {
    const double v = std::clamp(i / 4096.0, 1e-9, 1 - 0x1p-33);
    out.push_back(std::llround(std::log2(-std::log2(1 - v) / v) * (1 << 24)));
  }
  return out;
}

bench::Options parse(int argc, char** argv, std::int64_t& nodes) {
  bench::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--nodes") nodes = std::stoll(value);
    if (flag == "--threads") set_num_threads(std::stoi(value));
    if (flag == "--only") options.only = value;
    if (flag == "--seconds") options.seconds = std::stod(value);
    if (flag == "--calls") options.calls = std::stoll(value);
    if (flag == "--json") options.json = value;
  }
  return options;
}

using Cases = std::vector<bench::Case>;

void sampling_cases(const Graph& graph, const std::vector<Hop>& hops, Cases& cases) {
  static std::vector<Hop> scratch;
  scratch = hops;
  std::int64_t total = 0;
  for (std::size_t h = 0; h < hops.size(); ++h) {
    const std::int64_t k = kFanouts[h], edges = hops[h].edges();
    total += edges;
    const std::string name = "hop " + std::to_string(h) + ", fanout " + std::to_string(k);
    cases.push_back({"sample, " + name, edges, 12.0 * static_cast<double>(edges),
                     [&graph, h, k] { sample(graph, scratch[h], k, static_cast<int>(h) + 1); }});
    cases.push_back({"compact, " + name, edges, 16.0 * static_cast<double>(edges),
                     [&graph, h] { relabel(graph, scratch[h]); }});
  }
  cases.push_back({"batch: sample and compact", total, 0.0, [&graph] { sampled_batch(graph); }});
}

void weighted_cases(const Graph& graph, const Hop& hop, Cases& cases) {
  static const std::vector<std::int64_t> entries = race_entries();
  static const RaceTable table{std::span<const std::int64_t>(entries)};
  static const Floats weight = values(static_cast<std::int64_t>(graph.indices.size()));
  static Offsets offsets(hop.dsts.size() + 1);
  static const SampleRows<Id> rows{graph.indptr, hop.dsts, static_cast<std::int64_t>(hop.dsts.size()), false};
  static Offsets eids(static_cast<std::size_t>(hop.edges()));
  static Offsets whole(hop.dsts.size() + 1);
  const std::int64_t all = sample_offsets(rows, Fanout{-1, false}, -1, std::span(whole));
  static Ids sources(static_cast<std::size_t>(all));
  sample_neighbors(rows, std::span<const Id>(graph.indices), Fanout{-1, false}, key_of(0),
                   std::span<const std::int64_t>(whole), std::span(sources));
  cases.push_back({"weighted sample, fanout 10 (per candidate)", all, 4.0 * static_cast<double>(all), [] {
                     const WeightedRows<Id> task{rows, weight, Fanout{10, false}};
                     weighted_offsets(task, -1, std::span(offsets));
                     weighted_sample(task, table, key_of(1), std::span<const std::int64_t>(offsets), std::span(eids));
                   }});
  const std::int64_t nodes = graph.nodes();
  cases.push_back({"collective sample of 1000", all, 4.0 * static_cast<double>(all), [nodes] {
                     Ids chosen(1000);
                     collective_sample(CollectiveTask<Id>{sources, nullptr, nodes}, table, key_of(2), std::span(chosen));
                   }});
  cases.push_back({"slice rows", all, 12.0 * static_cast<double>(all), [&hop] {
                     static Offsets indptr(whole.size()), kept(sources.size());
                     const IdSet<Id> set{std::span<const Id>(hop.dsts)};
                     slice_rows(Csc<Id>{whole, sources}, set, std::span(indptr), std::span(kept));
                   }});
}

void product_cases(const Graph& graph, const Hop& hop, const std::string& where, Cases& cases) {
  struct Data {
    const Hop& hop;
    Floats x, y, grad, grad_x, weight, grad_weight, table;
    Ids dst, out_dst;
    Offsets out_indptr;
    std::int64_t num_src, num_dst;
  };
  const auto d = std::make_shared<Data>(Data{hop, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, 0, 0});
  d->num_src = static_cast<std::int64_t>(hop.srcs.size());
  d->num_dst = static_cast<std::int64_t>(hop.dsts.size());
  d->x = values(d->num_src * kWidth);
  d->y.resize(static_cast<std::size_t>(d->num_dst * kWidth));
  d->grad = values(d->num_dst * kWidth);
  d->grad_x.resize(d->x.size());
  d->weight = values(hop.edges());
  d->grad_weight.resize(d->weight.size());
  d->dst.resize(static_cast<std::size_t>(hop.edges()));
  edge_rows(std::span<const std::int64_t>(hop.indptr), std::span(d->dst));
  const Csc<Id> csc{hop.indptr, hop.local};
  const Transposed<Id> t = transpose(csc, d->num_src);
  d->out_indptr.assign(t.indptr.data(), t.indptr.data() + d->num_src + 1);
  d->out_dst.assign(t.row.data(), t.row.data() + hop.edges());
  const double bytes = static_cast<double>(hop.edges() + d->num_dst) * kWidth * 4;
  const auto add = [&](const std::string& name, std::function<void()> call) {
    cases.push_back({name + ", " + where, hop.edges(), bytes, std::move(call)});
  };
  const auto gather = [d](const float* weight) {
    return Messages<float, const Id*>{d->hop.indptr, d->hop.local.data(), d->x.data(), weight, nullptr, 1, kWidth};
  };
  add("spmm csc sum", [d, gather] { spmm(gather(nullptr), Reduce::Sum, d->y.data()); });
  add("spmm csc weighted mean", [d, gather] { spmm(gather(d->weight.data()), Reduce::Mean, d->y.data()); });
  add("spmm csc max", [d, gather] { spmm(gather(nullptr), Reduce::Max, d->y.data()); });
  add("spmm csr sum", [d] {
    const Messages<float, EdgeOrder> m{d->out_indptr, {}, d->x.data(), nullptr, nullptr, 1, kWidth};
    spmm_csr(Csc<Id>{d->out_indptr, d->out_dst}, m, d->num_dst, Reduce::Sum, d->y.data());
  });
  add("spmm coo sum", [d, gather] {
    spmm_coo(gather(nullptr), std::span<const Id>(d->dst), d->num_dst, Reduce::Sum, d->y.data());
  });
  add("grad x, csc", [d, csc] {
    spmm_grad_x(csc, d->num_src, d->grad.data(), WeightedShape<float>{nullptr, 1, kWidth}, Reduce::Sum,
                d->grad_x.data());
  });
  add("grad weight, csc", [d, csc] {
    sddmm_dot(csc, DotRows<float>{d->x.data(), d->grad.data(), 1, kWidth}, d->grad_weight.data());
  });
  add("grad of a max, csc", [d, csc] {
    const ExtremumGrad<float> task{d->x.data(), d->y.data(), d->grad.data(), {nullptr, 1, kWidth}};
    spmm_extremum_grad(csc, d->num_src, task, d->grad_x.data(), static_cast<float*>(nullptr));
  });
  add("edge dropout bits, 4 heads", [d] {
    static Ids out;
    out.resize(d->dst.size());
    edge_dropout_bits(std::span<const std::int64_t>(d->hop.indptr), d->hop.edges(), std::span<const Id>(d->hop.dsts),
                      key_of(7), KeepMask{0x999999, 1}, reinterpret_cast<std::uint32_t*>(out.data()));
  });
  cases.push_back({"dropout bits p=0.5, rows x 128, " + where, d->num_src, 16.0 * static_cast<double>(d->num_src), [d] {
                     static std::vector<std::uint32_t> out;
                     out.resize(d->hop.srcs.size() * 4);
                     dropout_bits(std::span<const Id>(d->hop.srcs), key_of(8), KeepMask{1 << 23, 4}, out.data());
                   }});
  d->table = values(graph.nodes() * kWidth);
  add("sample and aggregate", [d, &graph] {
    const SampleRows<Id> rows{graph.indptr, d->hop.dsts, d->num_dst, false};
    const std::int64_t k = d->hop.edges() / std::max<std::int64_t>(1, d->num_dst);
    sample_aggregate(rows, std::span<const Id>(graph.indices), Fanout{k, false}, key_of(3), d->table.data(), kWidth,
                     Reduce::Mean, d->y.data());
  });
}

}  // namespace

int main(int argc, char** argv) {
  std::int64_t nodes = 200'000;
  const bench::Options options = parse(argc, argv, nodes);
  const Graph graph = planted(nodes);
  const std::vector<Hop> hops = sampled_batch(graph);
  Cases cases;
  sampling_cases(graph, hops, cases);
  if (options.calls == 0) {
    weighted_cases(graph, hops[1], cases);
    product_cases(graph, hops[1], "hop 1", cases);
    product_cases(graph, hops[2], "hop 2", cases);
  }
  return bench::run(cases, options);
}
