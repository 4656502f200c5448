#include <pybind11/stl.h>

#include "bindings.hpp"
#include "joestar/hidden_rows.hpp"
#include "joestar/marked_rows.hpp"
#include "joestar/place.hpp"
#include "joestar/rows.hpp"
#include "joestar/slots.hpp"

namespace joestar::bindings {
namespace {

RowTable table_of(const Tensor& tensor, std::int64_t rows, std::int64_t bytes) {
  return {static_cast<char*>(tensor.data), rows, bytes};
}

// Tables hold `*_rows` rows of `bytes` bytes.
void bind_gather_rows(const Tensor& table, std::int64_t table_rows, const Tensor& ids, const Tensor& out,
                      std::int64_t bytes) {
  with_id(ids, [&]<class Id>(Tag<Id>) {
    gather_rows(table_of(table, table_rows, bytes), ids.span<const Id>(), table_of(out, ids.numel, bytes));
  });
}

void bind_fill_rows(const Tensor& table, std::int64_t table_rows, const Tensor& ids, const Tensor& slots,
                    const Tensor& out, std::int64_t out_rows, std::int64_t bytes) {
  with_id(ids, [&]<class Id>(Tag<Id>) {
    with_id(slots, [&]<class Slot>(Tag<Slot>) {
      fill_rows(table_of(table, table_rows, bytes), ids.span<const Id>(), slots.span<const Slot>(),
                table_of(out, out_rows, bytes));
    });
  });
}

void bind_gather_cached(const Tensor& table, const Tensor& cache, std::int64_t cache_rows, const Tensor& slot_of,
                        const Tensor& ids, const Tensor& out, std::int64_t bytes) {
  with_id(ids, [&]<class Id>(Tag<Id>) {
    gather_cached(table_of(table, slot_of.numel, bytes), table_of(cache, cache_rows, bytes),
                  slot_of.span<const std::int32_t>(), ids.span<const Id>(), table_of(out, ids.numel, bytes));
  });
}

// MarkedRows of either id type. Tables of layers are needed while it is made alone.
class AnyMarked {
 public:
  virtual ~AnyMarked() = default;
  virtual std::int64_t count() const = 0;
  virtual std::vector<std::int64_t> counts() const = 0;
  virtual void write(const Tensor& values, const Tensor& out) const = 0;
  virtual void write_layer(std::size_t layer, const Tensor& given, const Tensor& flags, const Tensor& ids,
                           const Tensor& places) const = 0;
};

template <class Id>
class Marked : public AnyMarked {
 public:
  explicit Marked(MarkedRows<Id> rows) : rows_(std::move(rows)) {}
  std::int64_t count() const override { return rows_.count(); }
  std::vector<std::int64_t> counts() const override { return rows_.counts(); }
  void write(const Tensor& values, const Tensor& out) const override {
    rows_.write(values.span<const std::int32_t>(), out.as<std::int32_t>());
  }
  void write_layer(std::size_t layer, const Tensor& given, const Tensor& flags, const Tensor& ids,
                   const Tensor& places) const override {
    rows_.write_layer(layer, given.span<const Id>(), flags.as<std::uint8_t>(), ids.as<Id>(),
                      places.as<std::int32_t>());
  }

