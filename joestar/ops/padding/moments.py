"""``joestar::masked_mean``, ``masked_var`` and ``masked_std``: moments of valid entries."""

import math

from torch import Tensor

from joestar.ops.padding.mask_rows import mask_rows
from joestar.ops.registry import compose
from joestar.ops.shapes import wide_dtype


def _entries(x: Tensor, count: Tensor, dim: int, dims: list[int]) -> Tensor:
    """Valid entries that a reduction over ``dims`` adds up, in the dtype of sums."""
    others = math.prod(x.shape[d] for d in dims if d != dim)
    return (count * others).to(wide_dtype(x.dtype))


def _mean(x: Tensor, count: Tensor, dim: int, dims: list[int], keepdim: bool) -> Tensor:
    total = mask_rows(x, count, dim, 0).sum(dims, keepdim=keepdim, dtype=wide_dtype(x.dtype))
    return total / _entries(x, count, dim, dims)


def _var(x: Tensor, count: Tensor, dim: int, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    centred = mask_rows(x - _mean(x, count, dim, dims, True), count, dim, 0)
    freedom = (_entries(x, count, dim, dims) - correction).clamp_min(0)  # as in PyTorch: NaN or infinite then
    return (centred * centred).sum(dims, keepdim=keepdim) / freedom


def masked_mean(x: Tensor, count: Tensor, dim: int, dims: list[int], keepdim: bool) -> Tensor:
    """Mean over ``dims``, one of which (``dim``) is padded; in the dtype of ``x``, added up in at least float32."""
    return _mean(x, count, dim, dims, keepdim).to(x.dtype)


def masked_var(x: Tensor, count: Tensor, dim: int, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    """Variance over ``dims``, one of which (``dim``) is padded; ``correction`` 1 is the unbiased estimate."""
    return _var(x, count, dim, dims, correction, keepdim).to(x.dtype)


def masked_std(x: Tensor, count: Tensor, dim: int, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    """Square root of ``masked_var``, rounded once; where it is 0 its gradient is 0, as that of ``aten.std`` is."""
    var = _var(x, count, dim, dims, correction, keepdim)
    constant = var == 0
    return var.masked_fill(constant, 1).sqrt().masked_fill(constant, 0).to(x.dtype)


compose("masked_mean(Tensor x, Tensor count, int dim, int[] dims, bool keepdim) -> Tensor", masked_mean)
_MOMENT = "(Tensor x, Tensor count, int dim, int[] dims, float correction, bool keepdim) -> Tensor"
compose(f"masked_var{_MOMENT}", masked_var)
compose(f"masked_std{_MOMENT}", masked_std)
