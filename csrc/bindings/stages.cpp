#include <pybind11/stl.h>

#include <optional>

#include "bindings.hpp"
#include "joestar/large_batch.hpp"
#include "joestar/part_batch.hpp"
#include "joestar/place.hpp"
#include "joestar/union_hops.hpp"

namespace joestar::bindings {
namespace {

// MacroParts of either id type. write() ends with freeing them, which takes a while and needs no GIL.
class AnyParts {
 public:
  virtual ~AnyParts() = default;
  virtual std::int64_t num_rows() const = 0;
  virtual std::int64_t num_nodes() const = 0;
  virtual std::int64_t num_edges() const = 0;
  virtual void write(const Tensor& given, const Tensor& seeds, const Tensor& ids, const Tensor& indptr,
                     const Tensor& indices, const Tensor& eids) = 0;
};

template <class Id>
class Parts : public AnyParts {
 public:
  explicit Parts(MacroParts<Id> parts) : parts_(std::move(parts)) {}
  std::int64_t num_rows() const override { return parts_.value().num_rows(); }
  std::int64_t num_nodes() const override { return parts_.value().num_nodes(); }
  std::int64_t num_edges() const override { return parts_.value().num_edges(); }
  void write(const Tensor& given, const Tensor& seeds, const Tensor& ids, const Tensor& indptr, const Tensor& indices,
             const Tensor& eids) override {
    parts_.value().write(ids.as<Id>(), indptr.span<std::int64_t>(), indices.as<std::int32_t>(),
                         eids.as<std::int64_t>());
    parts_->numbers().look_up(given.span<const Id>(), seeds.as<std::int32_t>());
    parts_.reset();
  }

 private:
  std::optional<MacroParts<Id>> parts_;
};

// MacroParts of some parts, and which of their nodes are members.
class AnyOfParts : public AnyParts {
 public:
  virtual void mark(const Tensor& ids, std::int64_t rows, const Tensor& inner, const Tensor& halo) const = 0;
};

template <class Id>
class OfParts : public AnyOfParts {
 public:
  OfParts(MacroParts<Id> parts, PartNodes nodes) : parts_(std::move(parts)), nodes_(std::move(nodes)) {}
  std::int64_t num_rows() const override { return parts_.num_rows(); }
  std::int64_t num_nodes() const override { return parts_.num_nodes(); }
  std::int64_t num_edges() const override { return parts_.num_edges(); }
  void write(const Tensor& given, const Tensor& seeds, const Tensor& ids, const Tensor& indptr, const Tensor& indices,
             const Tensor& eids) override {
    parts_.write(given, seeds, ids, indptr, indices, eids);
  }
  // After write(), of its ids and number of rows.
  void mark(const Tensor& ids, std::int64_t rows, const Tensor& inner, const Tensor& halo) const override {
    mark_nodes(nodes_, ids.span<const Id>(), rows, inner.span<std::uint8_t>(), halo.span<std::uint8_t>());
  }

 private:
  Parts<Id> parts_;
  PartNodes nodes_;
};

// PickedParts of either id type.
class AnyPicked {
 public:
  virtual ~AnyPicked() = default;
  virtual std::int64_t num_rows() const = 0;
  virtual std::int64_t num_edges() const = 0;
  virtual void write(const Tensor& rows, const Tensor& indptr, const Tensor& sources, const Tensor& eids) = 0;
};

template <class Id>
class Picked : public AnyPicked {
 public:
  explicit Picked(PickedParts<Id> parts) : parts_(std::move(parts)) {}
  std::int64_t num_rows() const override { return parts_.value().num_rows(); }
  std::int64_t num_edges() const override { return parts_.value().num_edges(); }
  void write(const Tensor& rows, const Tensor& indptr, const Tensor& sources, const Tensor& eids) override {
    parts_.value().write(rows.as<Id>(), indptr.span<std::int64_t>(), sources.as<Id>(), eids.as<std::int64_t>());
    parts_.reset();
  }

