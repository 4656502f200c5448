#pragma once
// A tile of edges of a segment program: whose edges they are, what its leaves are for them, and its steps, run.

#include <memory>

#include "joestar/segment_steps.hpp"

namespace joestar {

// Edges in groups, all of a destination or all of a source: group g has the positions indptr[g] .. indptr[g + 1).
// `ids`: the other end of the edge at a position, int32 or int64 (`wide`). `edge`: its number; none: the position.
struct SegmentEdges {
  std::span<const std::int64_t> indptr;
  const void* ids = nullptr;
  bool wide = false;
  const std::int64_t* edge = nullptr;
  bool by_source = false;

  std::int64_t groups() const { return static_cast<std::int64_t>(indptr.size()) - 1; }
  std::int64_t begin(std::int64_t group) const { return indptr[static_cast<std::size_t>(group)]; }
  JOESTAR_INLINE std::int64_t id(std::int64_t p) const {
    return wide ? static_cast<const std::int64_t*>(ids)[p] : static_cast<const std::int32_t*>(ids)[p];
  }
  JOESTAR_INLINE std::int64_t number(std::int64_t p) const { return edge == nullptr ? p : edge[p]; }
};

namespace detail {

// The edges [first, last) of a tile are of one group; whether they are its first, or its last ones.
struct TilePart {
  std::int64_t group, first, last;
  bool begins, ends;
};

template <class A>
class SegmentTile {
 public:
  SegmentTile(const SegmentPlan<A>& plan, const SegmentEdges& edges)
      : plan_(plan), edges_(edges), size_(plan.tile()), value_(static_cast<std::size_t>(plan.values())),
        index_(3 * size_), rows_(size_ * static_cast<std::int64_t>(plan.leaves().size())) {
    std::int64_t total = 0, narrow = 0;
    std::vector<std::int64_t> offset;
    for (const std::int64_t count : plan.slots()) {
      offset.push_back(total);
      total += (count * size_ + 15) / 16 * 16 + 80;  // not a multiple of a page apart, where loads wait for stores
    }
    for (const SegmentLeaf& leaf : plan.leaves()) narrow = std::max(narrow, padded(leaf));
    memory_ = Scratch<A>(total + narrow * size_ + 16);
    A* base = memory_.data();
    while (reinterpret_cast<std::uintptr_t>(base) % 64 != 0) ++base;
    features_ = base + total;
    for (const TileStep<A>& step : plan.steps()) {
      if (step.slot < 0) continue;
      slot_.push_back(base + offset[static_cast<std::size_t>(step.slot)]);
      value(step.result) = {slot_.back(), nullptr, step.count};
    }
    constants();
    for (const TileStep<A>& step : plan.steps()) {
      if (step.op == SegmentOp::Load) far(plan.leaves()[static_cast<std::size_t>(step.result)], step.count);
    }
  }

  TileValue<A>& value(std::int64_t number) { return value_[static_cast<std::size_t>(number)]; }
  const std::vector<TilePart>& parts() const { return parts_; }
  std::int64_t edges() const { return count_; }
  std::int64_t number(std::int64_t e) const { return index_[2 * size_ + e]; }

  // The tile at position p, of edges of groups before `last`, computed; returns the next position. Whole groups as far as
  // there is room; larger ones are cut at multiples of the tile's size, so that sums depend on their own edges alone.
  std::int64_t run(std::int64_t p, std::int64_t group, std::int64_t last) {
    gather(p, group, edges_.begin(last));
    const std::int64_t next = p + count_, limit = std::min(next + size_, edges_.begin(last));
    fetched_ = std::max(fetched_, next);
    std::int64_t left = static_cast<std::int64_t>(plan_.steps().size());
    for (const TileStep<A>& each : plan_.steps()) {
      fetch(fetched_ + (limit - fetched_) / left--);
      step(each);
    }
    return next;
  }

  // Features of the tile's edges, as wide as `padded` says.
  const A* features(const SegmentLeaf& leaf) {
    const std::int64_t columns = padded(leaf);
    for (std::int64_t e = 0; e < count_; ++e) {
      load_numbers(leaf.data, number(e) * leaf.columns, leaf.columns, features_ + e * columns);
      std::fill_n(features_ + e * columns + leaf.columns, columns - leaf.columns, A{0});
    }
    return features_;
  }
  static std::int64_t padded(const SegmentLeaf& leaf) { return (leaf.columns + 3) / 4 * 4; }

 private:
  // Rows of at least so many numbers are read where they are.
  static constexpr std::int64_t kInPlace = 16;

