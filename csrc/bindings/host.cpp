// What the host does between two steps: waits for words that a device or another process writes, and looks whether
// Python's objects are the same as before.
#include <chrono>
#include <cstdint>

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `count` words, `stride` apart from each other, have become `value` under `mask` within so many microseconds.
bool await_words(std::uintptr_t address, std::int64_t stride, std::int64_t count, std::int64_t mask, std::int64_t value,
                 std::int64_t microseconds) {
  constexpr int kLooks = 64;  // between two looks at the clock
  const auto* words = reinterpret_cast<const std::int64_t*>(address);
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  std::int64_t at = 0;
  while (true) {
    for (int look = 0; look < kLooks; ++look) {
      while (at < count && (__atomic_load_n(words + at * stride, __ATOMIC_ACQUIRE) & mask) == value) ++at;
      if (at == count) return true;
      relax();
    }
    if (std::chrono::steady_clock::now() >= end) return false;
  }
}

// The parts of a snapshot of some mappings, as `joestar.runtime.facts.Entries` keeps them.
struct Known {
  PyObject* sizes;
  PyObject* keys;
  PyObject* values;
  Py_ssize_t at = 0;

  bool begins(Py_ssize_t mapping, Py_ssize_t size) const {
    return PyLong_AsSsize_t(PyList_GET_ITEM(sizes, mapping)) == size && at + size <= PyList_GET_SIZE(keys);
  }
};

// Keys are the same object, or the same string: others may compare in ways of their own (tensors do).
bool same_key(PyObject* known, PyObject* key) {
  return known == key || (PyUnicode_Check(known) && PyUnicode_Check(key) && PyUnicode_Compare(known, key) == 0);
}

// No Python runs in here, so that nothing can change the dictionary meanwhile.
bool same_dict(PyObject* dict, Known& known) {
  Py_ssize_t place = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(dict, &place, &key, &value)) {
    if (!same_key(PyList_GET_ITEM(known.keys, known.at), key)) return false;
    if (value != PyList_GET_ITEM(known.values, known.at)) return false;
    ++known.at;
  }
  return true;
}

bool same_mapping(py::handle mapping, Py_ssize_t size, Known& known) {
  const Py_ssize_t first = known.at;
  Py_ssize_t at = first;
  for (py::handle key : mapping) {
    if (at == first + size || !same_key(PyList_GET_ITEM(known.keys, at++), key.ptr())) return false;
  }
  const bool all_keys = at == first + size;
  at = first;
  for (py::handle value : mapping.attr("values")()) {
    if (at == first + size || value.ptr() != PyList_GET_ITEM(known.values, at++)) return false;
  }
  known.at = at;
  return all_keys && at == first + size;
}

bool same_entries(const py::list& mappings, const py::list& sizes, const py::list& keys, const py::list& values) {
  Known known{sizes.ptr(), keys.ptr(), values.ptr()};
  const Py_ssize_t count = PyList_GET_SIZE(mappings.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::handle mapping = PyList_GET_ITEM(mappings.ptr(), i);
    const Py_ssize_t size = PyObject_Size(mapping.ptr());
    if (size < 0) throw py::error_already_set();
    if (!known.begins(i, size)) return false;
    if (size == 0) continue;
    const bool plain = PyDict_Check(mapping.ptr()) && !PyODict_Check(mapping.ptr());  // which has an order of its own
    if (!(plain ? same_dict(mapping.ptr(), known) : same_mapping(mapping, size, known))) return false;
  }
  return true;
}

// 0 for a tensor without memory of its own.
std::uintptr_t address_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  PyObject* const found = PyObject_CallMethodNoArgs(tensor, name);
  if (found == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw py::error_already_set();  // NotImplementedError is one
    PyErr_Clear();
    return 0;
  }
  const auto address = static_cast<std::uintptr_t>(PyLong_AsUnsignedLongLong(found));
  Py_DECREF(found);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return address;
}

bool same_addresses(const py::list& tensors, const py::list& addresses) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
    const auto known = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(addresses.ptr(), i));
    if (address_of(PyList_GET_ITEM(tensors.ptr(), i)) != known) return false;
  }
  return true;
}

bool same_functions(const py::list& functions, const py::list& codes, const py::list& defaults,
                    const py::list& keywords) {
  const auto is = [](PyObject* now, PyObject* known) { return (now == nullptr ? Py_None : now) == known; };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(functions.ptr()); ++i) {
    PyObject* const function = PyList_GET_ITEM(functions.ptr(), i);
    if (!PyFunction_Check(function)) throw py::type_error("expected functions");
    if (PyFunction_GetCode(function) != PyList_GET_ITEM(codes.ptr(), i)) return false;
    if (!is(PyFunction_GetDefaults(function), PyList_GET_ITEM(defaults.ptr(), i))) return false;
    if (!is(PyFunction_GetKwDefaults(function), PyList_GET_ITEM(keywords.ptr(), i))) return false;
  }
  return true;
}

}  // namespace

void bind_host(py::module_& m) {
  m.def("await_words", &await_words, ReleaseGil());
  m.def("same_entries", &same_entries);
  m.def("same_addresses", &same_addresses);
  m.def("same_functions", &same_functions);
}

}  // namespace joestar::bindings
