#include "joestar/dropout.hpp"

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

void bind_row_bits(const Tensor& ids, const Tensor& key, std::int64_t site, std::uint32_t q, std::int64_t words,
               const Tensor& out) {
  with_id(ids, [&]<class Id>(Tag<Id>) {
    dropout_bits(ids.span<const Id>(), sample_key(key, site), KeepMask{q, words}, out.as<std::uint32_t>());
  });
}

void bind_edge_bits(const Tensor& indptr, std::int64_t edges, const Tensor& dsts, const Tensor& key, std::int64_t site,
                std::uint32_t q, std::int64_t words, const Tensor& out) {
  with_id(dsts, [&]<class Id>(Tag<Id>) {
    edge_dropout_bits(indptr.span<const std::int64_t>(), edges, dsts.span<const Id>(), sample_key(key, site),
                      KeepMask{q, words}, out.as<std::uint32_t>());
  });
}

void bind_apply(const Tensor& x, const Tensor& bits, const Tensor& gate, std::int64_t rows, std::int64_t columns,
                double scale, const Tensor& y) {
  with_value(x, [&]<class T>(Tag<T>) {
    dropout_apply(x.as<const T>(), bits.as<const std::uint32_t>(), gate.as<const T>(), rows, columns, scale, y.as<T>());
  });
}

void bind_relu_grad(const Tensor& grad, const Tensor& y, std::int64_t n, double scale, const Tensor& out) {
  with_value(grad, [&]<class T>(Tag<T>) {
    relu_dropout_grad(grad.as<const T>(), y.as<const T>(), n, scale, out.as<T>());
  });
}

}  // namespace

void bind_dropout(py::module_& m) {
  m.def("dropout_bits", &bind_row_bits, ReleaseGil());
  m.def("edge_dropout_bits", &bind_edge_bits, ReleaseGil());
  m.def("dropout_apply", &bind_apply, ReleaseGil());
  m.def("relu_dropout_grad", &bind_relu_grad, ReleaseGil());
}

}  // namespace joestar::bindings
