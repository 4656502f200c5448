#include "joestar/weighted.hpp"

#include "bindings.hpp"
#include "joestar/collective.hpp"
#include "joestar/slice_rows.hpp"

namespace joestar::bindings {
namespace {

RaceTable race_table(const Tensor& table) {
  if (table.dtype != DType::Int64 || table.numel != kRaceTableSize) {
    throw std::invalid_argument("table: expected the int64 tensor of joestar.kernels.race");
  }
  return RaceTable(table.span<const std::int64_t>());
}

template <class Id>
WeightedRows<Id> weighted_rows(const Tensor& indptr, const Tensor& weight, const Tensor& nodes, std::int64_t count,
                               bool sliced, std::int64_t k, bool replace, const Tensor& ids = {},
                               const Tensor& ranks = {}) {
  if (weight.numel < *(indptr.as<const std::int64_t>() + indptr.numel - 1)) {
    throw std::invalid_argument("weight: expected one number per edge, got " + std::to_string(weight.numel));
  }
  const auto rank = ranks.numel == 0 ? std::span<const std::int32_t>{} : ranks.span<const std::int32_t>();
  if (!rank.empty() && ranks.numel != weight.numel) {
    throw std::invalid_argument("ranks: expected one per weight, got " + std::to_string(ranks.numel));
  }
  return {sample_rows<Id>(indptr, nodes, count, sliced, ids), weight.span<const float>(), Fanout{k, replace}, rank};
}

std::int64_t bind_weighted_offsets(const Tensor& indptr, const Tensor& weight, const Tensor& nodes, std::int64_t count,
                                   bool sliced, std::int64_t k, bool replace, std::int64_t bound,
                                   const Tensor& offsets) {
  return with_id(nodes, [&]<class Id>(Tag<Id>) {
    return weighted_offsets(weighted_rows<Id>(indptr, weight, nodes, count, sliced, k, replace), bound,
                            offsets.span<std::int64_t>());
  });
}

void bind_weighted_sample(const Tensor& indptr, const Tensor& weight, const Tensor& nodes, std::int64_t count,
                          bool sliced, std::int64_t k, bool replace, const Tensor& key, std::int64_t site,
                          const Tensor& table, const Tensor& offsets, const Tensor& out, const Tensor& ids,
                          const Tensor& ranks) {
  with_id(nodes, [&]<class Id>(Tag<Id>) {
    weighted_sample(weighted_rows<Id>(indptr, weight, nodes, count, sliced, k, replace, ids, ranks), race_table(table),
                    sample_key(key, site), offsets.span<const std::int64_t>(), out.span<std::int64_t>());
  });
}

std::int64_t bind_collective_sample(const Tensor& indices, std::int64_t edges, const Tensor& weight,
                                    std::int64_t num_nodes, const Tensor& key, std::int64_t site, const Tensor& table,
                                    const Tensor& nodes, const Tensor& ids) {
  return with_id(nodes, [&]<class Id>(Tag<Id>) {
    const auto used = static_cast<std::size_t>(std::clamp<std::int64_t>(edges, 0, indices.numel));
    const CollectiveTask<Id> task{indices.span<const Id>().first(used), weight.as<const float>(), num_nodes,
                                  node_keys(ids)};
    return collective_sample(task, race_table(table), sample_key(key, site), nodes.span<Id>());
  });
}

std::int64_t bind_slice_rows(const Tensor& indptr, const Tensor& indices, const Tensor& srcs, std::int64_t count,
                             const Tensor& out_indptr, const Tensor& eids) {
  return with_id(indices, [&]<class Id>(Tag<Id>) {
    const auto used = static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, srcs.numel));
    const IdSet<Id> set(srcs.span<const Id>().first(used));
    return slice_rows(csc_of<Id>(indptr, indices), set, out_indptr.span<std::int64_t>(), eids.span<std::int64_t>());
  });
}

}  // namespace

void bind_weighted(py::module_& m) {
  m.def("weighted_offsets", &bind_weighted_offsets, ReleaseGil());
  m.def("weighted_sample", &bind_weighted_sample, ReleaseGil());
  m.def("collective_sample", &bind_collective_sample, ReleaseGil());
  m.def("slice_rows", &bind_slice_rows, ReleaseGil());
}

}  // namespace joestar::bindings
