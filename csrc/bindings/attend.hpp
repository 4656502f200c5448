#pragma once
// What both passes of attention read. Each is compiled in a file of its own: their templates take longest.

#include "joestar/attend.hpp"

#include "bindings.hpp"

namespace joestar::bindings {

template <class T>
using Wide = Accumulator<T>;

template <class Id, class T>
Attention<T, Id> attention(const Tensor& indptr, const Tensor& indices, const Tensor& s_src, const Tensor& s_dst,
                           const Tensor& s_edge, const Tensor& x, const Tensor& bits, std::int64_t heads,
                           std::int64_t width, bool shared, double slope, double scale) {
  return {csc_of<Id>(indptr, indices), s_src.as<const T>(),           s_dst.as<const T>(),
          x.as<const T>(),             bits.as<const std::int32_t>(), heads,
          width,                       shared,                        static_cast<Wide<T>>(slope),
          static_cast<Wide<T>>(scale), s_edge.as<const T>()};
}

}  // namespace joestar::bindings
