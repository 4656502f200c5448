"""``joestar::head_linear_bias_relu``: products per head with bias, ReLU and dropout as their epilogue (thesis 5.3.2), and
``joestar::bias_relu_grad_head_linear``, the gradient of that epilogue with its rows' products per head.

In no captured graph: a pass over the backend's graphs puts them there (``fusion/backend/product_epilogue.py``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from joestar import kernels
from joestar.ops.registry import define_gradient

ops = torch.ops.joestar


def _check(name: str, x: Tensor, weight: Tensor, rows: str, width: int) -> None:
    heads = weight.shape[0] if weight.dim() == 3 else -1
    if x.dtype != weight.dtype or heads < 0 or x.shape[1:] not in ((heads, width), (heads * width,)):
        raise ValueError(
            f"{name}: expected {rows} and a weight per head of one dtype; got {x.dtype} {list(x.shape)} and "
            f"{weight.dtype} {list(weight.shape)}"
        )


def head_linear_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``bias_relu(head_linear(x, weight), bias, bits, scale)``, heads side by side: ``[n, H C]``, and its bits.

    Args:
        x: ``[n, H, F]``; weight: ``[H, C, F]`` in the dtype of ``x``, however it lies; bias: ``[H C]`` in it, or none.
        bits, scale: see ``bias_relu``.
    """
    _check("head_linear_bias_relu", x, weight, "rows [n, H, F]", weight.shape[-1])
    return ops.bias_relu(ops.head_linear(x, weight).flatten(1), bias, bits, scale)


def bias_relu_grad_head_linear(
    grad: Tensor, kept: Tensor, scale: float, biased: bool, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(``rows``, ``sums`` of ``bias_relu_grad(grad, kept, scale, biased)``, ``head_linear(rows, weight)``).

    Args:
        grad: ``[n, H C]``; kept, scale, biased: see ``bias_relu_grad``.
        weight: ``[H, F, C]`` in the dtype of ``grad``, however it lies; the third result is ``[n, H, F]``.
    """
    _check("bias_relu_grad_head_linear", grad, weight, "gradients [n, H C]", weight.shape[-1])
    rows, sums = ops.bias_relu_grad(grad, kept, scale, biased)
    return rows, sums, ops.head_linear(rows.unflatten(1, (weight.shape[0], weight.shape[2])), weight)


def _forward(kernel: Callable) -> Callable:
    """The kernel where its programs keep a head's weight."""
    fits = kernels.find("gpu_mm_relu.heads_fit")

    def run(x, weight, bias, bits, scale):
        chosen = kernel if fits(x.dtype, *x.shape[1:], weight.shape[1]) else head_linear_bias_relu
        return chosen(x, weight, bias, bits, scale)

    return run


def _gradient(kernel: Callable) -> Callable:
    fits = kernels.find("gpu_mm_relu.heads_fit")

    def run(grad, kept, scale, biased, weight):
        chosen = kernel if fits(grad.dtype, *weight.shape) else bias_relu_grad_head_linear
        return chosen(grad, kept, scale, biased, weight)

    return run


def _fake(x: Tensor, weight: Tensor, bias, bits, scale) -> tuple[Tensor, Tensor]:
    n, columns = x.shape[0], weight.shape[0] * weight.shape[1]
    return x.new_empty((n, columns)), x.new_empty((n, -(-columns // 32)), dtype=torch.int32)


def _grad_fake(grad: Tensor, kept, scale, biased: bool, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    through = grad.new_empty((grad.shape[0], weight.shape[0], weight.shape[1]))
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[1] if biased else 0), through


define_gradient(
    "head_linear_bias_relu(Tensor x, Tensor weight, Tensor? bias, Tensor? bits, float scale) -> (Tensor, Tensor)",
    head_linear_bias_relu,
    fake=_fake, cuda="gpu_mm_relu", around_cuda=_forward,
)  # fmt: skip
define_gradient(
    "bias_relu_grad_head_linear(Tensor grad, Tensor kept, float scale, bool biased, Tensor weight)"
    " -> (Tensor, Tensor, Tensor)",
    bias_relu_grad_head_linear,
    fake=_grad_fake, cuda="gpu_mm_relu", around_cuda=_gradient,
)  # fmt: skip
