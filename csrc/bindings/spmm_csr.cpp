#include "bindings.hpp"
#include "joestar/extremum_grad_csr.hpp"

namespace joestar::bindings {
namespace {

void bind_csr(const Tensor& indptr, const Tensor& indices, const Tensor& x, const Tensor& weight, std::int64_t heads,
              std::int64_t width, std::int64_t num_dst, int reduce, const Tensor& y) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const Csc<Id> csr = csc_of<Id>(indptr, indices);
    const Messages<T, EdgeOrder> m{.indptr = csr.indptr,
                                   .ids = {},
                                   .x = x.as<const T>(),
                                   .weight = weight.as<const T>(),
                                   .heads = heads,
                                   .width = width};
    spmm_csr(csr, m, num_dst, static_cast<Reduce>(reduce), y.as<T>());
  });
}

void bind_csr_extremum_grad(const Tensor& indptr, const Tensor& indices, const Tensor& x, const Tensor& weight,
                            std::int64_t heads, std::int64_t width, const Tensor& y, const Tensor& grad,
                            std::int64_t num_dst, const Tensor& grad_x, const Tensor& grad_weight) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const ExtremumGrad<T> task{
        x.as<const T>(), y.as<const T>(), grad.as<const T>(), {weight.as<const T>(), heads, width}};
    spmm_csr_extremum_grad(csc_of<Id>(indptr, indices), num_dst, task, grad_x.as<T>(), grad_weight.as<T>());
  });
}

}  // namespace

void bind_spmm_csr(py::module_& m) {
  m.def("spmm_csr", &bind_csr, ReleaseGil());
  m.def("spmm_csr_extremum_grad", &bind_csr_extremum_grad, ReleaseGil());
}

}  // namespace joestar::bindings
