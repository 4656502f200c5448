"""``joestar::head_linear_bias_relu``: products per head with bias, ReLU and dropout as an epilogue (thesis 5.3.2), and
``joestar::head_linear_bias_relu_grad``: all its gradients in one pass over the rows.

In no captured graph: a pass over the backend's graphs puts them there (``fusion/backend/product_epilogue.py``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from joestar import kernels
from joestar.ops.dense.head_linear import check_heads
from joestar.ops.registry import define_gradient

ops = torch.ops.joestar


def head_linear_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``bias_relu(head_linear(x, weight), bias, bits, scale)``, heads side by side: ``[n, H C]``, and its bits.

    Args:
        x: ``[n, H, F]``; weight: ``[H, C, F]`` in the dtype of ``x``, however it lies; bias: ``[H C]`` in it, or none.
        bits, scale: see ``bias_relu``.
    """
    check_heads("head_linear_bias_relu", x, weight)
    return ops.bias_relu(ops.head_linear(x, weight).flatten(1), bias, bits, scale)


def head_linear_bias_relu_grad(
    grad: Tensor, kept: Tensor, scale: float, biased: bool, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x`` ``[n, H, F]``, ``weight`` ``[H, C, F]`` and, if ``biased``, the bias ``[H C]``, else ``[0]``.

    Args:
        grad: ``[n, H C]``; kept: what ``head_linear_bias_relu`` returned; scale, x, weight: its own.
    """
    check_heads("head_linear_bias_relu_grad", x, weight)
    rows, sums = ops.bias_relu_grad(grad, kept, scale, biased)
    rows = rows.unflatten(1, weight.shape[:2])
    return ops.head_linear(rows, weight.transpose(1, 2)), ops.head_linear_weight_grad(x, rows), sums


def _where_kept(composed: Callable) -> Callable[[Callable], Callable]:
    """The kernel where its programs keep a head's weight; the op's last arguments but its bias are ``x, weight``."""

    def around(kernel: Callable) -> Callable:
        fits = kernels.find("gpu_heads.heads_fit")

        def run(*args):
            x, weight = args[:2] if composed is head_linear_bias_relu else args[-2:]
            return (kernel if fits(x.dtype, *x.shape[1:], weight.shape[1]) else composed)(*args)

        return run

    return around


def _fake(x: Tensor, weight: Tensor, bias, bits, scale) -> tuple[Tensor, Tensor]:
    n, columns = x.shape[0], weight.shape[0] * weight.shape[1]
    return x.new_empty((n, columns)), x.new_empty((n, -(-columns // 32)), dtype=torch.int32)


def _grad_fake(grad: Tensor, kept, scale, biased: bool, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(weight.shape), grad.new_empty(grad.shape[1] if biased else 0)


define_gradient(
    "head_linear_bias_relu(Tensor x, Tensor weight, Tensor? bias, Tensor? bits, float scale) -> (Tensor, Tensor)",
    head_linear_bias_relu,
    fake=_fake, cuda="gpu_heads", around_cuda=_where_kept(head_linear_bias_relu),
)  # fmt: skip
define_gradient(
    "head_linear_bias_relu_grad(Tensor grad, Tensor kept, float scale, bool biased, Tensor x, Tensor weight)"
    " -> (Tensor, Tensor, Tensor)",
    head_linear_bias_relu_grad,
    fake=_grad_fake, cuda="gpu_heads", around_cuda=_where_kept(head_linear_bias_relu_grad),
)  # fmt: skip
