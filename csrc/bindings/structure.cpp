#include "joestar/structure.hpp"

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

void bind_edge_dst(const Tensor& indptr, const Tensor& out) {
  with_id(out, [&]<class Id>(Tag<Id>) { edge_rows(indptr.span<const std::int64_t>(), out.span<Id>()); });
}

void bind_out_degrees(const Tensor& indptr, const Tensor& indices, const Tensor& out) {
  with_id(indices, [&]<class Id>(Tag<Id>) { out_degrees(csc_of<Id>(indptr, indices), out.span<std::int64_t>()); });
}

void bind_add_self_loops(const Tensor& indptr, const Tensor& indices, std::int64_t num_dst, const Tensor& out_indptr,
                         const Tensor& out_indices) {
  with_id(indices, [&]<class Id>(Tag<Id>) {
    add_self_loops(csc_of<Id>(indptr, indices), num_dst, out_indptr.span<std::int64_t>(), out_indices.span<Id>());
  });
}

}  // namespace

void bind_structure(py::module_& m) {
  m.def("edge_dst", &bind_edge_dst, ReleaseGil());
  m.def("out_degrees", &bind_out_degrees, ReleaseGil());
  m.def("add_self_loops", &bind_add_self_loops, ReleaseGil());
}

}  // namespace joestar::bindings
