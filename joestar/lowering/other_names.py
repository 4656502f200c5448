"""Ops that are others under another name, or made of others: traced as those, which have rules for padded rows."""

import math

import torch
from torch import Tensor

from joestar.torch_private import statically_known_true

aten = torch.ops.aten


def _isclose(a: Tensor, b: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    error = (a - b).abs()
    close = (a == b) | (error.isfinite() & (error <= atol + (rtol * b).abs()))
    return close | (a.isnan() & b.isnan()) if equal_nan else close


def _hstack(tensors: list[Tensor]) -> Tensor:
    tensors = [one if one.dim() else one.view(1) for one in tensors]
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1)


def _column_stack(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(x.numel(), 1) if x.dim() < 2 else x for x in tensors], 1)


def _tensordot(a: Tensor, b: Tensor, dims_self: list[int], dims_other: list[int]) -> Tensor:
    over, under = ([dim % x.dim() for dim in dims] for x, dims in ((a, dims_self), (b, dims_other)))
    for one, other in zip(over, under, strict=True):  # a size of 1 goes with any
        if statically_known_true(a.shape[one] == 1):
            b = b.sum(other, keepdim=True)
        elif statically_known_true(b.shape[other] == 1):
            a = a.sum(one, keepdim=True)
    rows = [dim for dim in range(a.dim()) if dim not in over]
    columns = [dim for dim in range(b.dim()) if dim not in under]
    inner = [a.shape[dim] for dim in over]
    left = a.permute(rows + over).reshape([a.shape[dim] for dim in rows] + [math.prod(inner)])
    right = b.permute(under + columns).reshape([math.prod(inner), math.prod(b.shape[dim] for dim in columns)])
    return torch.matmul(left, right).reshape([a.shape[dim] for dim in rows] + [b.shape[dim] for dim in columns])


OTHER_NAMES = {
    aten.__and__.Tensor: torch.bitwise_and,
    aten.__and__.Scalar: torch.bitwise_and,
    aten.__or__.Tensor: torch.bitwise_or,
    aten.__or__.Scalar: torch.bitwise_or,
    aten.__iand__.Tensor: lambda a, b: a.bitwise_and_(b),
    aten.__iand__.Scalar: lambda a, b: a.bitwise_and_(b),
    aten.__ior__.Tensor: lambda a, b: a.bitwise_or_(b),
    aten.__ior__.Scalar: lambda a, b: a.bitwise_or_(b),
    aten.__ixor__.Tensor: lambda a, b: a.bitwise_xor_(b),
    aten.__ixor__.Scalar: lambda a, b: a.bitwise_xor_(b),
    aten.hstack.default: _hstack,
    aten.column_stack.default: _column_stack,
    aten.fliplr.default: lambda x: torch.flip(x, (1,)),
    aten.isclose.default: _isclose,
    aten.tensordot.default: _tensordot,
}
"""Op -> the function that is traced in its place."""
