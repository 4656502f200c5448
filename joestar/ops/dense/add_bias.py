"""``joestar::add_bias``: a bias whose gradient, ``joestar::column_sums``, reads rows that are stored."""

import torch
from torch import Tensor

from joestar.ops.registry import Padding, define, define_gradient, rows_dtype

ops = torch.ops.joestar


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """``x`` ``[n, D]`` plus ``bias`` ``[D]``, whose gradient comes from rows that are stored (``column_sums``)."""
    return x + bias


def column_sums(x: Tensor, dtype: str | None = None) -> Tensor:
    """Sums over the rows of ``x`` ``[n, D]``: ``[D]``, in ``dtype`` (``"float32"``) where it is given."""
    return x.sum(0, dtype=_named(dtype))


def _named(dtype: str | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype)


def _setup(ctx, inputs, output):
    pass


def _backward(ctx, grad):
    return grad, ops.column_sums(grad.contiguous()) if ctx.needs_input_grad[1] else None


define(
    "add_bias(Tensor x, Tensor bias) -> Tensor", add_bias, fake=lambda x, bias: x.new_empty(x.shape),
    gradient=(_setup, _backward), padding=Padding.SAFE, autocast=rows_dtype("add_bias", "x", "bias"),
    dissolved=("cpu", "cuda"),
)  # fmt: skip
define_gradient(
    "column_sums(Tensor x, str? dtype=None) -> Tensor", column_sums,
    fake=lambda x, dtype=None: x.new_empty(x.shape[1:], dtype=_named(dtype)), cuda="gpu_columns", dissolved=("cpu",),
)  # fmt: skip
