#include "joestar/part_batch.hpp"

#include <map>
#include <numeric>
#include <set>

#include "check.hpp"

using namespace joestar;

namespace {

template <IdType Id>
struct Case {
  test::Graph<Id> graph = test::random_graph<Id>(400, 400, 5, 3);
  std::vector<std::int32_t> part_of, chosen{1, 0, 0, 1, 0, 0, 0, 1};
  std::vector<Id> hubs{3, 90, 399}, seeds;

  Case() {
    for (std::int64_t v = 0; v < 400; ++v) {
      part_of.push_back(static_cast<std::int32_t>(v * 7 % 8));
      if (member(v) && v % 9 == 0) seeds.push_back(static_cast<Id>(v));
    }
  }
  bool member(std::int64_t v) const { return chosen[static_cast<std::size_t>(v * 7 % 8)] != 0; }
  bool inside(std::int64_t v) const { return member(v) || std::ranges::count(hubs, static_cast<Id>(v)) > 0; }

  // All edges that row v may hold, in order.
  std::vector<Id> candidates(std::int64_t v) const {
    std::vector<Id> out;
    for (auto e = graph.indptr[static_cast<std::size_t>(v)]; e < graph.indptr[static_cast<std::size_t>(v) + 1]; ++e) {
      const Id u = graph.indices[static_cast<std::size_t>(e)];
      if (member(v) || inside(u)) out.push_back(u);
    }
    return out;
  }
};

template <IdType Id>
struct Written {
  std::vector<Id> ids;
  std::vector<std::int64_t> indptr;
  std::vector<std::int32_t> indices;
  bool operator==(const Written&) const = default;

