"""Layouts that kernels and their callers agree on."""

import torch
from torch import Tensor

CAT_ALIGNMENT = 8
"""Rows of joined matrices are multiples of this: 16 bytes of bfloat16, as GEMMs want them."""
NARROW = 8
"""Most columns of a product whose rows a GPU reads once and adds up, forward or for the gradient of its weight, for
which this is better than the library's product."""

_KEPT_BYTES = 512
"""Longest column of a weight that is kept: 128 of them are 64 KB of the 227 that a multiprocessor of an H200 shares."""


REDUCTIONS = ("sum", "mean", "max", "min", "sum2", "mean2")
"""What ``multi_aggregate`` computes; ``sum2`` and ``mean2`` are those of the squares."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype accumulate in: those of 16 bits in float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` and 1."""
    return 1 << max(0, n - 1).bit_length()


def cat_width(width: int, ones: bool = True) -> int:
    """Columns of ``[aggregated rows, own rows, 1, 0, ...]`` for rows of ``width``; the 1 multiplies the bias.

    Without ``ones`` those of ``[aggregated rows, own rows, 0, ...]``.
    """
    return -(-(2 * width + int(ones)) // CAT_ALIGNMENT) * CAT_ALIGNMENT


def shares_rows(x: Tensor, weight: Tensor | None) -> bool:
    """Whether the heads of ``weight`` ``[E, H]`` all scale the one row ``x[n, 0]`` of ``x`` ``[N, 1, ...]``."""
    return weight is not None and weight.dim() == 2 and x.dim() >= 2 and x.shape[1] == 1 and weight.shape[1] != 1


def message_shape(x: Tensor, weight: Tensor | None) -> tuple:
    """Shape of one message ``weight[e] * x[n]``: that of a row of ``x``, once per head where heads share rows."""
    return (weight.shape[1], *x.shape[2:]) if shares_rows(x, weight) else tuple(x.shape[1:])


def reductions(reduces: str) -> list[str]:
    """The kinds in ``"mean,max,mean2"``.

    Raises:
        ValueError: for a kind that there is not, or that occurs twice.
    """
    kinds = reduces.split(",")
    if len(set(kinds)) != len(kinds) or not set(kinds) <= set(REDUCTIONS):
        raise ValueError(f"expected some of {', '.join(REDUCTIONS)}, each once, joined by commas; got {reduces!r}")
    return kinds


def extrema(reduces: str) -> list[str]:
    """Those of the kinds that are extrema."""
    return [kind for kind in reductions(reduces) if kind in ("max", "min")]


def keeps_weight(dtype: torch.dtype, width: int, columns: int) -> bool:
    """Whether programs of ``mm_bias_relu`` keep a weight ``[F, D]``.

    Its columns are one tile, whose bits are whole words in a tensor: one, two or four of them.
    """
    return width > 0 and power_of_two(width) * dtype.itemsize <= _KEPT_BYTES and -(-columns // 32) in (1, 2, 4)


SHARES = {1: torch.int32, 2: torch.int16, 4: torch.int8}
"""What is in a word for each of so many heads: column ``c`` has bit ``c // W`` of word ``c % W`` of ``W``."""


def keeps_head_weight(dtype: torch.dtype, heads: int, width: int, columns: int) -> bool:
    """The same for weights ``[H, D, F]`` of ``head_linear_bias_relu``: heads have some bytes of every word each.

    And a program has a place for the gradient of a head's weight, and for tiles of rows beside it.
    """
    whole = columns in (16, 32, 64) and heads * columns % 32 == 0
    return keeps_weight(dtype, width, columns) and whole and heads in SHARES
