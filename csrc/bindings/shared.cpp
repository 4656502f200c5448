#include "bindings.hpp"
#include "joestar/spmm_shared.hpp"

namespace joestar::bindings {
namespace {

void bind_forward(const Tensor& indptr, const Tensor& indices, const Tensor& x, const Tensor& weight,
                  std::int64_t heads, std::int64_t width, bool mean, const Tensor& y) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const Csc<Id> csc = csc_of<Id>(indptr, indices);
    spmm_shared(SharedMessages<T, Id>{csc.indptr, csc.indices.data(), x.as<const T>(), weight.as<const T>(), heads,
                                      width},
                mean, y.as<T>());
  });
}

void bind_grad_x(const Tensor& indptr, const Tensor& indices, const Tensor& grad, const Tensor& weight,
                 std::int64_t heads, std::int64_t width, bool mean, std::int64_t num_src, const Tensor& grad_x) {
  with_types(indices, grad, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    spmm_shared_grad_x(csc_of<Id>(indptr, indices), num_src, grad.as<const T>(),
                       WeightedShape<T>{weight.as<const T>(), heads, width}, mean, grad_x.as<T>());
  });
}

}  // namespace

void bind_shared(py::module_& m) {
  m.def("spmm_shared", &bind_forward, ReleaseGil());
  m.def("spmm_shared_grad_x", &bind_grad_x, ReleaseGil());
}

}  // namespace joestar::bindings
