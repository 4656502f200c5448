#include "joestar/multi.hpp"

#include "check.hpp"

using namespace joestar;

namespace {

// Values of few different ones, so that extrema are attained several times.
struct Case {
  test::Graph<std::int32_t> graph;
  std::int64_t num_src, width;
  std::vector<double> x;

  std::int64_t size() const { return graph.rows() * width; }
  double degree(std::int64_t row) const {
    return static_cast<double>(graph.indptr[static_cast<std::size_t>(row) + 1] -
                               graph.indptr[static_cast<std::size_t>(row)]);
  }
};

Case random_case(std::int64_t rows, std::int64_t num_src, std::int64_t width) {
  Case c{test::random_graph<std::int32_t>(rows, num_src, 6, 12), num_src, width, {}};
  c.x = test::random_values<double>(num_src * width, 1);
  for (double& value : c.x) value = std::round(4 * value);
  return c;
}

template <class V>
auto& at(V& values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

// visit(row, source, d) for every edge and column.
template <class F>
void for_all(const Case& c, F&& visit) {
  for (std::int64_t i = 0; i < c.graph.rows(); ++i) {
    for (auto e = at(c.graph.indptr, i); e < at(c.graph.indptr, i + 1); ++e) {
      for (std::int64_t d = 0; d < c.width; ++d) visit(i, std::int64_t{at(c.graph.indices, e)}, d);
    }
  }
}

struct Results {
  std::vector<double> sum, mean, max, min, square_sum, square_mean;
  std::vector<std::int32_t> max_ties, min_ties;

  bool operator==(const Results&) const = default;
};

Results expected(const Case& c) {
  const auto n = static_cast<std::size_t>(c.size());
  const double inf = std::numeric_limits<double>::infinity();
  Results r{std::vector<double>(n), std::vector<double>(n), std::vector<double>(n, -inf), std::vector<double>(n, inf),
            std::vector<double>(n), std::vector<double>(n), std::vector<std::int32_t>(n), std::vector<std::int32_t>(n)};
  for_all(c, [&](auto row, auto source, auto d) {
    const std::int64_t i = row * c.width + d;
    const double value = at(c.x, source * c.width + d);
    at(r.sum, i) += value;
    at(r.square_sum, i) += value * value;
    at(r.max, i) = std::max(at(r.max, i), value);
    at(r.min, i) = std::min(at(r.min, i), value);
  });
  for_all(c, [&](auto row, auto source, auto d) {
    const std::int64_t i = row * c.width + d;
    at(r.max_ties, i) += at(c.x, source * c.width + d) == at(r.max, i);
    at(r.min_ties, i) += at(c.x, source * c.width + d) == at(r.min, i);
  });
  for (std::int64_t i = 0; i < c.size(); ++i) {
    const double degree = c.degree(i / c.width);
    at(r.mean, i) = at(r.sum, i) / std::max(1.0, degree);
    at(r.square_mean, i) = at(r.square_sum, i) / std::max(1.0, degree);
    if (degree == 0) at(r.max, i) = at(r.min, i) = 0;
  }
  return r;
}

void forward(const Case& c) {
  const Results right = expected(c);
  const Messages<double, const std::int32_t*> m{
      .indptr = c.graph.indptr, .ids = c.graph.indices.data(), .x = c.x.data(), .width = c.width};
  const auto all = test::for_thread_counts([&] {
    const std::vector<double> old(static_cast<std::size_t>(c.size()), 5.0);
    const std::vector<std::int32_t> none(static_cast<std::size_t>(c.size()), 5);
    Results r{old, old, old, old, old, old, none, none};
    multi_aggregate(m, MultiResults<double>{r.sum.data(), r.mean.data(), r.max.data(), r.min.data(),
                                            r.square_sum.data(), r.square_mean.data(), r.max_ties.data(),
                                            r.min_ties.data()});
    return r;
  });
  CHECK(all == right);  // whole numbers: sums are exact, whatever their order
  std::vector<double> low(static_cast<std::size_t>(c.size()), 5.0);
  multi_aggregate(m, MultiResults<double>{nullptr, nullptr, nullptr, low.data(), nullptr, nullptr, nullptr, nullptr});
  CHECK(low == right.min);
}

void gradient(const Case& c) {
  const Results y = expected(c);
  const auto plain = test::random_values<double>(c.size(), 2), square = test::random_values<double>(c.size(), 3);
  const auto top = test::random_values<double>(c.size(), 4), low = test::random_values<double>(c.size(), 5);
  std::vector<double> right(c.x.size());
  for_all(c, [&](auto row, auto source, auto d) {
    const std::int64_t i = row * c.width + d, s = source * c.width + d;
    at(right, s) += at(plain, i) + 2 * at(c.x, s) * at(square, i);
    at(right, s) += at(c.x, s) == at(y.max, i) ? at(top, i) : 0;
    at(right, s) += at(c.x, s) == at(y.min, i) ? at(low, i) : 0;
  });
  const MultiGrad<double> grad{plain.data(), square.data(), {y.max.data(), y.min.data()}, {top.data(), low.data()}};
  const auto got = test::for_thread_counts([&] {
    std::vector<double> out(c.x.size(), 5.0);
    multi_aggregate_grad(c.graph.csc(), c.num_src, grad, c.x.data(), c.width, out.data());
    return out;
  });
  CHECK(test::close(got, right, 1e-11));
  const MultiGrad<double> some{nullptr, nullptr, {y.min.data(), nullptr}, {low.data(), nullptr}};
  std::vector<double> only(c.x.size(), 5.0), of_min(c.x.size());
  for_all(c, [&](auto row, auto source, auto d) {
    const std::int64_t i = row * c.width + d, s = source * c.width + d;
    at(of_min, s) += at(c.x, s) == at(y.min, i) ? at(low, i) : 0;
  });
  multi_aggregate_grad(c.graph.csc(), c.num_src, some, c.x.data(), c.width, only.data());
  CHECK(test::close(only, of_min, 1e-12));
}

}  // namespace

int main() {
  for (const std::int64_t width : {1, 7, 64, 130}) {
    const Case c = random_case(300, 90, width);
    forward(c);
    gradient(c);
  }
  forward(random_case(1, 3, 5));
  return report("multi");
}
