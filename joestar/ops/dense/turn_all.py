"""``joestar::turn_all``: several matrices turned, in one launch.

In no captured graph: a pass over the backend's graphs puts it there (``fusion/backend/product_layout.py``).
"""

import torch
from torch import Tensor

from joestar.ops.registry import define_gradient


def turn_all(matrices: list[Tensor]) -> list[Tensor]:
    """``matrix.t()`` of every matrix ``[F, D]``, stored: contiguous ``[D, F]``."""
    return [matrix.t().clone(memory_format=torch.contiguous_format) for matrix in matrices]


define_gradient(
    "turn_all(Tensor[] matrices) -> Tensor[]", turn_all,
    fake=lambda matrices: [matrix.new_empty((matrix.shape[1], matrix.shape[0])) for matrix in matrices],
    cuda="gpu_turn",
)  # fmt: skip
