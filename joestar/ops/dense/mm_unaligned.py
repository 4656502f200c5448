"""``joestar::mm_unaligned``: a small product whose rows are no multiple of 16 bytes, as of 47 classes.

In no captured graph: a pass over the backend's graphs puts it there (``fusion/backend/unaligned_products.py``).
"""

import torch
from torch import Tensor

from joestar.ops.dense.mm_bias_relu import check_product
from joestar.ops.registry import define_gradient


def mm_unaligned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight + bias``: ``[n, D]``.

    Args:
        x: ``[n, F]``; weight: ``[F, D]`` in the dtype of ``x``, however it lies; bias: ``[D]`` in it, or none.

    Raises:
        ValueError: for other shapes or dtypes.
    """
    check_product("mm_unaligned", x, weight)
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


define_gradient(
    "mm_unaligned(Tensor x, Tensor weight, Tensor? bias) -> Tensor", mm_unaligned,
    fake=lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[1])), cuda="gpu_unaligned",
)  # fmt: skip
