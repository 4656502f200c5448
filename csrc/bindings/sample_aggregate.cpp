#include "joestar/sample_aggregate.hpp"

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

std::int64_t bind_fused(const Tensor& indptr, const Tensor& indices, const Tensor& nodes, std::int64_t count,
                        std::int64_t k, bool replace, const Tensor& key, std::int64_t site, const Tensor& x,
                        std::int64_t width, int reduce, const Tensor& y, std::int64_t stride, const Tensor& ids) {
  return with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    return sample_aggregate(sample_rows<Id>(indptr, nodes, count, false, ids), indices.span<const Id>(),
                            Fanout{k, replace}, sample_key(key, site), x.as<const T>(), width, static_cast<Reduce>(reduce), y.as<T>(), stride);
  });
}

}  // namespace

void bind_sample_aggregate(py::module_& m) { m.def("sample_aggregate", &bind_fused, ReleaseGil()); }

}  // namespace joestar::bindings
