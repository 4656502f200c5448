"""Aggregations whose gradient for ``x`` takes a form of choice: ``joestar::spmm_by`` and ``joestar::aggregate_cat_by``.

The same results as ``spmm`` and ``aggregate_cat``; gradients agree to rounding. Forms of the backward pass:

- ``scatter`` (on a CPU only): every destination adds its gradient to the rows of its sources, every task in a tile of
  its own; nothing is converted (thesis 5.3.3).
- ``transposed``: the edges are ordered by source once, then every source gathers; in edge order.
- ``linked`` (on a GPU only): every edge is linked into a list of its source, which gathers them; in any order.

``FORMS`` says which form the plain op takes on a device, first, and what else there is. Gradients are compositions of
other ops: AOTAutograd traces them, and orders the edges of a structure once for all that read it.
"""

import torch
from torch import Tensor

from joestar.ops.aggregate.values import per_degree, widen
from joestar.ops.registry import CSC, Padding, define

ops = torch.ops.joestar

FORMS = {
    "spmm": {"cpu": ("transposed", "scatter"), "cuda": ("linked", "transposed")},
    "aggregate_cat": {"cpu": ("transposed", "scatter"), "cuda": ("linked", "transposed")},
}
"""Per op and device the forms of its backward pass, that of the op itself first."""


def spmm_by(indptr, indices, x, weight, reduce, backward):
    """``spmm``, a sum or mean of rows per head, whose gradient for ``x`` takes the form ``backward``."""
    _check("spmm", x, backward)
    if reduce not in ("sum", "mean"):
        raise ValueError(f"spmm_by: reduce must be sum or mean; got {reduce!r}. Use spmm for others")
    if weight is not None and weight.dim() == 2 and x.dim() > 1 and x.shape[1] != weight.shape[1]:
        shapes = f"x {list(x.shape)} and weights {list(weight.shape)}"
        raise ValueError(f"spmm_by: expected a row per head; got {shapes}. Use spmm for rows that heads share")
    return ops.spmm(indptr, indices, x, weight, reduce)


def aggregate_cat_by(indptr, indices, x, bits, scale, reduce, backward):
    """``aggregate_cat``, whose gradient takes the form ``backward``."""
    _check("aggregate_cat", x, backward)
    return ops.aggregate_cat(indptr, indices, x, bits, scale, reduce)


def _check(name: str, x: Tensor, backward: str) -> None:
    forms = FORMS[name][x.device.type]
    if backward not in forms:
        raise ValueError(
            f"{name}_by: backward on {x.device.type} must be one of {', '.join(sorted(forms))}; got {backward!r}"
        )


# --- forms of the gradient for x ---


def grad_x(
    indptr: Tensor, indices: Tensor, grad: Tensor, weight: Tensor | None, num_src: int, reduce: str, form: str
) -> Tensor:
    """Gradient of ``spmm`` (sum or mean) for ``x`` ``[num_src, ...]``, in the dtype of ``grad``."""
    if form == FORMS["spmm"][grad.device.type][0]:
        return ops.spmm_grad_x(indptr, indices, grad, weight, num_src, reduce)
    wide = per_degree(widen(grad), indptr, reduce) if reduce == "mean" else grad
    if form == "scatter":
        return ops.spmm_csr(indptr, indices, wide, weight, num_src, "sum").to(grad.dtype)
    offsets, dst, order = by_source(indptr, indices, num_src)
    weight = None if weight is None else torch.index_select(weight, 0, order)
    return ops.spmm(offsets, dst, wide, weight, "sum").to(grad.dtype)


def by_source(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """The edges in order of their source, stably: (offsets int64 ``[num_src + 1]``, destinations, edge numbers).

    Edges past the last valid one come last, behind all offsets.
    """
    edges = indices.shape[0]
    valid = torch.arange(edges, device=indices.device) < indptr[-1]
    source, order = torch.sort(torch.where(valid, indices.to(torch.int64), num_src), stable=True)
    offsets = torch.searchsorted(source, torch.arange(num_src + 1, device=indices.device))
    dst = ops.edge_dst(indptr, edges, indices)
    return offsets, torch.index_select(dst, 0, order), order


def _spmm_setup(ctx, inputs, output):
    indptr, indices, x, weight, ctx.reduce, ctx.form = inputs
    ctx.num_src = x.shape[0]
    needs_x = weight is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(indptr, indices, x if needs_x else None, weight)


def _spmm_backward(ctx, grad):
    indptr, indices, x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    for_x = for_weight = None
    if ctx.needs_input_grad[2]:
        for_x = grad_x(indptr, indices, grad, weight, ctx.num_src, ctx.reduce, ctx.form)
    if ctx.needs_input_grad[3]:
        for_weight = ops.spmm_grad_weight(indptr, indices, x, grad, weight, ctx.reduce)
    return None, None, for_x, for_weight, None, None


def _cat_setup(ctx, inputs, output):
    indptr, indices, x, bits, ctx.scale, ctx.reduce, ctx.form = inputs
    ctx.save_for_backward(indptr, indices, x, bits)


def _cat_backward(ctx, grad):
    indptr, indices, x, bits = ctx.saved_tensors
    if ctx.form == FORMS["aggregate_cat"][x.device.type][0]:
        for_x = ops.aggregate_cat_grad(indptr, indices, grad, x, bits, ctx.scale, ctx.reduce)
    else:
        for_x = _cat_grad_x(indptr, indices, grad, x, bits, ctx.scale, ctx.reduce, ctx.form)
    return None, None, for_x, None, None, None, None


def _cat_grad_x(indptr, indices, grad, x, bits, scale, reduce, form) -> Tensor:
    """The gradient through the neighbours in a form of choice, plus that of the rows themselves, masked."""
    num_src, width = x.shape
    through = grad_x(indptr, indices, grad[:, :width].contiguous(), None, num_src, reduce, form)
    own = torch.nn.functional.pad(grad[:, width:], (0, 0, 0, num_src - grad.shape[0]))
    total = through + own
    if bits is None:
        return total
    kept = ops.dropout_apply(total, bits, 0.0, False) * scale
    return torch.where(~(x <= 0), kept, torch.zeros_like(kept))


define(
    f"spmm_by({CSC}, Tensor x, Tensor? weight, str reduce, str backward) -> Tensor", spmm_by,
    gradient=(_spmm_setup, _spmm_backward), padding=Padding.SAFE,
    fake=lambda indptr, indices, x, weight, reduce, backward: x.new_empty((indptr.shape[0] - 1, *x.shape[1:])),
)  # fmt: skip
define(
    f"aggregate_cat_by({CSC}, Tensor x, Tensor? bits, float scale, str reduce, str backward) -> Tensor",
    aggregate_cat_by, gradient=(_cat_setup, _cat_backward), padding=Padding.SAFE,
    fake=lambda indptr, indices, x, bits, scale, reduce, backward: x.new_empty((indptr.shape[0] - 1, 2 * x.shape[1])),
)  # fmt: skip