  // Rows that lie anywhere in memory, in bytes: of the other ends of edges, or of their numbers.
  struct FarRows {
    const char* data;
    std::int64_t bytes;
    bool by_number;
  };

  void far(const SegmentLeaf& leaf, std::int64_t count) {
    const bool other = leaf.by == (edges_.by_source ? SegmentBy::Destination : SegmentBy::Source);
    const bool numbered = leaf.by == SegmentBy::Edge && edges_.edge != nullptr;
    if (!other && !numbered) return;
    const std::int64_t number = leaf.data.number == SegmentNumber::Wide ? static_cast<std::int64_t>(sizeof(A)) : 2;
    far_.push_back({static_cast<const char*>(leaf.data.data), row_size(leaf, count) * number, numbered});
  }

  // Asks for the far rows of edges of the next tile, up to this position.
  void fetch(std::int64_t until) {
    for (; fetched_ < until; ++fetched_) {
      for (const FarRows& rows : far_) {
        const char* row = rows.data + (rows.by_number ? edges_.number(fetched_) : edges_.id(fetched_)) * rows.bytes;
        for (std::int64_t offset = 0; offset < rows.bytes; offset += 64) prefetch(row + offset);
      }
    }
  }

  std::int64_t row_size(const SegmentLeaf& leaf, std::int64_t count) const {
    return leaf.shared ? count / plan_.heads() : count;
  }
  bool in_place(const SegmentLeaf& leaf, std::int64_t count) const {
    return leaf.data.number == SegmentNumber::Wide && count >= kInPlace && row_size(leaf, count) == count;
  }
  const std::int64_t* index_of(SegmentBy by) const {
    return index_.data() + size_ * (by == SegmentBy::Source ? 0 : by == SegmentBy::Destination ? 1 : 2);
  }
  const A** rows_of(std::int64_t leaf) const { return rows_.data() + size_ * leaf; }

  // Vectors and weights in the type of the sums.
  void constants() {
    const auto& leaves = plan_.leaves();
    std::int64_t total = 0;
    for (const SegmentLeaf& leaf : leaves) total += leaf.by == SegmentBy::Vector ? std::max(plan_.width(), plan_.heads()) : 0;
    for (const SegmentLeaf& leaf : leaves) total += (padded(leaf) + 1) * plan_.width() * (leaf.columns > 0);
    constant_ = Scratch<A>(total);
    A* next = constant_.data();
    for (const TileStep<A>& step : plan_.steps()) {
      if (step.op != SegmentOp::Load) continue;
      const SegmentLeaf& leaf = leaves[static_cast<std::size_t>(step.result)];
      if (leaf.by == SegmentBy::Vector) {
        load_numbers(leaf.data, 0, step.count, next);
        std::fill_n(rows_of(step.result), size_, next);
        value(step.result).rows = rows_of(step.result);
        next += step.count;
      } else if (leaf.by == SegmentBy::Narrow) {
        weight_.push_back({step.result, next});
        next = narrow_constants(leaf, next);
      }
    }
  }

  // Weight [columns, width], transposed and padded with 0, then the bias.
  A* narrow_constants(const SegmentLeaf& leaf, A* out) const {
    const std::int64_t width = plan_.width(), columns = padded(leaf);
    const Scratch<A> row(leaf.columns);
    std::fill_n(out, (columns + 1) * width, A{0});
    for (std::int64_t w = 0; w < width; ++w) {
      load_numbers(leaf.weight, w * leaf.columns, leaf.columns, row.data());
      for (std::int64_t k = 0; k < leaf.columns; ++k) out[k * width + w] = row[k];
    }
    if (leaf.bias.given()) load_numbers(leaf.bias, 0, width, out + columns * width);
    return out + (columns + 1) * width;
  }

  void gather(std::int64_t p, std::int64_t group, std::int64_t end) {
    std::int64_t *source = index_.data(), *destination = source + size_, *edge = destination + size_;
    std::int64_t* own = edges_.by_source ? source : destination;
    std::int64_t* other = edges_.by_source ? destination : source;
    parts_.clear();
    count_ = 0;
    while (count_ < size_ && p + count_ < end) {
      const std::int64_t at = p + count_;
      while (edges_.begin(group + 1) <= at) ++group;
      const std::int64_t left = edges_.begin(group + 1) - at, room = size_ - count_;
      if (left > room && count_ > 0) break;
      const std::int64_t taken = std::min(left, room);
      parts_.push_back({group, count_, count_ + taken, at == edges_.begin(group), taken == left});
      std::fill_n(own + count_, taken, group);
      for (std::int64_t k = 0; k < taken; ++k) {
        other[count_ + k] = edges_.id(at + k);
        edge[count_ + k] = edges_.number(at + k);
      }
      count_ += taken;
    }
  }

