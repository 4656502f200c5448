"""Registration of the tensor-level ops (thesis table 5.3) as ``torch.ops.joestar.*``.

One row of ``SCHEMAS`` per op. CPU tensors run its C++ kernel (``kernels/cpu.py``), CUDA tensors its Triton kernel
(``kernels/gpu.py``); where there is none, its PyTorch reference (``ops/reference``) runs. Shapes for tracing are in
``ops/fake.py``, gradients in ``ops/autograd.py``.
"""

import torch

from joestar.kernels import gpu_kernels, native_kernels
from joestar.ops import composite, ranks, reference

# indptr is int64 over rows, indices are sources; key is int64 [3] = (seed, epoch, step).
_CSC = "Tensor indptr, Tensor indices"
_DSTS = "Tensor dsts, Tensor dst_count"
_SCORES = "Tensor s_src, Tensor s_dst, Tensor x"
_DRAWS = "int k, bool replace, Tensor key, int site"
# What nodes hash as, one entry per node of the graph in the dtype of its ids; without, every node hashes as itself.
_HASHED = "Tensor? node_ids=None"

SCHEMAS = {
    "slice_cols": f"({_CSC}, {_DSTS}, SymInt num_edges) -> (Tensor, Tensor, Tensor)",
    "rowwise_sample": f"({_CSC}, Tensor row_ids, {_DRAWS}, SymInt num_edges, {_HASHED}) -> (Tensor, Tensor, Tensor)",
    "sample_cols": f"({_CSC}, {_DSTS}, {_DRAWS}, SymInt num_edges, {_HASHED}) -> (Tensor, Tensor, Tensor)",
    "sample_eids": f"(Tensor indptr, {_DSTS}, {_DRAWS}, SymInt num_edges, {_HASHED}) -> Tensor",
    "weighted_sample": "(Tensor indptr, Tensor weight, Tensor row_ids, Tensor row_count, bool sliced, "
    f"{_DRAWS}, SymInt num_edges, {_HASHED}) -> (Tensor, Tensor, Tensor)",
    "collective_sample": "(Tensor sub_indptr, Tensor sub_indices, Tensor? weight, int num_nodes, int k, Tensor key,"
    f" int site, {_HASHED}) -> (Tensor, Tensor)",
    "slice_rows": "(Tensor sub_indptr, Tensor sub_indices, Tensor row_ids, Tensor srcs, Tensor src_count,"
    " SymInt num_edges) -> (Tensor, Tensor, Tensor)",
    "compact": f"({_DSTS}, Tensor sub_indptr, Tensor sub_indices, int num_nodes, SymInt num_src)"
    " -> (Tensor, Tensor, Tensor)",
    "spmm": f"({_CSC}, Tensor x, Tensor? weight, str reduce) -> Tensor",
    "spmm_grad_x": f"({_CSC}, Tensor grad, Tensor? weight, SymInt num_src, str reduce, bool shared=False) -> Tensor",
    "spmm_grad_weight": f"({_CSC}, Tensor x, Tensor grad, Tensor weight_like, str reduce) -> Tensor",
    "spmm_extremum_grad": f"({_CSC}, Tensor x, Tensor? weight, Tensor y, Tensor grad) -> (Tensor, Tensor)",
    "spmm_csr": f"({_CSC}, Tensor x, Tensor? weight, SymInt num_dst, str reduce) -> Tensor",
    "spmm_csr_extremum_grad": f"({_CSC}, Tensor x, Tensor? weight, Tensor y, Tensor grad) -> (Tensor, Tensor)",
    "spmm_coo": "(Tensor src, Tensor dst, Tensor x, Tensor? weight, SymInt num_dst, str reduce) -> Tensor",
    "sddmm": f"({_CSC}, Tensor? lhs, Tensor? rhs, str op) -> Tensor",
    "scatter_src": f"({_CSC}, Tensor e, SymInt num_src) -> Tensor",
    "scatter_dst": "(Tensor indptr, Tensor e) -> Tensor",
    "edge_softmax": "(Tensor indptr, Tensor s) -> Tensor",
    "edge_softmax_grad": "(Tensor indptr, Tensor out, Tensor grad) -> Tensor",
    "attend": f"({_CSC}, {_SCORES}, float slope, Tensor? bits, float scale) -> (Tensor, Tensor, Tensor)",
    "attend_grad": f"({_CSC}, {_SCORES}, Tensor top, Tensor total, Tensor grad, float slope, Tensor? bits,"
    " float scale, bool needs_x) -> (Tensor, Tensor, Tensor)",
    "edge_map": f"({_CSC}, Tensor[] leaves, str program, str reduce) -> Tensor",
    "edge_map_grad": f"({_CSC}, Tensor[] leaves, str program, str reduce, Tensor grad, bool[] wanted) -> Tensor[]",
    "edge_dst": "(Tensor indptr, SymInt num_edges, Tensor like) -> Tensor",
    "sample_aggregate_self": f"({_CSC}, {_DSTS}, {_DRAWS}, Tensor x, str reduce, {_HASHED})"
    " -> (Tensor, Tensor, Tensor)",
    "sample_aggregate_cat": f"({_CSC}, {_DSTS}, {_DRAWS}, Tensor x, str reduce, bool ones=True, {_HASHED})"
    " -> (Tensor, Tensor)",
    "aggregate_cat": f"({_CSC}, Tensor x, Tensor? bits, float scale, str reduce) -> Tensor",
    "aggregate_cat_grad": f"({_CSC}, Tensor grad, Tensor x, Tensor? bits, float scale, str reduce) -> Tensor",
    "aggregate_cat_kept": f"({_CSC}, Tensor x, Tensor bits, float scale, str reduce, Tensor? bias=None)"
    " -> (Tensor, Tensor)",
    "aggregate_cat_kept_grad": f"({_CSC}, Tensor grad, Tensor kept, float scale, str reduce, bool biased=False)"
    " -> (Tensor, Tensor)",
    "aggregate_rows": f"({_CSC}, Tensor x, Tensor? weight, Tensor? own, Tensor? bits, float scale, str reduce)"
    " -> Tensor",
    "aggregate_rows_grad": f"({_CSC}, Tensor grad, Tensor x, Tensor? weight, Tensor? own, Tensor? bits, float scale,"
    " str reduce) -> Tensor",
    "aggregate_rows_kept": f"({_CSC}, Tensor x, Tensor? weight, Tensor? own, Tensor bits, float scale, str reduce,"
    " Tensor? bias=None) -> (Tensor, Tensor)",
    "aggregate_rows_kept_grad": f"({_CSC}, Tensor grad, Tensor? weight, Tensor? own, Tensor kept, float scale,"
    " str reduce, bool biased=False) -> (Tensor, Tensor)",
    "sample_aggregate_own": f"({_CSC}, {_DSTS}, {_DRAWS}, Tensor x, Tensor own, str reduce, {_HASHED})"
    " -> (Tensor, Tensor)",
    "join_columns": "(Tensor[] parts, int width) -> Tensor",
    "split_columns": "(Tensor joined, int[] widths) -> Tensor[]",
    "join_columns_all": "(Tensor[] parts, int[] counts, int[] widths) -> Tensor[]",
    "split_columns_all": "(Tensor[] joined, int[] counts, int[] widths) -> Tensor[]",
    "add_bias": "(Tensor x, Tensor bias) -> Tensor",
    "bias_relu": "(Tensor x, Tensor? bias, Tensor? bits, float scale) -> (Tensor, Tensor)",
    "bias_relu_grad": "(Tensor grad, Tensor kept, float scale, bool biased) -> (Tensor, Tensor)",
    "column_sums": "(Tensor x) -> Tensor",
    "dropout_apply": "(Tensor x, Tensor bits, float p, bool relu) -> Tensor",
    "relu_dropout_grad": "(Tensor grad, Tensor y, float p) -> Tensor",
    "dropout_bits": "(Tensor ids, Tensor key, int site, float p, SymInt columns) -> Tensor",
    "edge_dropout_bits": "(Tensor indptr, SymInt num_edges, Tensor dsts, Tensor key, int site, float p, SymInt columns)"
    " -> Tensor",
    "add_self_loops": f"({_CSC}, Tensor dst_count) -> (Tensor, Tensor)",
    "block_self_loops": f"({_CSC}, Tensor sources, {_DSTS}, SymInt num_src) -> (Tensor, Tensor, Tensor)",
    "sampled_self_loops": f"({_CSC}, {_DSTS}) -> (Tensor, Tensor)",
    "out_degrees": f"({_CSC}, SymInt num_src) -> Tensor",
    "sample_aggregate": f"({_CSC}, {_DSTS}, {_DRAWS}, Tensor x, str reduce, {_HASHED}) -> (Tensor, Tensor)",
    "overflow": "(Tensor[] counts, int[] bounds, Tensor flag) -> (Tensor, Tensor)",
    "take_batch": "(Tensor order, Tensor run, Tensor key, int size) -> (Tensor, Tensor)",
    "finish_step": "(Tensor(a!) key, Tensor(b!) flag, Tensor(c!) losses, Tensor run, Tensor loss, Tensor ok) -> ()",
}

