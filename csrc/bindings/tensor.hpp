#pragma once
// PyTorch tensors as plain views, by duck typing: data_ptr(), numel() and dtype. Nothing here links against PyTorch.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "joestar/float16.hpp"

namespace joestar::bindings {

namespace py = pybind11;

enum class DType : std::uint8_t { None, Int16, Int32, Int64, Float32, Float64, BFloat16, Float16, Other };

// A contiguous CPU tensor, or None. Valid while the call that received it runs.
struct Tensor {
  void* data = nullptr;
  std::int64_t numel = 0;
  DType dtype = DType::None;

  bool present() const { return dtype != DType::None; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  template <class T>
  std::span<T> span() const {
    return {static_cast<T*>(data), static_cast<std::size_t>(numel)};
  }
};

inline DType dtype_from_name(const std::string& name) {
  static const std::pair<const char*, DType> known[] = {
      {"torch.int16", DType::Int16},     {"torch.int32", DType::Int32},     {"torch.int64", DType::Int64},
      {"torch.float32", DType::Float32}, {"torch.float64", DType::Float64}, {"torch.bfloat16", DType::BFloat16},
      {"torch.float16", DType::Float16}};
  for (const auto& [text, dtype] : known) {
    if (name == text) return dtype;
  }
  return DType::Other;
}

// torch's dtypes are singletons that live as long as the process: their addresses identify them.
inline DType dtype_of(py::handle object) {
  static std::vector<std::pair<PyObject*, DType>> seen;
  for (const auto& [known, dtype] : seen) {
    if (known == object.ptr()) return dtype;
  }
  const DType dtype = dtype_from_name(py::str(object));
  object.inc_ref();
  seen.emplace_back(object.ptr(), dtype);
  return dtype;
}

inline py::object call(py::handle object, PyObject* method) {
  PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), method);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

inline Tensor view_tensor(py::handle object) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  static PyObject* const numel = PyUnicode_InternFromString("numel");
  static PyObject* const dtype = PyUnicode_InternFromString("dtype");
  Tensor tensor;
  tensor.data = PyLong_AsVoidPtr(call(object, data_ptr).ptr());
  tensor.numel = PyLong_AsLongLong(call(object, numel).ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  PyObject* type = PyObject_GetAttr(object.ptr(), dtype);
  if (type == nullptr) throw py::error_already_set();
  tensor.dtype = dtype_of(py::reinterpret_steal<py::object>(type));
  return tensor;
}

template <class T>
struct Tag {
  using type = T;
};

// f(Tag<id type>) for the dtype of `ids`.
template <class F>
auto with_id(const Tensor& ids, F&& f) {
  switch (ids.dtype) {
    case DType::Int32:
      return f(Tag<std::int32_t>{});
    case DType::Int64:
      return f(Tag<std::int64_t>{});
    default:
      throw std::invalid_argument("ids: expected dtype int32 or int64");
  }
}

// f(Tag<value type>) for the dtype of `values`.
template <class F>
auto with_value(const Tensor& values, F&& f) {
  switch (values.dtype) {
    case DType::Float32:
      return f(Tag<float>{});
    case DType::Float64:
      return f(Tag<double>{});
    case DType::BFloat16:
      return f(Tag<BFloat16>{});
    case DType::Float16:
      return f(Tag<Float16>{});
    default:
      throw std::invalid_argument("values: expected dtype float32, float64, bfloat16 or float16");
  }
}

}  // namespace joestar::bindings

namespace pybind11::detail {

template <>
struct type_caster<joestar::bindings::Tensor> {
  PYBIND11_TYPE_CASTER(joestar::bindings::Tensor, const_name("torch.Tensor | None"));

  bool load(handle source, bool) {
    if (source.is_none()) {
      value = joestar::bindings::Tensor{};
    } else {
      value = joestar::bindings::view_tensor(source);
    }
    return true;
  }
};

}  // namespace pybind11::detail
