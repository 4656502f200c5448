"""How rows of feature matrices are cut into tiles, and reductions over edges one tile wide."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import power_of_two
from joestar.kernels.tune import Config

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
REDUCE = {"sum": 0, "mean": 1, "max": 2, "min": 3}
_WIDEST = 256
_WHOLE, _WIDE_TILE = 1024, 512
"""Columns of the widest row that a program holds as a whole to add it up, and of the tiles of wider ones."""


def accumulator(*values: Tensor | None) -> tl.dtype:
    """fp64 if any operand is, else fp32."""
    return tl.float64 if any(v is not None and v.dtype == torch.float64 for v in values) else tl.float32


def check_values(**values: Tensor | None) -> None:
    """Raises ``ValueError`` unless all are of a floating-point dtype that the kernels know."""
    for name, value in values.items():
        if value is not None and value.dtype not in FLOATS:
            raise ValueError(f"GPU kernel: expected {name} of a floating-point dtype, got {value.dtype}; cast it first")


def row_size(x: Tensor) -> int:
    """Numbers per row of ``x`` ``[rows, ...]``."""
    size = 1
    for extent in x.shape[1:]:
        size *= extent
    return size


def heads_and_width(x: Tensor, weight: Tensor | None) -> tuple[int, int]:
    """How a row of ``x`` splits into heads with a weight each: (heads, numbers per head)."""
    size = row_size(x)
    if weight is None or weight.dim() == 1:
        return 1, size
    heads = weight.shape[1]
    if weight.dim() != 2 or x.dim() < 2 or x.shape[1] != heads:
        raise ValueError(
            "GPU kernel: expected weights [E] or, with values [N, H, ...], [E, H]; "
            f"values {list(x.shape)}, got weights {list(weight.shape)}"
        )
    return heads, size // max(heads, 1)


def column_block(width: int) -> int:
    """Columns of a tile: a power of two, one tile where 256 suffice, else the size that wastes least."""
    if width <= _WIDEST:
        return power_of_two(width)
    return min((_WIDEST, 128), key=lambda block: -(-width // block) * block)


def row_tile(width: int) -> int:
    """Columns that a program holds of rows that it adds up: all of them, or a tile of wide rows."""
    return power_of_two(width) if width <= _WHOLE else _WIDE_TILE


def distinct(configs: list[Config], width: int) -> list[Config]:
    """Each of the settings once, the first two for wide rows, whose tiles are all that differs."""
    found = [config for place, config in enumerate(configs) if config not in configs[:place]]
    return found if width <= _WHOLE else found[:2]


def tile_configs(width: int, bytes_per_value: int) -> list[Config]:
    """Rows and warps of a program, the default first: one 16-byte access per thread and row tile.

    Every setting is compiled when it is timed, so there are few: one or two rows a warp, and one, two or four warps.
    More warps only let more rows wait for the slowest, and rows of several tiles fill warps whatever the setting.
    """
    columns = column_block(width)
    vector = min(16 // bytes_per_value, columns)
    per_warp = max(1, 32 * vector // columns)
    if width > columns:
        pairs = [(2, 2), (1, 1)]
    elif columns >= 64:
        pairs = [(2, 2), (4, 4), (1, 1), (2, 1)]
    else:
        pairs = [(4, 4), (2, 2), (1, 1), (4, 2)]
    return [{"ROWS": per_warp * rows, "num_warps": warps} for rows, warps in pairs]


def for_activations(configs: list[Config], normed: bool) -> list[Config]:
    """Settings for kernels that need more registers: none that gives a warp more rows than others do.

    If ``normed`` programs of one warp, where nothing that a row has passes through shared memory.
    """
    fewest = min(config["ROWS"] / config["num_warps"] for config in configs)
    few = [config for config in configs if config["ROWS"] / config["num_warps"] == fewest]
    return [config for config in few if config["num_warps"] == 1] if normed else few


@triton.jit
def of_columns(vector, column, inside, ACC: tl.constexpr):
    """A vector's entries of these columns (there must be one: Triton's functions cannot return ``None``)."""
    return tl.load(vector + column, inside, 0).to(ACC)


@triton.jit
def tile_rows(ROWS: tl.constexpr):
    """Rows of this program's tile, ``[ROWS, 1]``.

    Whatever has one value per row keeps this shape: Triton 3.6 fails to lay out loops that mix it with ``[ROWS]``.
    """
    return tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]


@triton.jit
def tile_columns(part, BLOCK: tl.constexpr):
    """Columns of part ``part`` of a row, ``[1, BLOCK]``."""
    return part * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def start_value(REDUCE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """What a reduction begins with: 0, or the infinity that loses."""
    if REDUCE == 2:
        return tl.full([ROWS, BLOCK], float("-inf"), ACC)
    elif REDUCE == 3:
        return tl.full([ROWS, BLOCK], float("inf"), ACC)
    else:
        return tl.zeros([ROWS, BLOCK], ACC)


@triton.jit
def combine(total, value, valid, REDUCE: tl.constexpr):
    """One more message; ``value`` is 0 where it is not valid. NaN wins, as in torch."""
    if REDUCE == 2:
        return tl.where(valid, tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL), total)
    elif REDUCE == 3:
        return tl.where(valid, tl.minimum(total, value, propagate_nan=tl.PropagateNan.ALL), total)
    else:
        return total + value


@triton.jit
def finish(total, degree, REDUCE: tl.constexpr, ACC: tl.constexpr):
    """The mean's division; 0 for empty rows. ``degree`` is ``[rows, 1]``."""
    if REDUCE == 1:
        return total / tl.maximum(degree, 1).to(ACC)
    elif REDUCE >= 2:
        return tl.where(degree > 0, total, tl.zeros_like(total))
    else:
        return total