KEEPS_TABLES = frozenset({"compact", "collective_sample"})
"""Ops that write a table of the device which outlives the call: calls must be ordered, on one stream or by events.

Whoever reorders ops asks ``keeps_tables``. A kernel that comes to use such a table declares it here
(``tests/ops/test_device_tables.py`` finds it otherwise).
"""

DISSOLVED = {
    "cpu": (
        "add_bias",
        "bias_relu",
        "bias_relu_grad",
        "column_sums",
        "join_columns",
        "split_columns",
        "join_columns_all",
        "split_columns_all",
        "overflow",
    ),
    "cuda": ("add_bias", "join_columns", "dropout_apply", "relu_dropout_grad"),
}
"""Ops that Inductor compiles from their references, fused into what surrounds them."""

LIBRARY = torch.library.Library("joestar", "FRAGMENT")


def _two_tensors(kernel):
    """An extremum has no second gradient without weights; an op must return tensors: an empty one then."""

    def run(indptr, indices, x, weight, y, grad):
        grad_x, grad_weight = kernel(indptr, indices, x, weight, y, grad)
        return grad_x, x.new_empty(0) if grad_weight is None else grad_weight

    return run


def _implementation(name: str, module):
    kernel = getattr(module, name, None)
    return _two_tensors(kernel) if kernel is not None and name.endswith("extremum_grad") else kernel


def keeps_tables(target) -> bool:
    """Whether calls of an op (``torch.ops.joestar.compact.default``) share tables of the device, or wait for ranks."""
    namespace, _, name = target._schema.name.partition("::")
    return namespace == "joestar" and (name in KEEPS_TABLES or name in ranks.SCHEMAS)


def decompositions(device: torch.device) -> dict:
    """What to replace by its reference before Inductor compiles for this device."""
    names = DISSOLVED[device.type]
    return {getattr(torch.ops.joestar, name).default: getattr(reference, name) for name in names}


def _register() -> None:
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        slow = _implementation(name, reference)
        LIBRARY.impl(name, _implementation(name, native_kernels()) or slow, "CPU")
        LIBRARY.impl(name, _implementation(name, gpu_kernels()) or slow, "CUDA")


_register()
composite.register(LIBRARY)
ranks.register(LIBRARY)

from joestar.ops import autograd, fake  # noqa: E402, F401  (they attach to the ops defined above)
