#include "attend.hpp"

namespace joestar::bindings {
namespace {

void bind_forward(const Tensor& indptr, const Tensor& indices, const Tensor& s_src, const Tensor& s_dst,
                  const Tensor& s_edge, const Tensor& x, const Tensor& bits, std::int64_t heads, std::int64_t width,
                  bool shared, double slope, double scale, const Tensor& y, const Tensor& top, const Tensor& total) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const auto a = attention<Id, T>(indptr, indices, s_src, s_dst, s_edge, x, bits, heads, width, shared, slope, scale);
    attend(a, y.as<T>(), top.as<Wide<T>>(), total.as<Wide<T>>());
  });
}

}  // namespace

void bind_attend(py::module_& m) {
  m.def("attend", &bind_forward, ReleaseGil());
}

}  // namespace joestar::bindings
