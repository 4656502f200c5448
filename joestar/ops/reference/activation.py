"""Bias, ReLU and dropout of rows as one op, whose gradient reads a bit per entry."""

import torch
from torch import Tensor

from joestar.kernels.dropout import positive_bits
from joestar.ops.reference.dropout import dropout_apply


def bias_relu(x: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """ReLU of ``x`` plus ``bias``, then dropout: an epilogue of what made ``x`` (thesis 5.3.2).

    Args:
        x: ``[n, D]``; bias: ``[D]`` in the dtype of ``x``, or none.
        bits: int32 ``[n, ceil(D / 32)]``, what dropout keeps (``dropout_bits``), or none; scale: of what is kept.

    Returns:
        (``[n, D]``, kept): int32 ``[n, ceil(D / 32)]``, as ``bits`` are, the entries that gradients reach.
    """
    y = torch.relu(x if bias is None else x + bias).contiguous()
    every = x.new_full((x.shape[0], -(-x.shape[1] // 32)), -1, dtype=torch.int32)
    kept = positive_bits(torch.where(y.isnan(), 1, y), every if bits is None else bits)
    return y if bits is None else dropout_apply(y, bits, 0.0, False) * scale, kept


def bias_relu_grad(grad: Tensor, kept: Tensor, scale: float, biased: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias_relu`` for ``x`` ``[n, D]`` and, if ``biased``, the bias: the sum of the rows, else ``[0]``.

    Args:
        grad: ``[n, D]``; kept: what ``bias_relu`` returned; scale: its own, 1 without dropout.
    """
    rows = dropout_apply(grad, kept, 0.0, False) * scale
    return rows, rows.sum(0) if biased else rows.new_empty(0)
