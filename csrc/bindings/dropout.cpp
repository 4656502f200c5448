#include "joestar/dropout.hpp"

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

void bind_rows(const Tensor& ids, const Tensor& key, std::int64_t site, std::uint32_t q, std::int64_t words,
               const Tensor& out) {
  with_id(ids, [&]<class Id>(Tag<Id>) {
    dropout_bits(ids.span<const Id>(), sample_key(key, site), KeepMask{q, words}, out.as<std::uint32_t>());
  });
}

void bind_edges(const Tensor& indptr, std::int64_t edges, const Tensor& dsts, const Tensor& key, std::int64_t site,
                std::uint32_t q, std::int64_t words, const Tensor& out) {
  with_id(dsts, [&]<class Id>(Tag<Id>) {
    edge_dropout_bits(indptr.span<const std::int64_t>(), edges, dsts.span<const Id>(), sample_key(key, site),
                      KeepMask{q, words}, out.as<std::uint32_t>());
  });
}

}  // namespace

void bind_dropout(py::module_& m) {
  m.def("dropout_bits", &bind_rows, ReleaseGil());
  m.def("edge_dropout_bits", &bind_edges, ReleaseGil());
}

}  // namespace joestar::bindings
