"""``joestar::spmm_coo``: the same sums of a list of edges, sorted by destination (COO)."""

import torch
from torch import Tensor

from joestar.ops.aggregate import spmm
from joestar.ops.aggregate.spmm_csr import reduced
from joestar.ops.aggregate.values import messages
from joestar.ops.registry import Padding, define


def spmm_coo(src: Tensor, dst: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e with dst[e] = d of weight[e] * x[src[e]]``; ``dst`` is ascending."""
    valid = int((dst < num_dst).sum())
    message = messages(x, weight, src[:valid].to(torch.int64))
    return reduced(message, dst[:valid].to(torch.int64), num_dst, reduce, x.dtype)


def _setup(ctx, inputs, output):
    src, dst, x, weight, num_dst, reduce = inputs
    bounds = torch.arange(num_dst + 1, dtype=dst.dtype, device=dst.device)
    spmm.setup(ctx, (torch.searchsorted(dst, bounds), src, x, weight, reduce), output)


def _backward(ctx, grad):
    """Offsets of the rows, found by bisection, are all that the gradients of ``spmm`` need beyond the edges."""
    return None, None, *spmm.backward(ctx, grad)[2:4], None, None


define(
    "spmm_coo(Tensor src, Tensor dst, Tensor x, Tensor? weight, SymInt num_dst, str reduce) -> Tensor", spmm_coo,
    gradient=(_setup, _backward), padding=Padding.SAFE, cpu="cpu_spmm_forms", cuda="gpu_spmm_forms",
    fake=lambda src, dst, x, weight, num_dst, reduce: x.new_empty((num_dst, *x.shape[1:])),
)  # fmt: skip
