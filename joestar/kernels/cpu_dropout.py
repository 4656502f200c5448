"""Dropout masks as bits on the CPU, the same as those of ``joestar.ops.reference``, bit for bit."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, check_values, require
from joestar.kernels.dropout import DROPOUT_SITE, keep_numerator, positive_bits
from joestar.kernels.layout import wide_dtype


def _words(columns: int) -> int:
    return (columns + 31) // 32


def dropout_bits(ids: Tensor, key: Tensor, site: int, p: float, columns: int) -> Tensor:
    """Mask of rows with these ids: int32 ``[n, ceil(columns / 32)]``, bit ``c // W`` of word ``c % W`` set = kept."""
    ids = check_ids(ids, "ids")
    out = torch.empty(ids.numel(), _words(columns), dtype=torch.int32, device="cpu")
    _native.dropout_bits(ids, key.contiguous(), site + DROPOUT_SITE, keep_numerator(p), out.shape[1], out)
    return out


def edge_dropout_bits(
    indptr: Tensor, num_edges: int, dsts: Tensor, key: Tensor, site: int, p: float, columns: int
) -> Tensor:
    """Mask of edge values: int32 ``[num_edges, ceil(columns / 32)]``; an edge is (id of its destination, its rank).

    ``dsts`` ``[num_dst]`` are the ids of the rows of ``indptr``. Entries past the last edge count as edges of row 0.
    """
    indptr, dsts = check_offsets(indptr), check_ids(dsts, "dsts")
    require(indptr.numel() == dsts.numel() + 1, f"one id per row, {indptr.numel() - 1}", f"{dsts.numel()} ids")
    out = torch.empty(num_edges, _words(columns), dtype=torch.int32, device="cpu")
    key, q = key.contiguous(), keep_numerator(p)
    _native.edge_dropout_bits(indptr, num_edges, dsts, key, site + DROPOUT_SITE, q, out.shape[1], out)
    return out


def dropout_apply(x: Tensor, bits: Tensor, p: float, relu: bool) -> Tensor:
    """``x`` ``[n, ...]`` where its bit is set (and it is positive, with ``relu``), over ``1 - p``; else 0."""
    return gated_dropout(x, bits, x if relu else None, 1.0 / (1.0 - p))


def gated_dropout(x: Tensor, bits: Tensor, gate: Tensor | None, scale: float) -> Tensor:
    """``x * scale`` where its bit is set (and ``gate`` is positive); else 0."""
    x, bits = check_values(x, "x"), bits.contiguous()
    gate = None if gate is None else check_values(gate.to(x.dtype), "gate")
    columns = math.prod(x.shape[1:])
    require(bits.shape == (x.shape[0], _words(columns)), f"bits [{x.shape[0]}, {_words(columns)}]", f"{bits.shape}")
    y = x.new_empty(x.shape)
    _native.dropout_apply(x, bits, gate, x.shape[0], columns, scale, y)
    return y


def relu_dropout_grad(grad: Tensor, y: Tensor, p: float) -> Tensor:
    """Gradient of ``dropout_apply`` with ReLU, whose result was ``y``: ``grad / (1 - p)`` where ``y > 0``, else 0."""
    grad, y = check_values(grad, "grad"), check_values(y.to(grad.dtype), "y")
    require(grad.shape == y.shape, f"a gradient of shape {list(y.shape)}", f"{list(grad.shape)}")
    out = grad.new_empty(grad.shape)
    _native.relu_dropout_grad(grad, y, grad.numel(), 1.0 / (1.0 - p), out)
    return out


def bias_relu(
    x: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ReLU of ``x`` plus ``bias``, dropout, and the bits of what gradients reach; see ``joestar.ops.reference``."""
    x, width = check_values(x, "x"), x.shape[1]
    if bias is not None:
        right = bias.shape == (width,) and bias.dtype == x.dtype
        require(right, f"a bias {x.dtype} [{width}]", f"{bias.dtype} {list(bias.shape)}")
    if addend is not None:
        right = addend.shape == x.shape and addend.dtype == x.dtype
        require(right, f"an addend {x.dtype} {list(x.shape)}", f"{addend.dtype} {list(addend.shape)}")
    wide = x if addend is None else x.to(wide_dtype(x.dtype)) + addend
    y = torch.relu(wide if bias is None else wide + bias).to(x.dtype)
    every = torch.full((x.shape[0], _words(width)), -1, dtype=torch.int32, device="cpu")
    kept = positive_bits(y, every if bits is None else bits)
    return y if bits is None else gated_dropout(y, bits, None, scale), kept


def bias_relu_grad(
    grad: Tensor, kept: Tensor, scale: float, biased: bool, more: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias_relu`` for ``x`` and, if ``biased``, the bias; see ``joestar.ops.reference``."""
    if more:
        grad = grad.clone()
    for part in more or ():
        right = part.shape[0] <= grad.shape[0] and part.shape[1:] == grad.shape[1:] and part.dtype == grad.dtype
        require(right, f"first rows of {grad.dtype} {list(grad.shape)}", f"{part.dtype} {list(part.shape)}")
        grad[: part.shape[0]].add_(part)
    rows = gated_dropout(grad, kept, None, scale)
    return rows, rows.sum(0) if biased else rows.new_empty(0)
