#include "joestar/partition.hpp"

#include <cmath>
#include <numeric>
#include <set>

#include "check.hpp"
#include "joestar/part_facts.hpp"

using namespace joestar;

namespace {

using Parts = std::vector<std::int32_t>;

// Communities of 50 nodes, two thirds of the edges inside; both directions are stored.
template <IdType Id>
test::Graph<Id> communities(std::int64_t nodes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<Id>> rows(static_cast<std::size_t>(nodes));
  for (std::int64_t v = 0; v < nodes; ++v) {
    for (int e = 0; e < 6; ++e) {
      const std::int64_t near = v / 50 * 50 + static_cast<std::int64_t>(random() % 50);
      const std::int64_t u = e < 4 && near < nodes ? near : static_cast<std::int64_t>(random() % nodes);
      rows[static_cast<std::size_t>(v)].push_back(static_cast<Id>(u));
      rows[static_cast<std::size_t>(u)].push_back(static_cast<Id>(v));
    }
  }
  test::Graph<Id> graph{{0}, {}};
  for (const auto& row : rows) {
    graph.indices.insert(graph.indices.end(), row.begin(), row.end());
    graph.indptr.push_back(static_cast<std::int64_t>(graph.indices.size()));
  }
  return graph;
}

Parts some_labels(std::int64_t nodes, std::int32_t classes) {
  std::mt19937 random(5);
  Parts labels;
  for (std::int64_t v = 0; v < nodes; ++v) {
    labels.push_back(random() % 3 ? static_cast<std::int32_t>(random() % static_cast<unsigned>(classes)) : -1);
  }
  return labels;
}

// Eq. 4.2 for every part and every node, as it is written.
template <IdType Id>
void plain_pass(const Csc<Id>& graph, const Parts& labels, const PartitionOptions& options, double strength,
                Parts& parts) {
  const auto label = [&](std::size_t v) { return labels.empty() || labels[v] < 0 ? options.labels : labels[v]; };
  const std::size_t nodes = parts.size(), k = static_cast<std::size_t>(options.parts);
  for (std::size_t v = 0; v < nodes; ++v) {
    const std::int32_t before = parts[v];
    parts[v] = -1;
    std::vector<double> near(k, 0);
    std::vector<std::int64_t> size(k, 0), same(k, 0);
    double of_label = 0;
    for (std::size_t u = 0; u < nodes; ++u) {
      of_label += label(u) == label(v);
      if (parts[u] < 0) continue;
      ++size[static_cast<std::size_t>(parts[u])];
      same[static_cast<std::size_t>(parts[u])] += label(u) == label(v);
    }
    for (auto e = graph.indptr[v]; e < graph.indptr[v + 1]; ++e) {
      const std::int32_t part = parts[static_cast<std::size_t>(graph.indices[static_cast<std::size_t>(e)])];
      if (part >= 0) ++near[static_cast<std::size_t>(part)];
    }
    double best_score = -1e300;
    std::int32_t best = -1;
    for (std::size_t p = 0; p < k; ++p) {
      if (size[p] >= options.cap) continue;
      const double score = near[p] - strength * std::sqrt(static_cast<double>(same[p]) * (options.parts / of_label));
      const auto part = static_cast<std::int32_t>(p);
      if (score > best_score || (score == best_score && part == before)) best = part, best_score = score;
    }
    parts[v] = best;
  }
}

template <IdType Id>
void follows_the_equation(std::int32_t parts, std::int32_t classes, std::int64_t cap) {
  const auto graph = communities<Id>(400, 1);
  const Parts labels = classes > 0 ? some_labels(400, classes) : Parts{};
  Parts expected(400, -1);
  const PartitionOptions plain{parts, classes, cap, 1};
  for (double strength : {2.0, 5.0, 9.0}) plain_pass(graph.csc(), labels, plain, strength, expected);
  for (std::int64_t block : {1, 7, 100, 1000}) {
    const PartitionOptions options{parts, classes, cap, block};
    Parts got(400, -1);
    for (double strength : {2.0, 5.0, 9.0}) {
      GapStream<Id> stream(graph.csc(), labels, options, got);
      CHECK(stream.place(0, 150, strength) + stream.place(150, 400, strength) >= 0);
    }
    CHECK(got == expected);
  }
  for (std::int32_t part = 0; part < parts; ++part) CHECK(std::ranges::count(expected, part) <= cap);
}

void any_number_of_threads() {
  const auto graph = communities<std::int32_t>(20000, 2);
  const Parts labels = some_labels(20000, 7);
  const auto parts = test::for_thread_counts([&] {
    Parts got(20000, -1);
    for (double strength : {1.0, 2.0, 4.0, 8.0}) {
      GapStream<std::int32_t>(graph.csc(), labels, {100, 7, 240, 8192}, got).place(0, 20000, strength);
    }
    return got;
  });
  std::vector<std::int64_t> cut(100), halo(100), random_cut(100);
  part_facts<std::int32_t>(graph.csc(), parts, cut, halo);
  Parts random(20000);
  for (std::size_t v = 0; v < random.size(); ++v) random[v] = static_cast<std::int32_t>(v * 7919 % 100);
  part_facts<std::int32_t>(graph.csc(), random, random_cut, halo);
  const auto sum = [](const auto& values) { return std::accumulate(values.begin(), values.end(), std::int64_t{0}); };
  CHECK(3 * sum(cut) < 2 * sum(random_cut));
}

void counts_what_is_between_parts() {
  const auto graph = test::random_graph<std::int64_t>(300, 300, 4, 9);
  Parts parts(300);
  for (std::size_t v = 0; v < parts.size(); ++v) parts[v] = static_cast<std::int32_t>(v * v % 7);
  std::vector<std::int64_t> edges(7, 0);
  std::vector<std::set<std::int64_t>> outside(7);
  for (std::size_t v = 0; v < 300; ++v) {
    for (auto e = graph.indptr[v]; e < graph.indptr[v + 1]; ++e) {
      const std::int64_t u = graph.indices[static_cast<std::size_t>(e)];
      if (parts[static_cast<std::size_t>(u)] == parts[v]) continue;
      ++edges[static_cast<std::size_t>(parts[v])];
      outside[static_cast<std::size_t>(parts[v])].insert(u);
    }
  }
  for (int threads : {1, 4}) {
    set_num_threads(threads);
    std::vector<std::int64_t> cut(7, -1), halo(7, -1);
    part_facts<std::int64_t>(graph.csc(), parts, cut, halo);
    CHECK(cut == edges);
    for (std::size_t part = 0; part < 7; ++part) CHECK(halo[part] == static_cast<std::int64_t>(outside[part].size()));
  }
}

void refuses_a_cap_that_leaves_nodes_out() {
  const auto graph = communities<std::int32_t>(100, 1);
  Parts parts(100, -1);
  bool refused = false;
  try {
    GapStream<std::int32_t>(graph.csc(), {}, {10, 0, 9, 64}, parts);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  follows_the_equation<std::int32_t>(8, 0, 60);
  follows_the_equation<std::int64_t>(13, 5, 40);
  follows_the_equation<std::int32_t>(13, 5, 31);   // no slack: 13 * 31 = 403
  follows_the_equation<std::int32_t>(1, 2, 400);
  follows_the_equation<std::int32_t>(400, 2, 1);   // a part per node
  any_number_of_threads();
  counts_what_is_between_parts();
  refuses_a_cap_that_leaves_nodes_out();
  return report("partition");
}
