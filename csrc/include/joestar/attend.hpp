#pragma once
// Graph attention without edge values in memory: logits leaky_relu(s_src[source] + s_dst[row] + s_edge[edge]), their
// softmax over the edges of a row, dropout of coefficients, and the weighted sum of the sources' rows, per row; and the gradients.

#include <limits>

#include "joestar/sddmm.hpp"
#include "joestar/softmax.hpp"
#include "joestar/spmm_shared.hpp"

namespace joestar {

// Scores s_src [num_src, heads] and s_dst [rows, heads]; x [num_src, heads * width], or [num_src, width] if `shared`.
// bits [edges, words] with words = ceil(heads / 32), or none: bit h / words of word h % words keeps the coefficient of
// head h, which is then multiplied by `scale`. s_edge [edges, heads], or none.
template <class T, IdType Id>
struct Attention {
  Csc<Id> csc;
  const T* s_src;
  const T* s_dst;
  const T* x;
  const std::int32_t* bits;
  std::int64_t heads, width;
  bool shared;
  Accumulator<T> slope, scale;
  const T* s_edge = nullptr;

  std::int64_t size() const { return heads * width; }
  std::int64_t x_size() const { return shared ? width : heads * width; }
};

// What the forward pass left, per row and head the largest logit and the sum of exponentials, and the gradient of its
// result.
template <class T>
struct AttendState {
  const Accumulator<T>* top;
  const Accumulator<T>* total;
  const T* grad;
};

// Gradients; x and s_edge may be null. That of s_edge is 0 behind the last edge, up to the bound of the edges.
template <class T>
struct AttendGrads {
  T* s_src;
  T* s_dst;
  T* x;
  T* s_edge = nullptr;
};

namespace detail {

// 1, or `slope` for a negative sum: the leaky ReLU and its gradient as a factor, without a branch.
template <class A>
JOESTAR_INLINE A leak(A z, A slope) {
  return z > A{0} ? A{1} : slope;
}

// z[e, h] = s_src[source of e, h] + own[h] + s_edge[e, h] for the `degree` edges from `start` on.
template <int fixed, class T, class Id, class A>
JOESTAR_INLINE void edge_scores(const Attention<T, Id>& a, std::int64_t start, std::int64_t degree, const T* own,
                                A* JOESTAR_RESTRICT z) {
  const std::int64_t heads = fixed > 0 ? fixed : a.heads;
  const Id* ids = a.csc.indices.data() + start;
  for (std::int64_t e = 0; e < degree; ++e) {
    const T* s = a.s_src + static_cast<std::int64_t>(ids[e]) * heads;
    asm volatile("" : "+r"(s));  // one edge at a time: its scores are adjacent, those of several edges are not
    for (std::int64_t h = 0; h < heads; ++h) z[e * heads + h] = load(s[h]) + load(own[h]);
  }
  if (a.s_edge == nullptr) return;
  const T* plus = a.s_edge + start * heads;
  for (std::int64_t k = 0; k < degree * heads; ++k) z[k] += load(plus[k]);
}

// value[e, h] *= `scale` where the coefficient is kept, 0 elsewhere.
template <int fixed, class T, class Id, class A>
JOESTAR_INLINE void drop(const Attention<T, Id>& a, std::int64_t start, std::int64_t degree,
                         A* JOESTAR_RESTRICT value) {
  const std::int64_t heads = fixed > 0 ? fixed : a.heads, words = (heads + 31) / 32;
  const std::int32_t* bits = a.bits + start * words;
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto word = static_cast<std::uint32_t>(bits[e * words + (words == 1 ? 0 : h % words)]);
      const auto bit = static_cast<std::int32_t>((word >> (words == 1 ? h : h / words)) & 1u);
      value[e * heads + h] *= static_cast<A>(bit) * a.scale;  // a branch would be mispredicted
    }
  }
}

// sum[h] = sum over the edges of a row of value[e, h].
template <int fixed, class A>
JOESTAR_INLINE void head_totals(const A* JOESTAR_RESTRICT value, std::int64_t degree, std::int64_t any_heads,
                                A* JOESTAR_RESTRICT sum) {
  const std::int64_t heads = fixed > 0 ? fixed : any_heads;
  std::fill_n(sum, heads, A{0});
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) sum[h] += value[e * heads + h];
  }
}

