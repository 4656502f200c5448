#include "check.hpp"
#include "joestar/attend.hpp"

using namespace joestar;

namespace {

template <class V>
auto& at(V& values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

// Attention with the whole matrix of coefficients, in double.
struct Case {
  test::Graph<std::int32_t> graph;
  std::int64_t num_src, heads, width;
  bool shared;
  std::vector<double> s_src, s_dst, x, grad;
  std::vector<std::int32_t> bits;
  std::vector<double> s_edge;  // or none
  static constexpr double slope = 0.2, scale = 1.5;

  std::int64_t rows() const { return graph.rows(); }
  std::int64_t edges() const { return static_cast<std::int64_t>(graph.indices.size()); }
  std::int64_t words() const { return (heads + 31) / 32; }
  double& x_at(std::vector<double>& values, std::int64_t source, std::int64_t h, std::int64_t d) const {
    return at(values, shared ? source * width + d : (source * heads + h) * width + d);
  }
  Attention<double, std::int32_t> attention(bool dropout) const {
    return {graph.csc(), s_src.data(), s_dst.data(), x.data(), dropout ? bits.data() : nullptr, heads, width,
            shared,      slope,        scale,        s_edge.empty() ? nullptr : s_edge.data()};
  }
};

Case random_case(std::int64_t rows, std::int64_t num_src, std::int64_t heads, std::int64_t width, bool shared,
                 bool scored) {
  Case c{test::random_graph<std::int32_t>(rows, num_src, 6, 3), num_src, heads, width, shared, {}, {}, {}, {}, {}, {}};
  c.s_src = test::random_values<double>(num_src * heads, 1);
  c.s_dst = test::random_values<double>(rows * heads, 2);
  c.x = test::random_values<double>(num_src * width * (shared ? 1 : heads), 3);
  c.grad = test::random_values<double>(rows * heads * width, 4);
  if (scored) c.s_edge = test::random_values<double>(c.edges() * heads, 6);
  for (const double value : test::random_values<double>(c.edges() * c.words(), 5)) {
    c.bits.push_back(static_cast<std::int32_t>(value * 2147483647.0));
  }
  return c;
}

struct Expected {
  std::vector<double> y, s_src, s_dst, x, s_edge;
};

Expected naive(Case& c, bool dropout) {
  const std::int64_t H = c.heads, W = c.words();
  Expected out{std::vector<double>(c.grad.size()), std::vector<double>(c.s_src.size()),
               std::vector<double>(c.s_dst.size()), std::vector<double>(c.x.size()),
               std::vector<double>(c.s_edge.size())};
  for (std::int64_t i = 0; i < c.rows(); ++i) {
    const auto first = at(c.graph.indptr, i), last = at(c.graph.indptr, i + 1);
    for (std::int64_t h = 0; h < H; ++h) {
      double total = 0, dot = 0;
      const auto score = [&](auto e) {
        const double plus = c.s_edge.empty() ? 0.0 : at(c.s_edge, e * H + h);
        return at(c.s_src, at(c.graph.indices, e) * H + h) + at(c.s_dst, i * H + h) + plus;
      };
      const auto power = [&](auto e) { return std::exp(score(e) > 0 ? score(e) : c.slope * score(e)); };
      const auto kept = [&](auto e) {
        return !dropout ? 1.0 : (at(c.bits, e * W + h % W) >> (h / W)) & 1 ? c.scale : 0.0;
      };
      const auto product = [&](auto e) {
        double sum = 0;
        for (std::int64_t d = 0; d < c.width; ++d) {
          sum += c.x_at(c.x, at(c.graph.indices, e), h, d) * at(c.grad, (i * H + h) * c.width + d);
        }
        return sum;
      };
      for (auto e = first; e < last; ++e) total += power(e);
      for (auto e = first; e < last; ++e) dot += power(e) / total * kept(e) * product(e);
      for (auto e = first; e < last; ++e) {
        const std::int64_t source = at(c.graph.indices, e);
        const double alpha = power(e) / total, logit = alpha * (kept(e) * product(e) - dot);
        const double for_score = score(e) > 0 ? logit : c.slope * logit;
        at(out.s_src, source * H + h) += for_score;
        at(out.s_dst, i * H + h) += for_score;
        if (!out.s_edge.empty()) at(out.s_edge, e * H + h) = for_score;
        for (std::int64_t d = 0; d < c.width; ++d) {
          at(out.y, (i * H + h) * c.width + d) += alpha * kept(e) * c.x_at(c.x, source, h, d);
          c.x_at(out.x, source, h, d) += alpha * kept(e) * at(c.grad, (i * H + h) * c.width + d);
        }
      }
    }
  }
  return out;
}

void matches_naive(Case c, bool dropout) {
  const Expected expected = naive(c, dropout);
  const auto a = c.attention(dropout);
  std::vector<double> top(c.s_dst.size(), 5.0), total(c.s_dst.size(), 5.0);
  const auto y = test::for_thread_counts([&] {
    std::vector<double> out(c.grad.size(), 5.0);
    attend(a, out.data(), top.data(), total.data());
    return out;
  });
  CHECK(test::close(y, expected.y, 1e-11));
  const AttendState<double> state{top.data(), total.data(), c.grad.data()};
  std::vector<double> s_src(c.s_src.size()), s_dst(c.s_dst.size()), s_edge(c.s_edge.size());
  double* const for_edges = s_edge.empty() ? nullptr : s_edge.data();
  const auto x = test::for_thread_counts([&] {
    std::vector<double> out(c.x.size(), 5.0);
    s_src.assign(s_src.size(), 5.0);
    s_dst.assign(s_dst.size(), 5.0);
    s_edge.assign(s_edge.size(), 5.0);
    attend_grad(a, state, c.num_src, AttendGrads<double>{s_src.data(), s_dst.data(), out.data(), for_edges});
    return out;
  });
  CHECK(test::close(x, expected.x, 1e-11));
  CHECK(test::close(s_src, expected.s_src, 1e-11));
  CHECK(test::close(s_dst, expected.s_dst, 1e-11));
  CHECK(test::close(s_edge, expected.s_edge, 1e-11));
  std::vector<double> alone(s_src.size());
  attend_grad(a, state, c.num_src, AttendGrads<double>{alone.data(), s_dst.data(), nullptr});
  CHECK(alone == s_src);
}

}  // namespace

int main() {
  for (const auto& [rows, num_src] : {std::pair<std::int64_t, std::int64_t>{97, 120}, {3001, 900}}) {
    for (const auto& [heads, width] : {std::pair<std::int64_t, std::int64_t>{1, 5}, {4, 18}, {3, 7}, {35, 2}}) {
      for (bool shared : {false, true}) {
        for (bool dropout : {false, true}) {
          for (bool scored : {false, true}) {
            matches_naive(random_case(rows, num_src, heads, width, shared, scored), dropout);
          }
        }
      }
    }
  }
  return report("attend");
}
