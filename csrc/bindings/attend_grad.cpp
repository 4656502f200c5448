#include "attend.hpp"

namespace joestar::bindings {
namespace {

void bind_grad(const Tensor& indptr, const Tensor& indices, const Tensor& s_src, const Tensor& s_dst,
               const Tensor& s_edge, const Tensor& x, const Tensor& bits, std::int64_t heads, std::int64_t width,
               bool shared, double slope, double scale, const Tensor& top, const Tensor& total, const Tensor& grad,
               std::int64_t num_src, const Tensor& grad_s_src, const Tensor& grad_s_dst, const Tensor& grad_x,
               const Tensor& grad_s_edge) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const auto a = attention<Id, T>(indptr, indices, s_src, s_dst, s_edge, x, bits, heads, width, shared, slope, scale);
    const AttendState<T> state{top.as<const Wide<T>>(), total.as<const Wide<T>>(), grad.as<const T>()};
    const AttendGrads<T> grads{grad_s_src.as<T>(), grad_s_dst.as<T>(), grad_x.as<T>(), grad_s_edge.as<T>()};
    attend_grad(a, state, num_src, grads);
  });
}

}  // namespace

void bind_attend_grad(py::module_& m) {
  m.def("attend_grad", &bind_grad, ReleaseGil());
}

}  // namespace joestar::bindings