// value[e, h] /= divisor[h].
template <int fixed, class A>
JOESTAR_INLINE void divide_heads(A* JOESTAR_RESTRICT value, const A* JOESTAR_RESTRICT divisor, std::int64_t degree,
                                 std::int64_t any_heads) {
  const std::int64_t heads = fixed > 0 ? fixed : any_heads;
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) value[e * heads + h] /= divisor[h];
  }
}

// N edges at a time of those before `degree`, from `e` on; returns the next edge: acc[h, d] += weight[e, h] * x[ids[e], h, d].
template <int N, class T, class Id, class A, class Ahead>
JOESTAR_INLINE std::int64_t fold_by_head(A* JOESTAR_RESTRICT acc, const T* x, const Id* ids, const A* weight,
                                         std::int64_t heads, std::int64_t width, std::int64_t e, std::int64_t degree,
                                         const Ahead& ahead) {
  for (; e + N <= degree; e += N) {
    ahead.template at_each<N>(e);
    const T* row[N];
    for (int n = 0; n < N; ++n) row[n] = x + static_cast<std::int64_t>(ids[e + n]) * heads * width;
    for (std::int64_t h = 0; h < heads; ++h) {
      A scale[N];
      for (int n = 0; n < N; ++n) scale[n] = weight[(e + n) * heads + h];
      fold_columns<Add, Weighting::Scaled, N>(acc + h * width, row, scale, width);
      for (int n = 0; n < N; ++n) row[n] += width;
    }
  }
  return e;
}

// y = sums over the edges of the rows [first, last) of weight[e, h] * x[ids[e], h]; `weight` begins at the first edge of
// these rows. `fixed`: the width, where it is known to the compiler; 0 otherwise.
template <int fixed, class T, class Id>
JOESTAR_CLONES void weighted_rows(const Attention<T, Id>& a, const Accumulator<T>* weight, std::int64_t first,
                                  std::int64_t last, Accumulator<T>* buffer, T* y) {
  using A = Accumulator<T>;
  const std::int64_t heads = a.heads, width = fixed > 0 ? fixed : a.width, size = heads * width;
  const std::int64_t* indptr = a.csc.indptr.data();
  const RowPrefetcher<T, const Id*> prefetcher(a.x, a.csc.indices.data(), a.shared ? width : size, indptr[last]);
  prefetcher.start(indptr[first]);
  for (std::int64_t i = first; i < last; ++i) {
    const RowsAhead<T, Id> ahead{prefetcher, indptr[i]};
    const std::int64_t degree = indptr[i + 1] - ahead.start;
    const Id* ids = a.csc.indices.data() + ahead.start;
    A* acc = buffer;
    if constexpr (std::is_same_v<A, T>) acc = y + i * size;
    if (a.shared) {
      sum_shared(acc, a.x, ids, weight, degree, heads, width, ahead);
    } else {
      std::fill_n(acc, size, A{0});
      std::int64_t e = fold_by_head<8>(acc, a.x, ids, weight, heads, width, 0, degree, ahead);
      e = fold_by_head<4>(acc, a.x, ids, weight, heads, width, e, degree, ahead);
      fold_by_head<1>(acc, a.x, ids, weight, heads, width, e, degree, ahead);
    }
    finish_row(acc, y + i * size, size, 1, false);
    weight += degree * heads;
  }
}

