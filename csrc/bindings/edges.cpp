#include "bindings.hpp"
#include "joestar/sddmm.hpp"
#include "joestar/softmax.hpp"

namespace joestar::bindings {
namespace {

void bind_sddmm(const Tensor& indptr, const Tensor& indices, const Tensor& lhs, const Tensor& rhs, std::int64_t size,
                int op, const Tensor& out) {
  with_types(indices, out, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    sddmm(csc_of<Id>(indptr, indices), lhs.as<const T>(), rhs.as<const T>(), size, static_cast<EdgeOp>(op),
          out.as<T>());
  });
}

void bind_dot(const Tensor& indptr, const Tensor& indices, const Tensor& lhs, const Tensor& rhs, std::int64_t heads,
              std::int64_t width, bool shared, bool mean, const Tensor& out) {
  with_types(indices, lhs, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const DotRows<T> rows{lhs.as<const T>(), rhs.as<const T>(), heads, width, shared, mean};
    sddmm_dot(csc_of<Id>(indptr, indices), rows, out.as<T>());
  });
}

void bind_softmax(const Tensor& indptr, const Tensor& s, std::int64_t edges, std::int64_t heads, const Tensor& out) {
  with_value(s, [&]<class T>(Tag<T>) {
    edge_softmax(indptr.span<const std::int64_t>(), s.as<const T>(), edges, heads, out.as<T>());
  });
}

void bind_softmax_grad(const Tensor& indptr, const Tensor& out, const Tensor& grad, std::int64_t edges,
                       std::int64_t heads, const Tensor& grad_s) {
  with_value(out, [&]<class T>(Tag<T>) {
    edge_softmax_grad(indptr.span<const std::int64_t>(), out.as<const T>(), grad.as<const T>(), edges, heads,
                      grad_s.as<T>());
  });
}

}  // namespace

void bind_edges(py::module_& m) {
  m.def("sddmm", &bind_sddmm, ReleaseGil());
  m.def("sddmm_dot", &bind_dot, ReleaseGil());
  m.def("edge_softmax", &bind_softmax, ReleaseGil());
  m.def("edge_softmax_grad", &bind_softmax_grad, ReleaseGil());
}

}  // namespace joestar::bindings
