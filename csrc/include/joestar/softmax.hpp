#pragma once
// Softmax of edge values over the in-edges of each destination, and its gradient.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "joestar/spmm.hpp"

namespace joestar {
namespace detail {

JOESTAR_INLINE double exponential(double x) { return std::exp(x); }

// exp to within 2 units in the last place, without branches or tables (Cephes' polynomial on [-ln 2 / 2, ln 2 / 2]).
JOESTAR_INLINE float exponential(float x) {
  x = x < -105.0f ? -105.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer part ends up in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const std::int32_t power = std::bit_cast<std::int32_t>(shifted) - 0x4B400000;
  const std::int32_t half = power >> 1;  // in two factors, so that subnormal results come out
  return p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((power - half + 127) << 23);
}

// One row of `degree` edges and `heads` values each; `value` holds degree * heads numbers and may be `out` itself.
// `fixed` is the number of heads, or 0 where the compiler does not know it.
template <int fixed, class T, class A>
JOESTAR_CLONES void softmax_row(const T* s, std::int64_t degree, std::int64_t any_heads, A* value, A* top, A* total,
                                T* out) {
  const std::int64_t heads = fixed > 0 ? fixed : any_heads;
  std::fill_n(top, heads, -std::numeric_limits<A>::infinity());
  std::fill_n(total, heads, A{0});
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) top[h] = Largest::combine(top[h], A(load(s[e * heads + h])));
  }
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) value[e * heads + h] = load(s[e * heads + h]) - top[h];
  }
  for (std::int64_t i = 0; i < degree * heads; ++i) value[i] = exponential(value[i]);
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) total[h] += value[e * heads + h];
  }
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) out[e * heads + h] = store<T>(value[e * heads + h] / total[h]);
  }
}

template <int fixed, class T, class A>
JOESTAR_CLONES void softmax_grad_row(const T* out, const T* grad, std::int64_t degree, std::int64_t any_heads,
                                     A* JOESTAR_RESTRICT total, T* JOESTAR_RESTRICT grad_s) {
  const std::int64_t heads = fixed > 0 ? fixed : any_heads;
  std::fill_n(total, heads, A{0});
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) total[h] += load(out[e * heads + h]) * load(grad[e * heads + h]);
  }
  for (std::int64_t e = 0; e < degree; ++e) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const A probability = load(out[e * heads + h]);
      grad_s[e * heads + h] = store<T>(probability * load(grad[e * heads + h]) - probability * total[h]);
    }
  }
}

// Runs f(number of heads as a constant, 0 for an unusual one).
template <class F>
void with_heads(std::int64_t heads, F&& f) {
  switch (heads) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
    case 8:
      return f(std::integral_constant<int, 8>{});
    default:
      return f(std::integral_constant<int, 0>{});
  }
}

// The rows [first, last).
template <int fixed, class T>
void softmax_rows(std::span<const std::int64_t> indptr, const T* s, std::int64_t heads, std::int64_t first,
                  std::int64_t last, T* out) {
  using A = Accumulator<T>;
  const Scratch<A> top(heads), total(heads);
  std::vector<A> wide;
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t start = indptr[i] * heads, degree = indptr[i + 1] - indptr[i];
    A* value;
    if constexpr (std::is_same_v<A, T>) {
      value = out + start;
    } else {
      wide.resize(static_cast<std::size_t>(degree * heads));
      value = wide.data();
    }
    softmax_row<fixed>(s + start, degree, heads, value, top.data(), total.data(), out + start);
  }
}

template <class T>
void zero_tail(std::span<const std::int64_t> indptr, std::int64_t edges, std::int64_t heads, T* out) {
  std::fill(out + indptr.back() * heads, out + edges * heads, T{});
}

}  // namespace detail

// s, out [edges, heads]; 0 behind the last edge.
template <class T>
void edge_softmax(std::span<const std::int64_t> indptr, const T* s, std::int64_t edges, std::int64_t heads, T* out) {
  detail::with_heads(heads, [&]<int fixed>(std::integral_constant<int, fixed>) {
    parallel_rows(indptr, row_grain(heads), [&](std::int64_t first, std::int64_t last) {
      detail::softmax_rows<fixed>(indptr, s, heads, first, last, out);
    });
  });
  detail::zero_tail(indptr, edges, heads, out);
}

// grad_s = out * grad - out * (sum over the row of out * grad).
template <class T>
void edge_softmax_grad(std::span<const std::int64_t> indptr, const T* out, const T* grad, std::int64_t edges,
                       std::int64_t heads, T* grad_s) {
  detail::with_heads(heads, [&]<int fixed>(std::integral_constant<int, fixed>) {
    parallel_rows(indptr, row_grain(heads), [&](std::int64_t first, std::int64_t last) {
      const Scratch<Accumulator<T>> total(heads);
      for (std::int64_t i = first; i < last; ++i) {
        const std::int64_t start = indptr[i] * heads, degree = indptr[i + 1] - indptr[i];
        detail::softmax_grad_row<fixed>(out + start, grad + start, degree, heads, total.data(), grad_s + start);
      }
    });
  });
  detail::zero_tail(indptr, edges, heads, grad_s);
}

}  // namespace joestar
