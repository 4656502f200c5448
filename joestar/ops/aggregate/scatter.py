"""``joestar::scatter_src`` and ``joestar::scatter_dst``: sums of edges' values at one end, in gradients."""

from torch import Tensor

from joestar.ops.aggregate.values import widen
from joestar.ops.registry import CSC, define_structural
from joestar.ops.sampling.edge_dst import edge_dst, valid_edges


def scatter_src(indptr: Tensor, indices: Tensor, e: Tensor, num_src: int) -> Tensor:
    """Sum of edge values per source ``[num_src, ...]``, in edge order."""
    src, _ = valid_edges(indptr, indices)
    value = widen(e)[: src.numel()]
    return value.new_zeros((num_src, *value.shape[1:])).index_add(0, src, value).to(e.dtype)


def scatter_dst(indptr: Tensor, e: Tensor) -> Tensor:
    """Sum of edge values per destination ``[num_dst, ...]``."""
    dst = edge_dst(indptr, int(indptr[-1]), indptr)
    value = widen(e)[: dst.numel()]
    return value.new_zeros((indptr.numel() - 1, *value.shape[1:])).index_add(0, dst, value).to(e.dtype)


define_structural(
    f"scatter_src({CSC}, Tensor e, SymInt num_src) -> Tensor", scatter_src, cpu="cpu_spmm", cuda="gpu_grad",
    fake=lambda indptr, indices, e, num_src: e.new_empty((num_src, *e.shape[1:])),
)  # fmt: skip
define_structural(
    "scatter_dst(Tensor indptr, Tensor e) -> Tensor", scatter_dst, cpu="cpu_spmm", cuda="gpu_spmm",
    fake=lambda indptr, e: e.new_empty((indptr.shape[0] - 1, *e.shape[1:])),
)  # fmt: skip
