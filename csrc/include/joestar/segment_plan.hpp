#pragma once
// A segment program (joestar/kernels/segment_program.py) as a flat list: leaves, steps and sinks, checked once; and where
// the values of a tile of edges lie. Values have a number per edge, per head, or per column.

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "joestar/float16.hpp"

namespace joestar {

// A table of any of these numbers, or none. Wide: float, or double for a program in double.
enum class SegmentNumber { None, Wide, BFloat16, Float16, Int32, Int64 };

struct SegmentTable {
  const void* data = nullptr;
  SegmentNumber number = SegmentNumber::None;

  bool given() const { return number != SegmentNumber::None; }

  // What is written to: results are the caller's own memory.
  template <class T>
  T* out() const {
    return static_cast<T*>(const_cast<void*>(data));
  }
};

// What a leaf reads for an edge: the row of its source, its destination or its own; a vector, the same for all; a bit per
// head; a product of few features with a weight; how many edges its destination has.
enum class SegmentBy : std::int64_t { Source, Destination, Edge, Vector, Bits, Narrow, Degree, Count };

// `size`: 0, 1 or 2, a number per edge, head or column. `shared`: a row for all heads. Narrow: features [edges, columns],
// weight [width, columns], bias [width] or none.
struct SegmentLeaf {
  SegmentBy by;
  std::int64_t size;
  bool shared = false;
  SegmentTable data, weight, bias;
  std::int64_t columns = 0;
};

// The names in `segment_step_names`, in the same order; then loading a leaf, and another name for a value.
enum class SegmentOp : std::int64_t {
  Add, Sub, Mul, Div, Maximum, Minimum, Neg, Relu, Sigmoid, Tanh, Exp, Abs, Silu, LeakyRelu, Elu, AddScalar, MulScalar,
  ReluGrad, LeakyReluGrad, EluGrad, SigmoidGrad, TanhGrad, AbsGrad, SiluGrad, LargerGrad, Dot, Total, Spread, Count,
  Load, Same,
};

inline constexpr std::array<const char*, static_cast<std::size_t>(SegmentOp::Count)> segment_step_names = {
    "add", "sub", "mul", "div", "maximum", "minimum", "neg", "relu", "sigmoid", "tanh", "exp", "abs", "silu",
    "leaky_relu", "elu", "add_scalar", "mul_scalar", "relu_grad", "leaky_relu_grad", "elu_grad", "sigmoid_grad",
    "tanh_grad", "abs_grad", "silu_grad", "larger_grad", "dot", "total", "spread"};

// Values are numbered: first the leaves, then the steps. Operands are as large as the result, but for the second one of
// Add, Sub, Mul and Div and the only one of Spread, which may be smaller, and those of Dot and Total, which are rows.
struct SegmentStep {
  SegmentOp op;
  std::int64_t size;
  std::array<std::int64_t, 3> in;
  double number;
};

// What becomes of values: sums, means and weighted sums by group of edges; values of edges, or of each their total; sums
// over all edges of a vector or of a weight and its bias.
enum class SegmentInto : std::int64_t { Sum, Mean, Softmax, Edges, EdgeTotal, Vector, Narrow, Count };

// `value` and, of a softmax, `score`; of a narrow leaf's gradient `score` is the leaf. `extra`: of a softmax the largest
// score and the sum of exponentials, of a weight's gradient the bias's; wide, or none.
struct SegmentSink {
  SegmentInto into;
  std::int64_t value, score;
  SegmentTable out, extra, extra2;
};

namespace detail {

// A step with its counts of numbers per edge. Of operands of different sizes `blocks` numbers of the smaller one go with
// `length` each of the larger. `slot`: where the result lies, -1 if it is another value's memory.
template <class A>
struct TileStep {
  SegmentOp op;
  std::int64_t result, count, blocks, length, slot;
  std::array<std::int64_t, 3> in;
  A number;
};

inline void segment_require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("segment program: expected ") + what);
}

inline int segment_operands(SegmentOp op) {
  if (op == SegmentOp::LargerGrad) return 3;
  if (op >= SegmentOp::Neg && op <= SegmentOp::MulScalar) return 1;
  return op == SegmentOp::Total || op == SegmentOp::Spread ? 1 : 2;
}

}  // namespace detail

