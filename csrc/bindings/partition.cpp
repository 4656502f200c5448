#include "joestar/partition.hpp"

#include <functional>
#include <memory>

#include "bindings.hpp"
#include "joestar/part_facts.hpp"

namespace joestar::bindings {
namespace {

// A GapStream over ids of either width; Python holds the tensors.
class Stream {
 public:
  Stream(const Tensor& indptr, const Tensor& indices, const Tensor& labels, const Tensor& parts_of, std::int32_t parts,
         std::int32_t num_labels, std::int64_t cap, std::int64_t block) {
    with_id(indices, [&]<class Id>(Tag<Id>) {
      auto stream = std::make_shared<GapStream<Id>>(
          csc_of<Id>(indptr, indices),
          labels.present() ? labels.span<const std::int32_t>() : std::span<const std::int32_t>{},
          PartitionOptions{parts, num_labels, cap, block}, parts_of.span<std::int32_t>());
      place_ = [stream](std::int64_t first, std::int64_t last, double strength) {
        return stream->place(first, last, strength);
      };
    });
  }

  std::int64_t place(std::int64_t first, std::int64_t last, double strength) { return place_(first, last, strength); }

 private:
  std::function<std::int64_t(std::int64_t, std::int64_t, double)> place_;
};

void bind_facts(const Tensor& indptr, const Tensor& indices, const Tensor& parts_of, const Tensor& cut,
                const Tensor& halo) {
  with_id(indices, [&]<class Id>(Tag<Id>) {
    part_facts(csc_of<Id>(indptr, indices), parts_of.span<const std::int32_t>(), cut.span<std::int64_t>(),
               halo.span<std::int64_t>());
  });
}

}  // namespace

void bind_partition(py::module_& m) {
  py::class_<Stream>(m, "GapStream")
      .def(py::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int32_t, std::int32_t,
                    std::int64_t, std::int64_t>(),
           ReleaseGil())
      .def("place", &Stream::place, ReleaseGil());
  m.def("part_facts", &bind_facts, ReleaseGil());
}

}  // namespace joestar::bindings
