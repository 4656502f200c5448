#include "joestar/spmm_coo.hpp"

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

void bind_coo(const Tensor& src, const Tensor& dst, const Tensor& x, const Tensor& weight, std::int64_t heads,
              std::int64_t width, std::int64_t num_dst, int reduce, const Tensor& y) {
  with_types(src, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const std::span<const Id> rows = dst.span<const Id>();
    if (!sorted_by_destination(rows)) {
      throw std::invalid_argument(
          "dst: expected ids >= 0 in ascending order; sort the edges by destination (torch.sort(dst, stable=True)), or "
          "use spmm or spmm_csr");
    }
    const Messages<T, const Id*> m{.indptr = {},
                                   .ids = src.as<const Id>(),
                                   .x = x.as<const T>(),
                                   .weight = weight.as<const T>(),
                                   .heads = heads,
                                   .width = width};
    spmm_coo(m, rows, num_dst, static_cast<Reduce>(reduce), y.as<T>());
  });
}

}  // namespace

void bind_spmm_coo(py::module_& m) {
  m.def("spmm_coo", &bind_coo, ReleaseGil());
}

}  // namespace joestar::bindings