template <class A>
class SegmentPlan {
 public:
  SegmentPlan(std::int64_t heads, std::int64_t width, std::int64_t tile, std::vector<SegmentLeaf> leaves,
              const std::vector<SegmentStep>& steps, std::vector<SegmentSink> sinks)
      : heads_(heads), width_(width), tile_(tile), leaves_(std::move(leaves)), sinks_(std::move(sinks)) {
    detail::segment_require(heads >= 1 && width >= 0 && width % heads == 0, "columns in heads");
    detail::segment_require(tile >= 1, "a tile of edges");
    for (const SegmentLeaf& leaf : leaves_) {
      const bool known = leaf.by >= SegmentBy::Source && leaf.by < SegmentBy::Count;
      detail::segment_require(known && leaf.size >= 0 && leaf.size <= 2, "leaves of a known kind and size");
      sizes_.push_back(leaf.size);
    }
    for (const SegmentStep& step : steps) check(step);
    for (const SegmentSink& sink : sinks_) check(sink);
    arrange(steps);
  }

  std::int64_t heads() const { return heads_; }
  std::int64_t width() const { return width_; }
  std::int64_t tile() const { return tile_; }
  std::int64_t values() const { return static_cast<std::int64_t>(sizes_.size()); }
  const std::vector<SegmentLeaf>& leaves() const { return leaves_; }
  const std::vector<SegmentSink>& sinks() const { return sinks_; }
  const std::vector<detail::TileStep<A>>& steps() const { return steps_; }
  // Numbers per edge of every slot.
  const std::vector<std::int64_t>& slots() const { return slots_; }
  // Numbers per edge of a value.
  std::int64_t count(std::int64_t value) const { return numbers(sizes_[static_cast<std::size_t>(value)]); }

 private:
  std::int64_t numbers(std::int64_t size) const { return size == 0 ? 1 : size == 1 ? heads_ : width_; }

  void check(const SegmentStep& step) {
    using detail::segment_require;
    segment_require(step.op >= SegmentOp::Add && step.op < SegmentOp::Count, "steps out of segment_step_names");
    std::array<std::int64_t, 3> in{};
    for (int i = 0; i < detail::segment_operands(step.op); ++i) {
      const std::int64_t value = step.in[static_cast<std::size_t>(i)];
      segment_require(value >= 0 && value < values(), "values before the step that reads them");
      in[static_cast<std::size_t>(i)] = sizes_[static_cast<std::size_t>(value)];
    }
    const bool rows = step.op == SegmentOp::Dot || step.op == SegmentOp::Total;
    bool fits = step.size >= 0 && step.size <= 2;
    if (rows) {
      fits = step.size == 1 && in[0] == 2 && (step.op == SegmentOp::Total || in[1] == 2);
    } else if (step.op == SegmentOp::Spread) {
      fits = fits && in[0] <= step.size;
    } else {
      const bool smaller = step.op <= SegmentOp::Div;
      for (int i = 0; i < detail::segment_operands(step.op); ++i) {
        const std::int64_t own = in[static_cast<std::size_t>(i)];
        fits = fits && (own == step.size || (smaller && i == 1 && own < step.size));
      }
    }
    segment_require(fits, "operands of the size of a step's result");
    sizes_.push_back(step.size);
  }

  void check(const SegmentSink& sink) const {
    using detail::segment_require;
    segment_require(sink.into >= SegmentInto::Sum && sink.into < SegmentInto::Count, "sinks of a known kind");
    segment_require(sink.value >= 0 && sink.value < values(), "values in front of the results");
    const std::int64_t size = sizes_[static_cast<std::size_t>(sink.value)];
    if (sink.into == SegmentInto::Softmax) {
      segment_require(sink.score >= 0 && sink.score < values(), "scores in front of the results");
      const std::int64_t score = sizes_[static_cast<std::size_t>(sink.score)];
      segment_require(score >= 1 && score <= size, "scores per head, or per column as the values");
      segment_require(sink.extra.given() && sink.extra2.given(), "where a softmax's sums are kept");
    }
    if (sink.into == SegmentInto::Narrow) {
      const bool leaf = sink.score >= 0 && sink.score < static_cast<std::int64_t>(leaves_.size());
      segment_require(leaf && leaves_[static_cast<std::size_t>(sink.score)].by == SegmentBy::Narrow && size == 2,
                      "the gradient of a narrow leaf");
    }
  }

