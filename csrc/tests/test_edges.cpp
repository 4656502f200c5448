#include "check.hpp"
#include "joestar/sddmm.hpp"
#include "joestar/softmax.hpp"

using namespace joestar;

namespace {

double value_of(EdgeOp op, double a, double b) {
  switch (op) {
    case EdgeOp::Add:
      return a + b;
    case EdgeOp::Sub:
      return a - b;
    case EdgeOp::Mul:
      return a * b;
    case EdgeOp::Div:
      return a / b;
    case EdgeOp::CopyLhs:
      return a;
    default:
      return b;
  }
}

void elementwise_matches() {
  auto graph = test::random_graph<std::int32_t>(120, 90, 6, 1);
  graph.indices.resize(graph.indices.size() + 3, 0);  // three padded edges
  const auto edges = graph.indices.size();
  const auto lhs = test::random_values<double>(90 * 5, 2), rhs = test::random_values<double>(120 * 5, 3);
  for (EdgeOp op : {EdgeOp::Add, EdgeOp::Sub, EdgeOp::Mul, EdgeOp::Div, EdgeOp::CopyLhs, EdgeOp::CopyRhs}) {
    std::vector<double> expected(edges * 5, 0.0);
    for (std::size_t i = 0; i < 120; ++i) {
      for (auto e = static_cast<std::size_t>(graph.indptr[i]); e < static_cast<std::size_t>(graph.indptr[i + 1]); ++e) {
        for (std::size_t d = 0; d < 5; ++d) {
          expected[e * 5 + d] = value_of(op, lhs[static_cast<std::size_t>(graph.indices[e]) * 5 + d], rhs[i * 5 + d]);
        }
      }
    }
    const auto got = test::for_thread_counts([&] {
      std::vector<double> out(edges * 5, 9.0);
      sddmm(graph.csc(), op == EdgeOp::CopyRhs ? nullptr : lhs.data(), op == EdgeOp::CopyLhs ? nullptr : rhs.data(), 5,
            op, out.data());
      return out;
    });
    CHECK(got == expected);
  }
}

template <class T>
void softmax_matches(double tolerance) {
  auto graph = test::random_graph<std::int32_t>(150, 90, 6, 4);
  const auto valid = graph.indices.size(), edges = valid + 2;
  for (std::size_t heads : {std::size_t{1}, std::size_t{4}}) {
    auto s = test::random_values<T>(static_cast<std::int64_t>(edges * heads), 5);
    for (T& value : s) value *= 20;
    std::vector<double> expected(edges * heads, 0.0), expected_grad(edges * heads, 0.0);
    const auto grad = test::random_values<T>(static_cast<std::int64_t>(edges * heads), 6);
    for (std::size_t i = 0; i < 150; ++i) {
      const auto begin = static_cast<std::size_t>(graph.indptr[i]), end = static_cast<std::size_t>(graph.indptr[i + 1]);
      for (std::size_t h = 0; h < heads; ++h) {
        double total = 0.0, product = 0.0;
        for (auto e = begin; e < end; ++e) total += std::exp(static_cast<double>(s[e * heads + h]));
        for (auto e = begin; e < end; ++e) {
          expected[e * heads + h] = std::exp(static_cast<double>(s[e * heads + h])) / total;
          product += expected[e * heads + h] * static_cast<double>(grad[e * heads + h]);
        }
        for (auto e = begin; e < end; ++e) {
          expected_grad[e * heads + h] = expected[e * heads + h] * (static_cast<double>(grad[e * heads + h]) - product);
        }
      }
    }
    const auto got = test::for_thread_counts([&] {
      std::vector<T> out(edges * heads, T{9});
      edge_softmax<T>(graph.indptr, s.data(), static_cast<std::int64_t>(edges), static_cast<std::int64_t>(heads),
                      out.data());
      return out;
    });
    CHECK(test::close(got, expected, tolerance));
    std::vector<T> grad_s(edges * heads, T{9});
    edge_softmax_grad<T>(graph.indptr, got.data(), grad.data(), static_cast<std::int64_t>(edges),
                         static_cast<std::int64_t>(heads), grad_s.data());
    CHECK(test::close(grad_s, expected_grad, tolerance));
  }
}

void exponential_is_accurate() {
  double worst = 0.0;
  for (float x = -87.0f; x <= 88.0f; x += 0.00173f) {
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(detail::exponential(x)) - exact) / exact);
  }
  CHECK(worst < 2.5e-7);
  CHECK(detail::exponential(0.0f) == 1.0f);
  CHECK(detail::exponential(-std::numeric_limits<float>::infinity()) == 0.0f);
  CHECK(std::isnan(detail::exponential(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace

int main() {
  set_num_threads(4);
  elementwise_matches();
  softmax_matches<float>(1e-6);
  softmax_matches<double>(1e-14);
  exponential_is_accurate();
  return report("edges");
}