// Coefficients of the edges of the rows [first, last), as they are applied; their largest logits and sums. Exponentials
// are taken of all rows at once, in long loops.
template <int fixed, class T, class Id, class A>
JOESTAR_CLONES void coefficients(const Attention<T, Id>& a, std::int64_t first, std::int64_t last,
                                 A* JOESTAR_RESTRICT values, A* JOESTAR_RESTRICT tops, A* JOESTAR_RESTRICT totals) {
  const std::int64_t heads = fixed > 0 ? fixed : a.heads, base = a.csc.indptr[first];
  const std::int64_t count = (a.csc.indptr[last] - base) * heads;
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = a.csc.indptr[i], degree = a.csc.indptr[i + 1] - start;
    edge_scores<fixed>(a, start, degree, a.s_dst + i * heads, values + (start - base) * heads);
  }
  for (std::int64_t k = 0; k < count; ++k) values[k] *= leak(values[k], a.slope);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = a.csc.indptr[i], degree = a.csc.indptr[i + 1] - start;
    A* JOESTAR_RESTRICT value = values + (start - base) * heads;
    A* JOESTAR_RESTRICT top = tops + i * heads;
    std::fill_n(top, heads, degree > 0 ? -std::numeric_limits<A>::infinity() : A{0});
    for (std::int64_t e = 0; e < degree; ++e) {
      for (std::int64_t h = 0; h < heads; ++h) top[h] = Largest::combine(top[h], value[e * heads + h]);
    }
    for (std::int64_t e = 0; e < degree; ++e) {
      for (std::int64_t h = 0; h < heads; ++h) value[e * heads + h] -= top[h];
    }
  }
  for (std::int64_t k = 0; k < count; ++k) values[k] = exponential(values[k]);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = a.csc.indptr[i], degree = a.csc.indptr[i + 1] - start;
    A* JOESTAR_RESTRICT value = values + (start - base) * heads;
    head_totals<fixed>(value, degree, heads, totals + i * heads);
    divide_heads<fixed>(value, totals + i * heads, degree, heads);
  }
  if (a.bits != nullptr) drop<fixed>(a, base, a.csc.indptr[last] - base, values);
}

// Values of the edges of a block of rows, [edges, heads] each.
template <class A>
struct AttendScratch {
  explicit AttendScratch(std::int64_t values) : z(values), probability(values), applied(values) {}
  Scratch<A> z, probability, applied;
};

// For the edges of the rows [first, last): `grads` [edges, heads] holds <x, gradient of the row>, and then the gradients
// of the scores; scratch.applied the coefficients as they are applied. grad_s_dst: sums over a row.
template <int fixed, class T, class Id, class A>
JOESTAR_CLONES void score_gradients(const Attention<T, Id>& a, const AttendState<T>& state, std::int64_t first,
                                    std::int64_t last, const AttendScratch<A>& scratch, A* JOESTAR_RESTRICT grads,
                                    A* JOESTAR_RESTRICT sum, T* grad_s_dst) {
  const std::int64_t heads = fixed > 0 ? fixed : a.heads, base = a.csc.indptr[first];
  const std::int64_t count = (a.csc.indptr[last] - base) * heads;
  A* JOESTAR_RESTRICT z = scratch.z.data();
  A* JOESTAR_RESTRICT probability = scratch.probability.data();
  A* JOESTAR_RESTRICT applied = scratch.applied.data();
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = a.csc.indptr[i], degree = a.csc.indptr[i + 1] - start;
    edge_scores<fixed>(a, start, degree, a.s_dst + i * heads, z + (start - base) * heads);
  }
  for (std::int64_t k = 0; k < count; ++k) probability[k] = z[k] * leak(z[k], a.slope);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = a.csc.indptr[i], degree = a.csc.indptr[i + 1] - start;
    A* JOESTAR_RESTRICT value = probability + (start - base) * heads;
    const A* JOESTAR_RESTRICT top = state.top + i * heads;
    for (std::int64_t e = 0; e < degree; ++e) {
      for (std::int64_t h = 0; h < heads; ++h) value[e * heads + h] -= top[h];
    }
  }
  for (std::int64_t k = 0; k < count; ++k) probability[k] = exponential(probability[k]);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = a.csc.indptr[i], degree = a.csc.indptr[i + 1] - start;
    divide_heads<fixed>(probability + (start - base) * heads, state.total + i * heads, degree, heads);
  }
  std::copy_n(probability, count, applied);
  if (a.bits != nullptr) drop<fixed>(a, base, a.csc.indptr[last] - base, applied);
  for (std::int64_t k = 0; k < count; ++k) grads[k] *= applied[k];
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t offset = (a.csc.indptr[i] - base) * heads, degree = a.csc.indptr[i + 1] - a.csc.indptr[i];
    A* JOESTAR_RESTRICT grad = grads + offset;
    const A* JOESTAR_RESTRICT p = probability + offset;
    head_totals<fixed>(grad, degree, heads, sum);
    for (std::int64_t e = 0; e < degree; ++e) {
      for (std::int64_t h = 0; h < heads; ++h) grad[e * heads + h] -= p[e * heads + h] * sum[h];
    }
  }
  for (std::int64_t k = 0; k < count; ++k) grads[k] *= leak(z[k], a.slope);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = a.csc.indptr[i], degree = a.csc.indptr[i + 1] - start;
    head_totals<fixed>(grads + (start - base) * heads, degree, heads, sum);
    for (std::int64_t h = 0; h < heads; ++h) grad_s_dst[i * heads + h] = store<T>(sum[h]);
  }
}

}  // namespace detail

