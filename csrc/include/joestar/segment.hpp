#pragma once
// Segment programs: values of edges, tile by tile, and what becomes of them. Every group of edges is one thread's; sums
// over all edges are kept per block of groups, in double, and added in order: the same bits for any number of threads.

#include "joestar/segment_tile.hpp"

namespace joestar {
namespace detail {

// Numbers of the sums over all edges that a sink has in a block.
template <class A>
std::int64_t partial_size(const SegmentPlan<A>& plan, const SegmentSink& sink) {
  if (sink.into == SegmentInto::Vector) return plan.count(sink.value);
  if (sink.into != SegmentInto::Narrow) return 0;
  return plan.width() * (plan.leaves()[static_cast<std::size_t>(sink.score)].columns + 1);
}

inline bool is_grouped(SegmentInto into) { return into <= SegmentInto::Softmax; }

// The groups [first, last), of one thread.
template <class A>
class SegmentBlock {
 public:
  SegmentBlock(const SegmentPlan<A>& plan, const SegmentEdges& edges, double* partial)
      : plan_(plan), edges_(edges), tile_(plan, edges), partial_(partial) {
    std::int64_t rows = 0, scores = 0, most = 0;
    for (const SegmentSink& sink : plan.sinks()) {
      offset_.push_back(rows);
      if (is_grouped(sink.into)) rows += plan.count(sink.value);
      if (sink.into == SegmentInto::Softmax) scores = std::max(scores, plan.count(sink.score));
      most = std::max(most, partial_size(plan, sink));
    }
    own_ = Scratch<A>(most);
    sums_ = Scratch<A>(rows);
    powers_ = Scratch<A>(scores * plan.tile());
    factor_ = Scratch<A>(scores);
  }

  void run(std::int64_t first, std::int64_t last) {
    for (std::int64_t g = first; g < last; ++g) {
      if (edges_.begin(g) == edges_.begin(g + 1)) clear(g);
    }
    std::int64_t group = first;
    for (std::int64_t p = edges_.begin(first); p < edges_.begin(last);) {
      p = tile_.run(p, group, last);
      group = tile_.parts().back().group;
      double* partial = partial_;
      for (std::size_t i = 0; i < plan_.sinks().size(); ++i) {
        const SegmentSink& sink = plan_.sinks()[i];
        const std::int64_t size = partial_size(plan_, sink);
        std::fill_n(own_.data(), size, A{0});
        take(sink, sums_.data() + offset_[i], own_.data());
        for (std::int64_t k = 0; k < size; ++k) partial[k] += own_[k];
        partial += size;
      }
    }
  }

 private:
  // A group without edges.
  void clear(std::int64_t group) {
    for (const SegmentSink& sink : plan_.sinks()) {
      if (!is_grouped(sink.into)) continue;
      const std::int64_t count = plan_.count(sink.value);
      std::fill_n(sums_.data(), count, A{0});
      store_numbers(static_cast<const A*>(sums_.data()), count, sink.out, group * count);
      if (sink.into != SegmentInto::Softmax) continue;
      const std::int64_t scores = plan_.count(sink.score);
      std::fill_n(sink.extra.out<A>() + group * scores, scores, A{0});
      std::fill_n(sink.extra2.out<A>() + group * scores, scores, A{0});
    }
  }

  void take(const SegmentSink& sink, A* sums, A* partial) {
    const TileValue<A> value = tile_.value(sink.value);
    if (value.count == 0) return;
    switch (sink.into) {
      case SegmentInto::Softmax:
        return softmax(sink, value, sums);
      case SegmentInto::Sum:
      case SegmentInto::Mean:
        return sum(sink, value, sums);
      case SegmentInto::Edges:
        return keep(sink, value);
      case SegmentInto::EdgeTotal:
        for (std::int64_t e = 0; e < tile_.edges(); ++e) {
          const A all = total(value.at(e), value.count);
          store_numbers(&all, 1, sink.out, tile_.number(e));
        }
        return;
      case SegmentInto::Vector:
        return add_rows<Weighting::None>(partial, value, none(), 0, 1, 0, tile_.edges());
      default:
        return narrow(sink, value, partial);
    }
  }
  static const A* none() { return nullptr; }

  // Where the sums of a group are made: in the result itself, if it is as wide.
  A* sums_of(const SegmentSink& sink, std::int64_t group, std::int64_t count, A* sums) const {
    return sink.out.number == SegmentNumber::Wide ? sink.out.template out<A>() + group * count : sums;
  }

  void sum(const SegmentSink& sink, const TileValue<A>& value, A* sums) {
    for (const TilePart& part : tile_.parts()) {
      A* acc = sums_of(sink, part.group, value.count, sums);
      if (part.begins) std::fill_n(acc, value.count, A{0});
      add_rows<Weighting::None>(acc, value, none(), 0, 1, part.first, part.last);
      if (!part.ends) continue;
      if (sink.into == SegmentInto::Mean) {
        const A degree = static_cast<A>(edges_.begin(part.group + 1) - edges_.begin(part.group));
        rescale(acc, static_cast<const A*>(&degree), 1, value.count, true);
      }
      store_numbers(static_cast<const A*>(acc), value.count, sink.out, part.group * value.count);
    }
  }

