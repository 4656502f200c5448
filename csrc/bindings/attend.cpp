#include "joestar/attend.hpp"

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

template <class T>
using Wide = Accumulator<T>;

template <class Id, class T>
Attention<T, Id> attention(const Tensor& indptr, const Tensor& indices, const Tensor& s_src, const Tensor& s_dst,
                           const Tensor& s_edge, const Tensor& x, const Tensor& bits, std::int64_t heads,
                           std::int64_t width, bool shared, double slope, double scale) {
  return {csc_of<Id>(indptr, indices), s_src.as<const T>(),           s_dst.as<const T>(),
          x.as<const T>(),             bits.as<const std::int32_t>(), heads,
          width,                       shared,                        static_cast<Wide<T>>(slope),
          static_cast<Wide<T>>(scale), s_edge.as<const T>()};
}

void bind_forward(const Tensor& indptr, const Tensor& indices, const Tensor& s_src, const Tensor& s_dst,
                  const Tensor& s_edge, const Tensor& x, const Tensor& bits, std::int64_t heads, std::int64_t width,
                  bool shared, double slope, double scale, const Tensor& y, const Tensor& top, const Tensor& total) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const auto a = attention<Id, T>(indptr, indices, s_src, s_dst, s_edge, x, bits, heads, width, shared, slope, scale);
    attend(a, y.as<T>(), top.as<Wide<T>>(), total.as<Wide<T>>());
  });
}

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

void bind_attend(py::module_& m) {
  m.def("attend", &bind_forward, ReleaseGil());
  m.def("attend_grad", &bind_grad, ReleaseGil());
}

}  // namespace joestar::bindings
