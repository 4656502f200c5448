#include "check.hpp"
#include "joestar/segment.hpp"
#include "joestar/structure.hpp"

using namespace joestar;

namespace {

using Ids = std::int32_t;
constexpr std::int64_t H = 2, D = 20, W = H * D, K = 3;

template <class V>
auto& at(V& values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

// Rows of sources, destinations and edges, features with a weight, a vector, in double.
struct Case {
  test::Graph<Ids> graph;
  std::int64_t num_src;
  std::vector<double> src, dst, edge, features, weight, bias, vector;

  std::int64_t rows() const { return graph.rows(); }
  std::int64_t edges() const { return static_cast<std::int64_t>(graph.indices.size()); }
  SegmentEdges by_destination() const { return {graph.indptr, graph.indices.data(), false}; }
};

Case random_case(std::int64_t rows, std::int64_t num_src) {
  Case c{test::random_graph<Ids>(rows, num_src, 6, 3), num_src, {}, {}, {}, {}, {}, {}, {}};
  c.src = test::random_values<double>(num_src * W, 1);
  c.dst = test::random_values<double>(rows * W, 2);
  c.edge = test::random_values<double>(c.edges() * W, 3);
  c.features = test::random_values<double>(c.edges() * K, 4);
  c.weight = test::random_values<double>(W * K, 5);
  c.bias = test::random_values<double>(W, 6);
  c.vector = test::random_values<double>(W, 7);
  return c;
}

SegmentTable wide(const std::vector<double>& values) { return {values.data(), SegmentNumber::Wide}; }

std::vector<SegmentLeaf> leaves_of(const Case& c) {
  return {{SegmentBy::Source, 2, false, wide(c.src), {}, {}, 0},
          {SegmentBy::Destination, 2, false, wide(c.dst), {}, {}, 0},
          {SegmentBy::Edge, 2, false, wide(c.edge), {}, {}, 0},
          {SegmentBy::Narrow, 2, false, wide(c.features), wide(c.weight), wide(c.bias), K},
          {SegmentBy::Vector, 2, false, wide(c.vector), {}, {}, 0}};
}

// Value 7, (source + narrow) * destination * vector, and its total per head, value 8.
std::vector<SegmentStep> steps() {
  return {{SegmentOp::Add, 2, {0, 3, 0}, 0},
          {SegmentOp::Mul, 2, {5, 1, 0}, 0},
          {SegmentOp::Mul, 2, {6, 4, 0}, 0},
          {SegmentOp::Total, 1, {7, 0, 0}, 0}};
}

double narrow_at(const Case& c, std::int64_t e, std::int64_t w) {
  double sum = at(c.bias, w);
  for (std::int64_t k = 0; k < K; ++k) sum += at(c.features, e * K + k) * at(c.weight, w * K + k);
  return sum;
}

double value_at(const Case& c, std::int64_t row, std::int64_t e, std::int64_t w) {
  const std::int64_t source = at(c.graph.indices, e);
  return (at(c.src, source * W + w) + narrow_at(c, e, w)) * at(c.dst, row * W + w) * at(c.vector, w);
}

double score_at(const Case& c, std::int64_t row, std::int64_t e, std::int64_t h) {
  double sum = 0;
  for (std::int64_t d = 0; d < D; ++d) sum += value_at(c, row, e, h * D + d);
  return sum;
}

// All that a pass by destination may make of values, in one vector per sink.
using Results = std::vector<std::vector<double>>;

Results run_all(const Case& c, std::int64_t tile) {
  const std::int64_t n = c.rows(), E = c.edges();
  Results out;
  for (const std::int64_t size : {n * W, n * W, n * H, n * H, E * H, E, W, W * K, W}) {
    out.emplace_back(static_cast<std::size_t>(size), 5.0);
  }
  const std::vector<SegmentSink> sinks = {
      {SegmentInto::Mean, 7, -1, wide(out[0]), {}, {}},
      {SegmentInto::Softmax, 2, 8, wide(out[1]), wide(out[2]), wide(out[3])},
      {SegmentInto::Edges, 8, -1, wide(out[4]), {}, {}},
      {SegmentInto::EdgeTotal, 7, -1, wide(out[5]), {}, {}},
      {SegmentInto::Vector, 7, -1, wide(out[6]), {}, {}},
      {SegmentInto::Narrow, 2, 3, wide(out[7]), wide(out[8]), {}}};
  const SegmentPlan<double> plan(H, W, tile, leaves_of(c), steps(), sinks);
  run_segment(plan, c.by_destination(), E);
  return out;
}

Results naive(const Case& c) {
  const std::int64_t n = c.rows(), E = c.edges();
  Results out;
  for (const std::int64_t size : {n * W, n * W, n * H, n * H, E * H, E, W, W * K, W}) {
    out.emplace_back(static_cast<std::size_t>(size), 0.0);
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t first = at(c.graph.indptr, i), last = at(c.graph.indptr, i + 1);
    for (std::int64_t h = 0; first < last && h < H; ++h) {
      double& top = at(out[2], i * H + h) = score_at(c, i, first, h);
      for (auto e = first; e < last; ++e) top = std::max(top, score_at(c, i, e, h));
      for (auto e = first; e < last; ++e) at(out[3], i * H + h) += std::exp(score_at(c, i, e, h) - top);
    }
    for (auto e = first; e < last; ++e) {
      for (std::int64_t w = 0; w < W; ++w) {
        const double value = value_at(c, i, e, w), score = score_at(c, i, e, w / D);
        const double power = std::exp(score - at(out[2], i * H + w / D)) / at(out[3], i * H + w / D);
        at(out[0], i * W + w) += value / static_cast<double>(last - first);
        at(out[1], i * W + w) += power * at(c.edge, e * W + w);
        at(out[4], e * H + w / D) = score;
        at(out[5], e) += value;
        at(out[6], w) += value;
        at(out[8], w) += at(c.edge, e * W + w);
        for (std::int64_t k = 0; k < K; ++k) at(out[7], w * K + k) += at(c.edge, e * W + w) * at(c.features, e * K + k);
      }
    }
  }
  return out;
}

void by_destination(const Case& c) {
  const Results expected = naive(c);
  for (const std::int64_t tile : {1, 7, 64}) {
    const Results got = test::for_thread_counts([&] { return run_all(c, tile); });
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(test::close(got[i], expected[i], 1e-10));
  }
}

// Sums by source; of values of the edges, of those of destinations, and of both.
void by_source(const Case& c) {
  std::vector<double> expected(c.src.size());
  for (std::int64_t i = 0; i < c.rows(); ++i) {
    for (auto e = at(c.graph.indptr, i); e < at(c.graph.indptr, i + 1); ++e) {
      for (std::int64_t w = 0; w < W; ++w) {
        at(expected, at(c.graph.indices, e) * W + w) += value_at(c, i, e, w) - at(c.edge, e * W + w);
      }
    }
  }
  auto lines = steps();
  lines.push_back({SegmentOp::Sub, 2, {7, 2, 0}, 0});
  const Transposed<Ids> all = transpose(c.graph.csc(), c.num_src);
  const auto got = test::for_thread_counts([&] {
    std::vector<double> out(c.src.size(), 5.0);
    const SegmentPlan<double> plan(H, W, 16, leaves_of(c), lines, {{SegmentInto::Sum, 9, -1, wide(out), {}, {}}});
    run_segment(plan, {all.indptr.span(), all.row.data(), false, all.edge.data(), true}, c.edges());
    return out;
  });
  CHECK(test::close(got, expected, 1e-10));
}

// Rows of 16 bits are widened, results rounded once; what lies behind the last edge is 0.
void sixteen_bits() {
  const std::vector<std::int64_t> indptr = {0, 2, 2, 3};
  const std::vector<std::int64_t> ids = {1, 0, 1, 7};
  std::vector<BFloat16> rows, sums(3 * 4, store<BFloat16>(5.0f)), edges(4 * 4, store<BFloat16>(5.0f));
  for (int i = 0; i < 8; ++i) rows.push_back(store<BFloat16>(static_cast<float>(i)));
  const auto short_table = [](const auto& values) { return SegmentTable{values.data(), SegmentNumber::BFloat16}; };
  const SegmentPlan<float> plan(1, 4, 8, {{SegmentBy::Source, 2, false, short_table(rows), {}, {}, 0}},
                                {{SegmentOp::MulScalar, 2, {0, 0, 0}, 0.5}},
                                {{SegmentInto::Sum, 1, -1, short_table(sums), {}, {}},
                                 {SegmentInto::Edges, 1, -1, short_table(edges), {}, {}}});
  run_segment(plan, {indptr, ids.data(), true}, 4);
  std::vector<float> got, expected = {2, 3, 4, 5, 0, 0, 0, 0, 2, 2.5, 3, 3.5};
  for (const BFloat16 value : sums) got.push_back(load(value));
  CHECK(got == expected);
  for (int i = 12; i < 16; ++i) CHECK(load(at(edges, i)) == 0.0f);
  CHECK(load(at(edges, 0)) == 2.0f);
}

void bad_plans() {
  const std::vector<double> values(8);
  const std::vector<SegmentLeaf> rows = {{SegmentBy::Source, 2, false, wide(values), {}, {}, 0}};
  const auto plan = [&](std::int64_t heads, std::vector<SegmentStep> lines, std::vector<SegmentSink> sinks) {
    return test::throws<std::invalid_argument>([&] { SegmentPlan<double>(heads, 4, 8, rows, lines, sinks); });
  };
  const SegmentSink sum{SegmentInto::Sum, 0, -1, wide(values), {}, {}};
  CHECK(!plan(2, {}, {sum}));
  CHECK(plan(3, {}, {sum}));
  CHECK(plan(0, {}, {sum}));
  CHECK(plan(2, {{SegmentOp::Relu, 2, {1, 0, 0}, 0}}, {sum}));
  CHECK(plan(2, {{SegmentOp::Relu, 1, {0, 0, 0}, 0}}, {sum}));
  CHECK(plan(2, {{static_cast<SegmentOp>(99), 2, {0, 0, 0}, 0}}, {sum}));
  CHECK(plan(2, {{SegmentOp::Total, 1, {0, 0, 0}, 0}, {SegmentOp::Mul, 2, {1, 0, 0}, 0}}, {sum}));
  CHECK(plan(2, {}, {{SegmentInto::Sum, 4, -1, wide(values), {}, {}}}));
  CHECK(plan(2, {}, {{SegmentInto::Softmax, 0, 0, wide(values), {}, {}}}));
  CHECK(plan(2, {}, {{SegmentInto::Narrow, 0, 0, wide(values), {}, {}}}));
}

// What vectorised steps compute in float, against the library in double.
void steps_in_float() {
  std::vector<float> x;
  for (int i = -4000; i <= 4000; ++i) x.push_back(static_cast<float>(i) * 0.005f);
  for (const float v : {-1e30f, -200.0f, -1e-6f, 0.0f, 1e-6f, 200.0f, 1e30f}) x.push_back(v);
  for (const float v : x) {
    const double wide = v;
    const auto near = [](double got, double expected) { return std::abs(got - expected) <= 4e-7 * std::abs(expected); };
    CHECK(near(detail::hyperbolic_tangent(v), std::tanh(wide)));
    if (v < 80) CHECK(near(detail::exponential_less_one(v), std::expm1(wide)));
    if (v > -80) CHECK(near(detail::logistic(v), 1 / (1 + std::exp(-wide))));
  }
}

}  // namespace

int main() {
  for (const auto& [rows, num_src] : {std::pair<std::int64_t, std::int64_t>{97, 120}, {2001, 300}}) {
    const Case c = random_case(rows, num_src);
    by_destination(c);
    by_source(c);
  }
  sixteen_bits();
  bad_plans();
  steps_in_float();
  return report("segment");
}
