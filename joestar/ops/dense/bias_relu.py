"""``joestar::bias_relu``: bias, ReLU and dropout of rows as one op, whose gradient reads a bit per entry."""

import torch
from torch import Tensor

from joestar.kernels.dropout import positive_bits
from joestar.ops import shapes
from joestar.ops.dense.dropout import dropout_apply
from joestar.ops.registry import Padding, define, define_gradient, rows_dtype

ops = torch.ops.joestar


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
    kept = positive_bits(y, every if bits is None else bits)
    return y if bits is None else dropout_apply(y, bits, 0.0, False) * scale, kept


def bias_relu_grad(grad: Tensor, kept: Tensor, scale: float, biased: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias_relu`` for ``x`` ``[n, D]`` and, if ``biased``, the bias: the sum of the rows, else ``[0]``.

    Args:
        grad: ``[n, D]``; kept: what ``bias_relu`` returned; scale: its own, 1 without dropout.
    """
    rows = dropout_apply(grad, kept, 0.0, False) * scale
    return rows, rows.sum(0) if biased else rows.new_empty(0)


def _setup(ctx, inputs, output):
    ctx.scale = inputs[3]
    ctx.save_for_backward(output[1])


def _backward(ctx, grad, of_kept):
    (kept,) = ctx.saved_tensors
    biased = ctx.needs_input_grad[1]
    grad_x, grad_bias = ops.bias_relu_grad(grad.contiguous(), kept, ctx.scale, biased)
    return grad_x, grad_bias if biased else None, None, None


define(
    "bias_relu(Tensor x, Tensor? bias, Tensor? bits, float scale) -> (Tensor, Tensor)", bias_relu,
    fake=lambda x, bias, bits, scale: (x.new_empty(x.shape), shapes.words(x)), gradient=(_setup, _backward),
    padding=Padding.SAFE, cpu="cpu_dropout", cuda="gpu_activation", autocast=rows_dtype("bias_relu", "x", "bias"),
    dissolved=("cpu",),
)  # fmt: skip
define_gradient(
    "bias_relu_grad(Tensor grad, Tensor kept, float scale, bool biased) -> (Tensor, Tensor)", bias_relu_grad,
    fake=lambda grad, kept, scale, biased: (grad.new_empty(grad.shape), grad.new_empty(grad.shape[1] if biased else 0)),
    cpu="cpu_dropout", cuda="gpu_activation", dissolved=("cpu",),
)  # fmt: skip
