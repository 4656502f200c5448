"""``joestar::spmm_csr``: the same sums of a structure given by source (CSR); nothing is converted (thesis 5.3.3)."""

import torch
from torch import Tensor

from joestar.ops.aggregate.values import EXTREMUM, extremum_shares, fake_shares, messages, spread, two_tensors
from joestar.ops.once import refusing
from joestar.ops.registry import CSC, Padding, define, define_gradient
from joestar.ops.sampling.edge_dst import valid_edges

ops = torch.ops.joestar


def reduced(message: Tensor, dst: Tensor, num_dst: int, reduce: str, dtype: torch.dtype) -> Tensor:
    """``message`` ``[E, ...]`` reduced per destination; 0 where there is none."""
    out = message.new_zeros((num_dst, *message.shape[1:]))
    if reduce in ("max", "min"):
        how = {"max": "amax", "min": "amin"}[reduce]
        index = spread(dst, message).expand_as(message)
        return out.scatter_reduce(0, index, message, how, include_self=False).to(dtype)
    out = out.index_add(0, dst, message)
    if reduce == "mean":
        degree = torch.zeros(num_dst, dtype=torch.int64, device=dst.device).index_add(0, dst, torch.ones_like(dst))
        out = out / spread(degree.clamp(min=1).to(out.dtype), out)
    return out.to(dtype)


def spmm_csr(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, num_dst: int, reduce: str) -> Tensor:
    """``y[indices[e]] = reduce over edges e of weight[e] * x[row of e]``, ``indptr`` over the sources."""
    dst, src = valid_edges(indptr, indices)
    return reduced(messages(x, weight, src), dst, num_dst, reduce, x.dtype)


def spmm_csr_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm_csr`` (max or min), shared evenly among ties."""
    dst, src = valid_edges(indptr, indices)
    return extremum_shares(src, dst, x, weight, y, grad)


def _setup(ctx, inputs, output):
    indptr, indices, x, weight, ctx.num_dst, ctx.reduce = inputs
    extremum = ctx.reduce in ("max", "min")
    needs_x = extremum or (weight is not None and ctx.needs_input_grad[3])
    ctx.save_for_backward(indptr, indices, x if needs_x else None, weight, output if extremum else None)
    ctx.dtype = x.dtype


def _backward(ctx, grad):
    """The transpose of a scatter is a gather over the same offsets: nothing is converted."""
    indptr, indices, x, weight, y = ctx.saved_tensors
    grad = grad.contiguous()
    if y is not None:
        both = ops.spmm_csr_extremum_grad(indptr, indices, x, weight, y, grad)
        grad_x, grad_weight = refusing("joestar::spmm_csr", both, (x, weight, grad))
        return None, None, grad_x, grad_weight if weight is not None else None, None, None
    grad_x = grad_weight = None
    if ctx.reduce == "mean":
        degree = ops.out_degrees(indptr, indices, ctx.num_dst).clamp(min=1)
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.to(wide) / degree.to(wide).reshape((-1,) + (1,) * (grad.dim() - 1))
    if ctx.needs_input_grad[2]:
        grad_x = ops.spmm(indptr, indices, grad, weight, "sum").to(ctx.dtype)
    if ctx.needs_input_grad[3]:
        grad_weight = ops.spmm_grad_weight(indptr, indices, grad, x, weight, "sum")
        grad_weight = refusing("joestar::spmm_csr", grad_weight, (x, grad))
    return None, None, grad_x, grad_weight, None, None


define(
    f"spmm_csr({CSC}, Tensor x, Tensor? weight, SymInt num_dst, str reduce) -> Tensor", spmm_csr,
    gradient=(_setup, _backward), twice=True, padding=Padding.SAFE, cpu="cpu_spmm_forms", cuda="gpu_spmm_forms",
    fake=lambda indptr, indices, x, weight, num_dst, reduce: x.new_empty((num_dst, *x.shape[1:])),
)  # fmt: skip
define_gradient(
    f"spmm_csr_extremum_grad{EXTREMUM}", spmm_csr_extremum_grad, fake=fake_shares, cpu="cpu_spmm_forms",
    cuda="gpu_spmm_forms", adapt=two_tensors,
)  # fmt: skip
