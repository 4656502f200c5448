#pragma once
// Gradients of spmm. Sums per source go over the transposed structure in edge order: the same bits for any number of
// threads, without atomics.

#include <span>

#include "joestar/spmm.hpp"
#include "joestar/structure.hpp"

namespace joestar {

// Shapes of a weighted aggregation: values [*, heads * width], weights [*, heads] or none.
template <class T>
struct WeightedShape {
  const T* weight = nullptr;
  std::int64_t heads = 1;
  std::int64_t width = 1;
  std::int64_t row_size() const { return heads * width; }
};

namespace detail {

// scaled[i] = grad[i] / degree(i), in the accumulator's precision.
template <class T>
Scratch<Accumulator<T>> divide_by_degree(std::span<const std::int64_t> indptr, const T* grad, std::int64_t size) {
  const std::int64_t rows = static_cast<std::int64_t>(indptr.size()) - 1;
  Scratch<Accumulator<T>> scaled(rows * size);
  parallel_for(rows, row_grain(size), [&](std::int64_t i) {
    const auto degree = static_cast<Accumulator<T>>(std::max<std::int64_t>(1, indptr[i + 1] - indptr[i]));
    for (std::int64_t d = 0; d < size; ++d) scaled[i * size + d] = load(grad[i * size + d]) / degree;
  });
  return scaled;
}

template <class T>
Scratch<Accumulator<T>> widen(const T* values, std::int64_t count) {
  Scratch<Accumulator<T>> wide(values == nullptr ? 0 : count);
  parallel_for(wide.size(), 32768, [&](std::int64_t i) { wide[i] = load(values[i]); });
  return wide;
}

}  // namespace detail

// grad_x[s] = sum over the edges e of s of weight[e] * grad[row(e)] (/ degree(row(e)) for a mean).
template <class T, IdType Id>
void spmm_grad_x(const Csc<Id>& csc, std::int64_t num_src, const T* grad, const WeightedShape<T>& shape, Reduce reduce,
                 T* grad_x) {
  using A = Accumulator<T>;
  const Transposed<Id> by_source = transpose(csc, num_src);
  const std::span<const std::int64_t> indptr = by_source.indptr.span();
  const auto messages = [&]<class V>(const V* x, const V* weight) {
    return Messages<V, const Id*>{indptr,      by_source.row.data(), x, weight, by_source.edge.data(),
                                  shape.heads, shape.width};
  };
  if (reduce == Reduce::Sum) return spmm_sum(messages(grad, shape.weight), grad_x);
  const Scratch<A> scaled = detail::divide_by_degree(csc.indptr, grad, shape.row_size());
  if constexpr (std::is_same_v<A, T>) {
    spmm_sum(messages(static_cast<const A*>(scaled.data()), shape.weight), grad_x);
  } else {
    const Scratch<A> weight = detail::widen(shape.weight, csc.edges() * shape.heads);
    const A* weights = shape.weight == nullptr ? nullptr : weight.data();
    spmm_sum(messages(static_cast<const A*>(scaled.data()), weights), grad_x);
  }
}

// out[s] = sum of the edge values [*, size] of source s.
template <class T, IdType Id>
void scatter_src(const Csc<Id>& csc, std::int64_t num_src, const T* values, std::int64_t size, T* out) {
  const Transposed<Id> by_source = transpose(csc, num_src);
  const Messages<T, const std::int64_t*> m{
      .indptr = by_source.indptr.span(), .ids = by_source.edge.data(), .x = values, .width = size};
  detail::gather_reduce<detail::Add, Weighting::None>(m, out, false);
}

// out[i] = sum of the edge values [*, size] of row i.
template <class T>
void scatter_dst(std::span<const std::int64_t> indptr, const T* values, std::int64_t size, T* out) {
  const Messages<T, EdgeOrder> m{.indptr = indptr, .ids = {}, .x = values, .width = size};
  detail::gather_reduce<detail::Add, Weighting::None>(m, out, false);
}

}  // namespace joestar
