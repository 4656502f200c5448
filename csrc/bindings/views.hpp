#pragma once
// From tensors to the views that the kernels take.

#include <algorithm>
#include <type_traits>

#include "joestar/sampling.hpp"
#include "tensor.hpp"

namespace joestar::bindings {

// f(Tag<id type>, Tag<value type>).
template <class F>
auto with_types(const Tensor& ids, const Tensor& values, F&& f) {
  return with_id(ids,
                 [&]<class Id>(Tag<Id> id) { return with_value(values, [&](auto value) { return f(id, value); }); });
}

template <class Id>
Csc<Id> csc_of(const Tensor& indptr, const Tensor& indices) {
  const std::int64_t edges = indptr.as<const std::int64_t>()[indptr.numel - 1];
  if (edges > indices.numel) {
    throw std::invalid_argument("indices: expected at least indptr[-1] = " + std::to_string(edges) + " ids, got " +
                                std::to_string(indices.numel));
  }
  return {indptr.span<const std::int64_t>(), indices.span<const Id>()};
}

// What nodes hash as; none: themselves.
inline NodeKeys node_keys(const Tensor& ids) {
  if (!ids.present()) return {};
  return with_id(ids, [&]<class Id>(Tag<Id>) -> NodeKeys {
    if constexpr (std::is_same_v<Id, std::int32_t>) {
      return {.narrow = ids.as<const Id>()};
    } else {
      return {.wide = ids.as<const Id>()};
    }
  });
}

template <class Id>
SampleRows<Id> sample_rows(const Tensor& indptr, const Tensor& nodes, std::int64_t count, bool sliced,
                           const Tensor& ids = {}) {
  return {indptr.span<const std::int64_t>(), nodes.span<const Id>(), std::clamp<std::int64_t>(count, 0, nodes.numel),
          sliced, node_keys(ids)};
}

inline SampleKey sample_key(const Tensor& key, std::int64_t site) {
  if (!key.present()) return {0, 0, 0, site};
  if (key.dtype != DType::Int64 || key.numel != 3) {
    throw std::invalid_argument("key: expected an int64 tensor of 3 numbers (seed, epoch, step)");
  }
  const auto* words = key.as<const std::int64_t>();
  return {words[0], words[1], words[2], site};
}

}  // namespace joestar::bindings
