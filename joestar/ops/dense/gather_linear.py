"""``joestar::gather_linear``: an update of gathered rows that never stores them (gather-update, thesis 5.3.2).

On a CPU a block of rows is gathered into the cache, multiplied and overwritten by the next; on a GPU the product's own
loads gather (``kernels/gpu_gather_linear.py``). The backward pass gathers again.
"""

import torch
from torch import Tensor

from joestar.ops.registry import Padding, define, define_gradient

ops = torch.ops.joestar
BLOCK_BYTES = 2**20
"""Gathered rows that are held at a time on a CPU: they stay in its second-level cache."""


def _blocks(table: Tensor, ids: Tensor, dtype: torch.dtype):
    """(first row, gathered rows in ``dtype``), block by block; a block is overwritten by the next."""
    size = max(64, BLOCK_BYTES // max(1, table.shape[1] * table.element_size()))
    held = table.new_empty((min(size, ids.numel()), table.shape[1]))
    for first in range(0, ids.numel(), size):
        part = ids[first : first + size]
        rows = held[: part.numel()]
        torch.index_select(table, 0, part, out=rows)
        yield first, rows.to(dtype)


def _check(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if table.dim() != 2 or weight.dim() != 2 or table.shape[1] != weight.shape[1] or ids.dim() != 1:
        raise ValueError(
            "gather_linear: expected a table [N, F], ids [n] and a weight [C, F]; got "
            f"{list(table.shape)}, {list(ids.shape)} and {list(weight.shape)}"
        )
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.dtype != weight.dtype):
        raise ValueError(
            f"gather_linear: expected a bias [{weight.shape[0]}] in the weight's dtype {weight.dtype}; got "
            f"{list(bias.shape)} in {bias.dtype}"
        )


def _cpu(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(table, ids, weight, bias)
    out = weight.new_empty((ids.numel(), weight.shape[0]))
    for first, rows in _blocks(table, ids, weight.dtype):
        part = out[first : first + rows.shape[0]]
        if bias is None:
            torch.mm(rows, weight.t(), out=part)
        else:
            torch.addmm(bias, rows, weight.t(), out=part)
    return out


def _cpu_weight_grad(table: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    out = grad.new_zeros((grad.shape[1], table.shape[1]))
    for first, rows in _blocks(table, ids, grad.dtype):
        out.addmm_(grad[first : first + rows.shape[0]].t(), rows)
    return out


def gather_linear(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear(table[ids], weight, bias)`` ``[n, C]`` in the weight's dtype.

    Args:
        table: ``[N, F]``; ids: ``[n]``; weight: ``[C, F]``; bias: ``[C]`` in the weight's dtype, or none.
    """
    _check(table, ids, weight, bias)
    return torch.nn.functional.linear(torch.index_select(table, 0, ids).to(weight.dtype), weight, bias)


def gather_linear_weight_grad(table: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``gather_linear`` for its weight ``[C, F]``; ``grad`` ``[n, C]``."""
    return grad.t() @ torch.index_select(table, 0, ids).to(grad.dtype)


def _on_gpu(kernel):
    def run(table, ids, weight, bias):
        if torch.float64 in (table.dtype, weight.dtype):  # no tensor core would gain anything
            return gather_linear(table, ids, weight, bias)
        _check(table, ids, weight, bias)
        return kernel(table, ids, weight, bias)

    return run


def _autocast(device: str):
    """As ``linear`` under autocast: weight and bias are cast, and the rows as they are read; the table is not."""

    def run(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return ops.gather_linear(table, ids, weight.to(dtype), None if bias is None else bias.to(dtype))

    return run


def _setup(ctx, inputs, output):
    table, ids = inputs[:2]
    if ctx.needs_input_grad[0]:
        raise RuntimeError("gather_linear has no gradient for its table; gather with index_select, then use linear")
    ctx.save_for_backward(table, ids)


def _backward(ctx, grad):
    table, ids = ctx.saved_tensors
    grad = grad.contiguous()
    for_weight = ops.gather_linear_weight_grad(table, ids, grad) if ctx.needs_input_grad[2] else None
    return None, None, for_weight, grad.sum(0) if ctx.needs_input_grad[3] else None


define(
    "gather_linear(Tensor table, Tensor ids, Tensor weight, Tensor? bias) -> Tensor", gather_linear,
    fake=lambda table, ids, weight, bias: weight.new_empty((ids.shape[0], weight.shape[0])),
    gradient=(_setup, _backward), padding=Padding.SAFE, cpu=_cpu, cuda="gpu_gather_linear", around_cuda=_on_gpu,
    autocast=_autocast,
)  # fmt: skip
define_gradient(
    "gather_linear_weight_grad(Tensor table, Tensor ids, Tensor grad) -> Tensor", gather_linear_weight_grad,
    cpu=_cpu_weight_grad, cuda="gpu_gather_linear",
    fake=lambda table, ids, grad: grad.new_empty((grad.shape[1], table.shape[1])),
)  # fmt: skip
