#include "check.hpp"
#include "joestar/structure.hpp"

using namespace joestar;

namespace {

template <class T>
std::vector<T> copy(std::span<T> values) {
  return {values.begin(), values.end()};
}

// The large graph is sorted in buckets, the small ones at once.
template <IdType Id>
void transposition_is_stable(std::int64_t rows, std::int64_t num_src, std::int64_t mean) {
  const auto graph = test::random_graph<Id>(rows, num_src, mean, 3);
  std::vector<std::vector<std::pair<Id, std::int64_t>>> expected(static_cast<std::size_t>(num_src));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (auto e = graph.indptr[static_cast<std::size_t>(i)]; e < graph.indptr[static_cast<std::size_t>(i) + 1]; ++e) {
      expected[static_cast<std::size_t>(graph.indices[static_cast<std::size_t>(e)])].emplace_back(static_cast<Id>(i),
                                                                                                  e);
    }
  }
  for (int threads : {1, 4}) {
    set_num_threads(threads);
    const auto got = transpose(graph.csc(), num_src);
    CHECK(got.indptr[num_src] == static_cast<std::int64_t>(graph.indices.size()));
    for (std::int64_t s = 0; s < num_src; ++s) {
      const auto& edges = expected[static_cast<std::size_t>(s)];
      CHECK(got.indptr[s + 1] - got.indptr[s] == static_cast<std::int64_t>(edges.size()));
      for (std::size_t n = 0; n < edges.size(); ++n) {
        const auto t = got.indptr[s] + static_cast<std::int64_t>(n);
        CHECK(got.row[t] == edges[n].first && got.edge[t] == edges[n].second);
      }
    }
    std::vector<std::int64_t> degrees(static_cast<std::size_t>(num_src), -1);
    out_degrees(graph.csc(), std::span<std::int64_t>(degrees));
    for (std::int64_t s = 0; s < num_src; ++s) {
      CHECK(degrees[static_cast<std::size_t>(s)] == got.indptr[s + 1] - got.indptr[s]);
    }
  }
}

void rows_of_edges() {
  const std::vector<std::int64_t> indptr{0, 0, 2, 2, 5};
  std::vector<std::int32_t> rows(7, -1);
  edge_rows<std::int32_t>(indptr, rows);
  CHECK((rows == std::vector<std::int32_t>{1, 1, 3, 3, 3, 0, 0}));
}

void one_loop_per_row() {
  const test::Graph<std::int32_t> graph{{0, 2, 2, 5, 5}, {0, 2, 2, 1, 2}};
  std::vector<std::int64_t> indptr(5);
  std::vector<std::int32_t> indices(9, -1);
  add_self_loops<std::int32_t>(graph.csc(), 4, indptr, indices);
  CHECK((indptr == std::vector<std::int64_t>{0, 2, 3, 5, 6}));
  CHECK((indices == std::vector<std::int32_t>{2, 0, 1, 1, 2, 3, 0, 0, 0}));
  add_self_loops<std::int32_t>(graph.csc(), 3, indptr, indices);  // the last row is padding
  CHECK((indptr == std::vector<std::int64_t>{0, 2, 3, 5, 5}));
  CHECK((indices == std::vector<std::int32_t>{2, 0, 1, 1, 2, 0, 0, 0, 0}));
}

}  // namespace

int main() {
  transposition_is_stable<std::int32_t>(50, 40, 4);
  transposition_is_stable<std::int64_t>(20000, 30001, 8);
  transposition_is_stable<std::int32_t>(20000, 700, 8);
  transposition_is_stable<std::int32_t>(20000, 3, 8);
  rows_of_edges();
  one_loop_per_row();
  return report("structure");
}
