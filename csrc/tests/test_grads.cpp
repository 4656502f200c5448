#include "check.hpp"
#include "joestar/extremum_grad.hpp"
#include "joestar/sddmm.hpp"
#include "joestar/spmm_shared.hpp"

using namespace joestar;

namespace {

struct Case {
  test::Graph<std::int32_t> graph;
  std::int64_t num_src, heads, width;
  std::vector<double> x, weight, grad;

  std::int64_t size() const { return heads * width; }
  std::int64_t edges() const { return static_cast<std::int64_t>(graph.indices.size()); }
  double degree(std::int64_t row) const {
    return static_cast<double>(graph.indptr[static_cast<std::size_t>(row) + 1] -
                               graph.indptr[static_cast<std::size_t>(row)]);
  }
};

Case random_case(std::int64_t rows, std::int64_t num_src, std::int64_t heads, std::int64_t width) {
  Case c{test::random_graph<std::int32_t>(rows, num_src, 9, 12), num_src, heads, width, {}, {}, {}};
  c.x = test::random_values<double>(num_src * c.size(), 1);
  c.weight = test::random_values<double>(c.edges() * heads, 2);
  c.grad = test::random_values<double>(rows * c.size(), 3);
  return c;
}

// visit(edge, row, source, d) for every edge and column.
template <class F>
void for_all(const Case& c, F&& visit) {
  for (std::int64_t i = 0; i < c.graph.rows(); ++i) {
    for (auto e = c.graph.indptr[static_cast<std::size_t>(i)]; e < c.graph.indptr[static_cast<std::size_t>(i) + 1];
         ++e) {
      for (std::int64_t d = 0; d < c.size(); ++d) visit(e, i, c.graph.indices[static_cast<std::size_t>(e)], d);
    }
  }
}

template <class V>
auto& at(V& values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

void sums_and_means(const Case& c, Reduce reduce) {
  const std::int64_t size = c.size();
  std::vector<double> grad_x(static_cast<std::size_t>(c.num_src * size)), grad_w(c.weight.size());
  for_all(c, [&](auto e, auto row, auto source, auto d) {
    const double g = at(c.grad, row * size + d) / (reduce == Reduce::Mean ? c.degree(row) : 1.0);
    at(grad_x, source * size + d) += g * at(c.weight, e * c.heads + d / c.width);
    at(grad_w, e * c.heads + d / c.width) += g * at(c.x, source * size + d);
  });
  const auto got_x = test::for_thread_counts([&] {
    std::vector<double> out(grad_x.size(), 5.0);
    const WeightedShape<double> shape{c.weight.data(), c.heads, c.width};
    spmm_grad_x(c.graph.csc(), c.num_src, c.grad.data(), shape, reduce, out.data());
    return out;
  });
  CHECK(got_x == grad_x);  // the same order of summation
  const auto got_w = test::for_thread_counts([&] {
    std::vector<double> out(grad_w.size(), 5.0);
    const DotRows<double> rows{c.x.data(), c.grad.data(), c.heads, c.width, false, reduce == Reduce::Mean};
    sddmm_dot(c.graph.csc(), rows, out.data());
    return out;
  });
  CHECK(test::close(got_w, grad_w, 1e-12));
}

// Heads that share the first `width` columns of x.
void shared_rows(const Case& c, bool mean) {
  const std::int64_t size = c.size();
  std::vector<double> shared(static_cast<std::size_t>(c.num_src * c.width)), y(c.grad.size()), grad_x(shared.size()),
      grad_w(c.weight.size());
  for (std::int64_t i = 0; i < c.num_src * c.width; ++i) {
    at(shared, i) = at(c.x, i / c.width * size + i % c.width);
  }
  for_all(c, [&](auto e, auto row, auto source, auto d) {
    const double w = at(c.weight, e * c.heads + d / c.width) / (mean ? c.degree(row) : 1.0);
    const double x = at(shared, source * c.width + d % c.width), g = at(c.grad, row * size + d);
    at(y, row * size + d) += w * x;
    at(grad_x, source * c.width + d % c.width) += w * g;
    at(grad_w, e * c.heads + d / c.width) += g * x / (mean ? c.degree(row) : 1.0);
  });
  const auto got_y = test::for_thread_counts([&] {
    std::vector<double> out(y.size(), 5.0);
    const SharedMessages<double, std::int32_t> m{c.graph.indptr,  c.graph.indices.data(), shared.data(),
                                                 c.weight.data(), c.heads,                c.width};
    spmm_shared(m, mean, out.data());
    return out;
  });
  CHECK(test::close(got_y, y, 1e-12));
  const auto got_x = test::for_thread_counts([&] {
    std::vector<double> out(grad_x.size(), 5.0);
    const WeightedShape<double> shape{c.weight.data(), c.heads, c.width};
    spmm_shared_grad_x(c.graph.csc(), c.num_src, c.grad.data(), shape, mean, out.data());
    return out;
  });
  CHECK(test::close(got_x, grad_x, 1e-12));
  const auto got_w = test::for_thread_counts([&] {
    std::vector<double> out(grad_w.size(), 5.0);
    const DotRows<double> rows{shared.data(), c.grad.data(), c.heads, c.width, true, mean};
    sddmm_dot(c.graph.csc(), rows, out.data());
    return out;
  });
  CHECK(test::close(got_w, grad_w, 1e-12));
}

// Values on a coarse grid make ties; every weight of 1 keeps them exact.
void extrema(Case c, bool weighted) {
  const std::int64_t size = c.size(), rows = c.graph.rows();
  for (double& value : c.x) value = std::round(value * 2);
  for (double& value : c.weight) value = value > 0 ? 1.0 : 2.0;
  std::vector<double> y(static_cast<std::size_t>(rows * size));
  const double* weight = weighted ? c.weight.data() : nullptr;
  spmm(Messages<double, const std::int32_t*>{.indptr = c.graph.indptr,
                                             .ids = c.graph.indices.data(),
                                             .x = c.x.data(),
                                             .weight = weight,
                                             .heads = c.heads,
                                             .width = c.width},
       Reduce::Max, y.data());
  const auto message = [&](auto e, auto source, auto d) {
    return (weighted ? at(c.weight, e * c.heads + d / c.width) : 1.0) * at(c.x, source * size + d);
  };
  std::vector<double> ties(y.size()), grad_x(c.x.size()), grad_w(c.weight.size());
  for_all(c, [&](auto e, auto row, auto source, auto d) {
    at(ties, row * size + d) += message(e, source, d) == at(y, row * size + d);
  });
  for_all(c, [&](auto e, auto row, auto source, auto d) {
    if (message(e, source, d) != at(y, row * size + d)) return;
    const double share = at(c.grad, row * size + d) / at(ties, row * size + d);
    at(grad_x, source * size + d) += share * (weighted ? at(c.weight, e * c.heads + d / c.width) : 1.0);
    at(grad_w, e * c.heads + d / c.width) += share * at(c.x, source * size + d);
  });
  std::vector<double> got_w(c.weight.size(), 5.0);
  const auto got_x = test::for_thread_counts([&] {
    std::vector<double> out(grad_x.size(), 5.0);
    const ExtremumGrad<double> task{c.x.data(), y.data(), c.grad.data(), {weight, c.heads, c.width}};
    spmm_extremum_grad(c.graph.csc(), c.num_src, task, out.data(), weighted ? got_w.data() : nullptr);
    return out;
  });
  CHECK(got_x == grad_x);
  if (weighted) CHECK(test::close(got_w, grad_w, 1e-12));
}

void scatters(const Case& c) {
  const auto values = test::random_values<double>(c.edges() * 3, 6);
  std::vector<double> by_source(static_cast<std::size_t>(c.num_src * 3)),
      by_row(static_cast<std::size_t>(c.graph.rows() * 3));
  for (std::int64_t i = 0; i < c.graph.rows(); ++i) {
    for (auto e = at(c.graph.indptr, i); e < at(c.graph.indptr, i + 1); ++e) {
      for (int d = 0; d < 3; ++d) {
        at(by_source, at(c.graph.indices, e) * 3 + d) += at(values, e * 3 + d);
        at(by_row, i * 3 + d) += at(values, e * 3 + d);
      }
    }
  }
  std::vector<double> out(by_source.size(), 5.0), rows(by_row.size(), 5.0);
  scatter_src(c.graph.csc(), c.num_src, values.data(), 3, out.data());
  scatter_dst<double>(c.graph.indptr, values.data(), 3, rows.data());
  CHECK(out == by_source);
  CHECK(rows == by_row);
}

}  // namespace

int main() {
  for (const auto& [rows, num_src] : {std::pair<std::int64_t, std::int64_t>{97, 120}, {9001, 5000}}) {
    for (const auto& [heads, width] : {std::pair<std::int64_t, std::int64_t>{1, 5}, {3, 4}}) {
      const Case c = random_case(rows, num_src, heads, width);
      sums_and_means(c, Reduce::Sum);
      sums_and_means(c, Reduce::Mean);
      shared_rows(c, false);
      shared_rows(c, true);
      extrema(c, false);
      extrema(c, true);
      scatters(c);
    }
  }
  return report("grads");
}
