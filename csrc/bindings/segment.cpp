#include "joestar/segment.hpp"

#include "bindings.hpp"
#include "joestar/structure.hpp"

namespace joestar::bindings {
namespace {

template <class A>
SegmentTable table_of(const Tensor& tensor) {
  switch (tensor.dtype) {
    case DType::None:
      return {};
    case DType::BFloat16:
      return {tensor.data, SegmentNumber::BFloat16};
    case DType::Float16:
      return {tensor.data, SegmentNumber::Float16};
    case DType::Int32:
      return {tensor.data, SegmentNumber::Int32};
    case DType::Int64:
      return {tensor.data, SegmentNumber::Int64};
    default:
      if (tensor.dtype != (std::is_same_v<A, double> ? DType::Float64 : DType::Float32)) {
        throw std::invalid_argument("segment program: expected tensors as wide as the sums, or of 16 bits");
      }
      return {tensor.data, SegmentNumber::Wide};
  }
}

// Rows of `size` numbers of an int64 tensor.
struct Table {
  const std::int64_t* data;
  std::int64_t rows, size;
  std::int64_t at(std::int64_t row, std::int64_t column) const { return data[row * size + column]; }
};

Table table(const Tensor& tensor, std::int64_t size) {
  if (tensor.dtype != DType::Int64 || tensor.numel % size != 0) {
    throw std::invalid_argument("segment program: expected a plan in int64");
  }
  return {tensor.as<const std::int64_t>(), tensor.numel / size, size};
}

// leaves [*, 4]: by, size, shared, columns; steps [*, 5]: op, size, three values; sinks [*, 3]: into, value, score. Three
// tensors or None for every leaf (data, weight, bias), then for every sink (out, and two more).
template <class A>
SegmentPlan<A> plan_of(const Tensor& leaves, const Tensor& steps, const Tensor& numbers, const Tensor& sinks,
                       const std::vector<Tensor>& tensors, std::int64_t heads, std::int64_t width, std::int64_t tile) {
  const Table leaf = table(leaves, 4), step = table(steps, 5), sink = table(sinks, 3);
  const auto expected = static_cast<std::size_t>(3 * (leaf.rows + sink.rows));
  if (tensors.size() != expected || numbers.dtype != DType::Float64 || numbers.numel != step.rows) {
    throw std::invalid_argument("segment program: expected three tensors for every leaf and sink, a number per step");
  }
  auto next = tensors.begin();
  std::vector<SegmentLeaf> own;
  for (std::int64_t i = 0; i < leaf.rows; ++i, next += 3) {
    own.push_back({static_cast<SegmentBy>(leaf.at(i, 0)), leaf.at(i, 1), leaf.at(i, 2) != 0, table_of<A>(next[0]),
                   table_of<A>(next[1]), table_of<A>(next[2]), leaf.at(i, 3)});
  }
  std::vector<SegmentStep> lines;
  for (std::int64_t i = 0; i < step.rows; ++i) {
    lines.push_back({static_cast<SegmentOp>(step.at(i, 0)), step.at(i, 1),
                     {step.at(i, 2), step.at(i, 3), step.at(i, 4)}, numbers.as<const double>()[i]});
  }
  std::vector<SegmentSink> ends;
  for (std::int64_t i = 0; i < sink.rows; ++i, next += 3) {
    ends.push_back({static_cast<SegmentInto>(sink.at(i, 0)), sink.at(i, 1), sink.at(i, 2), table_of<A>(next[0]),
                    table_of<A>(next[1]), table_of<A>(next[2])});
  }
  return SegmentPlan<A>(heads, width, tile, std::move(own), lines, std::move(ends));
}

// num_src: groups are sources if it is given (0 or more), else destinations.
template <class A>
void run(const Tensor& indptr, const Tensor& indices, std::int64_t num_src, const SegmentPlan<A>& plan) {
  with_id(indices, [&]<class Id>(Tag<Id>) {
    const Csc<Id> csc = csc_of<Id>(indptr, indices);
    constexpr bool wide = std::is_same_v<Id, std::int64_t>;
    if (num_src < 0) return run_segment(plan, SegmentEdges{csc.indptr, csc.indices.data(), wide}, indices.numel);
    const Transposed<Id> by_source = transpose(csc, num_src);
    const std::span<const std::int64_t> groups = by_source.indptr.span();
    run_segment(plan, SegmentEdges{groups, by_source.row.data(), wide, by_source.edge.data(), true}, indices.numel);
  });
}

void bind_run(const Tensor& indptr, const Tensor& indices, std::int64_t num_src, bool in_double, const Tensor& leaves,
              const Tensor& steps, const Tensor& numbers, const Tensor& sinks, const py::list& given,
              std::int64_t heads, std::int64_t width, std::int64_t tile) {
  std::vector<Tensor> tensors;
  for (const py::handle tensor : given) tensors.push_back(tensor.is_none() ? Tensor{} : view_tensor(tensor));
  const py::gil_scoped_release released;
  if (in_double) {
    run(indptr, indices, num_src, plan_of<double>(leaves, steps, numbers, sinks, tensors, heads, width, tile));
  } else {
    run(indptr, indices, num_src, plan_of<float>(leaves, steps, numbers, sinks, tensors, heads, width, tile));
  }
}

py::list step_names() {
  py::list names;
  for (const char* name : segment_step_names) names.append(name);
  return names;
}

}  // namespace

void bind_segment(py::module_& m) {
  m.def("segment", &bind_run);
  m.def("segment_steps", &step_names, "Names of the steps of segment programs, in the order of their numbers.");
}

}  // namespace joestar::bindings
