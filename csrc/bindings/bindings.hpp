#pragma once
// The parts of the module joestar._native. Callers (joestar/kernels) check shapes, dtypes, devices and contiguity.

#include "views.hpp"

namespace joestar::bindings {

void bind_sampling(py::module_& m);
void bind_structure(py::module_& m);
void bind_spmm(py::module_& m);
void bind_spmm_coo(py::module_& m);
void bind_edges(py::module_& m);
void bind_sample_aggregate(py::module_& m);
void bind_dropout(py::module_& m);
void bind_weighted(py::module_& m);
void bind_spmm_csr(py::module_& m);
void bind_spmm_grad(py::module_& m);
void bind_shared(py::module_& m);
void bind_partition(py::module_& m);
void bind_multi(py::module_& m);
void bind_attend(py::module_& m);
void bind_attend_grad(py::module_& m);
void bind_segment(py::module_& m);
void bind_store(py::module_& m);
void bind_stages(py::module_& m);
void bind_host(py::module_& m);
void bind_stack_chunks(py::module_& m);

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

}  // namespace joestar::bindings
