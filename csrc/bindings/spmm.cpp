#include "joestar/spmm.hpp"

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

void bind_forward(const Tensor& indptr, const Tensor& indices, const Tensor& x, const Tensor& weight,
                  std::int64_t heads, std::int64_t width, int reduce, const Tensor& y, std::int64_t stride) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const Csc<Id> csc = csc_of<Id>(indptr, indices);
    const Messages<T, const Id*> m{.indptr = csc.indptr,
                                   .ids = csc.indices.data(),
                                   .x = x.as<const T>(),
                                   .weight = weight.as<const T>(),
                                   .heads = heads,
                                   .width = width};
    spmm(m, static_cast<Reduce>(reduce), y.as<T>(), stride);
  });
}

}  // namespace

void bind_spmm(py::module_& m) {
  m.def("spmm", &bind_forward, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
        py::arg("stride") = 0, ReleaseGil());
}

}  // namespace joestar::bindings