  // Steps in the order in which they run: a leaf is loaded in front of its first reader. Slots are used again as soon
  // as nothing reads their values any more.
  void arrange(const std::vector<SegmentStep>& steps) {
    const auto first = static_cast<std::int64_t>(leaves_.size());
    std::vector<std::int64_t> last(sizes_.size(), -1), slot_of(sizes_.size(), -1), root(sizes_.size());
    for (std::size_t v = 0; v < root.size(); ++v) root[v] = static_cast<std::int64_t>(v);
    std::vector<bool> loaded(sizes_.size(), false);
    const auto load = [&](std::int64_t value) {
      if (value >= first || loaded[static_cast<std::size_t>(value)]) return;
      loaded[static_cast<std::size_t>(value)] = true;
      steps_.push_back({SegmentOp::Load, value, count(value), 1, count(value), -1, {value, 0, 0}, A{0}});
    };
    for (std::size_t i = 0; i < steps.size(); ++i) {
      for (int k = 0; k < detail::segment_operands(steps[i].op); ++k) load(steps[i].in[static_cast<std::size_t>(k)]);
      steps_.push_back(tile_step(steps[i], first + static_cast<std::int64_t>(i)));
      const auto& step = steps_.back();
      if (step.op == SegmentOp::Same) {
        root[static_cast<std::size_t>(step.result)] = root[static_cast<std::size_t>(step.in[0])];
      }
    }
    for (const SegmentSink& sink : sinks_) {
      load(sink.value);
      if (sink.into == SegmentInto::Softmax) load(sink.score);
    }
    const auto root_of = [&](std::int64_t value) { return root[static_cast<std::size_t>(value)]; };
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      for (int k = 0; k < operands(steps_[i]); ++k) {
        last[static_cast<std::size_t>(root_of(steps_[i].in[static_cast<std::size_t>(k)]))] = static_cast<std::int64_t>(i);
      }
    }
    const auto end = static_cast<std::int64_t>(steps_.size());
    for (const SegmentSink& sink : sinks_) {
      last[static_cast<std::size_t>(root_of(sink.value))] = end;
      if (sink.into == SegmentInto::Softmax) last[static_cast<std::size_t>(root_of(sink.score))] = end;
    }
    std::vector<bool> free;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      detail::TileStep<A>& step = steps_[i];
      if (step.op == SegmentOp::Same) continue;
      std::size_t slot = 0;
      while (slot < slots_.size() && !(free[slot] && slots_[slot] == step.count)) ++slot;
      if (slot == slots_.size()) {
        slots_.push_back(step.count);
        free.push_back(true);
      }
      free[slot] = false;
      step.slot = slot_of[static_cast<std::size_t>(step.result)] = static_cast<std::int64_t>(slot);
      for (int k = 0; k < operands(step); ++k) {
        const std::int64_t value = root_of(step.in[static_cast<std::size_t>(k)]);
        const std::int64_t own = slot_of[static_cast<std::size_t>(value)];
        if (last[static_cast<std::size_t>(value)] == static_cast<std::int64_t>(i)) free[static_cast<std::size_t>(own)] = true;
      }
    }
  }

  static int operands(const detail::TileStep<A>& step) {
    return step.op == SegmentOp::Load ? 0 : step.op == SegmentOp::Same ? 1 : detail::segment_operands(step.op);
  }

  // Heads of one column, and one head alone, are no sizes of their own.
  detail::TileStep<A> tile_step(const SegmentStep& step, std::int64_t result) const {
    detail::TileStep<A> out{step.op, result, numbers(step.size), 1, numbers(step.size), -1, step.in,
                            static_cast<A>(step.number)};
    const std::int64_t first = count(step.in[0]);
    if (step.op == SegmentOp::Spread || step.op == SegmentOp::Total || step.op == SegmentOp::Dot) {
      out.blocks = step.op == SegmentOp::Spread ? first : out.count;
      out.length = out.blocks == 0 ? 0 : std::max(first, out.count) / out.blocks;
      if (step.op != SegmentOp::Spread && first == 0) out.length = 0;
      if (out.length == 1) out.op = step.op == SegmentOp::Dot ? SegmentOp::Mul : SegmentOp::Same;
    } else if (step.op <= SegmentOp::Div) {
      out.blocks = count(step.in[1]);
      out.length = out.blocks == 0 ? 0 : out.count / out.blocks;
    }
    return out;
  }

  std::int64_t heads_, width_, tile_;
  std::vector<SegmentLeaf> leaves_;
  std::vector<SegmentSink> sinks_;
  std::vector<std::int64_t> sizes_, slots_;
  std::vector<detail::TileStep<A>> steps_;
};

}  // namespace joestar