// y [rows, heads * width], and per row and head the largest logit and the sum of exponentials (0, where there are no
// edges) that the gradient needs.
template <class T, IdType Id>
void attend(const Attention<T, Id>& a, T* y, Accumulator<T>* top, Accumulator<T>* total) {
  const std::int64_t* indptr = a.csc.indptr.data();
  parallel_rows(a.csc.indptr, row_grain(a.size()), [&](std::int64_t first, std::int64_t last) {
    const Scratch<Accumulator<T>> weight((indptr[last] - indptr[first]) * a.heads);
    const auto buffer = detail::row_buffer<T>(a.size());
    detail::with_heads(a.heads, [&]<int fixed>(std::integral_constant<int, fixed>) {
      detail::coefficients<fixed>(a, first, last, weight.data(), top, total);
    });
    detail::with_width<T>(a.width, [&]<int fixed>(std::integral_constant<int, fixed>) {
      detail::weighted_rows<fixed>(a, weight.data(), first, last, buffer.data(), y);
    });
  });
}

// Gradients of attend; a logit's is alpha (m <x, grad> - sum over the row of alpha m <x, grad>). Coefficients and gradients of scores are values of edges while this runs; sums per source are
// over the transposed structure, in edge order.
template <class T, IdType Id>
void attend_grad(const Attention<T, Id>& a, const AttendState<T>& state, std::int64_t num_src,
                 const AttendGrads<T>& grads) {
  using A = Accumulator<T>;
  const std::int64_t values = a.csc.edges() * a.heads;
  const Scratch<A> grad_z(values);
  const Scratch<T> coefficient(grads.x == nullptr ? 0 : values);
  T* const applied = grads.x == nullptr ? nullptr : coefficient.data();
  const DotRows<T> products{a.x, state.grad, a.heads, a.width, a.shared, false};
  parallel_rows(a.csc.indptr, row_grain(a.size()), [&](std::int64_t first, std::int64_t last) {
    const Scratch<A> wide(a.size());
    detail::with_width<T>(a.width, [&]<int fixed>(std::integral_constant<int, fixed>) {
      detail::edge_dots<fixed>(a.csc, products, a.csc.indptr[first], a.csc.indptr[last], wide.data(), grad_z.data());
    });
    const std::int64_t base = a.csc.indptr[first] * a.heads, values = a.csc.indptr[last] * a.heads - base;
    const detail::AttendScratch<A> scratch(values);
    const Scratch<A> sum(a.heads);
    detail::with_heads(a.heads, [&]<int fixed>(std::integral_constant<int, fixed>) {
      detail::score_gradients<fixed>(a, state, first, last, scratch, grad_z.data() + base, sum.data(), grads.s_dst);
    });
    if (grads.s_edge != nullptr) {
      for (std::int64_t k = 0; k < values; ++k) grads.s_edge[base + k] = store<T>(grad_z[base + k]);
    }
    if (applied == nullptr) return;
    for (std::int64_t k = 0; k < values; ++k) applied[base + k] = store<T>(scratch.applied[k]);
  });
  if (grads.s_edge != nullptr) {
    const auto bound = static_cast<std::int64_t>(a.csc.indices.size());
    std::fill(grads.s_edge + values, grads.s_edge + bound * a.heads, T{});
  }
  const Transposed<Id> by_source = transpose(a.csc, num_src);
  const std::span<const std::int64_t> indptr = by_source.indptr.span();
  const Messages<A, const std::int64_t*> scores{
      .indptr = indptr, .ids = by_source.edge.data(), .x = grad_z.data(), .width = a.heads};
  detail::gather_reduce<detail::Add, Weighting::None>(scores, grads.s_src, false);
  if (grads.x == nullptr) return;
  if (a.shared) {
    return detail::all_head_sums(detail::HeadSums<T, T, Id>{by_source, state.grad, applied, a.heads, a.width}, grads.x);
  }
  const T* weight = applied;
  spmm_sum(Messages<T, const Id*>{indptr, by_source.row.data(), state.grad, weight, by_source.edge.data(), a.heads,
                                  a.width},
           grads.x);
}

}  // namespace joestar
