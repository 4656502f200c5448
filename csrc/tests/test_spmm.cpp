#include <bit>
#include <limits>

#include "check.hpp"
#include "joestar/spmm.hpp"

using namespace joestar;

namespace {

double reduced(Reduce reduce, double sum, double value, bool first) {
  if (reduce == Reduce::Max) return first ? value : std::max(sum, value);
  if (reduce == Reduce::Min) return first ? value : std::min(sum, value);
  return sum + value;
}

// In double, straight from the definition.
template <class T, IdType Id>
std::vector<double> naive(const test::Graph<Id>& graph, const std::vector<T>& x, const std::vector<T>& weight,
                          std::int64_t heads, std::int64_t width, Reduce reduce) {
  const std::int64_t size = heads * width;
  std::vector<double> y(static_cast<std::size_t>(graph.rows() * size), 0.0);
  for (std::int64_t i = 0; i < graph.rows(); ++i) {
    const auto begin = graph.indptr[static_cast<std::size_t>(i)], end = graph.indptr[static_cast<std::size_t>(i) + 1];
    for (std::int64_t d = 0; d < size; ++d) {
      double& out = y[static_cast<std::size_t>(i * size + d)];
      for (auto e = begin; e < end; ++e) {
        const double w =
            weight.empty() ? 1.0 : static_cast<double>(weight[static_cast<std::size_t>(e * heads + d / width)]);
        const auto row = static_cast<std::int64_t>(graph.indices[static_cast<std::size_t>(e)]) * size;
        out = reduced(reduce, out, w * static_cast<double>(x[static_cast<std::size_t>(row + d)]), e == begin);
      }
      if (reduce == Reduce::Mean && end > begin) out /= static_cast<double>(end - begin);
    }
  }
  return y;
}

template <class T, IdType Id>
void matches_naive(double tolerance) {
  const auto graph = test::random_graph<Id>(211, 190, 7, 4);
  const auto edges = static_cast<std::int64_t>(graph.indices.size());
  for (const auto& [heads, width] : {std::pair<int, int>{1, 1}, {1, 37}, {1, 128}, {3, 5}, {4, 1}}) {
    const auto x = test::random_values<T>(190 * heads * width, 1);
    for (bool weighted : {false, true}) {
      const auto weight = weighted ? test::random_values<T>(edges * heads, 2) : std::vector<T>{};
      for (Reduce reduce : {Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min}) {
        const auto y = test::for_thread_counts([&] {
          std::vector<T> out(static_cast<std::size_t>(211 * heads * width), std::numeric_limits<T>::quiet_NaN());
          spmm(Messages<T, const Id*>{.indptr = graph.indptr,
                                      .ids = graph.indices.data(),
                                      .x = x.data(),
                                      .weight = weighted ? weight.data() : nullptr,
                                      .heads = heads,
                                      .width = width},
               reduce, out.data());
          return out;
        });
        CHECK(test::close(y, naive(graph, x, weight, heads, width, reduce), tolerance));
      }
    }
  }
}

// Rows with something behind them, which stays.
void joined_rows() {
  const auto graph = test::random_graph<std::int32_t>(211, 190, 7, 4);
  for (const int width : {1, 16, 37, 64}) {
    const auto x = test::random_values<float>(190 * width, 1);
    const Messages<float, const std::int32_t*> m{
        .indptr = graph.indptr, .ids = graph.indices.data(), .x = x.data(), .width = width};
    const std::size_t size = static_cast<std::size_t>(width), stride = size + 3;
    for (Reduce reduce : {Reduce::Mean, Reduce::Max}) {
      std::vector<float> y(211 * size), joined(211 * stride, -7.0f);
      spmm(m, reduce, y.data());
      spmm(m, reduce, joined.data(), static_cast<std::int64_t>(stride));
      for (std::size_t i = 0; i < 211; ++i) {
        CHECK(std::equal(y.begin() + i * size, y.begin() + (i + 1) * size, joined.begin() + i * stride));
        for (std::size_t d = size; d < stride; ++d) CHECK(joined[i * stride + d] == -7.0f);
      }
    }
  }
}

void nan_wins_an_extremum() {
  const std::vector<std::int64_t> indptr{0, 3, 6};
  const std::vector<std::int32_t> ids{0, 1, 2, 1, 0, 2};
  const std::vector<float> x{1.0f, std::numeric_limits<float>::quiet_NaN(), 3.0f};
  std::vector<float> y(2);
  const Messages<float, const std::int32_t*> m{.indptr = indptr, .ids = ids.data(), .x = x.data()};
  for (Reduce reduce : {Reduce::Max, Reduce::Min}) {
    spmm(m, reduce, y.data());
    CHECK(std::isnan(y[0]) && std::isnan(y[1]));
  }
}

void sixteen_bits_round_trip() {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = Float16{static_cast<std::uint16_t>(bits)};
    const auto brain = BFloat16{static_cast<std::uint16_t>(bits)};
    const float h = load(half), b = load(brain);
    CHECK(std::isnan(h) ? std::isnan(load(store<Float16>(h))) : store<Float16>(h).bits == bits);
    CHECK(std::isnan(b) ? std::isnan(load(store<BFloat16>(b))) : store<BFloat16>(b).bits == bits);
  }
  CHECK(load(Float16{0x0001}) == 0x1p-24f);
  CHECK(load(Float16{0x3C00}) == 1.0f);
  CHECK(std::isinf(load(Float16{0x7C00})));
  CHECK(store<Float16>(65519.0f).bits == 0x7BFF);
  CHECK(store<Float16>(65520.0f).bits == 0x7C00);
  CHECK(store<Float16>(1.0f + 0x1p-11f).bits == 0x3C00);  // a tie goes to even
  CHECK(store<Float16>(1.0f + 0x3p-11f).bits == 0x3C02);
  CHECK(store<BFloat16>(1.0f + 0x1p-8f).bits == 0x3F80);
}

void no_rows_and_no_edges() {
  const std::vector<std::int64_t> none{0}, empty{0, 0, 0};
  std::vector<float> y(4, 9.0f);
  const std::vector<float> x{1.0f, 2.0f};
  spmm(Messages<float, const std::int32_t*>{.indptr = none, .ids = nullptr, .x = x.data(), .width = 2}, Reduce::Sum,
       y.data());
  CHECK(y[0] == 9.0f);
  spmm(Messages<float, const std::int32_t*>{.indptr = empty, .ids = nullptr, .x = x.data(), .width = 2}, Reduce::Max,
       y.data());
  CHECK(y == std::vector<float>(4, 0.0f));
}

}  // namespace

int main() {
  set_num_threads(4);
  matches_naive<float, std::int32_t>(1e-5);
  matches_naive<double, std::int64_t>(1e-13);
  joined_rows();
  nan_wins_an_extremum();
  sixteen_bits_round_trip();
  no_rows_and_no_edges();
  return report("spmm");
}
