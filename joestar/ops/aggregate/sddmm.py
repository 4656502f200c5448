"""``joestar::sddmm``: values of edges from rows of their ends."""

import torch
from torch import Tensor

from joestar.ops.aggregate.values import widen
from joestar.ops.registry import CSC, Padding, define
from joestar.ops.sampling.edge_dst import valid_edges

ops = torch.ops.joestar


def sddmm(indptr: Tensor, indices: Tensor, lhs: Tensor | None, rhs: Tensor | None, op: str) -> Tensor:
    """Edge values of ``lhs`` (sources) and ``rhs`` (destinations): add, sub, mul, div, dot, copy_lhs, copy_rhs."""
    src, dst = valid_edges(indptr, indices)
    left = None if lhs is None else lhs[src]
    right = None if rhs is None else rhs[dst]
    if op == "dot":
        value = (widen(left) * widen(right)).sum(-1).to(torch.promote_types(left.dtype, right.dtype))
    elif op in ("copy_lhs", "copy_rhs"):
        value = left if op == "copy_lhs" else right
    else:
        value = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[op](left, right)
    out = value.new_zeros((indices.numel(), *value.shape[1:]))
    out[: src.numel()] = value
    return out


def _fake(indptr, indices, lhs, rhs, op):
    value = rhs if lhs is None else lhs
    dtype = value.dtype if lhs is None or rhs is None else torch.promote_types(lhs.dtype, rhs.dtype)
    shape = value.shape[1:-1] if op == "dot" else value.shape[1:]
    return value.new_empty((indices.shape[0], *shape), dtype=dtype)


def _setup(ctx, inputs, output):
    indptr, indices, lhs, rhs, ctx.op = inputs
    ctx.num_src = 0 if lhs is None else lhs.shape[0]
    product = ctx.op in ("mul", "div", "dot")
    ctx.save_for_backward(indptr, indices, lhs if product else None, rhs if product else None)


def _backward(ctx, grad):
    indptr, indices, lhs, rhs = ctx.saved_tensors
    grad, op = grad.contiguous(), ctx.op
    if op == "dot":
        for_lhs = ops.spmm_grad_x(indptr, indices, rhs, grad, ctx.num_src, "sum") if ctx.needs_input_grad[2] else None
        for_rhs = ops.spmm(indptr, indices, lhs, grad, "sum") if ctx.needs_input_grad[3] else None
        return None, None, for_lhs, for_rhs, None
    edge_lhs = edge_rhs = grad
    if op == "sub":
        edge_rhs = -grad
    elif op in ("mul", "div"):
        right = ops.sddmm(indptr, indices, None, rhs, "copy_rhs")
        left = ops.sddmm(indptr, indices, lhs, None, "copy_lhs")
        if op == "mul":
            edge_lhs, edge_rhs = grad * right, grad * left
        else:
            edge_lhs, edge_rhs = grad / right, -grad * left / (right * right)
    for_lhs = ops.scatter_src(indptr, indices, edge_lhs, ctx.num_src) if ctx.needs_input_grad[2] else None
    for_rhs = ops.scatter_dst(indptr, edge_rhs) if ctx.needs_input_grad[3] else None
    return None, None, for_lhs, for_rhs, None


define(
    f"sddmm({CSC}, Tensor? lhs, Tensor? rhs, str op) -> Tensor", sddmm, fake=_fake, gradient=(_setup, _backward),
    padding=Padding.SAFE, cpu="cpu_edges", cuda="gpu_edges",
)  # fmt: skip
