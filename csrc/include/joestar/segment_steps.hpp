#pragma once
// Steps of a segment program over a tile of edges: one loop each, over numbers that lie side by side as far as possible.

#include "joestar/sddmm.hpp"
#include "joestar/segment_math.hpp"
#include "joestar/segment_plan.hpp"

namespace joestar::detail {

// A value of the edges of a tile: `count` numbers per edge, side by side, or where `rows` points.
template <class A>
struct TileValue {
  const A* base = nullptr;
  const A* const* rows = nullptr;
  std::int64_t count = 0;

  JOESTAR_INLINE const A* at(std::int64_t e) const { return rows == nullptr ? base + e * count : rows[e]; }
};

template <class F, class A>
JOESTAR_INLINE void unary(const TileStep<A>& step, const TileValue<A>& a, std::int64_t edges, A* JOESTAR_RESTRICT out) {
  const bool flat = a.rows == nullptr;
  const std::int64_t rows = flat ? 1 : edges, length = flat ? edges * step.count : step.count;
  const A number = step.number;
  for (std::int64_t e = 0; e < rows; ++e) {
    const A* x = a.at(e);
    A* JOESTAR_RESTRICT y = out + e * length;
    for (std::int64_t i = 0; i < length; ++i) y[i] = F::apply(x[i], number);
  }
}

template <class F, class A>
JOESTAR_INLINE void binary(const TileStep<A>& step, const TileValue<A>& a, const TileValue<A>& b, std::int64_t edges,
                           A* JOESTAR_RESTRICT out) {
  const bool flat = a.rows == nullptr && b.rows == nullptr;
  const std::int64_t rows = flat ? 1 : edges, length = flat ? edges * step.count : step.count;
  const A number = step.number;
  for (std::int64_t e = 0; e < rows; ++e) {
    const A *x = a.at(e), *y = b.at(e);
    A* JOESTAR_RESTRICT z = out + e * length;
    for (std::int64_t i = 0; i < length; ++i) z[i] = F::apply(x[i], y[i], number);
  }
}

// The second operand may be smaller: a number of it goes with `length` of the first.
template <class F, int fixed, class A>
JOESTAR_INLINE void scaled(const TileStep<A>& step, const TileValue<A>& a, const TileValue<A>& b, std::int64_t edges,
                           A* JOESTAR_RESTRICT out) {
  const std::int64_t length = fixed > 0 ? fixed : step.length;
  for (std::int64_t e = 0; e < edges; ++e) {
    const A *x = a.at(e), *y = b.at(e);
    A* JOESTAR_RESTRICT z = out + e * step.count;
    for (std::int64_t h = 0; h < step.blocks; ++h) {
      const A other = y[h];
      for (std::int64_t i = 0; i < length; ++i) z[h * length + i] = F::apply(x[h * length + i], other, A{0});
    }
  }
}

template <class F, class A>
JOESTAR_INLINE void mixed(const TileStep<A>& step, const TileValue<A>& a, const TileValue<A>& b, std::int64_t edges,
                          A* out) {
  if (step.length == 1) return binary<F>(step, a, b, edges, out);
  if (step.length == 16) return scaled<F, 16>(step, a, b, edges, out);
  if (step.length == 32) return scaled<F, 32>(step, a, b, edges, out);
  return scaled<F, 0>(step, a, b, edges, out);
}

template <class A>
JOESTAR_INLINE void larger_grad(const TileStep<A>& step, const TileValue<A>* in, std::int64_t edges,
                                A* JOESTAR_RESTRICT out) {
  for (std::int64_t e = 0; e < edges; ++e) {
    const A *grad = in[0].at(e), *a = in[1].at(e), *b = in[2].at(e);
    A* JOESTAR_RESTRICT y = out + e * step.count;
    for (std::int64_t i = 0; i < step.count; ++i) {
      const A half = grad[i] * A{0.5}, equal = a[i] == b[i] ? half : A{0};
      y[i] = a[i] > b[i] ? grad[i] : equal;
    }
  }
}

// Sixteen partial sums, as in `dot`.
template <class A>
JOESTAR_INLINE A total(const A* JOESTAR_RESTRICT x, std::int64_t size) {
  A lane[16] = {};
  std::int64_t d = 0;
  for (; d + 16 <= size; d += 16) {
    for (int l = 0; l < 16; ++l) lane[l] += x[d + l];
  }
  for (int l = 0; d < size; ++d, ++l) lane[l] += x[d];
  for (int l = 0; l < 8; ++l) lane[l] += lane[l + 8];
  for (int l = 0; l < 4; ++l) lane[l] += lane[l + 4];
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

template <int fixed, class A>
JOESTAR_INLINE void dots(const TileStep<A>& step, const TileValue<A>& a, const TileValue<A>& b, std::int64_t edges,
                         A* JOESTAR_RESTRICT out) {
  const std::int64_t length = fixed > 0 ? fixed : step.length;
  for (std::int64_t e = 0; e < edges; ++e) {
    const A *x = a.at(e), *y = b.at(e);
    for (std::int64_t h = 0; h < step.blocks; ++h) {
      out[e * step.blocks + h] = dot(x + h * length, y + h * length, length);
    }
  }
}

template <class A>
JOESTAR_INLINE void totals(const TileStep<A>& step, const TileValue<A>& a, std::int64_t edges,
                           A* JOESTAR_RESTRICT out) {
  for (std::int64_t e = 0; e < edges; ++e) {
    for (std::int64_t h = 0; h < step.blocks; ++h) {
      out[e * step.blocks + h] = total(a.at(e) + h * step.length, step.length);
    }
  }
}

template <class A>
JOESTAR_INLINE void spread(const TileStep<A>& step, const TileValue<A>& a, std::int64_t edges, A* JOESTAR_RESTRICT out) {
  for (std::int64_t e = 0; e < edges; ++e) {
    const A* x = a.at(e);
    for (std::int64_t h = 0; h < step.blocks; ++h) {
      std::fill_n(out + e * step.count + h * step.length, step.length, x[h]);
    }
  }
}

// out = what a step that is neither Load nor Same computes of values of the tile's edges.
template <class A>
JOESTAR_CLONES void run_step(const TileStep<A>& step, const TileValue<A>* in, std::int64_t edges, A* out) {
  switch (step.op) {
    case SegmentOp::Add:
      return mixed<AddStep>(step, in[0], in[1], edges, out);
    case SegmentOp::Sub:
      return mixed<SubStep>(step, in[0], in[1], edges, out);
    case SegmentOp::Mul:
      return mixed<MulStep>(step, in[0], in[1], edges, out);
    case SegmentOp::Div:
      return mixed<DivStep>(step, in[0], in[1], edges, out);
    case SegmentOp::Maximum:
      return binary<MaximumStep>(step, in[0], in[1], edges, out);
    case SegmentOp::Minimum:
      return binary<MinimumStep>(step, in[0], in[1], edges, out);
    case SegmentOp::Neg:
      return unary<NegStep>(step, in[0], edges, out);
    case SegmentOp::Relu:
      return unary<ReluStep>(step, in[0], edges, out);
    case SegmentOp::Sigmoid:
      return unary<SigmoidStep>(step, in[0], edges, out);
    case SegmentOp::Tanh:
      return unary<TanhStep>(step, in[0], edges, out);
    case SegmentOp::Exp:
      return unary<ExpStep>(step, in[0], edges, out);
    case SegmentOp::Abs:
      return unary<AbsStep>(step, in[0], edges, out);
    case SegmentOp::Silu:
      return unary<SiluStep>(step, in[0], edges, out);
    case SegmentOp::LeakyRelu:
      return unary<LeakyReluStep>(step, in[0], edges, out);
    case SegmentOp::Elu:
      return unary<EluStep>(step, in[0], edges, out);
    case SegmentOp::AddScalar:
      return unary<AddScalarStep>(step, in[0], edges, out);
    case SegmentOp::MulScalar:
      return unary<MulScalarStep>(step, in[0], edges, out);
    case SegmentOp::ReluGrad:
      return binary<ReluGradStep>(step, in[0], in[1], edges, out);
    case SegmentOp::LeakyReluGrad:
      return binary<LeakyReluGradStep>(step, in[0], in[1], edges, out);
    case SegmentOp::EluGrad:
      return binary<EluGradStep>(step, in[0], in[1], edges, out);
    case SegmentOp::SigmoidGrad:
      return binary<SigmoidGradStep>(step, in[0], in[1], edges, out);
    case SegmentOp::TanhGrad:
      return binary<TanhGradStep>(step, in[0], in[1], edges, out);
    case SegmentOp::AbsGrad:
      return binary<AbsGradStep>(step, in[0], in[1], edges, out);
    case SegmentOp::SiluGrad:
      return binary<SiluGradStep>(step, in[0], in[1], edges, out);
    case SegmentOp::LargerGrad:
      return larger_grad(step, in, edges, out);
    case SegmentOp::Dot:
      if (step.length == 16) return dots<16>(step, in[0], in[1], edges, out);
      if (step.length == 32) return dots<32>(step, in[0], in[1], edges, out);
      return dots<0>(step, in[0], in[1], edges, out);
    case SegmentOp::Total:
      return totals(step, in[0], edges, out);
    case SegmentOp::Spread:
      return spread(step, in[0], edges, out);
    default:
      return;
  }
}

// acc[d] += rows first, ..., last - 1 of a value, each times its number of `weight` per block of `length` columns; the
// weights of an edge are `stride` apart. In edge order for every column.
template <Weighting weighting, int N, class A>
JOESTAR_INLINE std::int64_t add_rows_by(A* JOESTAR_RESTRICT acc, const TileValue<A>& value, const A* weight,
                                        std::int64_t stride, std::int64_t blocks, std::int64_t length, std::int64_t e,
                                        std::int64_t last) {
  for (; e + N <= last; e += N) {
    const A* row[N];
    for (int n = 0; n < N; ++n) row[n] = value.at(e + n);
    for (std::int64_t h = 0; h < blocks; ++h) {
      A scale[N];
      for (int n = 0; n < N; ++n) scale[n] = weighting == Weighting::None ? A{1} : weight[(e + n) * stride + h];
      fold_columns<Add, weighting, N>(acc + h * length, row, scale, length);
      for (int n = 0; n < N; ++n) row[n] += length;
    }
  }
  return e;
}

template <Weighting weighting, class A>
JOESTAR_CLONES void add_rows(A* acc, const TileValue<A>& value, const A* weight, std::int64_t stride,
                             std::int64_t blocks, std::int64_t first, std::int64_t last) {
  const std::int64_t length = value.count / blocks;
  std::int64_t e = add_rows_by<weighting, 8>(acc, value, weight, stride, blocks, length, first, last);
  e = add_rows_by<weighting, 4>(acc, value, weight, stride, blocks, length, e, last);
  add_rows_by<weighting, 1>(acc, value, weight, stride, blocks, length, e, last);
}

// acc[d] += weight[e, d] * value[e, d].
template <class A>
JOESTAR_CLONES void add_products(A* JOESTAR_RESTRICT acc, const TileValue<A>& value, const A* weight,
                                 std::int64_t first, std::int64_t last) {
  for (std::int64_t e = first; e < last; ++e) {
    const A *x = value.at(e), *w = weight + e * value.count;
    for (std::int64_t d = 0; d < value.count; ++d) acc[d] += w[d] * x[d];
  }
}

// Some edges of a group of a softmax: `top` becomes the largest score yet, `factor` what the sums of the group's earlier
// edges are to be scaled by, and powers[e] = score - top, whose exponential is to be taken.
template <class A>
JOESTAR_CLONES void softmax_shift(const TileValue<A>& score, std::int64_t first, std::int64_t last, bool begins,
                                  A* JOESTAR_RESTRICT top, A* JOESTAR_RESTRICT factor, A* JOESTAR_RESTRICT powers) {
  constexpr A least = -std::numeric_limits<A>::infinity();
  const std::int64_t count = score.count;
  std::copy_n(top, begins ? 0 : count, factor);
  if (begins) std::fill_n(top, count, least);
  for (std::int64_t e = first; e < last; ++e) {
    const A* x = score.at(e);
    for (std::int64_t s = 0; s < count; ++s) top[s] = Largest::combine(top[s], x[s]);
  }
  for (std::int64_t s = 0; !begins && s < count; ++s) {
    const A power = exponential(factor[s] - top[s]);
    factor[s] = factor[s] == top[s] ? A{1} : power;
  }
  // Scores that are all -inf so far have a power of 0, not of NaN: a larger one may come.
  for (std::int64_t e = first; e < last; ++e) {
    const A* x = score.at(e);
    for (std::int64_t s = 0; s < count; ++s) {
      const A shift = top[s] == least ? A{0} : top[s];
      powers[e * count + s] = x[s] - shift;
    }
  }
}

template <class A>
JOESTAR_CLONES void exponentials(A* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) values[i] = exponential(values[i]);
}

// acc[h, d] *= factor[h], or /= with `divide`.
template <class A>
JOESTAR_CLONES void rescale(A* JOESTAR_RESTRICT acc, const A* JOESTAR_RESTRICT factor, std::int64_t blocks,
                            std::int64_t length, bool divide) {
  for (std::int64_t h = 0; h < blocks; ++h) {
    const A by = factor[h];
    if (divide) {
      for (std::int64_t d = 0; d < length; ++d) acc[h * length + d] /= by;
    } else {
      for (std::int64_t d = 0; d < length; ++d) acc[h * length + d] *= by;
    }
  }
}

// out[n, w] = bias[w] + sum of features[n, k] * weight[k, w], for N edges and 4 features at a time; `columns` is a multiple
// of 4.
template <int N, class A>
JOESTAR_INLINE void narrow_rows(const A* JOESTAR_RESTRICT features, const A* JOESTAR_RESTRICT weight,
                                const A* JOESTAR_RESTRICT bias, std::int64_t columns, std::int64_t width,
                                A* JOESTAR_RESTRICT out) {
  for (std::int64_t k = 0; k < columns; k += 4) {
    A f[N][4];
    for (int n = 0; n < N; ++n) {
      for (int j = 0; j < 4; ++j) f[n][j] = features[n * columns + k + j];
    }
    const A* JOESTAR_RESTRICT w = weight + k * width;
#pragma GCC ivdep
    for (std::int64_t d = 0; d < width; ++d) {
      for (int n = 0; n < N; ++n) {
        A sum = k == 0 ? bias[d] : out[n * width + d];
        for (int j = 0; j < 4; ++j) sum += f[n][j] * w[j * width + d];
        out[n * width + d] = sum;
      }
    }
  }
}

template <class A>
JOESTAR_CLONES void narrow_tile(const A* features, const A* weight, const A* bias, std::int64_t columns,
                                std::int64_t width, std::int64_t edges, A* out) {
  std::int64_t e = 0;
  for (; e + 4 <= edges; e += 4) narrow_rows<4>(features + e * columns, weight, bias, columns, width, out + e * width);
  for (; e < edges; ++e) narrow_rows<1>(features + e * columns, weight, bias, columns, width, out + e * width);
}

// `count` numbers of a table from `first` on, as A, and back.
template <class A>
JOESTAR_CLONES void load_numbers(const SegmentTable& table, std::int64_t first, std::int64_t count,
                                 A* JOESTAR_RESTRICT out) {
  switch (table.number) {
    case SegmentNumber::BFloat16: {
      const auto* x = static_cast<const BFloat16*>(table.data) + first;
      for (std::int64_t i = 0; i < count; ++i) out[i] = load(x[i]);
      return;
    }
    case SegmentNumber::Float16: {
      const auto* x = static_cast<const Float16*>(table.data) + first;
      for (std::int64_t i = 0; i < count; ++i) out[i] = load(x[i]);
      return;
    }
    default:
      std::copy_n(static_cast<const A*>(table.data) + first, count, out);
  }
}

template <class A>
JOESTAR_CLONES void store_numbers(const A* JOESTAR_RESTRICT x, std::int64_t count, const SegmentTable& table,
                                  std::int64_t first) {
  if constexpr (std::is_same_v<A, float>) {
    if (table.number == SegmentNumber::BFloat16) {
      auto* out = table.out<BFloat16>() + first;
      for (std::int64_t i = 0; i < count; ++i) out[i] = store<BFloat16>(x[i]);
      return;
    }
    if (table.number == SegmentNumber::Float16) {
      auto* out = table.out<Float16>() + first;
      for (std::int64_t i = 0; i < count; ++i) out[i] = store<Float16>(x[i]);
      return;
    }
  }
  A* out = table.out<A>() + first;
  if (out != x) std::copy_n(x, count, out);
}

// The numbers [first, last) become 0.
template <class A>
void zero_numbers(const SegmentTable& table, std::int64_t first, std::int64_t last) {
  const std::int64_t bytes = table.number == SegmentNumber::Wide ? static_cast<std::int64_t>(sizeof(A)) : 2;
  std::fill(table.out<char>() + first * bytes, table.out<char>() + last * bytes, char{0});
}

}  // namespace joestar::detail