  void step(const TileStep<A>& step) {
    if (step.op == SegmentOp::Load) return load(step);
    if (step.op == SegmentOp::Same) {
      value(step.result) = value(step.in[0]);
      return;
    }
    TileValue<A> in[3];
    for (int i = 0; i < segment_operands(step.op); ++i) in[i] = value(step.in[static_cast<std::size_t>(i)]);
    run_step(step, static_cast<const TileValue<A>*>(in), count_, const_cast<A*>(value(step.result).base));
  }

  void load(const TileStep<A>& step) {
    const SegmentLeaf& leaf = plan_.leaves()[static_cast<std::size_t>(step.result)];
    TileValue<A>& own = value(step.result);
    A* out = const_cast<A*>(own.base);
    switch (leaf.by) {
      case SegmentBy::Vector:
        return;
      case SegmentBy::Bits:
        return load_bits(leaf, step.count, out);
      case SegmentBy::Degree:
        return load_degrees(leaf, out);
      case SegmentBy::Narrow:
        for (const auto& [number, weight] : weight_) {
          if (number != step.result) continue;
          const std::int64_t width = plan_.width(), columns = padded(leaf);
          narrow_tile(features(leaf), static_cast<const A*>(weight), static_cast<const A*>(weight + columns * width),
                      columns, width, count_, out);
        }
        return;
      default:
        return load_rows(leaf, step, out);
    }
  }

  void load_rows(const SegmentLeaf& leaf, const TileStep<A>& step, A* out) {
    TileValue<A>& own = value(step.result);
    const std::int64_t count = step.count, size = row_size(leaf, count);
    const std::int64_t* index = index_of(leaf.by);
    const A* data = static_cast<const A*>(leaf.data.data);
    const bool wide = leaf.data.number == SegmentNumber::Wide;
    if (leaf.by == SegmentBy::Edge && edges_.edge == nullptr && size == count) {
      if (!wide) return load_numbers(leaf.data, index[0] * count, count_ * count, out);
      own.base = data + index[0] * count;  // side by side there as well
    } else if (in_place(leaf, count)) {
      const A** rows = rows_of(step.result);
      for (std::int64_t e = 0; e < count_; ++e) rows[e] = data + index[e] * count;
      own.rows = rows;
    } else {
      for (std::int64_t e = 0; e < count_; ++e) {
        A* row = out + e * count;
        if (wide) {
          for (std::int64_t i = 0; i < size; ++i) row[i] = data[index[e] * size + i];
        } else {
          load_numbers(leaf.data, index[e] * size, size, row);
        }
        for (std::int64_t i = size; i < count; ++i) row[i] = row[i - size];
      }
    }
  }

  void load_bits(const SegmentLeaf& leaf, std::int64_t heads, A* out) const {
    const auto* bits = static_cast<const std::int32_t*>(leaf.data.data);
    const std::int64_t words = (heads + 31) / 32;
    for (std::int64_t e = 0; e < count_; ++e) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const auto word = static_cast<std::uint32_t>(bits[number(e) * words + h % words]);
        out[e * heads + h] = static_cast<A>((word >> (h / words)) & 1u);
      }
    }
  }

  void load_degrees(const SegmentLeaf& leaf, A* out) const {
    const auto* offsets = static_cast<const std::int64_t*>(leaf.data.data);
    const std::int64_t* row = index_of(SegmentBy::Destination);
    for (std::int64_t e = 0; e < count_; ++e) out[e] = static_cast<A>(offsets[row[e] + 1] - offsets[row[e]]);
  }

  const SegmentPlan<A>& plan_;
  const SegmentEdges& edges_;
  std::int64_t size_, count_ = 0, fetched_ = 0;
  std::vector<FarRows> far_;
  std::vector<TileValue<A>> value_;
  Scratch<std::int64_t> index_;  // sources, destinations, numbers of edges
  Scratch<const A*> rows_;
  Scratch<A> memory_, constant_;
  std::vector<A*> slot_;
  A* features_ = nullptr;
  std::vector<TilePart> parts_;
  std::vector<std::pair<std::int64_t, A*>> weight_;
};

}  // namespace detail
}  // namespace joestar