  std::int64_t rows() const { return static_cast<std::int64_t>(indptr.size()) - 1; }
  std::map<Id, std::vector<Id>> edges() const {
    std::map<Id, std::vector<Id>> out;
    for (std::size_t i = 0; i + 1 < indptr.size(); ++i) {
      auto& row = out[ids[i]];
      for (auto e = indptr[i]; e < indptr[i + 1]; ++e) {
        row.push_back(ids[static_cast<std::size_t>(indices[static_cast<std::size_t>(e)])]);
      }
    }
    return out;
  }
};

template <IdType Id>
Written<Id> written(const Case<Id>& c, std::vector<std::int64_t> fanouts, std::int64_t halo_fanout) {
  std::vector<LargeHop> hops;
  for (std::size_t h = 0; h < fanouts.size(); ++h) {
    hops.push_back({Fanout{fanouts[h], false}, key_state({1, 2, 3, static_cast<std::int64_t>(h)})});
  }
  const PartNodes nodes = part_nodes<Id>(c.part_of, c.chosen, c.hubs);
  const PartTask<Id> task{c.graph.csc(), nodes, halo_fanout, key_state({1, 2, 3, 99}), hops};
  const auto parts = part_batch<Id>(task, c.seeds);
  Written<Id> out{std::vector<Id>(static_cast<std::size_t>(parts.num_nodes())),
                  std::vector<std::int64_t>(static_cast<std::size_t>(parts.num_rows()) + 1),
                  std::vector<std::int32_t>(static_cast<std::size_t>(parts.num_edges()))};
  parts.write(out.ids.data(), out.indptr, out.indices.data(), nullptr);
  return out;
}

template <IdType Id>
void all_rows_with_all_their_edges() {
  const Case<Id> c;
  const auto got = test::for_thread_counts([&] { return written(c, {}, -1); });
  const auto edges = got.edges();
  std::set<Id> there;
  for (std::int64_t v = 0; v < 400; ++v) {
    if (!c.inside(v)) continue;
    CHECK(edges.at(static_cast<Id>(v)) == c.candidates(v));
    there.insert(static_cast<Id>(v));
    for (const Id u : c.candidates(v)) there.insert(u);
  }
  CHECK((std::set<Id>(got.ids.begin(), got.ids.end()) == there && there.size() == got.ids.size()));
  for (std::size_t i = static_cast<std::size_t>(got.rows()); i < got.ids.size(); ++i) CHECK(!c.inside(got.ids[i]));
}

template <IdType Id>
void what_hops_reach(int hops) {
  const Case<Id> c;
  const auto got = test::for_thread_counts([&] {
    return written(c, std::vector<std::int64_t>(static_cast<std::size_t>(hops), -1), -1);
  });
  std::set<Id> seen(c.seeds.begin(), c.seeds.end()), rows;
  for (int hop = 0; hop < hops; ++hop) {
    std::set<Id> next = seen;
    for (const Id v : seen) {
      if (!c.inside(v)) continue;
      rows.insert(v);
      for (const Id u : c.candidates(v)) next.insert(u);
    }
    seen = next;
  }
  CHECK((std::set<Id>(got.ids.begin(), got.ids.end()) == seen));
  const auto edges = got.edges();
  CHECK(edges.size() == rows.size());
  for (const Id v : rows) CHECK(edges.at(v) == c.candidates(v));
}

// With all parts chosen, what is picked ahead is what a large batch picks, edge by edge.
template <IdType Id>
void picks_are_those_of_a_large_batch() {
  Case<Id> c;
  std::fill(c.chosen.begin(), c.chosen.end(), 1);
  for (const std::vector<std::int64_t>& fanouts : {std::vector<std::int64_t>{3, 2}, {15, 10, 5}, {2, -1}, {-1}}) {
    std::vector<LargeHop> hops;
    for (std::size_t h = 0; h < fanouts.size(); ++h) {
      hops.push_back({Fanout{fanouts[h], false}, key_state({1, 2, 3, static_cast<std::int64_t>(h)})});
    }
    const auto parts = sample_large_batch<Id>({c.graph.csc(), hops, {}, {}, false}, std::span<const Id>(c.seeds));
    Written<Id> expected{std::vector<Id>(static_cast<std::size_t>(parts.num_nodes())),
                         std::vector<std::int64_t>(static_cast<std::size_t>(parts.num_rows()) + 1),
                         std::vector<std::int32_t>(static_cast<std::size_t>(parts.num_edges()))};
    parts.write(expected.ids.data(), expected.indptr, expected.indices.data(), nullptr);
    CHECK(written(c, fanouts, -1) == expected);
  }
}

// Which nodes are members and hubs, for numbers of nodes that do and do not end with a word.
void members_are_those_of_chosen_parts() {
  for (const std::int64_t nodes : {1, 31, 63, 64, 65, 400, 4096, 70001}) {
    std::vector<std::int32_t> part_of, chosen{0, 1, 0, 7, 0};
    for (std::int64_t v = 0; v < nodes; ++v) part_of.push_back(static_cast<std::int32_t>(v * v % 5));
    const std::vector<std::int32_t> hubs{0, static_cast<std::int32_t>(nodes - 1)};
    const PartNodes got = part_nodes<std::int32_t>(part_of, chosen, hubs);
    for (std::int64_t v = 0; v < nodes; ++v) {
      const bool member = chosen[static_cast<std::size_t>(part_of[static_cast<std::size_t>(v)])] != 0;
      CHECK(PartNodes::has(got.members, v) == member);
      CHECK(PartNodes::has(got.inside, v) == (member || v == 0 || v == nodes - 1));
    }
    for (std::int64_t w = nodes / 64 + 1; w < got.members.num_words(); ++w) CHECK(got.members.words()[w] == 0);
  }
}

// What is told of nodes with and without a row.
template <IdType Id>
void marks_say_who_is_inner_and_who_is_halo() {
  const Case<Id> c;
  const PartNodes nodes = part_nodes<Id>(c.part_of, c.chosen, c.hubs);
  std::vector<Id> ids(400);
  std::iota(ids.begin(), ids.end(), Id{0});
  for (const std::int64_t rows : {0, 137, 400}) {
    std::vector<std::uint8_t> inner(400), halo(400);
    mark_nodes<Id>(nodes, ids, rows, inner, halo);
    for (std::int64_t v = 0; v < 400; ++v) {
      CHECK(inner[static_cast<std::size_t>(v)] == (v < rows && c.member(v)));
      CHECK(halo[static_cast<std::size_t>(v)] == (v >= rows && !c.inside(v)));
    }
  }
}

template <IdType Id>
void picks_are_bounded_and_in_order() {
  const Case<Id> c;
  const auto got = test::for_thread_counts([&] { return written(c, {3, 2}, 2); });
  for (const auto& [v, row] : got.edges()) {
    const auto all = c.candidates(v);
    const bool seed = std::ranges::count(c.seeds, v) > 0;
    std::int64_t outside = 0;
    for (const Id u : row) outside += !c.inside(u);
    CHECK(static_cast<std::int64_t>(row.size()) <= (seed ? 5 : 2) && (outside <= 2 || !c.member(v)));
    std::size_t at = 0;  // a subsequence of all
    for (const Id u : all) at += at < row.size() && row[at] == u;
    CHECK(at == row.size());
  }
}

}  // namespace

int main() {
  all_rows_with_all_their_edges<std::int32_t>();
  all_rows_with_all_their_edges<std::int64_t>();
  for (int hops : {1, 2, 3}) what_hops_reach<std::int32_t>(hops);
  what_hops_reach<std::int64_t>(2);
  picks_are_those_of_a_large_batch<std::int32_t>();
  picks_are_those_of_a_large_batch<std::int64_t>();
  members_are_those_of_chosen_parts();
  marks_say_who_is_inner_and_who_is_halo<std::int32_t>();
  marks_say_who_is_inner_and_who_is_halo<std::int64_t>();
  picks_are_bounded_and_in_order<std::int32_t>();
  picks_are_bounded_and_in_order<std::int64_t>();
  return report("part_batch");
}
