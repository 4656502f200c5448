#include "joestar/multi.hpp"

#include <pybind11/stl.h>

#include <vector>

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

// results: sum, mean, max, min, sum and mean of squares; ties: of max and min. None: not asked for.
void bind_forward(const Tensor& indptr, const Tensor& indices, const Tensor& x, std::int64_t width,
                  const std::vector<Tensor>& results, const std::vector<Tensor>& ties) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    const Csc<Id> csc = csc_of<Id>(indptr, indices);
    const Messages<T, const Id*> m{.indptr = csc.indptr, .ids = csc.indices.data(), .x = x.as<const T>(), .width = width};
    const auto out = [&](std::size_t i) { return results.at(i).as<T>(); };
    multi_aggregate(m, MultiResults<T>{out(0), out(1), out(2), out(3), out(4), out(5), ties.at(0).as<std::int32_t>(),
                                       ties.at(1).as<std::int32_t>()});
  });
}

void bind_grad(const Tensor& indptr, const Tensor& indices, const Tensor& x, std::int64_t width, std::int64_t num_src,
               const Tensor& plain, const Tensor& square, const std::vector<Tensor>& extreme,
               const std::vector<Tensor>& share, const Tensor& grad_x) {
  with_types(indices, x, [&]<class Id, class T>(Tag<Id>, Tag<T>) {
    using A = const Accumulator<T>;
    const MultiGrad<T> grad{plain.as<A>(), square.as<A>(), {extreme.at(0).as<const T>(), extreme.at(1).as<const T>()},
                            {share.at(0).as<A>(), share.at(1).as<A>()}};
    multi_aggregate_grad(csc_of<Id>(indptr, indices), num_src, grad, x.as<const T>(), width, grad_x.as<T>());
  });
}

}  // namespace

void bind_multi(py::module_& m) {
  m.def("multi_aggregate", &bind_forward, ReleaseGil());
  m.def("multi_aggregate_grad", &bind_grad, ReleaseGil());
}

}  // namespace joestar::bindings
