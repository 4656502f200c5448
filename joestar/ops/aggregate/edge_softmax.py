"""``joestar::edge_softmax``: softmax over the in-edges of every destination, and its gradient."""

import torch
from torch import Tensor

from joestar.ops.aggregate.scatter import scatter_dst
from joestar.ops.aggregate.values import spread, widen
from joestar.ops.registry import Padding, define, define_gradient
from joestar.ops.sampling.edge_dst import edge_dst

ops = torch.ops.joestar


def edge_softmax(indptr: Tensor, s: Tensor) -> Tensor:
    """Softmax of edge values over the in-edges of each destination, ``[E]`` or ``[E, H]``."""
    dst = edge_dst(indptr, int(indptr[-1]), indptr)
    value = widen(s)[: dst.numel()]
    rows = (indptr.numel() - 1, *value.shape[1:])
    index = spread(dst, value).expand_as(value)
    top = value.new_full(rows, -torch.inf).scatter_reduce(0, index, value, "amax")
    power = torch.exp(value - top[dst])
    total = value.new_zeros(rows).index_add(0, dst, power)
    out = value.new_zeros(s.shape)
    out[: dst.numel()] = power / total[dst]
    return out.to(s.dtype)


def edge_softmax_grad(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``edge_softmax``: ``out * (grad - sum over the row of out * grad)``."""
    product = widen(out) * widen(grad)
    dst = edge_dst(indptr, out.shape[0], indptr)
    result = product - widen(out) * scatter_dst(indptr, product)[dst]
    valid = torch.arange(out.shape[0], device=out.device) < indptr[-1]
    return torch.where(spread(valid, result), result, 0).to(out.dtype).contiguous()


def _setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx, grad):
    indptr, out = ctx.saved_tensors
    return None, ops.edge_softmax_grad(indptr, out, grad.contiguous())


define(
    "edge_softmax(Tensor indptr, Tensor s) -> Tensor", edge_softmax, fake=lambda indptr, s: s.new_empty(s.shape),
    gradient=(_setup, _backward), padding=Padding.SAFE, cpu="cpu_edges", cuda="gpu_edges",
)  # fmt: skip
define_gradient(
    "edge_softmax_grad(Tensor indptr, Tensor out, Tensor grad) -> Tensor", edge_softmax_grad, cpu="cpu_edges",
    cuda="gpu_edges", fake=lambda indptr, out, grad: out.new_empty(out.shape),
)  # fmt: skip