  void softmax(const SegmentSink& sink, const TileValue<A>& value, A* sums) {
    const TileValue<A> score = tile_.value(sink.score);
    const std::int64_t scores = score.count;
    A* powers = powers_.data();
    A* factor = factor_.data();
    for (const TilePart& part : tile_.parts()) {
      softmax_shift(score, part.first, part.last, part.begins, sink.extra.out<A>() + part.group * scores,
                    factor, powers);
    }
    exponentials(powers, tile_.edges() * scores);
    const A* by = factor;  // only the tile's first group may go on from the tile before
    const TileValue<A> all{powers, nullptr, scores};
    for (const TilePart& part : tile_.parts()) {
      A* acc = sums_of(sink, part.group, value.count, sums);
      A* sum = sink.extra2.out<A>() + part.group * scores;
      const std::int64_t length = value.count / scores;
      if (part.begins) {
        std::fill_n(acc, value.count, A{0});
        std::fill_n(sum, scores, A{0});
      } else {
        rescale(acc, by, scores, length, false);
        rescale(sum, by, scores, 1, false);
      }
      add_rows<Weighting::None>(sum, all, none(), 0, 1, part.first, part.last);
      if (length == 1) {
        add_products(acc, value, static_cast<const A*>(powers), part.first, part.last);
      } else {
        add_rows<Weighting::Scaled>(acc, value, static_cast<const A*>(powers), scores, scores, part.first, part.last);
      }
      if (!part.ends) continue;
      rescale(acc, static_cast<const A*>(sum), scores, length, true);
      store_numbers(static_cast<const A*>(acc), value.count, sink.out, part.group * value.count);
    }
  }

  void keep(const SegmentSink& sink, const TileValue<A>& value) {
    const std::int64_t count = value.count;
    if (value.rows == nullptr && edges_.edge == nullptr) {
      return store_numbers(value.base, tile_.edges() * count, sink.out, tile_.number(0) * count);
    }
    for (std::int64_t e = 0; e < tile_.edges(); ++e) {
      store_numbers(value.at(e), count, sink.out, tile_.number(e) * count);
    }
  }

  // Per column of the features and, last, of the bias: sums over edges, [columns + 1, width].
  void narrow(const SegmentSink& sink, const TileValue<A>& value, A* partial) {
    const SegmentLeaf& leaf = plan_.leaves()[static_cast<std::size_t>(sink.score)];
    const std::int64_t width = plan_.width(), stride = tile_.padded(leaf);
    if (sink.out.given()) {
      const A* features = tile_.features(leaf);
      for (std::int64_t k = 0; k < leaf.columns; ++k) {
        add_rows<Weighting::Scaled>(partial + k * width, value, features + k, stride, 1, 0, tile_.edges());
      }
    }
    if (!sink.extra.given()) return;
    add_rows<Weighting::None>(partial + leaf.columns * width, value, none(), 0, 1, 0, tile_.edges());
  }

  const SegmentPlan<A>& plan_;
  const SegmentEdges& edges_;
  SegmentTile<A> tile_;
  double* partial_;
  std::vector<std::int64_t> offset_;
  Scratch<A> sums_, powers_, factor_, own_;
};

// What blocks have added up, in their order, into the gradients of vectors, weights and biases.
template <class A>
void finish_partial(const SegmentPlan<A>& plan, double* partial, std::int64_t blocks, std::int64_t stride) {
  const Scratch<A> all(stride);
  for (std::int64_t i = 0; i < stride; ++i) {
    for (std::int64_t b = 1; b < blocks; ++b) partial[i] += partial[b * stride + i];
    all[i] = static_cast<A>(blocks > 0 ? partial[i] : 0.0);
  }
  const A* sums = all.data();
  for (const SegmentSink& sink : plan.sinks()) {
    if (sink.into == SegmentInto::Vector) store_numbers(sums, plan.count(sink.value), sink.out, 0);
    if (sink.into == SegmentInto::Narrow) {
      const std::int64_t width = plan.width(), columns = plan.leaves()[static_cast<std::size_t>(sink.score)].columns;
      for (std::int64_t i = 0; sink.out.given() && i < width * columns; ++i) {
        store_numbers(sums + i % columns * width + i / columns, 1, sink.out, i);
      }
      if (sink.extra.given()) store_numbers(sums + columns * width, width, sink.extra, 0);
    }
    sums += partial_size(plan, sink);
  }
}

}  // namespace detail

// Runs a program over groups of edges. Values of edges behind the last of `num_edges` are 0.
template <class A>
void run_segment(const SegmentPlan<A>& plan, const SegmentEdges& edges, std::int64_t num_edges) {
  std::int64_t stride = 0;
  for (const SegmentSink& sink : plan.sinks()) {
    stride += detail::partial_size(plan, sink);
    const bool per_edge = sink.into == SegmentInto::Edges || sink.into == SegmentInto::EdgeTotal;
    if (!per_edge) continue;
    const std::int64_t count = sink.into == SegmentInto::Edges ? plan.count(sink.value) : 1;
    detail::zero_numbers<A>(sink.out, edges.indptr.back() * count, num_edges * count);
  }
  const std::int64_t groups = edges.groups(), work = edges.indptr.back() + groups;
  const std::int64_t grain = std::max(4 * row_grain(plan.width()), work / 256), blocks = num_blocks(work, grain);
  const Scratch<double> partial(blocks * stride);
  std::fill_n(partial.data(), partial.size(), 0.0);
  parallel_blocks(blocks, [&](std::int64_t b) {
    const std::int64_t first = balanced_row(edges.indptr, b, blocks), last = balanced_row(edges.indptr, b + 1, blocks);
    if (first < last) detail::SegmentBlock<A>(plan, edges, partial.data() + b * stride).run(first, last);
  });
  if (stride > 0) detail::finish_partial(plan, partial.data(), blocks, stride);
}

}  // namespace joestar