 private:
  std::optional<PickedParts<Id>> parts_;
};

// f(task, seeds) with the task of these arguments, of either id type.
template <class F>
auto with_large_batch(const Tensor& indptr, const Tensor& indices, const Tensor& seeds,
                      const std::vector<std::int64_t>& fanouts, bool replace, const Tensor& key,
                      const std::vector<std::int64_t>& sites, const Tensor& weight, const Tensor& table, bool want_eids,
                      F&& f) {
  if (fanouts.empty() || fanouts.size() > 255 || sites.size() != fanouts.size()) {
    throw std::invalid_argument("fanouts: expected 1 to 255 of them, and a site for each");
  }
  if (table.dtype != DType::Int64 || table.numel != kRaceTableSize) {
    throw std::invalid_argument("table: expected the int64 tensor of joestar.kernels.race");
  }
  return with_id(indices, [&]<class Id>(Tag<Id>) {
    std::vector<LargeHop> hops;
    for (std::size_t h = 0; h < fanouts.size(); ++h) {
      hops.push_back({Fanout{fanouts[h], replace}, key_state(sample_key(key, sites[h]))});
    }
    const Csc<Id> graph = csc_of<Id>(indptr, indices);
    if (weight.present() && weight.numel < graph.edges()) {
      throw std::invalid_argument("weight: expected one number per edge, got " + std::to_string(weight.numel));
    }
    const LargeBatchTask<Id> task{graph, hops, weight.span<const float>(),
                                  table.span<const std::int64_t>(), want_eids};
    return f(task, seeds.span<const Id>());
  });
}

std::unique_ptr<AnyParts> bind_large_batch(const Tensor& indptr, const Tensor& indices, const Tensor& seeds,
                                           const std::vector<std::int64_t>& fanouts, bool replace, const Tensor& key,
                                           const std::vector<std::int64_t>& sites, const Tensor& weight,
                                           const Tensor& table, bool want_eids) {
  const auto sample = []<class Id>(const LargeBatchTask<Id>& task,
                                   std::span<const Id> given) -> std::unique_ptr<AnyParts> {
    return std::make_unique<Parts<Id>>(sample_large_batch<Id>(task, given));
  };
  return with_large_batch(indptr, indices, seeds, fanouts, replace, key, sites, weight, table, want_eids, sample);
}

std::unique_ptr<AnyPicked> bind_pick_large_batch(const Tensor& indptr, const Tensor& indices, const Tensor& seeds,
                                                 const std::vector<std::int64_t>& fanouts, bool replace,
                                                 const Tensor& key, const std::vector<std::int64_t>& sites,
                                                 const Tensor& weight, const Tensor& table, bool want_eids) {
  const auto pick = []<class Id>(const LargeBatchTask<Id>& task,
                                 std::span<const Id> given) -> std::unique_ptr<AnyPicked> {
    return std::make_unique<Picked<Id>>(pick_large_batch<Id>(task, given));
  };
  return with_large_batch(indptr, indices, seeds, fanouts, replace, key, sites, weight, table, want_eids, pick);
}

std::unique_ptr<AnyParts> bind_union_hops(const Tensor& indptr, const Tensor& indices, const Tensor& seeds,
                                          const std::vector<std::vector<Tensor>>& blocks) {
  return with_id(indices, [&]<class Id>(Tag<Id>) -> std::unique_ptr<AnyParts> {
    std::vector<UnionHop<Id>> hops;
    for (const std::vector<Tensor>& block : blocks) {
      hops.push_back({block.at(0).span<const std::int64_t>(), block.at(1).span<const Id>(),
                      block.at(2).span<const Id>(), block.at(3).span<const std::int64_t>()});
      if (block[0].numel > block[2].numel + 1) throw std::invalid_argument("srcs: expected one for each row at least");
    }
    return std::make_unique<Parts<Id>>(
        union_hops(UnionTask<Id>{csc_of<Id>(indptr, indices), seeds.span<const Id>(), hops}));
  });
}

std::unique_ptr<AnyOfParts> bind_part_batch(const Tensor& indptr, const Tensor& indices, const Tensor& part_of,
                                            const Tensor& chosen, const Tensor& hubs, const Tensor& seeds,
                                            std::int64_t halo_fanout, std::int64_t halo_site, const Tensor& key,
                                            const std::vector<std::int64_t>& fanouts,
                                            const std::vector<std::int64_t>& sites) {
  if (fanouts.size() > 255 || sites.size() != fanouts.size()) {
    throw std::invalid_argument("fanouts: expected at most 255 of them, and a site for each");
  }
  return with_id(indices, [&]<class Id>(Tag<Id>) -> std::unique_ptr<AnyOfParts> {
    std::vector<LargeHop> hops;
    for (std::size_t h = 0; h < fanouts.size(); ++h) {
      hops.push_back({Fanout{fanouts[h], false}, key_state(sample_key(key, sites[h]))});
    }
    PartNodes nodes = part_nodes<Id>(part_of.span<const std::int32_t>(), chosen.span<const std::int32_t>(),
                                     hubs.span<const Id>());
    const PartTask<Id> task{csc_of<Id>(indptr, indices), nodes, halo_fanout, key_state(sample_key(key, halo_site)),
                            hops};
    MacroParts<Id> parts = part_batch<Id>(task, seeds.span<const Id>());
    return std::make_unique<OfParts<Id>>(std::move(parts), std::move(nodes));
  });
}

void bind_edge_ranks(const Tensor& whole, const Tensor& rows, const Tensor& indptr, const Tensor& eids,
                     const Tensor& out) {
  if (rows.numel + 1 != indptr.numel || eids.numel != out.numel ||
      indptr.as<const std::int64_t>()[rows.numel] != eids.numel) {
    throw std::invalid_argument("edge_ranks: expected offsets of every row, and as many eids and ranks as edges");
  }
  with_id(rows, [&]<class Id>(Tag<Id>) {
    edge_ranks(whole.span<const std::int64_t>(), rows.span<const Id>(), indptr.span<const std::int64_t>(),
               eids.span<const std::int64_t>(), out.span<std::int32_t>());
  });
}

}  // namespace

void bind_stages(py::module_& m) {
  py::class_<AnyParts>(m, "MacroParts")
      .def_property_readonly("num_rows", &AnyParts::num_rows)
      .def_property_readonly("num_nodes", &AnyParts::num_nodes)
      .def_property_readonly("num_edges", &AnyParts::num_edges)
      .def("write", &AnyParts::write, ReleaseGil());
  py::class_<AnyOfParts, AnyParts>(m, "PartsOfGraph").def("mark", &AnyOfParts::mark, ReleaseGil());
  m.def("part_batch", &bind_part_batch, ReleaseGil());
  m.def("large_batch", &bind_large_batch, ReleaseGil());
  py::class_<AnyPicked>(m, "PickedParts")
      .def_property_readonly("num_rows", &AnyPicked::num_rows)
      .def_property_readonly("num_edges", &AnyPicked::num_edges)
      .def("write", &AnyPicked::write, ReleaseGil());
  m.def("pick_large_batch", &bind_pick_large_batch, ReleaseGil());
  m.def("advise_huge", [](const Tensor& bytes_of, std::int64_t itemsize) {
    advise_huge(bytes_of.data, static_cast<std::size_t>(bytes_of.numel * itemsize));
  }, "Asks for huge pages under a tensor that has not been written yet.");
  m.def("collapse_huge", [](const Tensor& tensor, std::int64_t itemsize) {
    return collapse_huge(tensor.data, static_cast<std::size_t>(tensor.numel * itemsize));
  }, ReleaseGil(), "Moves a tensor that has been written into huge pages; whether it was done.");
  m.def("free_scratch", [] { process_instance<PageCache>().clear(); }, ReleaseGil(),
        "Frees the memory that first stages keep for their next macro-batch (2 GiB at most).");
  m.def("union_hops", &bind_union_hops, ReleaseGil());
  m.def("edge_ranks", &bind_edge_ranks, ReleaseGil());
}

}  // namespace joestar::bindings
