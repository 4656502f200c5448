#pragma once
// Graph attention without edge values in memory: logits leaky_relu(s_src[source] + s_dst[row]), their softmax over the
// edges of a row, dropout of coefficients, and the weighted sum of the sources' rows, per row; and the gradients.

#include <vector>

#include "joestar/sddmm.hpp"
#include "joestar/softmax.hpp"
#include "joestar/spmm_shared.hpp"

namespace joestar {

// Scores s_src [num_src, heads] and s_dst [rows, heads]; x [num_src, heads * width], or [num_src, width] if `shared`.
// bits [edges, words] with words = ceil(heads / 32), or none: bit h / words of word h % words keeps the coefficient of
// head h, which is then multiplied by `scale`.
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

  std::int64_t size() const { return heads * width; }
  std::int64_t x_size() const { return shared ? width : heads * width; }
};

// What the forward pass left: y [rows, heads * width], and per row and head the largest logit and the sum of
// exponentials. `grad` is the gradient of y.
template <class T>
struct AttendState {
  const T* y;
  const Accumulator<T>* top;
  const Accumulator<T>* total;
  const T* grad;
};

// Gradients; grad_x may be null.
template <class T>
struct AttendGrads {
  T* s_src;
  T* s_dst;
  T* x;
};

namespace detail {

// z[e, h] = s_src[source of e, h] + own[h] for the `degree` edges from `start` on.
template <int fixed, class T, class Id, class A>
JOESTAR_INLINE void edge_scores(const Attention<T, Id>& a, std::int64_t start, std::int64_t degree, const T* own,
                                A* JOESTAR_RESTRICT z) {
  const std::int64_t heads = fixed > 0 ? fixed : a.heads;
  const Id* ids = a.csc.indices.data() + start;
  for (std::int64_t e = 0; e < degree; ++e) {
    const T* s = a.s_src + static_cast<std::int64_t>(ids[e]) * heads;
    for (std::int64_t h = 0; h < heads; ++h) z[e * heads + h] = load(s[h]) + load(own[h]);
  }
}

// `scale` where the coefficient of edge e and head h is kept, else 0.
template <class T, class Id>
JOESTAR_INLINE Accumulator<T> factor(const Attention<T, Id>& a, std::int64_t e, std::int64_t h) {
  const std::int64_t words = (a.heads + 31) / 32;
  const auto word = static_cast<std::uint32_t>(a.bits[e * words + h % words]);
  return (word >> (h / words)) & 1u ? a.scale : Accumulator<T>{0};
}

// acc[h * width + d] = sum over the edges of weight[e, h] * x[ids[e], h, d]; N edges at a time.
template <int N, class T, class Id, class A>
JOESTAR_INLINE std::int64_t fold_by_head(A* JOESTAR_RESTRICT acc, const Attention<T, Id>& a, const Id* ids,
                                         const A* weight, std::int64_t e, std::int64_t degree) {
  for (; e + N <= degree; e += N) {
    const T* row[N];
    for (int n = 0; n < N; ++n) row[n] = a.x + static_cast<std::int64_t>(ids[e + n]) * a.size();
    for (std::int64_t h = 0; h < a.heads; ++h) {
      A scale[N];
      for (int n = 0; n < N; ++n) scale[n] = weight[(e + n) * a.heads + h];
      fold_columns<Add, Weighting::Scaled, N>(acc + h * a.width, row, scale, a.width);
      for (int n = 0; n < N; ++n) row[n] += a.width;
    }
  }
  return e;
}

template <class T, class Id, class A>
JOESTAR_INLINE void weighted_sum(A* JOESTAR_RESTRICT acc, const Attention<T, Id>& a, const Id* ids, const A* weight,
                                 std::int64_t degree) {
  if (a.shared) return sum_shared(acc, a.x, ids, weight, degree, a.heads, a.width);
  std::fill_n(acc, a.size(), A{0});
  std::int64_t e = fold_by_head<8>(acc, a, ids, weight, 0, degree);
  e = fold_by_head<4>(acc, a, ids, weight, e, degree);
  fold_by_head<1>(acc, a, ids, weight, e, degree);
}

// Rows [first, last). `edge` grows to the largest row's edges; `buffer` holds a row of accumulators.
template <int fixed, class T, class Id>
JOESTAR_CLONES void attend_rows(const Attention<T, Id>& a, std::int64_t first, std::int64_t last,
                                std::vector<Accumulator<T>>& edge, Accumulator<T>* buffer, T* y, Accumulator<T>* top,
                                Accumulator<T>* total) {
  using A = Accumulator<T>;
  const std::int64_t heads = fixed > 0 ? fixed : a.heads, size = a.size();
  const std::int64_t* indptr = a.csc.indptr.data();
  const Id* ids = a.csc.indices.data();
  const RowPrefetcher<T, const Id*> prefetcher(a.x, ids, a.x_size(), indptr[last]);
  prefetcher.start(indptr[first]);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = indptr[i], degree = indptr[i + 1] - start;
    A* acc = buffer;
    if constexpr (std::is_same_v<A, T>) acc = y + i * size;
    if (degree == 0) {
      std::fill_n(top + i * heads, heads, A{0});
      std::fill_n(total + i * heads, heads, A{0});
      std::fill_n(acc, size, A{0});
      finish_row(acc, y + i * size, size, 1, false);
      continue;
    }
    if (static_cast<std::int64_t>(edge.size()) < degree * heads) edge.resize(static_cast<std::size_t>(degree * heads));
    A* value = edge.data();
    edge_scores<fixed>(a, start, degree, a.s_dst + i * heads, value);
    for (std::int64_t k = 0; k < degree * heads; ++k) value[k] = value[k] > A{0} ? value[k] : value[k] * a.slope;
    for (std::int64_t e = start; e < start + degree; ++e) prefetcher.at(e);
    softmax_row<fixed>(value, degree, heads, value, top + i * heads, total + i * heads, value);
    if (a.bits != nullptr) {
      for (std::int64_t e = 0; e < degree; ++e) {
        for (std::int64_t h = 0; h < heads; ++h) value[e * heads + h] *= factor(a, start + e, h);
      }
    }
    weighted_sum(acc, a, ids + start, value, degree);
    finish_row(acc, y + i * size, size, 1, false);
  }
}

