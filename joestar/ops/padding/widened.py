"""``joestar::widened`` and ``joestar::narrowed``: to the dtype that values are added up in, and back."""

from torch import Tensor

from joestar.ops.registry import compose
from joestar.ops.shapes import wide_dtype


def widened(x: Tensor) -> Tensor:
    """``x`` in the dtype that its values are added up in."""
    return x.to(wide_dtype(x.dtype))


def narrowed(x: Tensor, like: Tensor) -> Tensor:
    """``x`` in the dtype of ``like``."""
    return x.to(like.dtype)


compose("widened(Tensor x) -> Tensor", widened)
compose("narrowed(Tensor x, Tensor like) -> Tensor", narrowed)
