"""``joestar::bias_relu``: bias, ReLU and dropout of rows as one op, whose gradient reads a bit per entry."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from joestar.kernels.dropout import positive_bits
from joestar.ops import shapes
from joestar.ops.dense.dropout import dropout_apply
from joestar.ops.registry import Padding, define, define_gradient, rows_dtype

ops = torch.ops.joestar


def bias_relu(
    x: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ReLU of ``x`` plus ``addend`` plus ``bias``, then dropout: an epilogue of what made ``x`` (thesis 5.3.2).

    Args:
        x: ``[n, D]``; bias: ``[D]`` in the dtype of ``x``, or none; addend: as ``x``, or none.
        bits: int32 ``[n, ceil(D / 32)]``, what dropout keeps (``dropout_bits``), or none; scale: of what is kept.

    Returns:
        (``[n, D]``, kept): int32 ``[n, ceil(D / 32)]``, as ``bits`` are, the entries that gradients reach.
    """
    wide = x if addend is None else x.to(torch.promote_types(x.dtype, torch.float32)) + addend
    y = torch.relu(wide if bias is None else wide + bias).to(x.dtype).contiguous()
    every = x.new_full((x.shape[0], -(-x.shape[1] // 32)), -1, dtype=torch.int32)
    kept = positive_bits(y, every if bits is None else bits)
    return y if bits is None else dropout_apply(y, bits, 0.0, False) * scale, kept


def bias_relu_grad(
    grad: Tensor, kept: Tensor, scale: float, biased: bool, more: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias_relu`` for ``x`` ``[n, D]`` and, if ``biased``, the bias: the sum of the rows, else ``[0]``.

    Args:
        grad: ``[n, D]``; kept: what ``bias_relu`` returned; scale: its own, 1 without dropout.
        more: other parts of the gradient, ``[m, D]`` in its dtype, of the first ``m`` rows: ``grad`` is added to these.
    """
    for part in more or ():
        grad = grad + F.pad(part, (0, 0, 0, grad.shape[0] - part.shape[0]))
    rows = dropout_apply(grad, kept, 0.0, False) * scale
    return rows, rows.sum(0) if biased else rows.new_empty(0)


def _setup(ctx, inputs, output):
    ctx.scale = inputs[3]
    ctx.save_for_backward(output[1])


def _backward(ctx, grad, of_kept):
    (kept,) = ctx.saved_tensors
    biased, added = ctx.needs_input_grad[1], len(ctx.needs_input_grad) > 4 and ctx.needs_input_grad[4]
    grad_x, grad_bias = ops.bias_relu_grad(grad.contiguous(), kept, ctx.scale, biased)
    return grad_x, grad_bias if biased else None, None, None, grad_x if added else None


define(
    "bias_relu(Tensor x, Tensor? bias, Tensor? bits, float scale, Tensor? addend=None) -> (Tensor, Tensor)", bias_relu,
    fake=lambda x, bias, bits, scale, addend=None: (x.new_empty(x.shape), shapes.words(x)),
    gradient=(_setup, _backward),
    padding=Padding.SAFE, cpu="cpu_dropout", cuda="gpu_activation", dissolved=("cpu",),
    autocast=rows_dtype("bias_relu", "x", "bias", "addend"),
)  # fmt: skip
define_gradient(
    "bias_relu_grad(Tensor grad, Tensor kept, float scale, bool biased, Tensor[]? more=None) -> (Tensor, Tensor)",
    bias_relu_grad,
    fake=lambda grad, kept, scale, biased, more=None: (
        grad.new_empty(grad.shape), grad.new_empty(grad.shape[1] if biased else 0)
    ),
    cpu="cpu_dropout", cuda="gpu_activation", dissolved=("cpu",),
)  # fmt: skip