// Scratch memory of attend_grad_rows: values of a row's edges, one row of gradients, values per head.
template <class A>
struct AttendScratch {
  std::vector<A> z, alpha;
  Scratch<A> wide, delta, sum;
};

// Per edge and head of the rows [first, last): the coefficient that was applied (unless null), the gradient of the
// score, and per row the sum of the latter.
template <int fixed, class T, class Id>
JOESTAR_CLONES void attend_grad_rows(const Attention<T, Id>& a, const AttendState<T>& state, std::int64_t first,
                                     std::int64_t last, AttendScratch<Accumulator<T>>& scratch, T* coefficient,
                                     Accumulator<T>* grad_z, T* grad_s_dst) {
  using A = Accumulator<T>;
  const std::int64_t heads = fixed > 0 ? fixed : a.heads, width = a.width, size = heads * width;
  const std::int64_t step = a.shared ? 0 : width;
  const std::int64_t* indptr = a.csc.indptr.data();
  const Id* ids = a.csc.indices.data();
  const RowPrefetcher<T, const Id*> prefetcher(a.x, ids, a.x_size(), indptr[last]);
  prefetcher.start(indptr[first]);
  A* wide = scratch.wide.data();
  A* delta = scratch.delta.data();
  A* sum = scratch.sum.data();
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = indptr[i], degree = indptr[i + 1] - start;
    std::fill_n(sum, heads, A{0});
    if (degree > 0) {
      const auto needed = static_cast<std::size_t>(degree * heads);
      if (scratch.z.size() < needed) {
        scratch.z.resize(needed);
        scratch.alpha.resize(needed);
      }
      A* z = scratch.z.data();
      A* alpha = scratch.alpha.data();
      const A* top = state.top + i * heads;
      const A* total = state.total + i * heads;
      for (std::int64_t d = 0; d < size; ++d) wide[d] = load(state.grad[i * size + d]);
      for (std::int64_t h = 0; h < heads; ++h) {
        delta[h] = dot(state.y + i * size + h * width, wide + h * width, width);
      }
      edge_scores<fixed>(a, start, degree, a.s_dst + i * heads, z);
      for (std::int64_t e = 0; e < degree; ++e) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const A s = z[e * heads + h];
          alpha[e * heads + h] = (s > A{0} ? s : s * a.slope) - top[h];
        }
      }
      for (std::int64_t k = 0; k < degree * heads; ++k) alpha[k] = exponential(alpha[k]);
      for (std::int64_t e = 0; e < degree; ++e) {
        prefetcher.at(start + e);
        const T* row = a.x + static_cast<std::int64_t>(ids[start + e]) * a.x_size();
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t k = e * heads + h;
          const A product = dot(row + h * step, wide + h * width, width);
          const A kept = a.bits == nullptr ? A{1} : factor(a, start + e, h);
          const A probability = alpha[k] / total[h];
          const A logit = probability * (kept * product - delta[h]);
          const A score = z[k] > A{0} ? logit : logit * a.slope;
          if (coefficient != nullptr) coefficient[start * heads + k] = store<T>(probability * kept);
          grad_z[start * heads + k] = score;
          sum[h] += score;
        }
      }
    }
    for (std::int64_t h = 0; h < heads; ++h) grad_s_dst[i * heads + h] = store<T>(sum[h]);
  }
}

}  // namespace detail

// y [rows, heads * width], and per row and head the largest logit and the sum of exponentials (0, where there are no
// edges) that the gradient needs.
template <class T, IdType Id>
void attend(const Attention<T, Id>& a, T* y, Accumulator<T>* top, Accumulator<T>* total) {
  detail::with_heads(a.heads, [&]<int fixed>(std::integral_constant<int, fixed>) {
    parallel_rows(a.csc.indptr, row_grain(a.size()), [&](std::int64_t first, std::int64_t last) {
      std::vector<Accumulator<T>> edge;
      const auto buffer = detail::row_buffer<T>(a.size());
      detail::attend_rows<fixed>(a, first, last, edge, buffer.data(), y, top, total);
    });
  });
}

// Gradients of attend. Coefficients and gradients of scores are values of edges while this runs; sums per source are
// over the transposed structure, in edge order.
template <class T, IdType Id>
void attend_grad(const Attention<T, Id>& a, const AttendState<T>& state, std::int64_t num_src,
                 const AttendGrads<T>& grads) {
  using A = Accumulator<T>;
  const std::int64_t values = a.csc.edges() * a.heads;
  const Scratch<A> grad_z(values);
  const Scratch<T> coefficient(grads.x == nullptr ? 0 : values);
  T* const applied = grads.x == nullptr ? nullptr : coefficient.data();
  detail::with_heads(a.heads, [&]<int fixed>(std::integral_constant<int, fixed>) {
    parallel_rows(a.csc.indptr, row_grain(a.size()), [&](std::int64_t first, std::int64_t last) {
      detail::AttendScratch<A> scratch{{}, {}, Scratch<A>(a.size()), Scratch<A>(a.heads), Scratch<A>(a.heads)};
      detail::attend_grad_rows<fixed>(a, state, first, last, scratch, applied, grad_z.data(), grads.s_dst);
    });
  });
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