 private:
  MarkedRows<Id> rows_;
};

Places places_of(const Tensor& table) {
  if (!table.present()) return {};
  if (table.dtype == DType::Int16) return {nullptr, table.as<const std::int16_t>(), table.numel};
  return {table.as<const std::int32_t>(), nullptr, table.numel};
}

std::unique_ptr<AnyMarked> bind_marked_rows(const Tensor& ids, const Tensor& marks, const std::vector<Tensor>& layers,
                                            bool placed) {
  std::vector<Places> places;
  for (const Tensor& table : layers) places.push_back(places_of(table));
  return with_id(ids, [&]<class Id>(Tag<Id>) -> std::unique_ptr<AnyMarked> {
    return std::make_unique<Marked<Id>>(
        MarkedRows<Id>(ids.span<const Id>(), marks.span<const std::uint8_t>(), places, placed));
  });
}

// (missing, too old, sum of ages, largest age)
std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> bind_pull_hidden(
    const Tensor& table, const Tensor& stamps, const Tensor& rows, const Tensor& known, std::int32_t now,
    std::int32_t max_age, const Tensor& out, const Tensor& usable, const Tensor& age, std::int64_t bytes) {
  HiddenCounts counts;
  with_id(rows, [&]<class Id>(Tag<Id>) {
    counts = pull_hidden(table_of(table, stamps.numel, bytes), stamps.span<const std::int32_t>(),
                         rows.span<const Id>(), known.span<const std::uint8_t>(), now, max_age,
                         table_of(out, rows.numel, bytes), usable.span<std::uint8_t>(), age.span<std::int32_t>());
  });
  return {counts.missing, counts.too_old, counts.ages, counts.oldest};
}

// How many rows were stored. `old` and `old_stamps` have no entries where what was there is not kept.
std::int64_t bind_push_hidden(const Tensor& table, const Tensor& stamps, const Tensor& rows, const Tensor& stored,
                              std::int32_t now, const Tensor& values, const Tensor& old, const Tensor& old_stamps,
                              std::int64_t bytes, const Tensor& done) {
  std::optional<Replaced> replaced;
  if (done.numel > 0) replaced = Replaced{table_of(old, rows.numel, bytes), old_stamps.span<std::int32_t>()};
  std::int64_t count = 0;
  with_id(rows, [&]<class Id>(Tag<Id>) {
    count = push_hidden(table_of(table, stamps.numel, bytes), stamps.span<std::int32_t>(), rows.span<const Id>(),
                        stored.span<const std::uint8_t>(), now, table_of(values, rows.numel, bytes), replaced);
  });
  if (replaced) done.span<std::int64_t>()[0] = 1;  // nothing that interrupts Python comes between
  return count;
}

std::int64_t bind_row_twice(const Tensor& rows, const Tensor& stored, const Tensor& place) {
  std::int64_t found = -1;
  with_id(rows, [&]<class Id>(Tag<Id>) {
    found = row_twice(rows.span<const Id>(), stored.span<const std::uint8_t>(), place.span<std::int32_t>());
  });
  return found;
}

void bind_place_structure(const Tensor& indptr, const Tensor& indices, const Tensor& slots, const Tensor& table,
                          const Tensor& out_indptr, const Tensor& out_indices) {
  with_id(indices, [&]<class Local>(Tag<Local>) {
    with_id(slots, [&]<class Slot>(Tag<Slot>) {
      with_id(out_indices, [&]<class Id>(Tag<Id>) {
        place_structure(csc_of<Local>(indptr, indices), slots.span<const Slot>(), table.span<const Slot>(),
                        out_indptr.span<std::int64_t>(), out_indices.span<Id>());
      });
    });
  });
}

void bind_add_row_values(const Tensor& indptr, const Tensor& indices, const Tensor& value, const Tensor& out) {
  with_id(indices, [&]<class Id>(Tag<Id>) {
    add_row_values(csc_of<Id>(indptr, indices), value.span<const std::int64_t>(), out.span<std::int64_t>());
  });
}

// (cold nodes, nodes to load, where to go on), or (.., .., -1) where the pool has no room.
std::tuple<std::int64_t, std::int64_t, std::int64_t> bind_take_slots(
    const Tensor& ids, const Tensor& slot_of, std::int32_t first, const Tensor& owner, const Tensor& since,
    const Tensor& keep, const Tensor& used, bool reuse, std::int64_t hand, std::int32_t turn, const Tensor& slots,
    const Tensor& fresh, const Tensor& fresh_slots) {
  SlotCounts counts;
  with_id(ids, [&]<class Id>(Tag<Id>) {
    const SlotPool<Id> pool{slot_of.span<std::int32_t>(), first, owner.span<Id>(), since.span<std::int32_t>(),
                            keep.span<const std::uint8_t>(), used.span<std::uint8_t>(), reuse};
    counts = take_slots<Id>(ids.span<const Id>(), pool, hand, turn, slots.span<std::int32_t>(), fresh.span<Id>(),
                            fresh_slots.span<std::int32_t>());
  });
  return {counts.cold, counts.fresh, counts.fits ? counts.hand : -1};
}

}  // namespace

void bind_store(py::module_& m) {
  m.def("gather_rows", &bind_gather_rows, ReleaseGil());
  m.def("fill_rows", &bind_fill_rows, ReleaseGil());
  m.def("gather_cached", &bind_gather_cached, ReleaseGil());
  py::class_<AnyMarked>(m, "MarkedRows")
      .def_property_readonly("count", &AnyMarked::count)
      .def_property_readonly("counts", &AnyMarked::counts)
      .def("write", &AnyMarked::write, ReleaseGil())
      .def("write_layer", &AnyMarked::write_layer, ReleaseGil());
  m.def("marked_rows", &bind_marked_rows, ReleaseGil());
  m.def("pull_hidden", &bind_pull_hidden, ReleaseGil());
  m.def("push_hidden", &bind_push_hidden, ReleaseGil());
  m.def("row_twice", &bind_row_twice, ReleaseGil());
  m.def("place_structure", &bind_place_structure, ReleaseGil());
  m.def("take_slots", &bind_take_slots, ReleaseGil());
  m.def("add_row_values", &bind_add_row_values, ReleaseGil());
}

}  // namespace joestar::bindings
