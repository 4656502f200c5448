#include "joestar/spmm_grad.hpp"

#include "bindings.hpp"
#include "joestar/extremum_grad.hpp"

namespace joestar::bindings {
namespace {

void bind_grad_x(const Tensor& indptr, const Tensor& indices, const Tensor& grad, const Tensor& weight,
                 std::int64_t heads, std::int64_t width, int reduce, std::int64_t num_src, const Tensor& grad_x) {
  with_types(indices, grad, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    spmm_grad_x(csc_of<Id>(indptr, indices), num_src, grad.as<const T>(),
                WeightedShape<T>{weight.as<const T>(), heads, width}, static_cast<Reduce>(reduce), grad_x.as<T>());
  });
}

void bind_extremum_grad(const Tensor& indptr, const Tensor& indices, const Tensor& x, const Tensor& weight,
                        std::int64_t heads, std::int64_t width, const Tensor& y, const Tensor& grad,
                        std::int64_t num_src, const Tensor& grad_x, const Tensor& grad_weight) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const ExtremumGrad<T> task{
        x.as<const T>(), y.as<const T>(), grad.as<const T>(), {weight.as<const T>(), heads, width}};
    spmm_extremum_grad(csc_of<Id>(indptr, indices), num_src, task, grad_x.as<T>(), grad_weight.as<T>());
  });
}

void bind_scatter_src(const Tensor& indptr, const Tensor& indices, const Tensor& values, std::int64_t size,
                      std::int64_t num_src, const Tensor& out) {
  with_types(indices, values, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    scatter_src(csc_of<Id>(indptr, indices), num_src, values.as<const T>(), size, out.as<T>());
  });
}

void bind_scatter_dst(const Tensor& indptr, const Tensor& values, std::int64_t size, const Tensor& out) {
  with_value(values, [&]<class T>(Tag<T>) {
    scatter_dst(indptr.span<const std::int64_t>(), values.as<const T>(), size, out.as<T>());
  });
}

}  // namespace

void bind_spmm_grad(py::module_& m) {
  m.def("spmm_grad_x", &bind_grad_x, ReleaseGil());
  m.def("spmm_extremum_grad", &bind_extremum_grad, ReleaseGil());
  m.def("scatter_src", &bind_scatter_src, ReleaseGil());
  m.def("scatter_dst", &bind_scatter_dst, ReleaseGil());
}

}  // namespace joestar::bindings
