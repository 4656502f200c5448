"""``joestar::mm_bias_relu``: a product with bias, ReLU and dropout as its epilogue (thesis 5.3.2), and
``joestar::mm_bias_relu_grad``, one whose rows are masked as the gradient of such rows is.

In no captured graph: a pass over the backend's graphs puts them there (``fusion/backend/product_epilogue.py``).
"""

import torch
from torch import Tensor

from joestar.ops.dense import bias_relu as epilogue
from joestar.ops.registry import define_gradient


def check_product(name: str, x: Tensor, weight: Tensor) -> None:
    """Raises ``ValueError`` unless rows ``[n, F]`` and a weight ``[F, D]`` of one dtype are given."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or x.dtype != weight.dtype:
        raise ValueError(
            f"{name}: expected rows [n, F] and a weight [F, D] of one dtype; got {x.dtype} {list(x.shape)} and "
            f"{weight.dtype} {list(weight.shape)}"
        )


def mm_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``bias_relu(x @ weight, bias, bits, scale)``: ``[n, D]``, and a bit for every entry that gradients reach.

    Args:
        x: ``[n, F]``; weight: ``[F, D]`` in the dtype of ``x``, however it lies; bias: ``[D]`` in it, or none.
        bits, scale: see ``bias_relu``.
    """
    check_product("mm_bias_relu", x, weight)
    return epilogue.bias_relu(x @ weight, bias, bits, scale)


def mm_bias_relu_grad(grad: Tensor, weight: Tensor, kept: Tensor, scale: float, biased: bool) -> tuple[Tensor, Tensor]:
    """``bias_relu_grad(grad @ weight, kept, scale, biased)``: of rows that a product with ``weight`` read.

    Args:
        grad: ``[n, C]``; weight: ``[C, D]`` in its dtype, however it lies; kept, scale, biased: see ``bias_relu_grad``.
    """
    check_product("mm_bias_relu_grad", grad, weight)
    return epilogue.bias_relu_grad(grad @ weight, kept, scale, biased)


def _fake(x: Tensor, weight: Tensor, bias, bits, scale) -> tuple[Tensor, Tensor]:
    n, width = x.shape[0], weight.shape[1]
    return x.new_empty((n, width)), x.new_empty((n, -(-width // 32)), dtype=torch.int32)


define_gradient(
    "mm_bias_relu(Tensor x, Tensor weight, Tensor? bias, Tensor? bits, float scale) -> (Tensor, Tensor)", mm_bias_relu,
    fake=_fake, cuda="gpu_mm_relu",
)  # fmt: skip
define_gradient(
    "mm_bias_relu_grad(Tensor grad, Tensor weight, Tensor kept, float scale, bool biased) -> (Tensor, Tensor)",
    mm_bias_relu_grad,
    fake=lambda grad, weight, kept, scale, biased: (
        grad.new_empty((grad.shape[0], weight.shape[1])), grad.new_empty(weight.shape[1] if biased else 0)
    ),
    cuda="gpu_mm_relu",
)  # fmt: skip
