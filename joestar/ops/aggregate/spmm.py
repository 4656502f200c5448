"""``joestar::spmm``: sum, mean or extremum over the in-edges of every destination, and its gradients."""

import torch
from torch import Tensor

from joestar.kernels.layout import message_shape, shares_rows
from joestar.ops.aggregate.values import (
    EXTREMUM,
    extremum_shares,
    fake_shares,
    messages,
    per_degree,
    per_weight,
    spread,
    two_tensors,
    widen,
)
from joestar.ops.registry import CSC, Padding, define, define_gradient
from joestar.ops.sampling.edge_dst import valid_edges

ops = torch.ops.joestar


def spmm(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e of d of weight[e] * x[indices[e]]``; an empty row gives 0.

    A sum or mean of rows shared by heads, ``x`` ``[N, 1, ...]`` and ``weight`` ``[E, H]``, is ``[num_dst, H, ...]``.
    """
    src, dst = valid_edges(indptr, indices)
    message = messages(x, weight, src)
    out = message.new_zeros((indptr.numel() - 1, *message.shape[1:]))
    if reduce in ("sum", "mean"):
        out = per_degree(out.index_add(0, dst, message), indptr, reduce)
    else:
        how = {"max": "amax", "min": "amin"}[reduce]
        out = out.scatter_reduce(0, spread(dst, message).expand_as(message), message, how, include_self=False)
    return out.to(x.dtype)


def spmm_grad_x(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, num_src: int, reduce: str,
    shared: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient of ``spmm`` (sum or mean) for ``x``: the transposed product, summed per source in edge order.

    ``shared``: the heads of ``grad`` ``[num_dst, H, ...]`` read one row; the result is ``[num_src, 1, ...]``.
    """
    src, dst = valid_edges(indptr, indices)
    message = messages(per_degree(widen(grad), indptr, reduce), weight, dst)
    message = message.sum(1, keepdim=True) if shared else message
    out = message.new_zeros((num_src, *message.shape[1:]))
    return out.index_add(0, src, message).to(grad.dtype)


def spmm_grad_weight(
    indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, weight_like: Tensor, reduce: str
) -> Tensor:
    """Gradient of ``spmm`` (sum or mean) for the edge weights, in the shape of ``weight_like``."""
    src, dst = valid_edges(indptr, indices)
    product = widen(x)[src] * per_degree(widen(grad), indptr, reduce)[dst]
    out = product.new_zeros(weight_like.shape)
    out[: src.numel()] = per_weight(product, weight_like)
    return out.to(weight_like.dtype)


def spmm_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm`` (max or min), shared evenly among ties."""
    return extremum_shares(*valid_edges(indptr, indices), x, weight, y, grad)


def _grad_x_fake(indptr, indices, grad, weight, num_src, reduce, shared=False):
    return grad.new_empty((num_src, *((1, *grad.shape[2:]) if shared else grad.shape[1:])))


def setup(ctx, inputs, output):
    indptr, indices, x, weight, ctx.reduce = inputs
    extremum = ctx.reduce in ("max", "min")
    ctx.num_src, ctx.shared = x.shape[0], shares_rows(x, weight)
    needs_x = extremum or (weight is not None and ctx.needs_input_grad[3])
    ctx.save_for_backward(indptr, indices, x if needs_x else None, weight, output if extremum else None)


def backward(ctx, grad):
    indptr, indices, x, weight, y = ctx.saved_tensors
    grad = grad.contiguous()
    if ctx.reduce in ("max", "min"):
        grad_x, grad_weight = ops.spmm_extremum_grad(indptr, indices, x, weight, y, grad)
        return None, None, grad_x, grad_weight if weight is not None else None, None
    grad_x = grad_weight = None
    if ctx.needs_input_grad[2]:
        grad_x = ops.spmm_grad_x(indptr, indices, grad, weight, ctx.num_src, ctx.reduce, ctx.shared)
    if ctx.needs_input_grad[3]:
        grad_weight = ops.spmm_grad_weight(indptr, indices, x, grad, weight, ctx.reduce)
    return None, None, grad_x, grad_weight, None


def _autocast(device: str):
    """Extrema of short rows times wider weights: the weights are rounded first, as rows and messages are.

    ``w.to(h.dtype)`` in the user's model does that, and ``simplify`` takes it away.
    """

    def run(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, *rest) -> Tensor:
        with torch.autocast(device, enabled=False):
            extremum = bool(rest) and rest[0] in ("max", "min")
            if extremum and weight is not None and torch.promote_types(x.dtype, weight.dtype) != x.dtype:
                weight = weight.to(x.dtype)
            return torch.ops.joestar.spmm(indptr, indices, x, weight, *rest)

    return run


define(
    f"spmm({CSC}, Tensor x, Tensor? weight, str reduce) -> Tensor", spmm,
    fake=lambda indptr, indices, x, weight, reduce: x.new_empty((indptr.shape[0] - 1, *message_shape(x, weight))),
    gradient=(setup, backward), padding=Padding.SAFE, cpu="cpu_spmm", cuda="gpu_spmm", autocast=_autocast,
)  # fmt: skip
define_gradient(
    f"spmm_grad_x({CSC}, Tensor grad, Tensor? weight, SymInt num_src, str reduce, bool shared=False) -> Tensor",
    spmm_grad_x, fake=_grad_x_fake, cpu="cpu_spmm", cuda="gpu_grad",
)  # fmt: skip
define_gradient(
    f"spmm_grad_weight({CSC}, Tensor x, Tensor grad, Tensor weight_like, str reduce) -> Tensor", spmm_grad_weight,
    cpu="cpu_edges", cuda="gpu_grad",
    fake=lambda indptr, indices, x, grad, weight_like, reduce: weight_like.new_empty(weight_like.shape),
)  # fmt: skip
define_gradient(
    f"spmm_extremum_grad{EXTREMUM}", spmm_extremum_grad, fake=fake_shares, cpu="cpu_spmm", cuda="gpu_grad",
    adapt=two_tensors,
)  # fmt: skip
