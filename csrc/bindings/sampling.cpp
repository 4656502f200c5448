#include "joestar/sampling.hpp"

#include "bindings.hpp"
#include "joestar/compact.hpp"

namespace joestar::bindings {
namespace {

std::int64_t bind_sample_offsets(const Tensor& indptr, const Tensor& nodes, std::int64_t count, bool sliced,
                                 std::int64_t k, bool replace, std::int64_t bound, const Tensor& offsets) {
  return with_id(nodes, [&]<class Id>(Tag<Id>) {
    return sample_offsets(sample_rows<Id>(indptr, nodes, count, sliced), Fanout{k, replace}, bound,
                          offsets.span<std::int64_t>());
  });
}

void bind_sample_neighbors(const Tensor& indptr, const Tensor& indices, const Tensor& nodes, std::int64_t count,
                           bool sliced, std::int64_t k, bool replace, const Tensor& key, std::int64_t site,
                           const Tensor& offsets, const Tensor& out, const Tensor& ids) {
  with_id(nodes, [&]<class Id>(Tag<Id>) {
    sample_neighbors(sample_rows<Id>(indptr, nodes, count, sliced, ids), indices.span<const Id>(), Fanout{k, replace},
                     sample_key(key, site), offsets.span<const std::int64_t>(), out.span<Id>());
  });
}

void bind_sample_edges(const Tensor& indptr, const Tensor& nodes, std::int64_t count, std::int64_t k, bool replace,
                       const Tensor& key, std::int64_t site, const Tensor& offsets, const Tensor& out,
                       const Tensor& ids) {
  with_id(nodes, [&]<class Id>(Tag<Id>) {
    sample_edges(sample_rows<Id>(indptr, nodes, count, false, ids), Fanout{k, replace}, sample_key(key, site),
                 offsets.span<const std::int64_t>(), out.span<std::int64_t>());
  });
}

std::int64_t bind_compact(const Tensor& dsts, std::int64_t count, const Tensor& indices, std::int64_t edges,
                          std::int64_t num_nodes, const Tensor& srcs, const Tensor& local) {
  return with_id(dsts, [&]<class Id>(Tag<Id>) {
    const std::int64_t rows = std::min(std::max<std::int64_t>(0, count), dsts.numel);
    const auto used = static_cast<std::size_t>(std::min(edges, indices.numel));
    const CompactTask<Id> task{dsts.span<const Id>().first(static_cast<std::size_t>(rows)),
                               indices.span<const Id>().first(used), srcs.span<Id>(), local.span<Id>().first(used)};
    std::fill(local.as<Id>() + used, local.as<Id>() + local.numel, Id{0});
    return compact(task, num_nodes);
  });
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def("sample_offsets", &bind_sample_offsets, ReleaseGil());
  m.def("sample_neighbors", &bind_sample_neighbors, ReleaseGil());
  m.def("sample_edges", &bind_sample_edges, ReleaseGil());
  m.def("compact", &bind_compact, ReleaseGil());
}

}  // namespace joestar::bindings
