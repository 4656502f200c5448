#include <cstdlib>
#include <limits>

#include "bindings.hpp"
#include "joestar/parallel.hpp"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

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

// By default the C library returns large freed blocks to the system, which clears every page again on their next use:
// for results of tens of megabytes that costs more than computing them.
bool keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kLargest = std::numeric_limits<int>::max();
  return mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 && mallopt(M_TRIM_THRESHOLD, kLargest) == 1;
#else
  return false;
#endif
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Joestar's C++ kernels over raw CPU buffers.";
  m.def("build_info", &build_info, "Compiler, language standard, parallel backend and number of threads.");
  m.def("num_threads", &num_threads, "Number of threads that kernels use.");
  m.def("set_num_threads", &set_num_threads, py::arg("threads"), "Sets the number of threads; at least 1.");
  m.def("keep_freed_memory", &keep_freed_memory,
        "Lets this whole process keep freed blocks of up to 1 GiB for reuse; False where the C library cannot.");
  bind_sampling(m);
  bind_structure(m);
  bind_spmm(m);
  bind_spmm_coo(m);
  bind_edges(m);
  bind_sample_aggregate(m);
  bind_dropout(m);
  bind_weighted(m);
  bind_spmm_csr(m);
  bind_spmm_grad(m);
  bind_shared(m);
  bind_partition(m);
  bind_multi(m);
  bind_attend(m);
  bind_attend_grad(m);
  bind_segment(m);
  bind_store(m);
  bind_stages(m);
  bind_host(m);
  bind_stack_chunks(m);
}

}  // namespace joestar::bindings
