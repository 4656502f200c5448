#include <limits>

#include "check.hpp"
#include "joestar/extremum_grad_csr.hpp"
#include "joestar/spmm_coo.hpp"

using namespace joestar;

namespace {

// A structure by source, by destination, and as a list of edges sorted by destination: the same edges in one order.
template <IdType Id>
struct Forms {
  test::Graph<Id> csr;
  std::vector<std::int64_t> edge;  // of the sorted list, in csr
  std::vector<Id> src, dst;
  std::vector<std::int64_t> indptr;
  std::int64_t num_dst;
};

template <IdType Id>
Forms<Id> make_forms(std::int64_t num_src, std::int64_t num_dst, std::int64_t mean) {
  Forms<Id> f{test::random_graph<Id>(num_src, num_dst, mean, 21), {}, {}, {}, {}, num_dst};
  const Transposed<Id> t = transpose(f.csr.csc(), num_dst);
  f.indptr.assign(t.indptr.data(), t.indptr.data() + num_dst + 1);
  for (std::int64_t d = 0; d < num_dst; ++d) {
    for (std::int64_t i = t.indptr[d]; i < t.indptr[d + 1]; ++i) {
      f.src.push_back(t.row[i]);
      f.dst.push_back(static_cast<Id>(d));
      f.edge.push_back(t.edge[i]);
    }
  }
  return f;
}

template <class T>
std::vector<T> reordered(const std::vector<T>& weight, const std::vector<std::int64_t>& edge, std::int64_t heads) {
  std::vector<T> out;
  for (const std::int64_t e : edge) {
    for (std::int64_t h = 0; h < heads; ++h) out.push_back(weight[static_cast<std::size_t>(e * heads + h)]);
  }
  return out;
}

// Gather, scatter and sorted edges add the same numbers in the same order: equal bits.
template <class T, IdType Id>
void all_forms_agree(std::int64_t num_src, std::int64_t num_dst, std::int64_t mean) {
  const Forms<Id> f = make_forms<Id>(num_src, num_dst, mean);
  for (const auto& [heads, width] : {std::pair<int, int>{1, 1}, {1, 16}, {1, 37}, {1, 200}, {3, 5}, {2, 64}}) {
    const auto x = test::random_values<T>(num_src * heads * width, 1);
    for (bool weighted : {false, true}) {
      const auto weight = weighted ? test::random_values<T>(f.csr.csc().edges() * heads, 2) : std::vector<T>{};
      const auto sorted_weight = weighted ? reordered(weight, f.edge, heads) : weight;
      const T* w = weighted ? weight.data() : nullptr;
      const T* sorted_w = weighted ? sorted_weight.data() : nullptr;
      for (Reduce reduce : {Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min}) {
        const auto run = [&](auto&& product) {
          return test::for_thread_counts([&] {
            std::vector<T> y(static_cast<std::size_t>(num_dst * heads * width), std::numeric_limits<T>::quiet_NaN());
            product(y.data());
            return y;
          });
        };
        const auto gather = run([&](T* y) {
          spmm(Messages<T, const Id*>{f.indptr, f.src.data(), x.data(), sorted_w, nullptr, heads, width}, reduce, y);
        });
        const auto scatter = run([&](T* y) {
          const Messages<T, EdgeOrder> m{f.csr.indptr, {}, x.data(), w, nullptr, heads, width};
          spmm_csr(f.csr.csc(), m, num_dst, reduce, y);
        });
        const auto listed = run([&](T* y) {
          const Messages<T, const Id*> m{{}, f.src.data(), x.data(), sorted_w, nullptr, heads, width};
          spmm_coo(m, std::span<const Id>(f.dst), num_dst, reduce, y);
        });
        CHECK(gather == scatter);
        CHECK(gather == listed);
      }
    }
  }
}

void lists_are_checked_and_padded() {
  using Ids = std::vector<std::int32_t>;
  const auto sorted = [](const Ids& dst) { return sorted_by_destination(std::span<const std::int32_t>(dst)); };
  CHECK(sorted({}) && sorted({0}) && sorted({0, 0, 3, 9}));
  CHECK(!sorted({1, 0}) && !sorted({-1, 0}) && !sorted({0, 2, 1, 3}));
  const Ids src{0, 1, 1, 0, 0}, dst{1, 1, 3, 5, 5};
  const std::vector<float> x{1.0f, 10.0f};
  std::vector<float> y(5, -1.0f);
  const Messages<float, const std::int32_t*> m{{}, src.data(), x.data()};
  spmm_coo(m, std::span<const std::int32_t>(dst), 5, Reduce::Sum, y.data());
  CHECK((y == std::vector<float>{0, 11, 0, 10, 0}));
  spmm_coo(m, std::span<const std::int32_t>(dst).first(0), 5, Reduce::Max, y.data());
  CHECK(y == std::vector<float>(5, 0.0f));
}

// Few values and therefore many ties; both structures must share the gradient alike.
template <IdType Id>
void extremum_gradients_agree() {
  const Forms<Id> f = make_forms<Id>(120, 90, 6);
  std::mt19937 random(5);
  const auto few = [&](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = static_cast<float>(random() % 4) * 0.5f - 1.0f;
    return values;
  };
  for (const auto& [heads, width] : {std::pair<int, int>{1, 3}, {1, 160}, {2, 5}}) {
    const std::int64_t size = heads * width, edges = f.csr.csc().edges();
    const auto x = few(120 * size), grad = test::random_values<float>(90 * size, 4);
    for (bool weighted : {false, true}) {
      const auto weight = weighted ? few(edges * heads) : std::vector<float>{};
      const auto sorted_weight = weighted ? reordered(weight, f.edge, heads) : weight;
      std::vector<float> y(static_cast<std::size_t>(90 * size));
      const Messages<float, EdgeOrder> m{f.csr.indptr, {},   x.data(), weighted ? weight.data() : nullptr,
                                         nullptr,      heads, width};
      spmm_csr(f.csr.csc(), m, 90, Reduce::Max, y.data());
      const auto run = [&](bool by_source) {
        return test::for_thread_counts([&] {
          const float* w = by_source ? weight.data() : sorted_weight.data();
          const ExtremumGrad<float> task{x.data(), y.data(), grad.data(), {weighted ? w : nullptr, heads, width}};
          std::vector<float> grad_x(x.size()), grad_weight(weight.size());
          if (by_source) {
            spmm_csr_extremum_grad(f.csr.csc(), 90, task, grad_x.data(), grad_weight.data());
          } else {
            spmm_extremum_grad(Csc<Id>{f.indptr, f.src}, 120, task, grad_x.data(), grad_weight.data());
          }
          return std::pair(grad_x, grad_weight);
        });
      };
      const auto scattered = run(true), gathered = run(false);
      CHECK(test::close(scattered.first, gathered.first, 1e-5));
      CHECK(test::close(reordered(scattered.second, weighted ? f.edge : std::vector<std::int64_t>{}, heads),
                        gathered.second, 1e-5));
    }
  }
}

}  // namespace

int main() {
  set_num_threads(4);
  all_forms_agree<float, std::int32_t>(190, 211, 7);
  all_forms_agree<double, std::int64_t>(400, 33, 5);
  lists_are_checked_and_padded();
  extremum_gradients_agree<std::int32_t>();
  extremum_gradients_agree<std::int64_t>();
  return report("spmm_forms");
}
