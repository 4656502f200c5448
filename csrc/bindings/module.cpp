#include "bindings.hpp"
#include "joestar/parallel.hpp"

namespace joestar::bindings {
namespace {

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

py::dict build_info() {
  py::dict info;
  info["parallel"] = parallel_backend();
  info["compiler"] = compiler();
  info["cpp_std"] = static_cast<long>(__cplusplus);
  info["threads"] = num_threads();
  return info;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Joestar's C++ kernels over raw CPU buffers.";
  m.def("build_info", &build_info, "Compiler, language standard, parallel backend and number of threads.");
  m.def("num_threads", &num_threads, "Number of threads that kernels use.");
  m.def("set_num_threads", &set_num_threads, py::arg("threads"), "Sets the number of threads; at least 1.");
  bind_sampling(m);
  bind_structure(m);
  bind_spmm(m);
  bind_edges(m);
  bind_sample_aggregate(m);
}

}  // namespace joestar::bindings
