"""Aggregation, edge values and their gradients. 16-bit values accumulate in float32."""

import torch
from torch import Tensor

from joestar.ops.reference.structure import edge_dst, valid_edges


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _like(values: Tensor, target: Tensor) -> Tensor:
    """Appends dimensions to ``values`` until it broadcasts over ``target``."""
    return values.reshape(values.shape + (1,) * (target.dim() - values.dim()))


def _messages(x: Tensor, weight: Tensor | None, src: Tensor) -> Tensor:
    message = _wide(x)[src]
    return message if weight is None else message * _like(_wide(weight)[: src.numel()], message)


def _per_weight(product: Tensor, weight: Tensor) -> Tensor:
    """``product`` ``[E, ...]`` summed over the dimensions that a weight ``[E]`` or ``[E, H]`` spans."""
    spanned = list(range(weight.dim(), product.dim()))
    return product.sum(spanned) if spanned else product


def _per_degree(grad: Tensor, indptr: Tensor, reduce: str) -> Tensor:
    if reduce != "mean":
        return grad
    return grad / _like((indptr[1:] - indptr[:-1]).clamp(min=1).to(grad.dtype), grad)


def spmm(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """``y[d] = reduce over edges e of d of weight[e] * x[indices[e]]``; an empty row gives 0.

    A sum or mean of rows shared by heads, ``x`` ``[N, 1, ...]`` and ``weight`` ``[E, H]``, is ``[num_dst, H, ...]``.
    """
    src, dst = valid_edges(indptr, indices)
    message = _messages(x, weight, src)
    out = message.new_zeros((indptr.numel() - 1, *message.shape[1:]))
    if reduce in ("sum", "mean"):
        out = _per_degree(out.index_add(0, dst, message), indptr, reduce)
    else:
        how = {"max": "amax", "min": "amin"}[reduce]
        out = out.scatter_reduce(0, _like(dst, message).expand_as(message), message, how, include_self=False)
    return out.to(x.dtype)


def spmm_grad_x(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, num_src: int, reduce: str,
    shared: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient of ``spmm`` (sum or mean) for ``x``: the transposed product, summed per source in edge order.

    ``shared``: the heads of ``grad`` ``[num_dst, H, ...]`` read one row; the result is ``[num_src, 1, ...]``.
    """
    src, dst = valid_edges(indptr, indices)
    message = _messages(_per_degree(_wide(grad), indptr, reduce), weight, dst)
    message = message.sum(1, keepdim=True) if shared else message
    out = message.new_zeros((num_src, *message.shape[1:]))
    return out.index_add(0, src, message).to(grad.dtype)


def spmm_grad_weight(
    indptr: Tensor, indices: Tensor, x: Tensor, grad: Tensor, weight_like: Tensor, reduce: str
) -> Tensor:
    """Gradient of ``spmm`` (sum or mean) for the edge weights, in the shape of ``weight_like``."""
    src, dst = valid_edges(indptr, indices)
    product = _wide(x)[src] * _per_degree(_wide(grad), indptr, reduce)[dst]
    out = product.new_zeros(weight_like.shape)
    out[: src.numel()] = _per_weight(product, weight_like)
    return out.to(weight_like.dtype)


def extremum_shares(
    src: Tensor, dst: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients for ``x`` and ``weight`` of a max or min ``y`` over edges, shared evenly among ties."""
    message = _messages(x, weight, src).to(y.dtype)
    chosen = (message == y[dst]).to(_wide(grad).dtype)
    ties = torch.zeros_like(_wide(y)).index_add(0, dst, chosen).clamp(min=1)
    share = chosen * (_wide(grad) / ties)[dst]
    through = share if weight is None else share * _like(_wide(weight)[: src.numel()], share)
    grad_x = torch.zeros_like(_wide(x)).index_add(0, src, through).to(x.dtype)
    if weight is None:
        return grad_x, None
    grad_weight = share.new_zeros(weight.shape)
    grad_weight[: src.numel()] = _per_weight(share * _wide(x)[src], weight)
    return grad_x, grad_weight.to(weight.dtype)


def spmm_extremum_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, y: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``spmm`` (max or min), shared evenly among ties."""
    return extremum_shares(*valid_edges(indptr, indices), x, weight, y, grad)


def sddmm(indptr: Tensor, indices: Tensor, lhs: Tensor | None, rhs: Tensor | None, op: str) -> Tensor:
    """Edge values of ``lhs`` (sources) and ``rhs`` (destinations): add, sub, mul, div, dot, copy_lhs, copy_rhs."""
    src, dst = valid_edges(indptr, indices)
    left = None if lhs is None else lhs[src]
    right = None if rhs is None else rhs[dst]
    if op == "dot":
        value = (_wide(left) * _wide(right)).sum(-1).to(torch.promote_types(left.dtype, right.dtype))
    elif op in ("copy_lhs", "copy_rhs"):
        value = left if op == "copy_lhs" else right
    else:
        value = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[op](left, right)
    out = value.new_zeros((indices.numel(), *value.shape[1:]))
    out[: src.numel()] = value
    return out


def scatter_src(indptr: Tensor, indices: Tensor, e: Tensor, num_src: int) -> Tensor:
    """Sum of edge values per source ``[num_src, ...]``, in edge order."""
    src, _ = valid_edges(indptr, indices)
    value = _wide(e)[: src.numel()]
    return value.new_zeros((num_src, *value.shape[1:])).index_add(0, src, value).to(e.dtype)


def scatter_dst(indptr: Tensor, e: Tensor) -> Tensor:
    """Sum of edge values per destination ``[num_dst, ...]``."""
    dst = edge_dst(indptr, int(indptr[-1]), indptr)
    value = _wide(e)[: dst.numel()]
    return value.new_zeros((indptr.numel() - 1, *value.shape[1:])).index_add(0, dst, value).to(e.dtype)


def edge_softmax(indptr: Tensor, s: Tensor) -> Tensor:
    """Softmax of edge values over the in-edges of each destination, ``[E]`` or ``[E, H]``."""
    dst = edge_dst(indptr, int(indptr[-1]), indptr)
    value = _wide(s)[: dst.numel()]
    rows = (indptr.numel() - 1, *value.shape[1:])
    index = _like(dst, value).expand_as(value)
    top = value.new_full(rows, -torch.inf).scatter_reduce(0, index, value, "amax")
    power = torch.exp(value - top[dst])
    total = value.new_zeros(rows).index_add(0, dst, power)
    out = value.new_zeros(s.shape)
    out[: dst.numel()] = power / total[dst]
    return out.to(s.dtype)


def edge_softmax_grad(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``edge_softmax``: ``out * (grad - sum over the row of out * grad)``."""
    product = _wide(out) * _wide(grad)
    dst = edge_dst(indptr, out.shape[0], indptr)
    result = product - _wide(out) * scatter_dst(indptr, product)[dst]
    valid = torch.arange(out.shape[0], device=out.device) < indptr[-1]
    return torch.where(_like(valid, result), result, 0).to(out.dtype).contiguous()
