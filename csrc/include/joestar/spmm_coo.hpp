#pragma once
// Sparse-dense product, COO sorted by destination: y[dst[e]] reduces over weight[e] * x[src[e]], in edge order. The
// offsets of a few rows at a time live in a small buffer: nothing is converted or stored.

#include "joestar/spmm.hpp"

namespace joestar {

// True if 0 <= dst[0] <= dst[1] <= ...
template <IdType Id>
bool sorted_by_destination(std::span<const Id> dst) {
  if (dst.empty()) return true;
  const auto ordered = [&](std::int64_t i) {
    const auto e = static_cast<std::size_t>(i);
    return static_cast<int>(dst[e] <= dst[e + 1]);
  };
  const auto both = [](int x, int y) { return x & y; };
  return dst[0] >= 0 && parallel_reduce(static_cast<std::int64_t>(dst.size()) - 1, 1 << 16, 1, ordered, both) == 1;
}

namespace detail {

// First edge at or after `e` that begins a row.
template <IdType Id>
std::int64_t row_start(std::span<const Id> dst, std::int64_t e) {
  if (e == 0 || e >= static_cast<std::int64_t>(dst.size())) return std::min(e, static_cast<std::int64_t>(dst.size()));
  return std::upper_bound(dst.begin() + e, dst.end(), dst[static_cast<std::size_t>(e) - 1]) - dst.begin();
}

constexpr std::int64_t kRunsTogether = 512;  // rows whose offsets are held at a time

// y = reductions of the rows [row, last_row), whose edges begin at e.
template <class Op, Weighting weighting, class T, IdType Id, class Out>
void reduce_runs(Messages<T, const Id*> m, std::span<const Id> dst, std::int64_t row, std::int64_t last_row,
                 std::int64_t e, Out* y, Accumulator<Out>* buffer, bool mean) {
  std::int64_t offsets[kRunsTogether + 1];
  while (row < last_row) {
    const std::int64_t rows = std::min(kRunsTogether, last_row - row);
    offsets[0] = e;
    for (std::int64_t i = 0; i < rows; ++i) {
      while (e < static_cast<std::int64_t>(dst.size()) && dst[static_cast<std::size_t>(e)] == row + i) ++e;
      offsets[i + 1] = e;
    }
    m.indptr = {offsets, static_cast<std::size_t>(rows) + 1};
    reduce_rows<Op, weighting>(m, y + row * m.row_size(), buffer, mean, 0, rows);
    row += rows;
  }
}

}  // namespace detail

// y [num_dst, heads * width] from messages whose ids are the sources; rows without edges give 0. Edges with dst >=
// num_dst are padding.
template <class T, IdType Id, class Out>
void spmm_coo(const Messages<T, const Id*>& m, std::span<const Id> dst, std::int64_t num_dst, Reduce reduce, Out* y) {
  const auto valid = std::partition_point(dst.begin(), dst.end(), [&](Id d) { return d < num_dst; }) - dst.begin();
  const std::span<const Id> rows = dst.first(static_cast<std::size_t>(valid));
  const std::int64_t grain = row_grain(m.row_size()), blocks = std::max<std::int64_t>(1, num_blocks(valid, grain));
  // A block has the rows that begin in its share of the edges, and the empty ones after each of them.
  const auto row_after = [&](std::int64_t edge) { return static_cast<std::int64_t>(rows[edge - 1]) + 1; };
  const auto run = [&]<class Op, Weighting weighting>() {
    parallel_blocks(blocks, [&](std::int64_t block) {
      const std::int64_t first = detail::row_start(rows, block * grain);
      const std::int64_t last = block + 1 == blocks ? valid : detail::row_start(rows, (block + 1) * grain);
      if (block > 0 && first == valid) return;
      const std::int64_t begin = block == 0 ? 0 : row_after(first), end = last == valid ? num_dst : row_after(last);
      if (begin >= end) return;
      const auto buffer = detail::row_buffer<Out>(m.row_size());
      detail::reduce_runs<Op, weighting>(m, rows, begin, end, first, y, buffer.data(), reduce == Reduce::Mean);
    });
  };
  detail::with_op(reduce, [&]<class Op>(Op) {
    detail::with_weighting(m, [&]<Weighting weighting>() { run.template operator()<Op, weighting>(); });
  });
}

}  // namespace joestar
