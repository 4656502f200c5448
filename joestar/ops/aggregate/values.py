"""Values of edges as tensors: what the references of aggregations share. 16-bit values accumulate in float32."""

import torch
from torch import Tensor

from joestar.ops.registry import CSC

EXTREMUM = f"({CSC}, Tensor x, Tensor? weight, Tensor y, Tensor grad) -> (Tensor, Tensor)"
"""Arguments and results of gradients of extrema."""


def widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def spread(values: Tensor, target: Tensor) -> Tensor:
    """Appends dimensions to ``values`` until it broadcasts over ``target``."""
    return values.reshape(values.shape + (1,) * (target.dim() - values.dim()))


def messages(x: Tensor, weight: Tensor | None, src: Tensor) -> Tensor:
    message = widen(x)[src]
    return message if weight is None else message * spread(widen(weight)[: src.numel()], message)


def per_weight(product: Tensor, weight: Tensor) -> Tensor:
    """``product`` ``[E, ...]`` summed over the dimensions that a weight ``[E]`` or ``[E, H]`` spans."""
    spanned = list(range(weight.dim(), product.dim()))
    return product.sum(spanned) if spanned else product


def per_degree(grad: Tensor, indptr: Tensor, reduce: str) -> Tensor:
    if reduce != "mean":
        return grad
    return grad / spread((indptr[1:] - indptr[:-1]).clamp(min=1).to(grad.dtype), grad)


def extremum_shares(
    src: Tensor, dst: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients for ``x`` and ``weight`` of a max or min ``y`` over edges, shared evenly among ties."""
    message = messages(x, weight, src).to(y.dtype)
    chosen = (message == y[dst]).to(widen(grad).dtype)
    ties = torch.zeros_like(widen(y)).index_add(0, dst, chosen).clamp(min=1)
    share = chosen * (widen(grad) / ties)[dst]
    through = share if weight is None else share * spread(widen(weight)[: src.numel()], share)
    grad_x = torch.zeros_like(widen(x)).index_add(0, src, through).to(x.dtype)
    if weight is None:
        return grad_x, None
    grad_weight = share.new_zeros(weight.shape)
    grad_weight[: src.numel()] = per_weight(share * widen(x)[src], weight)
    return grad_x, grad_weight.to(weight.dtype)


def fake_shares(indptr, indices, x, weight, y, grad):
    """Shapes of gradients of extrema."""
    return x.new_empty(x.shape), x.new_empty((0,)) if weight is None else weight.new_empty(weight.shape)


def two_tensors(implementation):
    """An extremum has no second gradient without weights; an op must return tensors: an empty one then."""

    def run(indptr, indices, x, weight, y, grad):
        grad_x, grad_weight = implementation(indptr, indices, x, weight, y, grad)
        return grad_x, x.new_empty(0) if grad_weight is None else grad_weight

    return run
